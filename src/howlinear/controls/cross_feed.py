"""Blocks of one model on the inputs of another: is a difference in R2 due to weights or to inputs?

    cross_feed(model_a, model_b, windows_a, windows_b, pairs="3:5,4:4").blocks[0]["split"]

Each model runs twice: once for the mean and covariance of every block's input, once for the rows. No
activations are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.feeding import InputMoments, Output, feed, input_moments
from howlinear.controls.gaussian import transport
from howlinear.controls.results import Control, estimate, mean
from howlinear.linear.folds import Folds, check_rows
from howlinear.linear.moments import Moments
from howlinear.models.families import Block, blocks
from howlinear.models.hooks import as_module
from howlinear.probing.samples import Cast
from howlinear.records.statistics import Sums
from howlinear.run.work import Work


def cross_feed(
    model_a: nn.Module,
    model_b: nn.Module,
    windows_a: Tensor,
    windows_b: Tensor,
    *,
    pairs: str = "same",
    folds: int = 5,
    work: Work | None = None,
) -> Control:
    """Feed blocks of A with B's inputs and blocks of B with A's, for pairs of depths.

    `pairs` is "same" (0:0, 1:1, ...), "all", or a list such as "3:5,4:4" (A's depth first). Windows
    are each model's own tokens of one text.
    """
    work = work or Work()
    every = (blocks(model_a), blocks(model_b))
    chosen = depth_pairs(pairs, len(every[0]), len(every[1]))
    _check_widths(model_a, model_b, every, chosen)
    split = Folds(folds)
    for ids, at in ((windows_a, every[0]), (windows_b, every[1])):
        check_rows(ids.shape[0], ids.shape[1], at[0].d_in, split)
    sides = []
    for k, (model, windows) in enumerate(((model_a, windows_a), (model_b, windows_b))):
        used = {i: every[k][i] for i in sorted({pair[k] for pair in chosen})}
        stats = input_moments(model, windows, list(used.values()), work, f"inputs of {'AB'[k]}")
        runs = {i: Cast(as_module(model, b)) for i, b in used.items()}
        sides.append(_Side(model, windows, used, stats, runs))
    scores = [
        feed(
            sides[k].model,
            sides[k].windows,
            _outputs(sides[k], sides[1 - k], [(pair[k], pair[1 - k]) for pair in chosen]),
            split,
            work,
            f"blocks on the inputs of {'AB'[k]}",
        )
        for k in (0, 1)
    ]
    same_windows = windows_a.shape == windows_b.shape and torch.equal(windows_a, windows_b)
    rows = [
        {
            "index": i,
            "path": every[0][i].path,
            "index_b": j,
            "path_b": every[1][j].path,
            **_two_by_two(i, j, scores[0][i], scores[1][j], paired=same_windows),
        }
        for i, j in chosen
    ]
    summary = {
        name: mean([r["split"][name]["value"] for r in rows])
        for name in ("difference", "weights", "inputs")
    }
    settings = {
        "pairs": pairs,
        "tokens": [windows_a.numel(), windows_b.numel()],
        "window": windows_a.shape[1],
        "folds": folds,
        "same_tokens": same_windows,
    }
    return Control("cross-feed", rows, summary, settings)


@dataclass(frozen=True, eq=False)
class _Side:
    """One of the two models; dicts are by block index."""

    model: nn.Module
    windows: Tensor
    blocks: dict[int, Block]
    stats: dict[int, InputMoments]
    runs: dict[int, Cast]


def _outputs(
    here: _Side, there: _Side, pairs: Sequence[tuple[int, int]]
) -> dict[Block, dict[Any, Output]]:
    """What is computed on the inputs of each block here.

    The block itself; each block from there that it is paired with; and the block itself on inputs
    moved to the mean and covariance of that one's.
    """
    outputs: dict[Block, dict[Any, Output]] = {}
    for i, block in here.blocks.items():
        outputs[block] = {"own": Output(here.runs[i], block.d_out)}
        for j in [j for first, j in pairs if first == i]:
            outputs[block]["other", j] = Output(there.runs[j], there.blocks[j].d_out)
            moved = transport(*here.stats[i], *there.stats[j])
            outputs[block]["moved", j] = Output(here.runs[i], block.d_out, moved)
    return outputs


def _two_by_two(
    i: int, j: int, on_a: dict[Any, Sums], on_b: dict[Any, Sums], *, paired: bool
) -> dict[str, Any]:
    """The cells R2(weights, inputs), and the shares of weights and inputs in R2(b, b) - R2(a, a)."""
    sums = {
        "aa": on_a["own"],
        "ba": on_a["other", j],  # b's weights on a's inputs
        "ab": on_b["other", i],
        "bb": on_b["own"],
        "a_moved": on_a["moved", j],  # a's weights on a's inputs with the moments of b's
        "b_moved": on_b["moved", i],
    }
    four = [sums[name] for name in ("aa", "ba", "ab", "bb")]

    def difference(aa: Any, ba: Any, ab: Any, bb: Any) -> float:
        return float(bb[0] - aa[0])

    def weights(aa: Any, ba: Any, ab: Any, bb: Any) -> float:
        return ((ba[0] - aa[0]) + (bb[0] - ab[0])) / 2

    def inputs(aa: Any, ba: Any, ab: Any, bb: Any) -> float:
        return ((ab[0] - aa[0]) + (bb[0] - ba[0])) / 2

    return {
        "cells": {name: estimate([s], paired) for name, s in sums.items()},
        "split": {f.__name__: estimate(four, paired, f) for f in (difference, weights, inputs)},
    }


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
    every: tuple[list[Block], list[Block]],
    pairs: Sequence[tuple[int, int]],
) -> None:
    for i, j in pairs:
        a, b = every[0][i], every[1][j]
        if a.d_in != b.d_in:
            raise ValueError(
                f"block {i} of {type(model_a).__name__} reads {a.d_in} features and block {j} of "
                f"{type(model_b).__name__} {b.d_in}: only models of one width can feed each other"
            )


def memory(at: Sequence[Block], folds: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Bytes of sums that `cross_feed` takes for the blocks of one model, at most."""
    total = 0
    for b in at:
        partners = max(sum(pair[k] == b.index for pair in pairs) for k in (0, 1))
        if partners:
            total += 8 * folds * Moments(b.d_in, (1 + 2 * partners) * b.d_out).size
    return total
