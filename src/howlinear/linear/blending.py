"""A map fitted to y + a c: as much of a correction c as held-out rows say can be learned.

    sums = merged([fit, held])                      # Moments of x and [y, c]
    a = learned_share(fit, held)                    # 0 to 1
    joint_map(Blend(sums, a), ...)

Least squares is linear in its target: with W_y and W_c fitted on some rows, W_y + a W_c is the map for
y + a c. On other rows its squared distance from y + c is a quadratic in a, whose minimum is known. Where
x says little about c, W_c mostly fits noise, and the minimum is near 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from howlinear.linear.moments import Moments
from howlinear.linear.solving import solve


def learned_share(fit: Moments, held: Moments, *, intercept: bool = True) -> float:
    """The a in [0, 1] with which the map of `fit` comes nearest to y + c on the rows of `held`."""
    if held.n == 0:
        return 0.0
    W_y, W_c = solve(fit, intercept=intercept)[0].weight.chunk(2)  # (d, columns) each
    S_xx, S_xy = held.gram(intercept)
    wanted = sum(S_xy.chunk(2, 1)) - S_xx @ W_y.t()  # of y + c, what W_y leaves
    squares = float(((W_c @ S_xx) * W_c).sum())
    return min(max(float((W_c.t() * wanted).sum()) / squares, 0.0), 1.0) if squares > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Blend:
    """Moments of x and y + a c, read from those of x and [y, c]."""

    sums: Moments
    a: float

    @property
    def d_out(self) -> int:
        return self.sums.d_out // 2

    @property
    def mean_x(self) -> Tensor:
        return self.sums.mean_x

    @property
    def mean_y(self) -> Tensor:
        y, c = self.sums.mean_y.chunk(2)
        return y + self.a * c

    @property
    def eps(self) -> float:
        return self.sums.eps

    @property
    def weight(self) -> float:
        return self.sums.weight

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        S_xx, S_xy = self.sums.gram(intercept)
        y, c = S_xy.chunk(2, 1)
        return S_xx, y + self.a * c

    def root(self, intercept: bool = True) -> None:
        """Sums have no factor."""
