"""A bounded, seeded sample of a block's rows, for scores that moments cannot give.

A row's key is a hash of the seed and of its token offset in the text. The sample keeps the rows with
the smallest keys, so it does not depend on how the text was divided, and samples of parts of a text
merge to the sample of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from howlinear.linear.rows import Rows

SAMPLE = 512  # rows kept for stream_error
PARTS = ("keys", "group", "x", "y", "stream")


class RowSample:
    """A uniform sample of rows of fixed size: those with the smallest keys."""

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
        keys = _hashed(place, self.seed)
        slots, new = self._accept(keys)
        at = new.to(x.device)
        self.keys[slots], self.group[slots] = keys[new], group[new]
        self.x[slots] = x[at].float().cpu()
        self.y[slots] = rows.y[at].float().cpu()
        self.stream[slots] = rows.h[at].float().square().sum(-1).cpu()

    def merge(self, other: RowSample) -> None:
        slots, new = self._accept(other.keys)
        for name in PARTS:
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
        return {name: getattr(self, name) for name in PARTS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, here in self.state_dict().items():
            saved = state.get(name)
            if saved is None or saved.dtype != here.dtype or saved.shape[1:] != here.shape[1:]:
                raise ValueError(f"the row sample has no {name} as expected")
            if len(saved) != len(state["keys"]) or not bool(saved.isfinite().all()):
                raise ValueError(f"{name} of the row sample is damaged")
            setattr(self, name, saved.clone())


def _hashed(place: Tensor, seed: int) -> Tensor:
    """63 pseudorandom bits of a seed and a place (splitmix64's finaliser)."""
    start = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = place.numpy().astype(np.uint64) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))
