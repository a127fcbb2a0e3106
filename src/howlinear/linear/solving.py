"""The exact least-squares map of an accumulator.

    affine = fit(moments)               # argmin of sum w |y - Wx - b|^2, solved, not trained

Notation: W (d_out, d_in), b (d_out,), S_xx (d_in, d_in), S_xy (d_in, d_out) centred sums over rows.

The columns of x are first scaled to unit variance. A Cholesky factorisation solves where that
matrix is well conditioned; otherwise its eigenvectors do, directions below the rank threshold are
left out, and the solution is the one of least norm in the scaled columns. The threshold is
numpy's for `matrix_rank` with the width in place of the row count: singular values of the scaled,
centred inputs below `d_in * eps` times the largest count as zero, eps being that of the rows'
dtype (float32's for anything narrower). Sums of squares cannot resolve singular values below
sqrt(d_in * 2.2e-16): that floor matters for float64 rows only.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine
from howlinear.linear.moments import Moments

if TYPE_CHECKING:
    from howlinear.linear.blending import Blend

log = logging.getLogger(__name__)

EPS = float(torch.finfo(torch.float64).eps)


def fit(moments: Any, y: Any = None, *, intercept: bool = True, ridge: float = 0.0) -> Affine:
    """The exact least-squares map of moments, or of rows in memory: `fit(x, y)`, as in scikit-learn.

    `ridge` adds ridge * |W|^2 to the sum of squares.

    O(d_in^2 (d_in / 3 + d_out)). Fewer rows than columns is refused unless there is a ridge; inputs
    that lack rank give the least-norm map, a warning and `rank < d_in`.
    """
    if not (ridge >= 0 and math.isfinite(ridge)):
        raise ValueError(f"ridge must be finite and not negative, got {ridge}")
    if y is not None:
        moments = Moments.from_arrays(moments, y)
    columns = moments.d_in + intercept
    if ridge == 0 and moments.n < columns:
        raise ValueError(
            f"{moments.n} rows cannot determine {columns} columns: at least {columns} are "
            f"needed to fit, about {40 * moments.d_in} to trust the result"
        )
    affine, _ = solve(moments, intercept=intercept, ridge=ridge)
    if affine.rank < moments.d_in:
        rank = affine.rank
        log.warning("inputs have rank %d of %d: this is the least-norm map", rank, moments.d_in)
    return affine


def solve(
    moments: Accumulator | Blend,
    *,
    columns: Tensor | None = None,
    intercept: bool = True,
    ridge: float = 0.0,
) -> tuple[Affine, Tensor]:
    """(map, Z) without the checks and warnings of `fit`, of some columns of x or all.

    Z (d_out, rank) has Z Z' = W S_xx W', the sums of squares that the map explains; with a ridge
    they count the penalty too. `effective_rank` reads it.
    """
    mean_x, noise = moments.mean_x, input_noise(moments, intercept)
    root = moments.root(intercept) if columns is None else None
    if root is None:
        S_xx, S_xy = moments.gram(intercept)
        if columns is not None:
            S_xx, S_xy = S_xx[columns][:, columns], S_xy[columns]
            mean_x, noise = mean_x[columns], noise[columns]
        if ridge:
            S_xx.diagonal().add_(ridge)
        W, rank, Z = solve_gram(S_xx, S_xy, noise, moments.eps)
    else:
        W, rank, Z = _solve_root(*root, noise, moments.eps, ridge)
    bias = moments.mean_y - W @ mean_x if intercept else W.new_zeros(len(W))
    return Affine(W, bias, rank), Z


def input_noise(moments: Accumulator | Blend, intercept: bool = True) -> Tensor:
    """(d_in,) root of the sum of squares that rounding alone gives each centred column of x."""
    if not intercept:
        return torch.zeros_like(moments.mean_x)
    return moments.eps * moments.mean_x.abs() * math.sqrt(moments.weight)


def column_scale(squares: Tensor, noise: Tensor | float) -> Tensor:
    """Root of each column's sum of squares; infinite for columns that only rounding makes vary.

    Dividing by infinity makes such a column zero and its coefficient too.
    """
    scale = squares.clamp_min(0).sqrt()
    return torch.where(scale > noise, scale, torch.inf)


def solve_gram(S_xx: Tensor, S_xy: Tensor, noise: Tensor, eps: float) -> tuple[Tensor, int, Tensor]:
    """(W, rank, Z) from sums of squares; `eps` is the resolution of the rows."""
    d = len(S_xx)
    tol = max(d * eps, math.sqrt(d * EPS))
    scale = column_scale(S_xx.diagonal(), noise)
    C = S_xx / scale / scale[:, None]  # unit diagonal
    B = S_xy.t() / scale
    L = _factor(C, tol)
    if L is None:
        values, V = torch.linalg.eigh(C)
        keep = values > tol**2 * values[-1]
        V, root = V[:, keep], values[keep].sqrt()
        Z = B @ V / root
        return (Z / root) @ V.t() / scale, int(keep.sum()), Z
    W, Z = solve_factored(L, B)
    return W / scale, d, Z


def solve_factored(L: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """(W, Z) with W L L' = B and Z Z' = W B'. Solving from the right is a quarter faster."""
    Z = torch.linalg.solve_triangular(L.t(), B, upper=True, left=False)
    return torch.linalg.solve_triangular(L, Z, upper=False, left=False), Z


