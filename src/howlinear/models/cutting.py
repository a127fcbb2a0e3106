"""A text -> one stream of tokens -> windows.

    windows(text.fit, tokenizer, 512, tokens=4096)          # (n, 512), the first tokens of the text
    spread_windows(text.fit, tokenizer, 512, tokens=4096)   # {"input_ids": ..., "document": (n,)}
    spread_windows(text.report(), tokenizer, 128, tokens=4096, nested=True)     # see `spread_order`

Profiles and held-out samples are spread over the whole text: a few articles in a row say little
about the others. The paper's protocol reads the first tokens.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from howlinear.models.documents import Documents

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Tokens dropped at the end of a tokenised prefix. A cut changes the token it falls into and, by
# merges, its neighbours. Nearly all tokenizers split at words first, so the change ends within a
# word or a run of spaces.
EDGE = 256

LONG, EXCERPTS = 4_000_000, 256  # characters that are tokenised to spread windows; most pieces
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is one byte


def default_tokens(width: int) -> int:
    """Enough tokens that held-out R2 is at most (1 - r2) / 39 too low."""
    return max(30_000, 40 * width)


def fitting_length(model: Any, tokenizer: Any, length: int) -> int:
    """The window length, or the number of positions of the model where that is smaller."""
    limits = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),  # RoBERTa's is two below its positions
    )
    return min([length, *(n for n in limits if isinstance(n, int) and n >= 2)])


def windows(
    text: str, tokenizer: Any, length: int, *, tokens: int | None = None, bos: str = "auto"
) -> "torch.Tensor":
    """Non-overlapping windows (n, length) of the first `tokens` tokens of the text; all if None.

    The text is one stream, tokenised without special tokens. `bos` adds special tokens to each
    window, within `length`: "auto" those that the tokenizer adds to a text (BOS for Llama, [CLS] and
    [SEP] for BERT, none for GPT-2), "always" the same and BOS in any case, "never" none. Special
    tokens count towards `tokens`. A text that is too short gives fewer windows and a log line. Time
    and memory grow with `tokens`, not with the text.
    """
    frame = _Frame.of(tokenizer, length, bos)
    wanted = frame.wanted(tokens)
    stream = first_tokens(text, tokenizer, None if wanted is None else wanted * frame.room)
    count = frame.fitting(len(stream), frame.room, tokens)
    return frame.cut(stream, range(0, count * frame.room, frame.room))


def check_cut(tokenizer: Any, length: int, tokens: int, bos: str) -> None:
    """Refuse, before a text is read, windows that cannot be cut."""
    _Frame.of(tokenizer, length, bos).wanted(tokens)


def spread_windows(
    text: Documents,
    tokenizer: Any,
    length: int,
    *,
    tokens: int | None = None,
    bos: str = "auto",
    stride: int | None = None,
    nested: bool = False,
) -> dict[str, "torch.Tensor"]:
    """Windows evenly spaced over the whole text, as many as `tokens` tokens have; all if None.

    {"input_ids": (n, length), "document": (n,)}, as `profile` takes them: the number of the document in
    which each window begins, where documents are known. They are some of the windows that the whole
    text has, one every `stride` tokens (by default one after the other). Of a text of more than `LONG`
    characters, and more than 16 for each token, excerpts stand for the whole. With `nested` they come in
    the order of `spread_order`, out of `LONG` characters at most: fewer tokens give the first of the same windows.
    """
    frame = _Frame.of(tokenizer, length, bos)
    whole = 0 if tokens is None or nested else tokens // length * length  # as a run records them
    long = len(text) if tokens is None else max(LONG, 16 * whole)
    if len(text) > long:
        stream, sizes = _excerpts(text, tokenizer, long, frame.room)
    else:
        stream, pieces = _encode(text, tokenizer), text.pieces()
        sizes = [len(ids) for ids in _encode_all(pieces, tokenizer)] if len(pieces) > 1 else []
    step = stride or frame.room
    every = frame.fitting(len(stream), step, tokens)
    count = min(every, frame.wanted(tokens) or every)
    even = [(2 * i + 1) * every // (2 * count) for i in range(count)]
    firsts = [i * step for i in (spread_order(every)[:count] if nested else even)]
    return {"input_ids": frame.cut(stream, firsts)} | _numbers(sizes, firsts)


def mixed(parts: Sequence["torch.Tensor"]) -> "torch.Tensor":
    """Windows of several texts, each text spread over the result.

    Not in turn: every second window would then be of one text.
    """
    import torch

    random = torch.Generator().manual_seed(0)
    places = [
        (torch.arange(len(part)) + torch.rand(len(part), generator=random)) / len(part)
        for part in parts
    ]
    return torch.cat(list(parts))[torch.cat(places).argsort(stable=True)]


def first_ids(tokenizer: Any, bos: str = "auto") -> list[int]:
    """The special tokens that windows begin with."""
    return _surroundings(tokenizer, bos)[0]


def _excerpts(text: str, tokenizer: Any, long: int, room: int) -> tuple[list[int], list[int]]:
    """Tokens of excerpts of `long` characters in all, each of whole windows; how many each has."""
    count = max(2, min(EXCERPTS, long // (16 * room)))  # so that long windows fit
    size = long // count
    starts = [i * (len(text) - size) // (count - 1) for i in range(count)]
    encoded = _encode_all([text[start : start + size] for start in starts], tokenizer)
    whole = [ids[: len(ids) // room * room] for ids in encoded]
    return list(chain.from_iterable(whole)), list(map(len, whole))


def spread_order(n: int) -> list[int]:
    """0 to n - 1, ordered such that every beginning is spread over all: by the bits read backwards."""
    bits = max(n - 1, 0).bit_length()
    return sorted(range(n), key=lambda i: f"{i:0{bits}b}"[::-1])


def _numbers(sizes: Sequence[int], firsts: Sequence[int]) -> dict[str, "torch.Tensor"]:
    """{"document": the document of each of these tokens}, by tokens a document; {} for only one."""
    import torch

    if len(sizes) < 2:
        return {}
    ends = torch.tensor(sizes).cumsum(0)
    last = len(sizes) - 1  # documents encoded one by one may have a token less than the stream
    numbers = torch.searchsorted(ends, torch.tensor(firsts), right=True)
    return {"document": numbers.clamp_max(last)}


@dataclass(frozen=True)
class _Frame:
    """A window of `length` tokens: its special tokens, and `room` for the text."""

    length: int
    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any, length: int, bos: str) -> "_Frame":
        if tokenizer is None:
            raise ValueError(
                "this model has no tokenizer, so it cannot read a text: name a text model"
            )
        frame = cls(length, *_surroundings(tokenizer, bos))
        if frame.room < 1:
            special = len(frame.before + frame.after)
            raise ValueError(f"`length` {length} leaves no room beside {special} special tokens")
        return frame

    @property
    def room(self) -> int:
        return self.length - len(self.before) - len(self.after)

    def wanted(self, tokens: int | None) -> int | None:
        """How many windows so many tokens are."""
        if tokens is not None and tokens < self.length:
            raise ValueError(
                f"`tokens` {tokens} is less than one window: lower `length` {self.length}"
            )
        return None if tokens is None else tokens // self.length

    def fitting(self, available: int, step: int, tokens: int | None) -> int:
        """How many windows a stream has, one every `step` tokens; says if they are too few."""
        if available < self.room:
            raise ValueError(
                f"the text has {available} tokens and one window takes {self.room}: "
                "take shorter windows or give more text"
            )
        count = (available - self.room) // step + 1
        if tokens is not None and count < tokens // self.length:
            logger.warning(
                "the text has %d tokens, fewer than the %d asked for", count * self.length, tokens
            )
        return count

    def cut(self, stream: list[int], firsts: Sequence[int]) -> "torch.Tensor":
        """(n, length) the windows that begin at these tokens of a stream."""
        import torch

        every = torch.tensor(stream, dtype=torch.long).unfold(0, self.room, 1)
        body = every[torch.tensor(firsts, dtype=torch.long)]
        ends = [torch.tensor(ids).long().expand(len(body), -1) for ids in (self.before, self.after)]
        return torch.cat([ends[0], body, ends[1]], dim=1)


def first_tokens(text: str, tokenizer: Any, wanted: int | None) -> list[int]:
    """The first `wanted` tokens of the whole text, from a prefix that is long enough."""
    size = len(text) if wanted is None else 5 * (wanted + EDGE)
    while size < len(text):
        ids = _encode(text[:size], tokenizer)
        if len(ids) >= wanted + EDGE:  # type: ignore[operator]
            return ids[:wanted]
        size *= 2
    return _encode(text, tokenizer)[:wanted]


def _encode(text: str, tokenizer: Any) -> list[int]:
    return _encode_all([text], tokenizer)[0]


def _encode_all(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each text, without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        options = {"add_special_tokens": False, "verbose": False}
        return [list(tokenizer(text, **options)["input_ids"]) for text in texts]
    # Twice as fast as calling the tokenizer, which also computes offsets. Some tokenizer.json files
    # truncate to a few hundred tokens; calling the tokenizer would lift that too.
    backend.no_truncation()
    backend.no_padding()
    encoded = backend.encode_batch_fast(list(map(str, texts)), add_special_tokens=False)
    return [list(one.ids) for one in encoded]


def _surroundings(tokenizer: Any, bos: str) -> tuple[list[int], list[int]]:
    """The special tokens before and after each window: those that the tokenizer adds to a short text."""
    if bos not in ("auto", "always", "never"):
        raise ValueError(f"unknown bos {bos}: `bos` takes auto, always or never")
    if bos == "never":
        return [], []
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    at = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    if bos == "always" and tokenizer.bos_token_id is None:
        raise ValueError('this tokenizer has no BOS token: use `bos="auto"` or `bos="never"`')
    if bos == "always" and before[:1] != [tokenizer.bos_token_id]:
        before = [tokenizer.bos_token_id, *before]
    return before, after


def count_bytes(ids: "torch.Tensor", tokenizer: Any) -> int:
    """utf-8 bytes of windows (n, length) of tokens, without special tokens.

    A window may begin or end within a character, which tokens of bytes have parts of: decoding
    would count a part as a replacement character of 3 bytes.
    """
    special = set(tokenizer.all_special_ids)
    rows = [[i for i in row if i not in special] for row in ids.tolist()]
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if not ("ByteLevel" in decoder or "ByteFallback" in decoder):
        return sum(len(tokenizer.decode(row).encode()) for row in rows)
    tokens = tokenizer.convert_ids_to_tokens(list(chain.from_iterable(rows)))
    if "ByteLevel" in decoder:  # a character of a token stands for a byte
        return sum(map(len, tokens))
    return sum(1 if BYTE.fullmatch(t) else len(t.replace("\u2581", " ").encode()) for t in tokens)
