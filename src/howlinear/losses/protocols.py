"""TODO"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EMPTY = "the text is empty: there is no token to predict"

Batches = Tensor | Iterable[Tensor | Mapping[str, Tensor]]


# -- protocols ------------------------------------------------------------------------------------

# A protocol's name is its kind and its numbers: how many numbers, and the kind in words. GPTQ (and
# wanda, and most papers on quantisation) averages the windows' means; full windows weigh the same,
# so that this is the mean over tokens, and only the text (documents joined by blank lines) is its own.
KINDS = {
    ("windows", 1): "windows of {length}, first token not predicted",
    ("stride", 2): "windows of {length} every {stride} tokens, each token counted once",
    ("gptq", 1): "GPTQ convention: windows of {length}, first token not predicted",
}


@dataclass(frozen=True)
class Protocol:
    """How a text is cut into windows, and which tokens of each are predicted.

    A window starts every `stride` tokens, and the tokens that no window before it held are counted,
    but for the window's first, which nothing predicts. Where windows overlap the last one may be
    shorter, so that all tokens count, as in Hugging Face's guide to perplexity (whose loop weighs
    windows by their tokens less one; here each token weighs the same). Else a rest is left out.
    """

    name: str
    length: int
    stride: int

    @classmethod
    def parse(cls, text: str) -> Protocol:
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

    def cut(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(start, end, first counted token) of each window of n tokens."""
        end = 0
        for start in range(0, n, self.stride):
            if end == n or (self.stride == self.length and start + self.length > n):
                return
            seen, end = end, min(start + self.length, n)
            yield start, end, max(seen, start + 1)


PROTOCOLS = {n: Protocol.parse(n) for n in ("windows-128", "stride-1024-512", "gptq-2048")}


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of one length: B windows of L tokens, n of them predicted."""

    inputs: dict[str, Tensor]
    counted: Tensor = field(repr=False)  # (B, L - 1) bool: is token t + 1 predicted, from state t?
    first: int  # number of the first window

    @property
    def targets(self) -> Tensor:
        """(n,) the tokens to predict."""
        return self.inputs["input_ids"][:, 1:][self.counted]

    @property
    def window(self) -> Tensor:
        """(n,) the number of each one's window."""
        return self.first + self.counted.nonzero()[:, 0]

    def rows(self, states: Tensor) -> Tensor:
        """(n, d), the states that predict, of states (B, L, d)."""
        return states[:, :-1][self.counted.to(states.device)]


def protocol_of(ids: Batches, protocol: Protocol | str | None) -> Protocol:
    """The protocol meant; a tensor of windows (n, length) tells it by its shape."""
    if protocol is None and isinstance(ids, Tensor) and ids.ndim == 2:
        protocol = f"windows-{ids.shape[1]}"
    if protocol is None:
        raise ValueError("these tokens need a protocol, such as windows-128 or gptq-2048")
    return Protocol.parse(protocol) if isinstance(protocol, str) else protocol


def batches(ids: Batches, how: Protocol, batch_size: int = 8) -> Iterator[Batch]:
    """Batches of a stream of tokens (n,), cut by the protocol; or of windows that are cut already.

    Those are a tensor (n, length) or batches: tensors, or dicts of model inputs. Of dicts, padding
    (attention_mask 0) is not counted, nor the token after it, nor labels of -100.
    """
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size} (--batch-size)")
    if isinstance(ids, Tensor) and ids.numel() == 0:
        raise ValueError(EMPTY)
    if isinstance(ids, Tensor) and ids.ndim == 1:
        yield from _from_stream(ids, how, batch_size)
        return
    first = 0
    for given in _checked(ids).split(batch_size) if isinstance(ids, Tensor) else ids:
        batch = _as_batch(given, how, first)
        yield batch
        first += len(batch.counted)


def _from_stream(ids: Tensor, how: Protocol, batch_size: int) -> Iterator[Batch]:
    if len(ids) < how.length:
        raise ValueError(
            f"the text has {len(ids)} tokens and one window takes {how.length} ({how.name}): "
            f"give more text (--text-file) or take shorter windows"
        )
    cuts = list(how.cut(len(ids)))
    full = [c for c in cuts if c[1] - c[0] == how.length]  # a shorter one comes last, alone
    groups = [full[i : i + batch_size] for i in range(0, len(full), batch_size)]
    first = 0
    for group in [*groups, *([c] for c in cuts[len(full) :])]:
        windows = _checked(torch.stack([ids[start:end] for start, end, _ in group]))
        skipped = torch.tensor([[counted - start] for start, _, counted in group])
        yield Batch({"input_ids": windows}, torch.arange(1, windows.shape[1]) >= skipped, first)
        first += len(group)


def _as_batch(given: Any, how: Protocol, first: int) -> Batch:
    inputs = {"input_ids": given} if isinstance(given, Tensor) else given
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise ValueError(
            f"expected token ids, or batches of them with input_ids, got {type(given).__name__}"
        )
    ids = _checked(inputs["input_ids"])
    mask = inputs.get("attention_mask", torch.ones_like(ids)).cpu() != 0
    short = "attention_mask" in inputs and ids.shape[1] < how.length
    if how.stride < how.length or (ids.shape[1] != how.length and not short):
        raise ValueError(
            f"{how.name} does not fit windows of shape {tuple(ids.shape)}: "
            f"give one stream of tokens, of shape (n,), or windows-{ids.shape[1]}"
        )
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    counted = mask[:, 1:] & mask[:, :-1]
    if "labels" in inputs:
        counted &= inputs["labels"][:, 1:].cpu() != -100
    rest = {k: v for k, v in inputs.items() if k not in ("input_ids", "labels")}
    return Batch({"input_ids": ids, **rest}, counted, first)


def _checked(ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"expected token ids: whole numbers of shape (n,) or (windows, length), "
            f"got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    return ids.long().cpu()
