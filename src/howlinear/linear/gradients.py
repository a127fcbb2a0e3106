"""A bounded sample of windows: rows of one block, and how predictions depend on its output there.

    sample = GradientSample(d_in, d_out)
    sample.add(key, x, y, gradient, group=0, cluster=3)     # the rows of one window
    sample.merge(other)                                     # of other windows of the same block

Notation: e (n, d_out) the error of a map on the sampled rows, g (n, d_out) gradients. For small errors
the KL divergence of the predictions from the original ones is E[(g . e)^2] / 2 nats a token, see
`profiling.gradients`. The windows with the smallest keys are kept. A key is a hash of the seed, of the
window's tokens and of their offset in the text, so that samples of parts of a text merge to the sample
of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from howlinear.linear.rows import checked_rows

WINDOWS = 12  # that are kept
LENGTH = 85  # tokens of each, at most: an error counts in the predictions that follow it


class GradientSample:
    """Rows of at most WINDOWS windows with their gradients, float32 on the CPU."""

    _PARTS = ("key", "group", "cluster", "x", "y", "gradient")

    def __init__(self, d_in: int, d_out: int) -> None:
        self.key = torch.empty(0, dtype=torch.int64)  # (n,) of the row's window
        self.group = torch.empty(0, dtype=torch.int64)  # (n,) the row's fold
        self.cluster = torch.empty(0, dtype=torch.int64)  # (n,) its document, or its window
        self.x = torch.empty(0, d_in)
        self.y = torch.empty(0, d_out)
        self.gradient = torch.empty(0, d_out)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.key)

    def add(
        self, key: int, x: Tensor, y: Tensor, gradient: Tensor, *, group: int, cluster: int
    ) -> None:
        """Add the rows of one window: x (n, d_in), y (n, d_out), gradient (n, d_out)."""
        new = GradientSample(self.x.shape[1], self.y.shape[1])
        new.key, new.group, new.cluster = (torch.full((len(x),), v) for v in (key, group, cluster))
        new.x, new.y, new.gradient = (t.float().cpu().clone() for t in (x, y, gradient))
        self.merge(new)

    def merge(self, other: GradientSample) -> None:
        """Keep the windows with the smallest keys of both."""
        key = torch.cat([self.key, other.key])
        windows = key.unique()  # ascending
        kept = torch.isin(key, windows[:WINDOWS])
        for name in self._PARTS:
            both = torch.cat([getattr(self, name), getattr(other, name)])
            setattr(self, name, both if bool(kept.all()) else both[kept])

    def only(self, rows: Tensor) -> GradientSample:
        """Some rows, by a mask (n,) or by their numbers."""
        part = GradientSample(self.x.shape[1], self.y.shape[1])
        for name in self._PARTS:
            setattr(part, name, getattr(self, name)[rows])
        return part

    def narrow(self, d_in: int) -> GradientSample:
        """The same rows with the first columns of x."""
        narrow = copy.copy(self)
        narrow.x = self.x[:, :d_in].clone()
        return narrow

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._PARTS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        rows = checked_rows(self.state_dict(), state, "gradient sample")
        if len(rows["key"]) > WINDOWS * LENGTH:
            raise ValueError("the gradient sample has more rows than expected")
        for name, saved in rows.items():
            setattr(self, name, saved)
