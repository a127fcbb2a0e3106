"""A streaming QR factorisation of rows with the interface of `Moments`: `--solver tsqr`.

It keeps the triangular factor of [1, z - c] instead of its square. Factors lose half as many digits
as sums of squares, and take more work and, for square blocks, two and a half times the memory.
`Moments` is tested against it.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator
from howlinear.linear.tiles import check_finite


class TSQR(Accumulator):
    """The triangular factor R of rows: R'R are the moments. More digits than `Moments`, more work."""

    _sums = ("_R",)
    _R: Tensor  # (1 + D, 1 + D), upper triangular

    @property
    def size(self) -> int:
        return (1 + self.d_in + self.d_out) ** 2

    def _allocate(self) -> None:
        size = 1 + self.d_in + self.d_out
        self._R = torch.zeros(size, size, dtype=torch.float64, device=self.device)

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        R = self._R
        for tile, w in self._tiles(x, y, weight, lead=1):
            tile[:, 0] = 1
            total = tile.sum(0)
            check_finite(total[1 : 1 + self.d_in], total[1 + self.d_in :])
            if w is not None:
                tile *= w.sqrt()[:, None]
            R = torch.linalg.qr(torch.cat([R, tile]), mode="r").R
        self._R = R

    def _combine(self, other: Self, delta: Tensor) -> None:
        R = other._R.clone()
        R[:, 1:] += torch.outer(R[:, 0], delta)
        self._R = torch.linalg.qr(torch.cat([self._R, R]), mode="r").R

    def _narrow_sums(self, narrow: Self) -> None:
        if narrow.d_in == self.d_in:
            narrow._R.copy_(self._R)
        else:
            narrow._R = torch.linalg.qr(self._without(self._R, narrow.d_in, lead=1), mode="r").R

    def root(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(R_xx, R_xy), R_xx upper triangular."""
        shift, d = self._require_rows(), self.d_in
        if intercept:
            return self._R[1 : 1 + d, 1 : 1 + d], self._R[1 : 1 + d, 1 + d :]
        raw = self._R[:, 1:] + torch.outer(self._R[:, 0], shift)
        R = torch.linalg.qr(raw, mode="r").R
        return R[:d, :d], R[:d, d:]

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), as of `Moments`."""
        R_xx, R_xy = self.root(intercept)
        return R_xx.t() @ R_xx, R_xx.t() @ R_xy

    def residual_squares(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(d_out,), without subtracting large sums from one another."""
        c, d = self._require_rows(), self.d_in
        offset = c[d:] - weight @ c[:d] - bias  # y - Wx - b = (y - c_y) - W (x - c_x) + offset
        R_1, R_x, R_y = self._R[:, 0], self._R[:, 1 : 1 + d], self._R[:, 1 + d :]
        E = R_y - R_x @ weight.t() + torch.outer(R_1, offset)
        return E.square().sum(0)

    def _mean(self) -> Tensor:
        return self._require_rows() + self._R[0, 1:] / self._R[0, 0]

    @property
    def S_yy(self) -> Tensor:
        self._require_rows()
        return self._R[1:, 1 + self.d_in :].square().sum(0)
