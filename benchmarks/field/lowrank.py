"""Whitened singular value decomposition of all matrices of a layer: SVD-LLM (arXiv 2403.07378).

With sums of products S of a matrix's inputs, the W' of rank k that lies closest to W x on that text is
U_k U_k' W, U_k the leading eigenvectors of W S W'. It equals the truncated decomposition of W L, L L' = S,
times L^-1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from field.llama import Calibration, Made, Walk, clone, linear

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
READS = {  # matrices with the same input
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def svd_llm(calibration: Calibration, target: int) -> Made:
    """SVD-LLM (arXiv 2403.07378): all matrices at one ratio, whitened by the inputs that the compressed
    model gives, layer after layer. On these inputs the paper's closed-form update of the left factor
    changes nothing: it is optimal already. The better of all matrices, as published, and feed-forward
    blocks alone is kept.
    """
    ways = {
        "all matrices": partial(decomposed, target=target, names=ATTENTION + FEED_FORWARD),
        "feed-forward": partial(decomposed, target=target, names=FEED_FORWARD),
    }
    return calibration.best(ways) if target > 0 else Made(clone(calibration.model))


def decomposed(calibration: Calibration, target: int, names: tuple[str, ...]) -> Any:
    small = clone(calibration.model)
    ranks = ranks_for(small.model.layers, target, names)
    walk = Walk(small, calibration.ids)
    for i, layer in enumerate(small.model.layers):
        read = {first: layer.get_submodule(first) for first in READS if first in names}
        S: dict[str, Any] = dict.fromkeys(read, 0.0)

        def add(rows: dict[str, Tensor], S: dict[str, Any] = S) -> None:
            for name, part in rows.items():
                S[name] = S[name] + (part.t() @ part).double()

        walk.watch(i, read, add)
        for first, products in S.items():
            for name in READS[first]:
                set_module(layer, name, factored(layer.get_submodule(name), products, ranks[name]))
        walk.step(i)
    return small


def ranks_for(layers: Any, target: int, names: tuple[str, ...]) -> dict[str, int]:
    """The rank of each matrix at the one ratio at which `target` parameters go."""
    shapes = {name: layers[0].get_submodule(name).weight.shape for name in names}

    def ranks(ratio: float) -> dict[str, int]:
        return {name: int(ratio * m * n / (m + n)) for name, (m, n) in shapes.items()}

    low, high = 0.0, 1.0
    before = sum(m * n for m, n in shapes.values())
    for _ in range(40):
        ratio = (low + high) / 2
        after = sum(k * sum(shapes[name]) for name, k in ranks(ratio).items())
        low, high = (ratio, high) if (before - after) * len(layers) >= target else (low, ratio)
    return ranks(low)


def factored(matrix: nn.Linear, S: Tensor, rank: int) -> nn.Sequential:
    """The matrix as two of this rank, the closest on inputs with sums of products S."""
    W = matrix.weight.double()
    if len(W) <= W.shape[1]:
        U = torch.linalg.eigh(W @ S @ W.t())[1][:, -rank:]
        into, out = U.t() @ W, U
    else:  # the smaller side: eigenvectors of L' W' W L
        S = S.clone()
        S.diagonal().add_(1e-9 * float(S.diagonal().mean()))
        L = torch.linalg.cholesky(S)
        V = torch.linalg.eigh(L.t() @ (W.t() @ W) @ L)[1][:, -rank:]
        into = torch.linalg.solve_triangular(L, V.t().contiguous(), upper=False, left=False)
        out = W @ (L @ V)
    like = matrix.weight
    return nn.Sequential(linear(into, like=like), linear(out, like=like))


def set_module(layer: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, module)
