"""The rows of one batch: inputs and outputs of a block, one row for each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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

    def only(self, at: Tensor, y: Tensor) -> Rows:
        """The rows `at` (m,) with another y (m, d_out): inputs and outputs of one expert."""
        kept, hidden = self.kept[at], None if self.hidden is None else self.hidden[at]
        return Rows(self.x[at], y, hidden, None, self._lead, kept, self._h, self.starts)

    @cached_property
    def h(self) -> Tensor | None:
        """(n, d), the residual stream after the add; None for an unknown family."""
        return self._h if self._h is None or self._keep is None else self._h[self._keep]

    @cached_property
    def stream(self) -> Tensor | None:
        """(n,), |h|^2 in float32 or better."""
        if self.h is None:
            return None
        return self.h.to(torch.promote_types(self.h.dtype, torch.float32)).square().sum(-1)

    @cached_property
    def inverse_stream(self) -> Tensor | None:
        """(n,), 1/|h| in float64 on the CPU: row weights of a fit; None for an unknown family."""
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
