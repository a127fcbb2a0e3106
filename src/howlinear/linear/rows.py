"""The rows of one batch: what enters a block and what leaves it, a token a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """What one block saw and said in one forward, padding left out. Read it inside `receive`.

    Without padding x and y are views of the model's own tensors: do not write to them.
    """

    x: Tensor  # (n, d_in)
    y: Tensor  # (n, d_out)
    hidden: Tensor | None  # (n, k): the hidden units that were asked for
    shape: tuple[int, int] | None  # (B, L) when nothing was left out
    _lead: tuple[int, int]  # (B, L) in any case
    _keep: Tensor | None  # (n,) which of the B L positions are rows, ascending; None: all
    _h: Tensor | None  # (B L, d)
    _starts: Tensor | None = None  # (B,) as `starts`, where the rows are only some of a block's

    def only(self, at: Tensor, y: Tensor) -> Rows:
        """The rows `at` (m,), with another y (m, d_out): what one expert was given, and said."""
        kept, hidden = self.kept[at], None if self.hidden is None else self.hidden[at]
        return Rows(self.x[at], y, hidden, None, self._lead, kept, self._h, self.starts)

    @cached_property
    def h(self) -> Tensor | None:
        """(n, d), the residual stream after the add; None where the family is not known."""
        return self._h if self._h is None or self._keep is None else self._h[self._keep]

    @cached_property
    def stream(self) -> Tensor | None:
        """(n,), |h|^2 in float32 or better."""
        if self.h is None:
            return None
        return self.h.to(torch.promote_types(self.h.dtype, torch.float32)).square().sum(-1)

    @cached_property
    def inverse_stream(self) -> Tensor | None:
        """(n,), 1/|h| in float64 in main memory: row weights of a fit."""
        return None if self.stream is None else self.stream.cpu().double().rsqrt()

    @cached_property
    def kept(self) -> Tensor:
        """(n,), which of the B L positions the rows are, ascending."""
        every = torch.arange(math.prod(self._lead), device=self.x.device)
        return every if self._keep is None else self._keep

    @cached_property
    def window(self) -> Tensor:
        """(n,), which window of the batch a row is from."""
        return self.kept // self._lead[1]

    @cached_property
    def starts(self) -> Tensor:
        """(B,), how far each window's first real token is from its left end."""
        if self._starts is not None:
            return self._starts
        batch, length = self._lead
        first = torch.full((batch,), length, device=self.kept.device)
        return first.scatter_reduce(0, self.window, self.kept % length, "amin")

    @cached_property
    def position(self) -> Tensor:
        """(n,), position in the window, 0 at its first real token: left padding does not count."""
        return self.kept % self._lead[1] - self.starts[self.window]
