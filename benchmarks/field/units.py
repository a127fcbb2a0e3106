"""Methods that remove hidden units of feed-forward blocks (FLAP: attention heads, too).

Attention is pruned by Wanda-sp, OSSCAR, SlimGPT, MoDeGPT and Olica as published, too; here only their
feed-forward part runs: all removed parameters are then those of feed-forward blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from field.llama import (
    Calibration,
    Made,
    Sums,
    Walk,
    clone,
    keep_units,
    linear,
    units_to_remove,
)
from howlinear.models.families import parameter_count

GROUP = 16  # units that OBS removes at once
RIDGE = 1e-6  # of the unit diagonal of scaled sums


def most(scores: Tensor, count: int) -> Tensor:
    """The numbers of the `count` largest scores, in order."""
    return scores.topk(count).indices.sort().values


def solve_down(S: Tensor, W: Tensor, units: Tensor) -> Tensor:
    """(d, units) the down projection of these units that comes closest to W h: W S_hk S_kk^-1."""
    scale = S.diagonal()[units].clamp_min(1e-30).rsqrt()
    kk = S[units][:, units] * scale * scale[:, None]
    kk.diagonal().add_(RIDGE)
    right = (S[units] @ W.double().t()) * scale[:, None]
    return (torch.cholesky_solve(right, torch.linalg.cholesky(kk)) * scale[:, None]).t()


# -- Wanda-sp -------------------------------------------------------------------------------------


def wanda(calibration: Calibration, target: int) -> Made:
    """Wanda-sp: the structured form of Wanda (arXiv 2306.11695) in FLAP's paper (arXiv 2312.11983).

    Unit j scores mean_i |W_ij| |h_j|_2; every block loses as many units, front to back on the inputs that
    the pruned model gives. With FLAP's bias instead of the removed units, which the published form lacks.
    """
    counts = units_to_remove(calibration, target, added=calibration.width)
    small = clone(calibration.model)
    walk = Walk(small, calibration.ids) if target > 0 else None
    for i, layer in enumerate(small.model.layers):
        if walk is None or not counts[i]:
            continue
        mlp, W = layer.mlp, layer.mlp.down_proj.weight
        sums = [torch.zeros_like(W[0], dtype=torch.float64) for _ in range(2)]

        def add(rows: dict[str, Tensor], sums: list[Tensor] = sums) -> None:
            sums[0] += rows["h"].sum(0)
            sums[1] += rows["h"].square().sum(0)

        walk.watch(i, {"h": mlp.down_proj}, add)
        units = most(W.abs().mean(0) * sums[1].sqrt(), len(W[0]) - counts[i])
        keep_units(mlp, units, bias=left_out(W, sums[0] / calibration.ids.numel(), units))
        walk.step(i)
    return Made(small, "same share in all blocks, with FLAP's bias")


def left_out(W: Tensor, mean: Tensor, units: Tensor) -> Tensor:
    """(d,) what inputs other than `units` add to the output on average: FLAP's bias."""
    gone = torch.ones(len(mean), dtype=torch.bool)
    gone[units] = False
    return W[:, gone].double() @ mean[gone]


# -- FLAP -----------------------------------------------------------------------------------------


def flap(calibration: Calibration, target: int) -> Made:
    """FLAP (arXiv 2312.11983): fluctuation of the input times the squared norm of its column.

    Scores are standardised in each layer and compared over all layers; the mean of what goes becomes a bias.
    Heads of one key-value group go together. The better of feed-forward blocks alone and both is kept.
    """
    ways = {
        name: partial(flap_pruned, target=target, attention=attention)
        for name, attention in (("feed-forward", False), ("feed-forward and heads", True))
    }
    return calibration.best(ways) if target > 0 else Made(clone(calibration.model))


def fluctuation(n: int, total: Tensor, squares: Tensor, W: Tensor) -> Tensor:
    """(inputs,) FLAP's score: sample variance of each input times its column's squared norm."""
    return (squares - total.square() / n) / (n - 1) * W.double().square().sum(0)


def flap_pruned(calibration: Calibration, target: int, attention: bool) -> Any:
    small, d = clone(calibration.model), calibration.width
    sums, layers = calibration.sums, small.model.layers
    entries = []  # (score, parameters, layer, group or None, unit)
    for i, (s, layer) in enumerate(zip(sums, layers, strict=True)):
        score = standardised(fluctuation(s.n, s.h, s.hh.diagonal(), layer.mlp.down_proj.weight))
        entries += [(v, 3 * d, i, False, j) for j, v in enumerate(score.tolist())]
        if attention:
            score = standardised(fluctuation(s.n, s.a, s.aa, layer.self_attn.o_proj.weight))
            groups = score.view(heads_of(layer.self_attn), -1).mean(1).tolist()
            size = parameter_count(layer.self_attn) // len(groups)
            groups[groups.index(max(groups))] = math.inf  # one stays
            entries += [(v, size, i, True, g) for g, v in enumerate(groups)]
    gone: dict[tuple[int, bool], list[int]] = {}
    freed = 0
    for _, size, i, is_head, j in sorted(entries):
        if freed >= target:
            break
        freed += size - (0 if (i, is_head) in gone else d)  # the first one of each brings a bias
        gone.setdefault((i, is_head), []).append(j)
    for (i, is_head), numbers in gone.items():
        if is_head:
            keep_heads(layers[i].self_attn, numbers, sums[i])
        else:
            units = others(len(sums[i].h), numbers)
            bias = left_out(layers[i].mlp.down_proj.weight, sums[i].h / sums[i].n, units)
            keep_units(layers[i].mlp, units, bias=bias)
    return small


