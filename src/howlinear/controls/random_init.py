"""The same architecture with fresh weights: is the profile learned, or architectural?

    random_init(model, windows, seeds=3).summary["below"]

An untrained model on a text gives few different rows: its embeddings are random vectors, so frequent
tokens are a few points, and its attention averages, so that deep rows of one window are nearly alike.
Such rows measure their own number and not the blocks. Untrained models therefore read as many tokens
drawn evenly from the vocabulary, in many short windows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.results import Control, mean, profiled
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.naming import BlockNames
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import over_blocks, pearson
from howlinear.records.words import known, plural
from howlinear.run.work import Advance, Work

UNFINISHED = "unfinished"  # how the note of such a result begins
SHORT = 16  # tokens in a window of an untrained model


def random_init(
    model: nn.Module,
    windows: WindowsLike,
    *,
    trained: Profile | None = None,
    seeds: int = 3,
    shuffled: bool = False,
    at: BlockNames = None,
    folds: int = 5,
    work: Work | None = None,
    after_seed: Callable[[Control], None] = lambda _: None,
) -> Control:
    """The trained profile against the range of the same architecture untrained.

    Fresh weights are drawn as the model's class draws them. `shuffled` permutes the trained weights
    within each matrix instead, which keeps their sizes and removes what they learned. `trained` is
    the trained model's profile on these windows, if it is known. `after_seed` is called with the result
    so far, after each untrained model but the last.
    """
    if seeds < 1:
        raise ValueError(f"an untrained range needs at least one seed, got {seeds} (`seeds`)")
    work, text = work or Work(), as_windows(windows).read()
    ids = text.all_ids
    advance = _begin(work, text.tokens, seeds, trained is not None)
    options: dict[str, Any] = {"at": at, "folds": folds, "advance": advance}
    trained = trained or profiled(model, text, work, **options)
    many = replace(work, batch_size=work.batch_size * max(1, ids.shape[1] // SHORT))
    settings: dict[str, Any] = {"seeds": seeds, "weights": "shuffled" if shuffled else "fresh"}
    settings |= {"tokens": text.tokens, "window": text.length}
    settings |= {"window_untrained": min(SHORT, ids.shape[1]), "folds": folds}
    draws: list[Profile] = []
    while True:
        net = untrained(model, seed := len(draws), shuffled)
        draws.append(profiled(net, tokens := drawn_tokens(net, ids, seed), many, **options))
        result = _result(trained, draws, tokens, settings)
        if len(draws) == seeds:
            return result
        after_seed(result)


def _result(
    trained: Profile, draws: Sequence[Profile], tokens: Tensor, settings: dict[str, Any]
) -> Control:
    """The untrained models measured so far beside the trained one."""
    rows = [_beside(b, [p.blocks[i] for p in draws]) for i, b in enumerate(trained.blocks)]
    notes = _notes(tokens, max(b.d_in for b in trained.blocks), settings["folds"])
    if len(draws) < settings["seeds"]:
        all_models = plural(settings["seeds"], "untrained model")
        notes.append(f"{UNFINISHED}: {len(draws)} of {all_models} measured")
    return Control("random-init", rows, _summary(rows, list(draws)), settings, notes)


def _begin(work: Work, tokens: int, seeds: int, known: bool) -> Advance:
    """One progress for all models: the first of them tells how long all take."""
    models = f"{plural(seeds, 'untrained model')}{'' if known else ' and the trained model'}"
    return work.begin(f"profiling {models}", (seeds + (not known)) * tokens // work.ranks.count)


def drawn_tokens(model: Any, windows: Tensor, seed: int) -> Tensor:
    """As many tokens, drawn evenly from the vocabulary, in windows of SHORT tokens.

    A first token that all windows share, such as BOS, stays.
    """
    generator = torch.Generator().manual_seed(seed)
    length = min(SHORT, windows.shape[1])
    shape = windows.numel() // length, length
    tokens = torch.randint(model.get_input_embeddings().num_embeddings, shape, generator=generator)
    first = windows[0, 0]
    if bool((windows[:, 0] == first).all()):
        tokens[:, 0] = first
    return tokens.to(windows)


def _notes(tokens: Tensor, columns: int, folds: int) -> list[str]:
    """A warning where untrained rows may have fewer independent values than a fit has columns."""
    counts = tokens[:, 1:].unique(return_counts=True)[1].double()
    different = float(counts.sum() ** 2 / counts.square().sum())  # of evenly frequent tokens
    rows = int(min(different, len(tokens)) * (folds - 1) / folds)
    if rows > columns:
        return []
    return [
        f"not meaningful: the untrained rows of a fit count for about {rows} independent ones "
        f"({len(tokens)} windows, {different:.0f} different tokens), fewer than the {columns} columns: "
        f"untrained R2 shows too few rows; give more tokens"
    ]


def _beside(b: BlockProfile, drawn: Sequence[BlockProfile]) -> dict[str, Any]:
    """One trained block beside the same block of each untrained model."""
    values = known(d.r2 for d in drawn)
    low, high = min(values, default=math.nan), max(values, default=math.nan)
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
        "low": low,
        "high": high,
        "mean": mean(values),
        "outside": b.r2 < low or b.r2 > high,
    }


def _summary(rows: list[dict[str, Any]], draws: list[Profile]) -> dict[str, Any]:
    """How many blocks lie outside the untrained range, and how the two profiles compare over depth."""
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
    numbers = known(values)
    return max(numbers) - min(numbers) if numbers else math.nan
