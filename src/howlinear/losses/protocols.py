"""Named ways to cut a text into windows and to choose the tokens that a loss is a mean over.

    protocol = EvalProtocol.parse("windows-128")    # or "stride-1024-512", "gptq-2048"
    for batch in scored_batches(ids, protocol):     # ids: one stream (n,), or windows (n, length)
        states = batch.rows(run(batch.inputs))      # (n, d), the states that predict
        batch.targets, batch.cluster                # (n,) tokens to predict, and their documents

A perplexity depends on how much context each token has, so a number is only comparable under one
protocol; results carry its name. `KINDS` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from howlinear.models import cutting
from howlinear.models.documents import Documents
from howlinear.models.forward import IDS, Batch, Windows, WindowsLike, as_stream, as_windows

EMPTY = "the text is empty: there is no token to predict"

# A protocol's name is its kind and its numbers: how many numbers, and the kind in words. GPTQ (and
# wanda, and most papers on quantisation) averages the windows' means. Full windows have equal
# weight, so this equals the mean over tokens; its text (documents joined by blank lines) differs.
KINDS = {
    ("windows", 1): "windows of {length}, first token not predicted",
    ("stride", 2): "windows of {length} every {stride} tokens, each token counted once",
    ("gptq", 1): "GPTQ convention: windows of {length}, first token not predicted",
}


@dataclass(frozen=True)
class EvalProtocol:
    """How a text is cut into windows, and which tokens of each are predicted.

    A window starts every `stride` tokens. It counts the tokens that no earlier window held, except
    the window's own first token, which nothing predicts. Where windows overlap, the last one may be
    shorter, so that all tokens count, as in Hugging Face's guide to perplexity (whose loop weights
    windows by their tokens less one; here each token has the same weight). Otherwise the tokens
    after the last full window are left out.
    """

    name: str
    length: int
    stride: int

    @classmethod
    def parse(cls, text: str) -> EvalProtocol:
        """From "windows-128", "stride-1024-512" (length, stride) or "gptq-2048"."""
        kind, *numbers = text.split("-")
        if not all(map(str.isdecimal, numbers)) or (kind, len(numbers)) not in KINDS:
            raise ValueError(
                f"unknown protocol {text!r}, expected windows-N, stride-LENGTH-STRIDE or gptq-2048"
            )
        return cls(text, int(numbers[0]), int(numbers[-1]))

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"{self.name}: windows need 2 tokens or more to predict one")
        if not 1 <= self.stride < self.length + (not self.name.startswith("stride")):
            raise ValueError(f"{self.name}: the stride must be at least 1 and less than the length")

    def __str__(self) -> str:
        kind, *numbers = self.name.split("-")
        return KINDS[kind, len(numbers)].format(length=self.length, stride=self.stride)

    @property
    def counted(self) -> int:
        """Tokens of a whole window that are predicted."""
        return min(self.stride, self.length - 1)

    def cut(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(start, end, first counted token) of each window of n tokens."""
        end = 0
        for start in range(0, n, self.stride):
            if end == n or (self.stride == self.length and start + self.length > n):
                return
            seen, end = end, min(start + self.length, n)
            yield start, end, max(seen, start + 1)


PROTOCOLS = {n: EvalProtocol.parse(n) for n in ("windows-128", "stride-1024-512", "gptq-2048")}


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """B windows of one length L, and which n of their tokens are predicted."""

    inputs: dict[str, Tensor]
    counted: Tensor = field(repr=False)  # (B, L - 1) bool: is token t + 1 predicted, from state t?
    clusters: Tensor = field(repr=False)  # (B,) each window's document, or its number

    @property
    def targets(self) -> Tensor:
        """(n,) the tokens to predict."""
        return self.inputs["input_ids"][:, 1:][self.counted]

    @property
    def cluster(self) -> Tensor:
        """(n,) the number of each predicted token's document, or of its window."""
        return self.clusters[self.counted.nonzero()[:, 0]]

    @property
    def tokens(self) -> int:
        """B L: tokens that the model reads."""
        return self.inputs["input_ids"].numel()

    def rows(self, states: Tensor) -> Tensor:
        """(n, d), the states that predict, of states (B, L, d)."""
        return states[:, :-1][self.counted.to(states.device)]


def as_tokens(ids: WindowsLike) -> Tensor | Windows:
    """One stream of tokens (n,), or windows with all batches in memory: what can be read twice."""
    stream = as_stream(ids)
    return as_windows(ids).read() if stream is None else stream


def protocol_of(ids: WindowsLike, protocol: EvalProtocol | str | None) -> EvalProtocol:
    """The protocol passed; without one, windows imply "windows-length", by the longest of them."""
    if protocol is None and as_stream(ids) is not None:
        raise ValueError("one stream of tokens needs a protocol, such as windows-128 or gptq-2048")
    if protocol is None:
        inputs = [batch.inputs for batch in as_windows(ids).batches()]
        protocol = f"windows-{max((i[IDS].shape[1] for i in inputs if IDS in i), default=128)}"
    return EvalProtocol.parse(protocol) if isinstance(protocol, str) else protocol