def _factor(C: Tensor, tol: float) -> Tensor | None:
    """L of C = L L', C of unit diagonal; None if directions of C are below the rank threshold."""
    L, info = torch.linalg.cholesky_ex(C)
    if int(info):
        return None
    if smallest_eigenvalue(L) > 100 * tol**2 * float(C.abs().sum(1).max()):
        return L
    values = torch.linalg.eigvalsh(C)
    return L if bool((values > tol**2 * values[-1]).all()) else None


class Both(NamedTuple):
    """The map of some rows, and of these and a few more."""

    some: Affine
    all: Affine
    #: P (d_out, m) and Q (m, d_in), all.weight = some.weight + P Q; None where both were solved for
    change: tuple[Tensor, Tensor] | None


def solve_both(moments: Accumulator, more: Accumulator) -> Both:
    """The maps of `moments`, and of `moments` and `more`.

    A few more rows, kept as they are, update the first map: with V and Y these rows as they enter the
    centred sums, W + (Y - V W')' (I + V S_xx^-1 V')^-1 V S_xx^-1. Otherwise both are solved for.
    """
    rows = more.kept() if moments.root() is None else None
    S_xx, S_xy = moments.gram()
    scale = column_scale(S_xx.diagonal(), input_noise(moments))
    tol = max(len(S_xx) * moments.eps, math.sqrt(len(S_xx) * EPS))
    L = _factor(S_xx / scale / scale[:, None], tol) if rows is not None else None
    if rows is None or L is None:
        return Both(solve(moments)[0], solve(merged([moments, more]))[0], None)
    solved = torch.linalg.solve_triangular
    W = solve_factored(L, S_xy.t() / scale)[0] / scale
    n, m = moments.weight, len(rows[0])
    V, Y = rows[0].double() - moments.mean_x, rows[1].double() - moments.mean_y
    mean_x, mean_y = (
        mean + part.sum(0) / (n + m) for mean, part in ((moments.mean_x, V), (moments.mean_y, Y))
    )
    off = (1 - math.sqrt(n / (n + m))) / m  # I - off 11' is the root of I - 11' / (n + m)
    V, Y = (part - off * part.sum(0) for part in (V, Y))
    U = solved(L, (V / scale).t(), upper=False)  # (d_in, m): U'U = V S_xx^-1 V'
    inner = U.t() @ U
    inner.diagonal().add_(1)
    gain = torch.cholesky_solve(Y - V @ W.t(), torch.linalg.cholesky(inner))  # (m, d_out)
    P, Q = gain.t(), solved(L.t(), U, upper=True).t() / scale
    both, rank = W + P @ Q, len(S_xx)
    some = Affine(W, moments.mean_y - W @ moments.mean_x, rank)
    return Both(some, Affine(both, mean_y - both @ mean_x, rank), (P, Q))


def _solve_root(
    R: Tensor, Y: Tensor, noise: Tensor, eps: float, ridge: float
) -> tuple[Tensor, int, Tensor]:
    """(W, rank, Z) from factors, R'R = S_xx and R'Y = S_xy."""
    if ridge:
        R = torch.cat([R, torch.diag(R.new_full((len(R),), math.sqrt(ridge)))])
        Y = torch.cat([Y, Y.new_zeros(len(R) - len(Y), Y.shape[1])])
        Q, R = torch.linalg.qr(R)
        Y = Q.t() @ Y
    tol = len(R) * eps
    scale = column_scale(R.square().sum(0), noise)
    R = R / scale
    U, s, Vh = torch.linalg.svd(R, full_matrices=False)
    keep = s > tol * s[0]
    rank = int(keep.sum())
    if rank == len(s):
        return torch.linalg.solve_triangular(R, Y, upper=True).t() / scale, rank, Y.t()
    Z = Y.t() @ U[:, keep]
    return (Z / s[keep]) @ Vh[keep] / scale, rank, Z


def smallest_eigenvalue(L: Tensor, steps: int = 4) -> float:
    """About the smallest eigenvalue of L L', by inverse iteration; never below it. O(d^2)."""
    v = torch.ones(len(L), 1, dtype=L.dtype, device=L.device)
    v[1::2] = -1  # unlikely to be orthogonal to the eigenvector
    v += torch.linspace(0, 0.5, len(L), dtype=L.dtype, device=L.device)[:, None]
    growth = 1.0
    for _ in range(steps):
        v = v / torch.linalg.vector_norm(v)
        v = torch.linalg.solve_triangular(L, v, upper=False)
        v = torch.linalg.solve_triangular(L.t(), v, upper=True)
        growth = float(torch.linalg.vector_norm(v))
    return 1 / growth
