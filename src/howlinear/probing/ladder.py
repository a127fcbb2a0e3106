"""From one matrix to the whole block: regress y on [x, the activations of k hidden units].

    steps, maps = regressions(model, block, fit, report, affine)
    steps[3]["k"], steps[3]["r2"], steps[3]["parameters"]

k = 0 is the affine map, k = all the block itself. Units are added one at a time, each the one that
lowers the squared error most given the matrix and the units before it: forward selection, done in
closed form on the Schur complement C = S_hh - S_hx S_xx^-1 S_xh (the part of the units that x does
not explain linearly) and E = S_hy - S_hx S_xx^-1 S_xy. Unit j lowers the error by |E_j|^2 / C_jj.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.linear.moments import Moments
from howlinear.linear.unit_selection import joint_map, unit_diagonal
from howlinear.models.families import Block
from howlinear.models.hooks import as_module
from howlinear.models.units import hidden_units, taken
from howlinear.probing.samples import Cast, Layer, Sample, outcome, size_of

ROWS_A_COLUMN = 8  # of a regression, at least


def unit_counts(m: int, extra: Sequence[int] = ()) -> list[int]:
    """0, 1, 2, 4, ... m, and extra ones."""
    powers = [2**i for i in range(m.bit_length()) if 2**i < m]
    return sorted({0, m, *powers, *(k for k in extra if 0 <= k <= m)})


def regressions(
    model: nn.Module, block: Block, fit: Sample, report: Sample, affine: Affine
) -> tuple[list[dict[str, Any]], dict[int, Layer]]:
    """Held-out scores and parameters for each number k of hidden units, and the maps by k.

    One k has as many parameters as two matrices, to compare with `dense (2x)`. Regressions with fewer
    than 8 fit rows a column are left out. The matrix is refitted for each k.
    """
    every = Cast(hidden_units(model, block))
    d, m = block.d_in, int(every(fit.x[:1]).shape[-1])
    one = sum(p.numel() for p in taken(model, block, [0]).parameters()) + block.d_out
    ks = unit_counts(m, [affine.parameters // one])  # as large as a second matrix
    fitted = [k for k in ks if 0 < k < m and len(fit) >= ROWS_A_COLUMN * (d + k + 1)]
    maps: dict[int, Any] = {0: affine, m: Cast(as_module(model, block))}
    if fitted:
        rows = Moments(d + m, block.d_out)
        for x, y in fit.chunks():
            with torch.no_grad():
                rows.update(torch.cat([x, every(x).float()], 1), y)
        order = forward_selection(rows, d, fitted[-1])
        for k in fitted:
            hidden = Cast(taken(model, block, order[:k]))
            maps[k] = joint_map(rows, d, order[:k], None, hidden).to(fit.x)
    steps = [
        {"k": k, "parameters": size_of(maps[k]), **outcome(maps[k], affine, report).to_dict()}
        for k in ks
        if k in maps
    ]
    return steps, maps


def probe_units(
    model: nn.Module, block: Block, fit: Sample, report: Sample, affine: Affine
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The record of `regressions`, and the map with at most as many parameters as two matrices."""
    steps, maps = regressions(model, block, fit, report, affine)
    limit = 2 * affine.parameters
    k = max((step["k"] for step in steps if step["parameters"] <= limit), default=0)
    record = {"steps": steps, "at_two_matrices": k}
    top = max((step["k"] for step in steps[:-1]), default=0)
    if 2 * top < steps[-1]["k"]:
        columns = block.d_in + (steps[-1]["k"] + 1) // 2 + 1
        record["note"] = f"more than {top} units need more rows: {ROWS_A_COLUMN * columns}"
    return record, {f"{k} units": maps[k]} if k else {}


def forward_selection(rows: Moments, d: int, most: int) -> list[int]:
    """Units in the order in which they lower the squared error most. O(most m (m + d_out))."""
    S, S_y = unit_diagonal(*rows.gram())
    W = _regress(S[:d, :d], torch.cat([S[:d, d:], S_y[:d]], 1))
    m = len(S) - d
    C = S[d:, d:] - S[d:, :d] @ W[:, :m]
    E = S_y[d:] - S[d:, :d] @ W[:, m:]
    floor = torch.finfo(torch.float64).eps ** 0.5  # below it a unit depends linearly on those taken
    left = C.diagonal().clone()
    order: list[int] = []
    for _ in range(most):
        gain = torch.where(left > floor, E.square().sum(1) / left.clamp_min(floor), -1.0)
        j = int(gain.argmax())
        if float(gain[j]) < 0:  # the others add nothing: in order of their numbers
            order += [u for u in range(m) if u not in set(order)][: most - len(order)]
            break
        order.append(j)
        c = C[:, j] / C[j, j].sqrt()
        e = E[j] / C[j, j].sqrt()
        C.addr_(c, c, alpha=-1)
        E.addr_(c, e, alpha=-1)
        left = C.diagonal().clone()
        left[order] = 0
    return order


def _regress(S: Tensor, B: Tensor) -> Tensor:
    """S^-1 B on the eigenvectors above the noise level."""
    values, vectors = torch.linalg.eigh(S)
    keep = values > len(S) * torch.finfo(torch.float64).eps * values[-1]
    V = vectors[:, keep]
    return V @ ((V.t() @ B) / values[keep, None])