def standardised(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


def others(count: int, gone: Sequence[int]) -> Tensor:
    kept = torch.ones(count, dtype=torch.bool)
    kept[list(gone)] = False
    return kept.nonzero()[:, 0]


def heads_of(attention: Any) -> int:
    """Number of key-value heads, each with the query heads that read it."""
    return attention.k_proj.weight.shape[0] // attention.head_dim


def keep_heads(attention: Any, gone: Sequence[int], sums: Sums) -> None:
    """Remove key-value groups; their mean output becomes the bias of the last projection."""
    count = heads_of(attention)

    def rows(width: int) -> Tensor:
        at = torch.arange(width).view(count, -1)
        return at[others(count, gone)].flatten()

    W = attention.o_proj.weight
    kept = rows(W.shape[1])
    attention.o_proj = linear(W[:, kept], left_out(W, sums.a / sums.n, kept))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        setattr(attention, name, linear(weight[rows(len(weight))]))


# -- optimal brain surgeon ------------------------------------------------------------------------


def obs(calibration: Calibration, target: int) -> Made:
    """Optimal brain surgeon for units: OSSCAR (arXiv 2403.12983) and SlimGPT (arXiv 2412.18110).

    Units go in groups, those first whose loss the others make up for best: |W_j|^2 / (S^-1)_jj, with W
    updated; front to back on the inputs that the pruned model gives. Two allocations, the better is kept:
    the same share in all blocks, and SlimGPT's, which grows with the logarithm of the depth. OSSCAR's local
    search after the elimination is left out.
    """
    blocks = len(calibration.layers)
    growing = [math.log(i + 1) / math.log(blocks) for i in range(blocks)]
    ways = {
        "same share": partial(obs_pruned, target=target, shares=None),
        "growing with depth": partial(obs_pruned, target=target, shares=growing),
        "half growing": partial(obs_pruned, target=target, shares=[0.5 + g for g in growing]),
    }
    return calibration.best(ways) if target > 0 else Made(clone(calibration.model))


def obs_pruned(calibration: Calibration, target: int, shares: Sequence[float] | None) -> Any:
    counts = units_to_remove(calibration, target, shares)
    small = clone(calibration.model)
    walk = Walk(small, calibration.ids)
    for i, layer in enumerate(small.model.layers):
        if counts[i]:
            W = layer.mlp.down_proj.weight
            S = torch.zeros(2 * [W.shape[1]], dtype=torch.float64)
            walk.watch(i, {"h": layer.mlp.down_proj}, lambda rows, S=S: S.add_(square(rows["h"])))
            units = eliminated(S, W, counts[i])
            keep_units(layer.mlp, units, solve_down(S, W, units))
        walk.step(i)
    return small


def square(rows: Tensor) -> Tensor:
    return (rows.t() @ rows).double()


def eliminated(S: Tensor, W: Tensor, count: int) -> Tensor:
    """The units that stay when `count` go, for sums of products S of the units. O(m^3)."""
    scale = S.diagonal().clamp_min(1e-30).sqrt()
    scaled = S / scale / scale[:, None]
    scaled.diagonal().add_(RIDGE)
    P = torch.cholesky_inverse(torch.linalg.cholesky(scaled))
    D = W.double().t() * scale[:, None]  # (m, d)
    kept = torch.ones(len(S), dtype=torch.bool)
    while count:
        cost = (D.square().sum(1) / P.diagonal()).masked_fill(~kept, math.inf)
        J = cost.topk(min(GROUP, count), largest=False).indices
        step = torch.linalg.solve(P[J][:, J], torch.cat([P[J], D[J]], 1))
        update = P[:, J] @ step
        P, D = P - update[:, : len(P)], D - update[:, len(P) :]
        kept[J] = False
        P.diagonal()[J] = 1.0  # zero up to rounding
        count -= len(J)
    return kept.nonzero()[:, 0]


# -- MoDeGPT --------------------------------------------------------------------------------------


def modegpt(calibration: Calibration, target: int) -> Made:
    """MoDeGPT (arXiv 2408.09632), the Nystrom approximation of feed-forward blocks.

    Units with the largest ridge leverage scores [S (S + l I)^-1]_jj stay, W becomes W S_hk S_kk^-1.
    The share that a block loses is in proportion to softmax(-s / e), s its block influence: the solution of
    the paper's allocation with an entropy term of weight e. The best of two l, and of two e and the
    same share everywhere, is kept.
    """
    ways = {}
    for ridge in (1.0, 0.01):  # of the median diagonal
        for entropy in (None, 0.3, 0.1):
            name = f"ridge {ridge:g}, " + ("same share" if entropy is None else f"e {entropy:g}")
            ways[name] = partial(nystrom, target=target, ridge=ridge, entropy=entropy)
    return calibration.best(ways) if target > 0 else Made(clone(calibration.model))


def nystrom(calibration: Calibration, target: int, ridge: float, entropy: float | None) -> Any:
    shares = None
    if entropy is not None:
        cosines, _ = calibration.cosines
        shares = (-(1 - cosines.diagonal(1)) / entropy).softmax(0).tolist()
    counts = units_to_remove(calibration, target, shares)
    small = clone(calibration.model)
    for layer, s, count in zip(small.model.layers, calibration.sums, counts, strict=True):
        if count:
            units = most(leverage(s.hh, ridge), len(s.hh) - count)
            keep_units(layer.mlp, units, solve_down(s.hh, layer.mlp.down_proj.weight, units))
    return small


def leverage(S: Tensor, ridge: float) -> Tensor:
    """Ridge leverage scores: 1 - l [(S + l I)^-1]_jj, l a share of the median diagonal."""
    damped = S.clone()
    damped.diagonal().add_(level := ridge * float(S.diagonal().median()))
    return 1 - level * torch.cholesky_inverse(torch.linalg.cholesky(damped)).diagonal()


# -- Olica ----------------------------------------------------------------------------------------

RANK = 0.03  # of the width: Olica's default
CALIBRATED = 6 / 32  # of the layers: Olica's default for 7B
DAMP = 0.5 * 128 * 128  # Olica's ridge of 0.5 of the mean diagonal, for that many tokens


def olica(calibration: Calibration, target: int) -> Made:
    """Olica (arXiv 2506.08436), feed-forward part: pruned units, then a low-rank map of x beside them.

    Units are scored by weights times norms of inputs, summed over the rows of gate and up and the
    column of down, each matrix over its mean. What is lost, E = W_gone h_gone, is regressed on x with a
    ridge, and the regression cut to rank 3 % of the width on the inputs at hand. As published only layers
    with the best prediction get it (6 of 32); the better of that and all layers is kept. Attention's
    decomposition is left out.
    """
    ways = {
        f"{name} corrected": partial(olica_pruned, target=target, share=share)
        for name, share in (("6 of 32 layers", CALIBRATED), ("all layers", 1.0))
    }
    return calibration.best(ways) if target > 0 else Made(clone(calibration.model))


class Corrected(nn.Module):
    """A block with a low-rank map of its input beside it."""

    def __init__(self, block: nn.Module, into: Tensor, out: Tensor) -> None:
        super().__init__()
        like = next(block.parameters())
        self.block, self.into, self.out = block, linear(into, like=like), linear(out, like=like)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.out(self.into(x))


def olica_pruned(calibration: Calibration, target: int, share: float) -> Any:
    blocks, d = len(calibration.layers), calibration.width
    corrected, rank = max(1, round(share * blocks)), max(1, round(RANK * d))
    counts = units_to_remove(calibration, target + corrected * rank * 2 * d)
    small, fits = clone(calibration.model), []
    for i, (layer, s, count) in enumerate(
        zip(small.model.layers, calibration.sums, counts, strict=True)
    ):
        W = layer.mlp.down_proj.weight
        units = most(three_matrices(layer.mlp, s), len(s.hh) - count)
        gone = others(len(s.hh), units.tolist())
        fits.append((*linear_calibration(s, W, gone, rank), i))
        keep_units(layer.mlp, units)
    for _, into, out, i in sorted(fits, key=lambda f: -f[0])[:corrected]:
        small.model.layers[i].mlp = Corrected(small.model.layers[i].mlp, into, out)
    return small


def three_matrices(mlp: Any, sums: Sums) -> Tensor:
    """(m,) weights times norms of their inputs, of the three matrices of a block."""
    x, h = sums.xx.diagonal().sqrt(), sums.hh.diagonal().sqrt()
    scores = [p.weight.double().abs() @ x for p in (mlp.gate_proj, mlp.up_proj)]
    scores.append(mlp.down_proj.weight.double().abs().sum(0) * h)
    return sum(score / score.mean() for score in scores)


def linear_calibration(s: Sums, W: Tensor, gone: Tensor, rank: int) -> tuple[float, Tensor, Tensor]:
    """The share of E = W_gone h_gone that x predicts, and the map of this rank: into (r, d), out (d, r)."""
    W = W.detach().double()[:, gone]
    damped = s.xx.clone()
    damped.diagonal().add_(DAMP / s.n * float(s.xx.diagonal().mean()))
    xE = s.xh[:, gone] @ W.t()  # (d, d)
    B = torch.cholesky_solve(xE, torch.linalg.cholesky(damped)).t()  # E ~ B x
    squares = float((W @ s.hh[gone][:, gone] * W).sum())
    left = squares - 2 * float((B.t() * xE).sum()) + float((B @ s.xx * B).sum())
    U = torch.linalg.eigh(B @ s.xx @ B.t())[1][:, -rank:]
    return 1 - left / max(squares, 1e-30), U.t() @ B, U
