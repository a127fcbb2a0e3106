"""May the products of a block's rows be made in float32? Measured on some of its rows.

    shift = float32_shift([], x, y)         # of some rows, with sums of earlier ones if there are
    if shift <= HARMLESS: ...

Float32 products are about twice as fast as float64 ones, or far more. They change R2 by their
rounding, which the weights of the map amplify: by much where y depends on directions in which the inputs
hardly vary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from howlinear.linear.accumulators import merged
from howlinear.linear.moments import Moments
from howlinear.linear.solving import column_scale, smallest_eigenvalue, solve_factored

NARROW = 256  # columns: blocks below it are summed in float64, which takes no time there
RESOLVED = 1e-4  # eigenvalues of scaled inputs: float32 products move them by about 1e-5
HARMLESS = 2.5e-7  # estimates up to here: R2 then moves by less than 1e-6, see docs/numerics.md


def float32_shift(before: Sequence[Moments], x: Tensor, y: Tensor) -> float:
    """About how far float32 products would move R2; infinite where they would lose a direction.

    `before` are float64 sums so far, x (n, d_in) and y (n, d_out) some more rows; together more rows than
    columns. The map of all is scored on these rows twice, by float32 products and by the rows in float64; the
    changes of all output features add without their signs. One tile is measured: errors of many cancel further.
    """
    shift = before[0].shift if before else None
    rounded = Moments(x.shape[-1], y.shape[-1], shift=shift, device=x.device, precision="mixed")
    rounded.update(x, y)
    S_xx, S_xy = merged([rounded, *before]).gram()
    scale, L = _resolved_factor(S_xx)
    total = float(rounded.S_yy.sum())
    if L is None or not total > 0:
        return math.inf
    W = solve_factored(L, S_xy.t() / scale)[0] / scale
    squares = rounded.residual_squares(W, rounded.mean_y - W @ rounded.mean_x)
    residuals = y.double() - (x.double() - rounded.mean_x) @ W.t()
    residuals -= residuals.mean(0)
    return float((squares - residuals.square().sum(0)).abs().sum()) / total


def is_resolved(sums: Moments) -> bool:
    """Do all directions of the scaled inputs stand far above what float32 products blur? O(d_in^3 / 3)"""
    return _resolved_factor(sums.gram()[0])[1] is not None


def _resolved_factor(S_xx: Tensor) -> tuple[Tensor, Tensor | None]:
    """The columns' scale, and L of the scaled S_xx = L L'; None if directions are not resolved."""
    scale = column_scale(S_xx.diagonal(), 0.0)
    L, info = torch.linalg.cholesky_ex(S_xx / scale / scale[:, None])
    return scale, None if int(info) or smallest_eigenvalue(L) <= RESOLVED else L
