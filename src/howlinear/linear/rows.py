"""Rows of a block, one for each token: those of one batch, and a bounded sample of all.

The sample is for scores that moments cannot give. A row's key is a hash of the seed and of its token
offset in the text; the rows with the smallest keys are kept. The sample therefore does not depend on
how the text was divided, and samples of parts of a text merge to the sample of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

SAMPLE = 512  # rows kept for stream_error


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs and outputs of one block in one forward, without padding. Read it inside `receive`.

    Without padding x and y are views of the model's own tensors: do not write to them.
    """

    x: Tensor  # (n, d_in)
    y: Tensor  # (n, d_out)
    hidden: Tensor | None  # (n, k) requested hidden units
    shape: tuple[int, int] | None  # (B, L) if there is no padding
    _lead: tuple[int, int]  # (B, L) in any case
    _keep: Tensor | None  # (n,) the positions, of B L, that are rows, ascending; None: all
    _h: Tensor | None  # (B L, d)
    _starts: Tensor | None = None  # (B,) `starts` of the block, for an expert's rows
    _scale: float = 1.0  # of y before the residual add

    @property
    def lead(self) -> tuple[int, int]:
        """(B, L), with padding."""
        return self._lead

    def copied(self) -> Rows:
        """x and y alone, to be kept after `receive`."""
        x, y = self.x.clone(), self.y.clone()
        return replace(self, x=x, y=y, hidden=None, _h=None)

    def only(self, at: Tensor, y: Tensor) -> Rows:
        """The rows `at` (m,) with another y (m, d_out): inputs and outputs of one expert."""
        kept, hidden = self.kept[at], None if self.hidden is None else self.hidden[at]
        rest = (self._lead, kept, self._h, self.starts, self._scale)
        return Rows(self.x[at], y, hidden, None, *rest)

    @cached_property
    def h(self) -> Tensor | None:
        """(n, d), the residual stream after the add; None for an unknown family."""
        return self._h if self._h is None or self._keep is None else self._h[self._keep]

    @cached_property
    def stream(self) -> Tensor | None:
        """(n,), |h|^2 in float32 or better, in units of y: where the layer adds s y, |h / s|^2."""
        return None if self.h is None else self.stream_at(slice(None))

    def stream_at(self, at: Tensor | slice) -> Tensor:
        """(m,), `stream` of some rows, where h is known."""
        assert self.h is not None
        wide = self.h[at].to(torch.promote_types(self.h.dtype, torch.float32))
        return (wide / self._scale).square().sum(-1)

    @cached_property
    def inverse_stream(self) -> Tensor | None:
        """(n,), 1/|h| in units of y, float64 on the CPU: row weights of a fit; None for an unknown family."""
        return None if self.stream is None else self.stream.cpu().double().rsqrt()

    @cached_property
    def kept(self) -> Tensor:
        """(n,), the positions, of B L, that are rows, ascending."""
        every = torch.arange(math.prod(self._lead), device=self.x.device)
        return every if self._keep is None else self._keep

    @cached_property
    def window(self) -> Tensor:
        """(n,), the window of each row in the batch."""
        return self.kept // self._lead[1]

    @cached_property
    def starts(self) -> Tensor:
        """(B,), the length of each window's left padding."""
        if self._starts is not None:
            return self._starts
        batch, length = self._lead
        first = torch.full((batch,), length, device=self.kept.device)
        return first.scatter_reduce(0, self.window, self.kept % length, "amin")

    @cached_property
    def position(self) -> Tensor:
        """(n,), position in the window, 0 at its first real token: left padding does not count."""
        return self.kept % self._lead[1] - self.starts[self.window]


class RowSample:
    """A uniform sample of rows of fixed size: those with the smallest keys."""

    _PARTS = ("keys", "group", "x", "y", "stream")
    _LAST = torch.iinfo(torch.int64).max

    def __init__(self, d_in: int, d_out: int, seed: int, size: int = SAMPLE) -> None:
        self.seed = seed
        self.keys = torch.full((size,), self._LAST)
        self.group = torch.full((size,), -1)
        self.x = torch.zeros(size, d_in)
        self.y = torch.zeros(size, d_out)
        self.stream = torch.zeros(size)

    def update(self, x: Tensor, rows: Rows, group: Tensor, place: Tensor) -> None:
        """`group` (n,) is each row's fold, `place` (n,) its token offset in the text."""
        if rows.h is None:
            return
        keys = hashed(place, self.seed)
        slots, new = self._accept(keys)
        at = new.to(x.device)
        self.keys[slots], self.group[slots] = keys[new], group[new]
        self.x[slots] = x[at].float().cpu()
        self.y[slots] = rows.y[at].float().cpu()
        self.stream[slots] = rows.stream_at(at).float().cpu()

    def merge(self, other: RowSample) -> None:
        slots, new = self._accept(other.keys)
        for name in self._PARTS:
            getattr(self, name)[slots] = getattr(other, name)[new]

    def _accept(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(slots to fill, indices of the new rows that fill them)"""
        size = len(self.keys)
        kept = torch.cat([self.keys, keys]).topk(size, largest=False).indices
        new = kept[kept >= size] - size
        new = new[keys[new] < self._LAST]
        stays = torch.zeros(size, dtype=torch.bool)
        stays[kept[kept < size]] = True
        return (~stays).nonzero().flatten()[: len(new)], new

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._PARTS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, saved in checked_rows(self.state_dict(), state, "row sample").items():
            setattr(self, name, saved)


def checked_rows(
    like: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str
) -> dict[str, Tensor]:
    """Copies of saved tensors of rows, as many in each, of the same types and widths as `like`."""
    count = len(state.get(next(iter(like)), ()))
    for name, here in like.items():
        saved = state.get(name)
        if saved is None or saved.dtype != here.dtype or saved.shape[1:] != here.shape[1:]:
            raise ValueError(f"the {what} has no {name} as expected")
        if len(saved) != count or not bool(saved.isfinite().all()):
            raise ValueError(f"{name} of the {what} is damaged")
    return {name: state[name].clone() for name in like}


def hashed(place: Tensor, seed: int) -> Tensor:
    """63 pseudorandom bits of a seed and a place (splitmix64's finaliser)."""
    start = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = place.numpy().astype(np.uint64) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))
