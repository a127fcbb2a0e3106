"""Text that a model writes itself: windows to fit on that cover what it was trained on, not one domain.

    ids = generated_windows(model, tokenizer, 32, 512)       # (32, 512), the same for the same seed

A window holds texts of DOCUMENT tokens, each written by itself: many short texts cover more than a few long ones.
A text begins with a token drawn at random from the vocabulary, behind the special tokens that windows
have; the rest is sampled from the model's predictions (arXiv 2305.17888 calibrates so, too). Special tokens are
not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from howlinear.models.cutting import first_ids
from howlinear.models.hooks import evaluating
from howlinear.models.offload import device_of, is_offloaded
from howlinear.run import room

VERSION = "2"  # another one where the same seed gives another text
DOCUMENT = 128  # tokens of a text, at most
MOST = 128  # texts that are written at once
CACHE = 2**31  # bytes that their keys and values may take, at most


def why_no_text(model: nn.Module) -> str:
    """Why a model cannot write text; "" if it can."""
    can = getattr(model, "can_generate", lambda: False)
    if not can() or model.config.is_encoder_decoder:  # type: ignore[union-attr]
        return f"{type(model).__name__} does not write text"
    if is_offloaded(model):
        return "a model writes text with all weights in memory"
    try:
        out = _next(model, torch.zeros(1, 2, dtype=torch.long))
    except Exception as problem:  # whatever a family raises that wants other inputs, too
        return f"{type(model).__name__} does not write text from tokens alone ({type(problem).__name__})"
    if getattr(out, "past_key_values", None) is None:  # masked language models, too
        return f"{type(model).__name__} keeps no keys and values, so that it writes too slowly"
    return ""


@torch.no_grad()
def _next(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    """The model's output for the tokens `ids` (n, tokens) that follow those it has seen."""
    with evaluating(model):
        return model(input_ids=ids.to(device_of(model)), use_cache=True, **options)


def generated_windows(
    model: nn.Module,
    tokenizer: Any,
    count: int,
    length: int,
    *,
    bos: str = "auto",
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """(count, length) token ids. ValueError for a model that does not generate.

    `progress` is called with the number of tokens written since the last call.
    """
    if reason := why_no_text(model):
        raise ValueError(f"{reason}: name another text with `also_fit`")
    random = torch.Generator().manual_seed(seed)
    size = min(len(tokenizer), model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    size = min(size, _next(model, torch.zeros(1, 1, dtype=torch.long)).logits.shape[-1])
    plain = torch.ones(size, dtype=torch.bool)
    plain[[i for i in special_ids(tokenizer) if i < size]] = False
    start = torch.tensor(first_ids(tokenizer, bos), dtype=torch.long)
    parts, behind = [], length - len(start)
    texts = max(1, -(-behind // DOCUMENT))  # in a window
    size = len(start) + -(-behind // texts)
    batch, needed = _texts_at_once(model, size, count * texts)
    room.check_memory(
        needed, "to write text, keys and values need", "name another text with `also_fit`, or none"
    )
    for first in range(0, count * texts, batch):
        n = min(batch, count * texts - first)
        drawn = torch.multinomial(plain.float(), n, replacement=True, generator=random)
        ids = torch.cat([start.expand(n, -1), drawn[:, None]], 1)
        parts.append(_continued(model, ids, size, plain, random, progress))
    written = torch.cat(parts)[:, len(start) :].reshape(count, -1)[:, :behind]
    return torch.cat([start.expand(count, -1), written], 1)


def special_ids(tokenizer: Any) -> set[int]:
    """The tokens that stand for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def _texts_at_once(model: Any, length: int, count: int) -> tuple[int, int]:
    """As many as CACHE has room for, and the bytes of their keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", heads)
    width = config.hidden_size
    if isinstance(heads, int) and isinstance(shared, int):
        width = shared * (getattr(config, "head_dim", None) or width // heads)
    size = 2 * config.num_hidden_layers * width * length * model.dtype.itemsize
    batch = int(min(max(CACHE // size, 1), MOST, count))
    return batch, batch * size


def _continued(
    model: nn.Module,
    ids: Tensor,
    length: int,
    plain: Tensor,
    random: torch.Generator,
    progress: Callable[[int], None],
) -> Tensor:
    """Texts that begin with `ids` (n, tokens); tokens that are not `plain` are not written."""
    new, cache = ids, None
    progress(ids.numel())
    while ids.shape[1] < length:
        out = _next(model, new, **{} if cache is None else {"past_key_values": cache})
        cache = _roomy(out.past_key_values, length) if cache is None else out.past_key_values
        logits = out.logits[:, -1, : len(plain)].float().cpu()
        logits[:, ~plain] = -torch.inf
        new = _drawn(logits, random)
        ids = torch.cat([ids, new], 1)
        progress(len(ids))
    return ids


def _drawn(logits: Tensor, random: torch.Generator) -> Tensor:
    """One token a row (n, 1) from the predictions, by one random number.

    `torch.multinomial` draws one for each token of the vocabulary, in one thread.
    """
    cumulated = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    if not bool((total > 0).all()):  # NaN
        raise ValueError("predictions are not finite: the model cannot write text")
    level = torch.rand(len(logits), 1, dtype=torch.float64, generator=random) * total
    below = total.nextafter(torch.zeros_like(total))  # the product may have been rounded up
    level = level.minimum(below)
    return torch.searchsorted(cumulated, level, right=True)


def _roomy(cache: Any, length: int) -> Any:
    """The cache with room for `length` tokens where it would be copied at each token."""
    for i, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.keys is not None:
            cache.layers[i] = _Roomy(layer.keys, layer.values, length)
    return cache


class _Roomy(DynamicLayer):
    """Keys and values that begin with these; new ones are written behind them."""

    _layer_type = None  # transformers registers subclasses that have one

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.room = [s.new_empty(*s.shape[:-2], length, s.shape[-1]) for s in (keys, values)]
        self.update(keys, values)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        begin = self.get_seq_length()
        end = begin + keys.shape[-2]
        for kept, new in zip(self.room, (keys, values), strict=True):
            kept[..., begin:end, :] = new
        self.keys, self.values = (kept[..., :end, :] for kept in self.room)
        return self.keys, self.values
