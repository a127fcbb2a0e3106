"""Which hidden units of a block to keep beside a matrix, and of which rank: y ~ Wx + b + D h_S.

    rows.update(torch.cat([x, every_unit(x)], 1), y, weight)    # Moments(d + m, d_out)
    alone, beside = eliminations(rows, d)
    order = beside.order                                        # units, the most needed first
    joint_map(rows, d, order[:k], rank=None, hidden=taken(model, block, order[:k]))

Everything is in closed form. Two methods choose k of m units. `probing.ladder.forward_selection`
starts from the matrix and adds the unit that lowers the squared error most. `elimination` starts
from all units, which is the block itself, and removes those that the rest replaces best (optimal
brain surgeon, for whole units): removing the units J from a fit with coefficients D and inverse
moments P adds D_J' P_JJ^-1 D_J to the squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.blending import Blend
from howlinear.linear.moments import Moments
from howlinear.linear.solving import column_scale, input_noise, solve, solve_gram

GROUP = 16  # units removed at once
RIDGE = 1e-9  # of the scaled moments' unit diagonal: units may repeat one another


@dataclass(frozen=True, eq=False)
class Elimination:
    """Hidden units of a block, the most needed first, and the errors of fits with the first k."""

    order: list[int]
    unexplained: dict[int, float]  # k -> share of the variance of y, on the rows of the fit


def eliminations(rows: Moments, d: int) -> tuple[Elimination, Elimination]:
    """All hidden units without a matrix, and beside one. O((d + m)^3)."""
    S, S_y = unit_diagonal(*rows.gram())
    S.diagonal().add_(RIDGE)
    squares = rows.S_yy.sum()
    alone = _eliminated(S[d:, d:], S_y[d:], 0, float(squares))
    return alone, _eliminated(S, S_y, d, float(squares)) if d else alone


def _eliminated(S: Tensor, S_y: Tensor, start: int, total: float) -> Elimination:
    """Columns of S from `start` on, the most needed first. S has a unit diagonal.

    P = S^-1 is not updated: what the removed columns take from it is C'C, C (removed, columns).
    """
    P = torch.cholesky_inverse(torch.linalg.cholesky(S))
    D = P @ S_y  # (columns, d_out)
    C = torch.empty_like(P[start:])
    diagonal = P.diagonal()[start:].clone()
    squares = max(total - float((D * S_y).sum()), 0.0)
    total = total or 1.0  # y that does not vary leaves nothing unexplained
    left = len(C)
    removed: list[int] = []
    unexplained = {left: squares / total}
    while left:
        # In groups from the first multiple of GROUP on, and by powers of 2 in the end: 32, 16, 8, 4, ...
        below = left % GROUP or GROUP
        count = below if left > GROUP else left - (1 << (left - 1).bit_length() >> 1)
        cost = D[start:].square().sum(1) / diagonal
        cost[removed] = torch.inf
        units = cost.topk(count, largest=False).indices
        J, gone = start + units, len(removed)
        rows = P[J] - C[:gone, J].t() @ C[:gone]
        L = torch.linalg.cholesky(rows[:, J])
        c = torch.linalg.solve_triangular(L, rows, upper=False)
        e = torch.linalg.solve_triangular(L, D[J], upper=False)
        C[gone : gone + count] = c
        diagonal -= c[:, start:].square().sum(0)
        D.addmm_(c.t(), e, alpha=-1)
        squares += float(e.square().sum())
        removed += units.tolist()
        left -= count
        unexplained[left] = squares / total
    return Elimination(removed[::-1], unexplained)


def unit_diagonal(S: Tensor, S_y: Tensor) -> tuple[Tensor, Tensor]:
    """(S, S_y) with the columns of x scaled to unit squares; columns of zeros stay zero."""
    scale = column_scale(S.diagonal(), 0.0)
    return S / scale / scale[:, None], S_y / scale[:, None]


def joint_map(
    rows: Moments | Blend,
    d: int,
    units: Sequence[int],
    rank: int | None,
    hidden: nn.Module | None,
    *,
    intercept: bool = True,
) -> Map:
    """The best map with these units and a matrix of this rank (None: full, 0: none).

    Without an intercept it is a matrix of full rank, units, or both.

    Reduced-rank regression beside the units: with the part of both sides removed that the units
    explain, the matrix is projected on the leading eigenvectors of W S W'; then D is solved again.
    """
    at = _columns(d, units)
    if rank is None:
        joint, _ = solve(rows, columns=at, intercept=intercept)
        return UnitMap.split(joint, tuple(units), hidden) if hidden is not None else joint
    if not rank and hidden is not None:
        joint, _ = solve(rows, columns=at[d:], intercept=intercept)
        nothing = Factored(joint.weight.new_zeros(0, d), joint.weight[:, :0], joint.bias)
        return UnitMap(nothing, tuple(units), joint.weight, hidden)
    S, S_y = rows.gram()
    into, out = S.new_zeros(0, d), S.new_zeros(rows.d_out, 0)
    if rank:
        W, explained = _explained(rows, at, d, S, S_y)
        out = torch.linalg.eigh(explained)[1].flip(1)[:, :rank]
        into = out.t() @ W
    bias = rows.mean_y - out @ (into @ rows.mean_x[:d])
    if hidden is None:
        return Factored(into, out, bias)
    h = at[d:]
    D = _coefficients(rows, h, S, S_y[h] - S[h][:, :d] @ into.t() @ out.t())
    return UnitMap(Factored(into, out, bias - D @ rows.mean_x[h]), tuple(units), D, hidden)


def unexplained_by_rank(rows: Moments, d: int, units: Sequence[int]) -> Tensor:
    """(d_out,) the share that a matrix of full rank explains and one of rank 0, 1, 2, ... does not."""
    _, explained = _explained(rows, _columns(d, units), d, *rows.gram())
    values = torch.linalg.eigvalsh(explained).clamp_min(0)  # the smallest first
    return values.cumsum(0).flip(0) / rows.S_yy.sum()


def _columns(d: int, units: Sequence[int]) -> Tensor:
    """The columns of [x, every unit] that are x or one of these units."""
    return torch.tensor([*range(d), *(d + u for u in units)])


def _explained(
    rows: Moments | Blend, at: Tensor, d: int, S: Tensor, S_y: Tensor
) -> tuple[Tensor, Tensor]:
    """W of the joint fit, and W S W', the squares and products that it explains.

    S there is that of x without the part that the units explain.
    """
    W = _coefficients(rows, at, S, S_y[at])[:, :d]
    inputs, h = S[:d, :d], at[d:]
    if len(h):
        inputs = inputs - S[:d, h] @ _coefficients(rows, h, S, S[h][:, :d]).t()
    return W, W @ inputs @ W.t()


def _coefficients(rows: Moments | Blend, at: Tensor, S: Tensor, S_y: Tensor) -> Tensor:
    """(outputs, columns) of the regression on the columns `at` of x, whose S_xy is `S_y`."""
    return solve_gram(S[at][:, at], S_y, input_noise(rows)[at], rows.eps)[0]