def scored_batches(
    ids: WindowsLike,
    protocol: EvalProtocol,
    batch_size: int = 8,
    positions: int | None = None,
    first: int = 0,
) -> Iterator[ScoredBatch]:
    """Batches of a stream of tokens (n,), which the protocol cuts; or of windows, as they are.

    See `models.forward` for what windows may be. Padding (attention_mask 0) is not counted, nor is
    the token after it, nor labels of -100. With `positions`, so many of the tokens to predict are
    drawn at random in each window, seeded by the window's number; `first` is the first one's number.
    """
    stream = as_stream(ids)
    if stream is not None:
        batches = _from_stream(stream.cpu(), protocol, batch_size)
    else:
        batches = (_scored(batch, protocol) for batch in as_windows(ids).batches(batch_size))
    for batch in batches:
        if positions is not None:
            batch = replace(batch, counted=_drawn(batch.counted, positions, first))
        first += len(batch.counted)
        yield batch


def _drawn(counted: Tensor, most: int, first: int) -> Tensor:
    """(B, L - 1) bool: at most so many of the positions that are counted in each window."""
    drawn = torch.zeros_like(counted)
    for i, row in enumerate(counted):
        at = row.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(first + i)
        drawn[i, at[torch.randperm(len(at), generator=generator)[:most]]] = True
    return drawn


def _from_stream(ids: Tensor, protocol: EvalProtocol, batch_size: int) -> Iterator[ScoredBatch]:
    if len(ids) == 0:
        raise ValueError(EMPTY)
    if len(ids) < protocol.length:
        raise ValueError(
            f"the text has {len(ids)} tokens and one window takes {protocol.length} "
            f"({protocol.name}): give more text or take shorter windows"
        )
    cuts = list(protocol.cut(len(ids)))
    full = ids.unfold(0, protocol.length, protocol.stride)
    short = [ids[None, start:end] for start, end, _ in cuts[len(full) :]]  # one at most
    first = 0
    for windows in (full, *short):
        for batch in as_windows(windows).batches(batch_size):
            group = cuts[first : first + len(batch)]
            skipped = torch.tensor([[counted - start] for start, _, counted in group])
            counted = torch.arange(1, windows.shape[1]) >= skipped
            inputs = {name: value.contiguous() for name, value in batch.inputs.items()}
            yield ScoredBatch(inputs, counted, first + torch.arange(len(batch)))
            first += len(batch)


def _scored(batch: Batch, protocol: EvalProtocol) -> ScoredBatch:
    """Windows that are cut already."""
    inputs = batch.inputs
    if "input_ids" not in inputs:
        raise ValueError(f"expected token ids, got dict of {', '.join(inputs)} without input_ids")
    if len(batch) == 0:
        raise ValueError(EMPTY)
    ids = inputs["input_ids"].cpu()
    mask = inputs.get("attention_mask", torch.ones_like(ids)).cpu() != 0
    short = "attention_mask" in inputs and ids.shape[1] < protocol.length
    uncounted = protocol.stride < protocol.length and "labels" not in inputs
    if uncounted or (ids.shape[1] != protocol.length and not short):
        raise ValueError(
            f"{protocol.name} does not fit windows of shape {tuple(ids.shape)}: "
            f"give one stream of tokens, of shape (n,), or windows-{ids.shape[1]}"
        )
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    counted = mask[:, 1:] & mask[:, :-1]
    if "labels" in inputs:
        counted &= inputs["labels"][:, 1:].cpu() != -100
    rest = {k: v for k, v in inputs.items() if k not in ("input_ids", "labels")}
    return ScoredBatch({"input_ids": ids, **rest}, counted, batch.clusters)


def held_out_tokens(
    text: Documents,
    tokenizer: Any,
    protocol: EvalProtocol,
    tokens: int,
    bos: str = "auto",
    *,
    positions: int | None = None,
    nested: bool = False,
) -> tuple[dict[str, Tensor], int]:
    """Windows of about `tokens` tokens to predict, spread over the text; their bytes in utf-8.

    Where the protocol's windows overlap, labels of -100 mark the tokens that give context alone.
    `positions` says how many tokens of a window will be predicted, all without it; for `nested` see
    `cutting.spread_windows`.
    """
    if not text.strip():
        raise ValueError("the held-out text is empty: profile a longer text")
    length, stride = protocol.length, protocol.stride
    counted = protocol.counted
    windows = -(-tokens // min(counted, positions or counted))
    overlapping = stride < length
    sample = cutting.spread_windows(
        text,
        tokenizer,
        length,
        tokens=windows * length,
        bos=bos if protocol.name.startswith("windows") else "never",
        stride=stride if overlapping else None,
        nested=nested,
    )
    ids = sample["input_ids"]
    if overlapping:
        sample["labels"] = ids.clone()
        sample["labels"][:, :-counted] = -100
    return sample, cutting.count_bytes(ids[:, -counted:], tokenizer)
