"""Learned or architectural? Experiments that can refute either, on any model.

    random_init(model, windows, seeds=3)                    # the same architecture, fresh weights
    cross_feed(model_a, model_b, windows_a, windows_b)      # whose weights, whose inputs?
    matched(model, windows)                                 # the block, or where it is asked?

Each returns a `Control`: what to write, block by block, with error bars. A control that feeds
blocks with other inputs than their own runs each model twice: once for the mean and covariance of
every block's input, once for the rows. No activations are stored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.feeding import Output, as_function, feed, input_moments, on_gaussian
from howlinear.controls.gaussian import expected_map, transport, whitening
from howlinear.linear.affine import Affine
from howlinear.linear.moments import Moments
from howlinear.linear.stores import Folds, check_rows
from howlinear.models.families import Block, blocks
from howlinear.profiling.passes import Course
from howlinear.profiling.profiler import Profile, profile
from howlinear.records.fields import MONITORED, BlockProfile
from howlinear.records.files import read_json
from howlinear.records.jackknife import Sums, jackknife, r2s
from howlinear.records.statistics import pearson
from howlinear.report.results import Result
from howlinear.run.ranks import ALONE, Ranks

SCALES = (0.5, 2.0, 4.0)

Begin = Callable[[str, int], Callable[[int], None]]  # (what, tokens) -> called with tokens done


def _silent(what: str, tokens: int) -> Callable[[int], None]:
    return lambda done: None


@dataclass(frozen=True, repr=False)
class Control(Result):
    """What `control-KIND.json` holds."""

    kind: str
    blocks: list[dict[str, Any]]
    summary: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        return f"control-{self.kind}", {
            "settings": self.settings,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": self.blocks,
        }

    def _line(self) -> str:
        return f"{self.kind}, {len(self.blocks)} blocks"


# -- fresh weights --------------------------------------------------------------------------------


def random_init(
    model: nn.Module,
    windows: Tensor,
    *,
    trained: Profile | None = None,
    seeds: int = 3,
    shuffled: bool = False,
    at: str | None = None,
    folds: int = 5,
    batch_size: int = 8,
    ranks: Ranks = ALONE,
    progress: Begin = _silent,
) -> Control:
    """The trained profile against the band of the same architecture untrained.

    Fresh weights are drawn as the model's class does. `shuffled` permutes the trained weights
    within each matrix instead: their sizes stay, what they learned goes. `trained` is the trained
    model's profile on the same windows, where there is one.
    """
    if seeds < 1:
        raise ValueError(f"a band needs at least one seed, got {seeds} (--seeds)")

    def measured(net: nn.Module, what: str) -> Profile:
        advance = progress(what, windows.numel() // ranks.count)
        # in batches: what a swap may cost nobody asks here
        batches = windows.split(batch_size)
        course = Course(ranks=ranks)
        return profile(net, batches, at=at, folds=folds, course=course, progress=advance)

    if trained is None:
        trained = measured(model, "profiling the trained model")
    draws = []
    for seed in range(seeds):
        net = untrained(model, seed, shuffled)
        draws.append(measured(net, f"profiling without training, seed {seed}"))
        del net
    rows = [_beside(b, [p.blocks[i] for p in draws]) for i, b in enumerate(trained.blocks)]
    summary = {
        "below": sum(r["r2"] < r["low"] for r in rows),
        "above": sum(r["r2"] > r["high"] for r in rows),
        "mean_trained": _mean([r["r2"] for r in rows]),
        "mean_untrained": _mean([r["mean"] for r in rows]),
        "range_trained": _range([r["r2"] for r in rows]),
        "range_untrained": _mean([_range([b.r2 for b in p.blocks]) for p in draws]),
        "pearson_with_untrained": pearson([r["r2"] for r in rows], [r["mean"] for r in rows]),
    }
    settings = {
        "seeds": seeds,
        "weights": "shuffled" if shuffled else "fresh",
        "tokens": windows.numel(),
        "window": windows.shape[1],
        "folds": folds,
    }
    return Control("random-init", rows, summary, settings)


def _beside(b: BlockProfile, drawn: Sequence[BlockProfile]) -> dict[str, Any]:
    """One trained block beside the same one of each untrained model."""
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
        "mean": _mean(values),
        "outside": not min(values) <= b.r2 <= max(values),
    }


def untrained(model: nn.Module, seed: int, shuffled: bool = False) -> nn.Module:
    """The same architecture with fresh weights, or with its own weights permuted; nobody's random
    numbers are used up."""
    parameter = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if shuffled:
            net = copy.deepcopy(model)
            with torch.no_grad():
                for p in net.parameters():
                    flat = p.detach().reshape(-1)
                    p.copy_(flat[torch.randperm(len(flat)).to(flat.device)].view_as(p))
        else:
            config = copy.deepcopy(model.config)
            try:
                net = type(model)(config)
            except Exception as err:  # a class of somebody else's
                raise ValueError(
                    f"{type(model).__name__} cannot be made from its config alone: {err}"
                ) from None
    return net.to(parameter.device, parameter.dtype).requires_grad_(False).eval()


# -- whose weights, whose inputs ------------------------------------------------------------------


def cross_feed(
    model_a: nn.Module,
    model_b: nn.Module,
    windows_a: Tensor,
    windows_b: Tensor,
    *,
    pairs: str = "same",
    folds: int = 5,
    batch_size: int = 8,
    ranks: Ranks = ALONE,
    progress: Begin = _silent,
) -> Control:
    """Blocks of A fed with B's inputs and the other way round, for pairs of depths.

    `pairs` is "same" (0:0, 1:1, ...), "all", or a list such as "3:5,4:4" (A's depth first). Windows
    are each model's own tokens of one text.
    """
    sides = (blocks(model_a), blocks(model_b))
    chosen = depth_pairs(pairs, len(sides[0]), len(sides[1]))
    _check_widths(model_a, model_b, sides, chosen)
    split = Folds(folds)
    for ids, own in ((windows_a, sides[0]), (windows_b, sides[1])):
        check_rows(ids.shape[0], ids.shape[1], own[0].d_in, split)
    models, windows = (model_a, model_b), (windows_a, windows_b)
    used = tuple(sorted({pair[k] for pair in chosen}) for k in (0, 1))
    stats = [
        input_moments(
            models[k],
            windows[k],
            [sides[k][i] for i in used[k]],
            batch_size,
            progress(f"inputs of {'AB'[k]}", windows[k].numel()),
            ranks,
        )
        for k in (0, 1)
    ]
    modules = [{i: as_function(models[k], sides[k][i]) for i in used[k]} for k in (0, 1)]
    scores: list[dict[int, dict[Any, Sums]]] = []
    for k in (0, 1):
        asked = {i: _on_inputs_of(k, i, sides, chosen, stats, modules) for i in used[k]}
        advance = progress(f"blocks on the inputs of {'AB'[k]}", windows[k].numel())
        feeding = (models[k], windows[k], sides[k], asked, split, batch_size, advance)
        scores.append(feed(*feeding, ranks=ranks))
    same_windows = windows_a.shape == windows_b.shape and torch.equal(windows_a, windows_b)
    rows = [_two_by_two(sides, (i, j), scores, paired=same_windows) for i, j in chosen]
    summary = {
        name: _mean([r["split"][name]["value"] for r in rows])
        for name in ("difference", "weights", "inputs")
    }
    settings = {
        "pairs": pairs,
        "tokens": [ids.numel() for ids in windows],
        "window": windows_a.shape[1],
        "folds": folds,
        "same_tokens": same_windows,
    }
    return Control("cross-feed", rows, summary, settings)


def _on_inputs_of(
    k: int,
    i: int,
    sides: tuple[list[Block], list[Block]],
    chosen: Sequence[tuple[int, int]],
    stats: Sequence[dict[int, tuple[Tensor, Tensor]]],
    modules: Sequence[dict[int, Callable[[Tensor], Tensor]]],
) -> dict[Any, Output]:
    """What runs on the inputs of block i of side k: itself, each block of the other side that it
    meets, and itself on inputs moved to where that one's are."""
    width = sides[k][i].d_out
    outputs: dict[Any, Output] = {"own": (None, modules[k][i], width)}
    for pair in chosen:
        if pair[k] == i:
            j = pair[1 - k]
            outputs["other", j] = (None, modules[1 - k][j], sides[1 - k][j].d_out)
            moved = transport(*stats[k][i], *stats[1 - k][j])
            outputs["moved", j] = (moved, modules[k][i], width)
    return outputs


def depth_pairs(text: str, count_a: int, count_b: int) -> list[tuple[int, int]]:
    """ "same", "all" or "3:5,4:4" -> pairs of depths."""
    if text == "same":
        return [(i, i) for i in range(min(count_a, count_b))]
    if text == "all":
        return [(i, j) for i in range(count_a) for j in range(count_b)]
    pairs = []
    for part in text.split(","):
        i, colon, j = part.strip().partition(":")
        if not (colon and i.isdecimal() and j.isdecimal()):
            raise ValueError(f"--pairs {text!r}: write same, all or depths such as 3:5,4:4")
        if int(i) >= count_a or int(j) >= count_b:
            raise ValueError(
                f"--pairs {part.strip()}: the models have {count_a} and {count_b} blocks, from 0"
            )
        pairs.append((int(i), int(j)))
    return list(dict.fromkeys(pairs))


def _check_widths(
    model_a: nn.Module,
    model_b: nn.Module,
    sides: tuple[list[Block], list[Block]],
    chosen: Sequence[tuple[int, int]],
) -> None:
    for i, j in chosen:
        a, b = sides[0][i], sides[1][j]
        if a.d_in != b.d_in:
            raise ValueError(
                f"block {i} of {type(model_a).__name__} reads {a.d_in} features and block {j} of "
                f"{type(model_b).__name__} {b.d_in}: only models of one width can feed each other"
            )


def memory(own: Sequence[Block], folds: int, pairs: Sequence[tuple[int, int]] | None = None) -> int:
    """Bytes of sums that `matched` takes, or with pairs of depths `cross_feed`, at most."""
    total = 0
    for b in own:
        each = 2 + len(SCALES)
        if pairs is not None:
            met = max(sum(pair[k] == b.index for pair in pairs) for k in (0, 1))
            each = 1 + 2 * met if met else 0
        total += 8 * folds * Moments(b.d_in, each * b.d_out).size if each else 0
    return total


def _two_by_two(
    sides: tuple[list[Block], list[Block]],
    pair: tuple[int, int],
    scores: list[dict[int, dict[Any, Sums]]],
    paired: bool,
) -> dict[str, Any]:
    """The cells R(weights, inputs), and how much of R(b, b) - R(a, a) each of the two makes."""
    (i, j), (on_a, on_b) = pair, (scores[0][pair[0]], scores[1][pair[1]])
    sums = {
        "aa": on_a["own"],
        "ba": on_a["other", j],  # b's weights on a's inputs
        "ab": on_b["other", i],
        "bb": on_b["own"],
        "a_moved": on_a["moved", j],  # a's weights on a's inputs with the moments of b's
        "b_moved": on_b["moved", i],
    }
    cells = {name: _estimate([s], lambda v: v[0], paired) for name, s in sums.items()}
    four = [sums[name] for name in ("aa", "ba", "ab", "bb")]

    def weights(aa: Any, ba: Any, ab: Any, bb: Any) -> float:
        return ((ba[0] - aa[0]) + (bb[0] - ab[0])) / 2

    def inputs(aa: Any, ba: Any, ab: Any, bb: Any) -> float:
        return ((ab[0] - aa[0]) + (bb[0] - ba[0])) / 2

    split = {
        "difference": _estimate(four, lambda aa, ba, ab, bb: bb[0] - aa[0], paired),
        "weights": _estimate(four, weights, paired),
        "inputs": _estimate(four, inputs, paired),
    }
    return {
        "index": i,
        "path": sides[0][i].path,
        "index_b": j,
        "path_b": sides[1][j].path,
        "cells": cells,
        "split": split,
    }


def _estimate(runs: list[Sums], statistic: Callable[..., float], paired: bool) -> dict[str, Any]:
    return jackknife(statistic, runs, paired=paired).to_dict()


# -- the block, or where it is asked --------------------------------------------------------------


def matched(
    model: nn.Module,
    windows: Tensor,
    *,
    at: str | None = None,
    folds: int = 5,
    seed: int = 0,
    batch_size: int = 8,
    ranks: Ranks = ALONE,
    progress: Begin = _silent,
) -> Control:
    """Each block on its own inputs, on Gaussian ones of the same mean and covariance, on whitened
    ones, and on scaled ones; and the map that weights and those two moments predict."""
    own = blocks(model, at)
    split = Folds(folds)
    check_rows(windows.shape[0], windows.shape[1], max(b.d_in for b in own), split)
    advance = progress("inputs", windows.numel())
    stats = input_moments(model, windows, own, batch_size, advance, ranks)
    notes: list[str] = []
    asked: dict[int, dict[Any, Output]] = {}
    expected: dict[int, Affine | None] = {}
    for b in own:
        module = as_function(model, b)
        asked[b.index] = {
            "own": (None, module, b.d_out),
            "whitened": (whitening(*stats[b.index]), module, b.d_out),
            **{f"x{s:g}": (partial(torch.mul, other=s), module, b.d_out) for s in SCALES},
        }
        try:
            expected[b.index] = expected_map(model, b, *stats[b.index])
        except ValueError as err:
            notes.append(str(err))
            expected[b.index] = None
    by_index = {b.index: b for b in own}
    advance = progress("blocks on their inputs, moved", windows.numel())
    known = {i: a for i, a in expected.items() if a is not None}
    scores = feed(model, windows, by_index, asked, split, batch_size, advance, known, ranks)
    rows: list[dict[str, Any]] = []
    advance = progress("blocks on Gaussian inputs", windows.numel())
    drawn: dict[int, tuple[Sums, Sums | None]] = {}
    for k, b in enumerate(own):
        if ranks.mine(k):
            module = asked[b.index]["own"][1]
            told_of = (b, stats[b.index], windows, split, seed, expected[b.index])
            drawn[b.index] = on_gaussian(module, *told_of)
        advance(windows.numel() // len(own))
    drawn = ranks.joined(drawn)
    for b in own:
        sums, guess = drawn[b.index]
        found = {str(name): s for name, s in scores[b.index].items()} | {"gaussian": sums}
        told = found.pop("predicted", None)
        rows.append(
            {
                "index": b.index,
                "path": b.path,
                "r2": {name: _estimate([s], lambda v: v[0], True) for name, s in found.items()},
                "predicted": None
                if told is None
                else {
                    "r2": _estimate([told], lambda v: v[0], True),
                    "r2_gaussian": None if guess is None else r2s(guess)[0],
                },
            }
        )
    settings = {
        "tokens": windows.numel(),
        "window": windows.shape[1],
        "folds": folds,
        "seed": seed,
        "scales": list(SCALES),
    }
    return Control("matched", rows, _over_depth(rows), settings, notes)


def _over_depth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of R2 on each kind of input, and how they go with R2 on own ones."""
    values = {name: [r["r2"][name]["value"] for r in rows] for name in rows[0]["r2"]}
    summary: dict[str, Any] = {
        name: {"mean": _mean(v), "pearson_with_own": pearson(values["own"], v)}
        for name, v in values.items()
    }
    predicted = [r["predicted"]["r2"]["value"] for r in rows if r["predicted"]]
    if predicted:
        summary["predicted"] = {"mean": _mean(predicted)}
    return summary


# -- over training --------------------------------------------------------------------------------


@dataclass(repr=False)
class Training(Result):
    """Profiles of checkpoints, in the order they were asked for; `control-checkpoints.json`."""

    asked: dict[str, Any]
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        return {"measured": [c["name"] for c in self.checkpoints]}

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """A row a block, its R2 at every checkpoint."""
        if not self.checkpoints:
            return []
        first = self.checkpoints[0]["blocks"]
        return [
            {
                "index": b["index"],
                "r2": [c["blocks"][i]["r2"] for c in self.checkpoints],
                "r2_body": [c["blocks"][i]["r2_body"] for c in self.checkpoints],
            }
            for i, b in enumerate(first)
        ]

    def measure(
        self,
        model: nn.Module,
        windows: Tensor,
        name: str,
        *,
        at: str | None = None,
        batch_size: int = 8,
        ranks: Ranks = ALONE,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Profile one more checkpoint."""
        found = profile(
            model,
            windows.split(batch_size),
            at=at,
            folds=self.asked["folds"],
            course=Course(ranks=ranks),
            progress=progress,
        )
        if self.checkpoints and len(found.blocks) != len(self.checkpoints[0]["blocks"]):
            raise ValueError(f"{name} has {len(found.blocks)} blocks, unlike the ones before it")
        rows = [{field: getattr(b, field) for field in MONITORED} for b in found.blocks]
        self.checkpoints.append({"name": name, "tokens": windows.numel(), "blocks": rows})

    def sort(self, names: Sequence[str]) -> None:
        """In the order of `names`; checkpoints of earlier calls that are not among them come last."""
        place = {name: i for i, name in enumerate(names)}
        self.checkpoints.sort(key=lambda c: place.get(c["name"], len(place)))

    def _file(self) -> tuple[str, dict[str, Any]]:
        return "control-checkpoints", {
            "asked": self.asked,
            "summary": self.summary,
            "checkpoints": self.checkpoints,
            "blocks": self.blocks,
        }

    def _line(self) -> str:
        names = [c["name"] for c in self.checkpoints]
        which = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
        return f"{len(names)} checkpoints{which}, {len(self.blocks)} blocks"


def training(path: Path, asked: dict[str, Any]) -> Training:
    """An empty record, or the one that an earlier call of the same left behind."""
    if not path.exists():
        return Training(asked)
    data = read_json(path, "control-checkpoints")
    if data.get("asked") != asked:
        raise ValueError(f"{path} was asked for something else: name another folder with -o")
    found: Any = data.get("checkpoints")
    ok = isinstance(found, list) and all(
        isinstance(c, dict)
        and isinstance(c.get("name"), str)
        and isinstance(c.get("blocks"), list)
        and all(isinstance(b, dict) and set(MONITORED) <= b.keys() for b in c["blocks"])
        for c in found
    )
    if not ok:
        raise ValueError(f"{path} is damaged: remove it")
    return Training(asked, found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
