"""y ~ Wx + b + D h_S in closed form: which hidden units S, and a matrix W of which rank.

    rows.update(torch.cat([x, every_unit(x)], 1), y, weight)    # Moments(d + m, d_out)
    order = elimination(rows, d).order                          # units, the most needed first
    joint_map(rows, d, order[:k], rank=None, hidden=taken(model, block, order[:k]))

Two ways lead to k of m units. `ladder.forward_selection` starts from the matrix and adds the unit that
lowers the squared error most; `elimination` starts from all units, which is the block itself, and
takes away those whose loss the rest repairs best (optimal brain surgeon, for whole units): removing
the units J from a fit with coefficients D and inverse moments P adds D_J' P_JJ^-1 D_J to the squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, Factored, Map, UnitMap, input_noise, solve_gram
from howlinear.linear.moments import Moments

GROUP = 16  # units removed at once
RIDGE = 1e-9  # of the scaled moments' unit diagonal: units may repeat one another


@dataclass(frozen=True, eq=False)
class Ladder:
    """Hidden units of a block, the most needed first, and what a fit with the first k of them leaves."""

    order: list[int]
    rungs: dict[int, float]  # k -> share of the variance left unexplained, on the rows of the fit


def elimination(rows: Moments, d: int, *, matrix: bool = True) -> Ladder:
    """All hidden units, beside a matrix or without one. O((d + m)^3)."""
    first = 0 if matrix else d
    S, S_y = rows.gram()
    S, S_y = S[first:, first:], S_y[first:]
    scale = S.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.inf)
    S, S_y = S / scale / scale[:, None], S_y / scale[:, None]
    S.diagonal().add_(RIDGE)
    P = torch.cholesky_inverse(torch.linalg.cholesky(S))
    D = P @ S_y
    at = d - first  # where the units begin
    alive = torch.ones(len(S) - at, dtype=torch.bool)
    total = float(rows.S_yy.sum())
    rest = max(total - float((D * S_y).sum()), 0.0)
    gone: list[int] = []
    rungs = {len(alive): rest / total}
    while (left := int(alive.sum())) > 0:
        cost = D[at:].square().sum(1) / P.diagonal()[at:]
        cost[~alive] = torch.inf
        # In groups from the first multiple of GROUP on, and by halves in the end: 32, 16, 8, 4, ...
        count = (left % GROUP or GROUP) if left > GROUP else left - left // 2
        J = cost.topk(count, largest=False).indices
        gone += J.tolist()
        alive[J] = False
        J = J + at
        L = torch.linalg.cholesky(P[J][:, J])
        c = torch.linalg.solve_triangular(L, P[J], upper=False)  # (group, d + m)
        e = torch.linalg.solve_triangular(L, D[J], upper=False)
        P.addmm_(c.t(), c, alpha=-1)
        D.addmm_(c.t(), e, alpha=-1)
        P[J] = P[:, J] = D[J] = 0
        rest += float(e.square().sum())
        rungs[int(alive.sum())] = rest / total
    return Ladder(gone[::-1], rungs)


def joint_map(
    rows: Moments,
    d: int,
    units: Sequence[int],
    rank: int | None,
    hidden: nn.Module | None,
    *,
    intercept: bool = True,
) -> Map:
    """The best map with these units and a matrix of this rank (None: full, 0: none).

    Without an intercept it can only be a matrix of full rank, perhaps beside units.

    Reduced-rank regression beside the units: with both sides freed of what the units explain, the
    matrix is projected on the leading eigenvectors of W S W'; then D is solved for again.
    """
    at = torch.tensor([*range(d), *(d + u for u in units)])
    if rank is None:
        S, S_y = rows.gram(intercept)
        noise = input_noise(rows, intercept)[at]
        W, input_rank, _ = solve_gram(S[at][:, at], S_y[at], noise, rows.eps)
        bias = rows.mean_y - W @ rows.mean_x[at] if intercept else W.new_zeros(len(W))
        joint = Affine(W, bias, input_rank)
        return UnitMap.split(joint, tuple(units), hidden) if hidden is not None else joint
    S, S_y = rows.gram()
    into, out = S.new_zeros(0, d), S.new_zeros(rows.d_out, 0)
    if rank:
        W, _, U = _directions(rows, d, at, S, S_y)
        out = U[:, :rank]
        into = out.t() @ W
    bias = rows.mean_y - out @ (into @ rows.mean_x[:d])
    if hidden is None:
        return Factored(into, out, bias)
    h = at[d:]
    D = _coefficients(rows, h, S, S_y[h] - S[h][:, :d] @ into.t() @ out.t())
    return UnitMap(Factored(into, out, bias - D @ rows.mean_x[h]), tuple(units), D, hidden)


def rest_by_rank(rows: Moments, d: int, units: Sequence[int]) -> Tensor:
    """(d_out,) what share a matrix of full rank explains that one of rank 0, 1, 2, ... does not."""
    at = torch.tensor([*range(d), *(d + u for u in units)])
    _, values, _ = _directions(rows, d, at, *rows.gram())
    return values.clamp_min(0).flip(0).cumsum(0).flip(0) / rows.S_yy.sum()


def _directions(
    rows: Moments, d: int, at: Tensor, S: Tensor, S_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """W of the joint fit, and the eigenvalues and vectors of W S W', the largest first.

    S there is that of x without the part which the units explain.
    """
    W = _coefficients(rows, at, S, S_y[at])[:, :d]
    inputs, h = S[:d, :d], at[d:]
    if len(h):
        inputs = inputs - S[:d, h] @ _coefficients(rows, h, S, S[h][:, :d]).t()
    values, U = torch.linalg.eigh(W @ inputs @ W.t())
    return W, values.flip(0), U.flip(1)


def _coefficients(rows: Moments, at: Tensor, S: Tensor, S_y: Tensor) -> Tensor:
    """(outputs, columns) of the regression on the columns `at` of x, whose S_xy is `S_y`."""
    return solve_gram(S[at][:, at], S_y, input_noise(rows)[at], rows.eps)[0]
