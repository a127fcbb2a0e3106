"""The same architecture with fresh weights: is the profile learned, or architectural?

random_init(model, windows, seeds=3).summary["below"]
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.results import Control, mean, profiled
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import over_blocks, pearson
from howlinear.run.work import Work


def random_init(
    model: nn.Module,
    windows: Tensor,
    *,
    trained: Profile | None = None,
    seeds: int = 3,
    shuffled: bool = False,
    at: str | None = None,
    folds: int = 5,
    work: Work | None = None,
) -> Control:
    """The trained profile against the band of the same architecture untrained.

    Fresh weights are drawn as the model's class draws them. `shuffled` permutes the trained weights
    within each matrix instead, which keeps their sizes and removes what they learned. `trained` is
    the trained model's profile on the same windows, if it is known.
    """
    if seeds < 1:
        raise ValueError(f"a band needs at least one seed, got {seeds} (--seeds)")
    measured = partial(profiled, windows=windows, at=at, folds=folds, work=work or Work())
    if trained is None:
        trained = measured(model, label="profiling the trained model")
    draws = [
        measured(untrained(model, seed, shuffled), label=f"profiling without training, seed {seed}")
        for seed in range(seeds)
    ]
    rows = [_beside(b, [p.blocks[i] for p in draws]) for i, b in enumerate(trained.blocks)]
    settings = {
        "seeds": seeds,
        "weights": "shuffled" if shuffled else "fresh",
        "tokens": windows.numel(),
        "window": windows.shape[1],
        "folds": folds,
    }
    return Control("random-init", rows, _summary(rows, draws), settings)


def _beside(b: BlockProfile, drawn: Sequence[BlockProfile]) -> dict[str, Any]:
    """One trained block beside the same block of each untrained model."""
    values = [d.r2 for d in drawn]
    return {
        "index": b.index,
        "path": b.path,
        "r2": b.r2,
        "r2_se": b.r2_se,
        "r2_body": b.r2_body,
        "untrained": [
            {"seed": s, "r2": d.r2, "r2_se": d.r2_se, "r2_body": d.r2_body}
            for s, d in enumerate(drawn)
        ],
        "low": min(values),
        "high": max(values),
        "mean": mean(values),
        "outside": not min(values) <= b.r2 <= max(values),
    }


def _summary(rows: list[dict[str, Any]], draws: list[Profile]) -> dict[str, Any]:
    """How many blocks lie outside the band, and how the two profiles compare over depth."""
    trained, means = [r["r2"] for r in rows], [r["mean"] for r in rows]
    return {
        "below": sum(r["r2"] < r["low"] for r in rows),
        "above": sum(r["r2"] > r["high"] for r in rows),
        "mean_trained": mean(trained),
        "mean_untrained": mean(means),
        "range_trained": _range(trained),
        "range_untrained": mean([_range([b.r2 for b in p.blocks]) for p in draws]),
        "pearson_with_untrained": over_blocks(pearson, trained, means).to_dict(),
    }


def untrained(model: nn.Module, seed: int, shuffled: bool = False) -> nn.Module:
    """The same architecture with fresh weights, or with its own weights permuted.

    The global random state is left as it was.
    """
    parameter = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _permuted(model) if shuffled else _fresh(model)
    return net.to(parameter.device, parameter.dtype).requires_grad_(False).eval()


@torch.no_grad()
def _permuted(model: nn.Module) -> nn.Module:
    net = copy.deepcopy(model)
    for p in net.parameters():
        flat = p.detach().reshape(-1)
        p.copy_(flat[torch.randperm(len(flat)).to(flat.device)].view_as(p))
    return net


def _fresh(model: nn.Module) -> nn.Module:
    try:
        return type(model)(copy.deepcopy(model.config))
    except Exception as error:  # classes from outside transformers raise anything
        name = type(model).__name__
        raise ValueError(f"{name} cannot be made from its config alone: {error}") from None


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
