"""Blocks of one model on the inputs of another: is a difference in R2 due to weights or to inputs?

    cross_feed(model_a, model_b, windows_a, windows_b, pairs="3:5,4:4").blocks[0]["split"]

Rows are read twice: once for the mean and covariance of every block's input, once to run blocks on them.
Each model runs once where its rows fit into memory (`feeding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from howlinear.controls.feeding import InputMoments, Output, TwiceRead, feed, input_moments
from howlinear.controls.gaussian import transport
from howlinear.controls.results import Control, estimate, mean
from howlinear.linear.folds import Folds, check_rows
from howlinear.linear.moments import Moments
from howlinear.models.families import Block, blocks
from howlinear.models.forward import Windows, WindowsLike, as_windows
from howlinear.models.hooks import as_module, evaluating
from howlinear.probing.samples import Cast
from howlinear.records.statistics import Sums
from howlinear.run.work import Work


def cross_feed(
    model_a: nn.Module,
    model_b: nn.Module,
    windows_a: WindowsLike,
    windows_b: WindowsLike,
    *,
    pairs: str = "same",
    folds: int = 5,
    work: Work | None = None,
) -> Control:
    """Feed blocks of A with B's inputs and blocks of B with A's, for pairs of depths.

    `pairs` is "same" (0:0, 1:1, ...), "all", or a list such as "3:5,4:4" (A's depth first). Windows
    are each model's own tokens of one text.
    """
    work, texts = work or Work(), (as_windows(windows_a).read(), as_windows(windows_b).read())
    every = (blocks(model_a), blocks(model_b))
    chosen = depth_pairs(pairs, len(every[0]), len(every[1]))
    check_widths(model_a, model_b, every, chosen)
    sides = []
    for k, model in enumerate((model_a, model_b)):
        text, split = texts[k], texts[k].folds(folds)
        check_rows(len(text), text.all_ids.shape[1], every[k][0].d_in, split)
        used = {i: every[k][i] for i in sorted({pair[k] for pair in chosen})}
        sides.append(_Side("AB"[k], model, text, split, used))
    a, b = sides
    with evaluating(model_a), evaluating(model_b):  # blocks of one run in the other's forward
        a.read_inputs(work)
        b.read_inputs(work)
        on_a = a.feed(b, chosen)
        on_b = b.feed(a, [(j, i) for i, j in chosen])
    same_ids = torch.equal(*(text.all_ids for text in texts))
    same_windows = same_ids and a.split == b.split
    rows: list[dict[str, Any]] = []
    for i, j in chosen:
        names = {"index": i, "path": every[0][i].path, "index_b": j, "path_b": every[1][j].path}
        rows.append(names | _two_by_two(i, j, on_a[i], on_b[j], paired=same_windows))
    return Control(
        "cross-feed",
        rows,
        {name: mean([r["split"][name]["value"] for r in rows]) for name in rows[0]["split"]},
        {
            "pairs": pairs,
            "tokens": [text.tokens for text in texts],
            "window": texts[0].length,
            "folds": a.split.groups,
            "same_tokens": same_windows,
        },
    )


class _Side:
    """One model and some of its blocks; dicts are by block index."""

    rows: TwiceRead
    stats: dict[int, InputMoments]

    def __init__(
        self, name: str, model: nn.Module, windows: Windows, split: Folds, blocks: dict[int, Block]
    ) -> None:
        self.name, self.model, self.windows, self.blocks = name, model, windows, blocks
        self.split = split
        self.runs = {i: Cast(as_module(model, b)) for i, b in blocks.items()}

    def read_inputs(self, work: Work) -> None:
        self.rows = TwiceRead(self.model, self.windows, list(self.blocks.values()), work)
        self.stats = input_moments(self.rows, f"inputs of {self.name}")

    def feed(self, other: _Side, pairs: Sequence[tuple[int, int]]) -> dict[int, dict[Any, Sums]]:
        """Fold sums of what is computed on the inputs of each block here.

        The block itself; each block of the other model that it is paired with; and the block itself
        on inputs moved to the mean and covariance of that one's.
        """
        outputs: dict[Block, dict[Any, Output]] = {
            b: {"own": Output(self.runs[i], b.d_out)} for i, b in self.blocks.items()
        }
        for i, j in pairs:
            block, moved = self.blocks[i], transport(*self.stats[i], *other.stats[j])
            outputs[block]["other", j] = Output(other.runs[j], other.blocks[j].d_out)
            outputs[block]["moved", j] = Output(self.runs[i], block.d_out, moved)
        return feed(self.rows, outputs, self.split, f"blocks on the inputs of {self.name}")


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
            raise ValueError(f"`pairs` {text!r}: write same, all or depths such as 3:5,4:4")
        if int(i) >= count_a or int(j) >= count_b:
            raise ValueError(
                f"`pairs` {part.strip()}: the models have {count_a} and {count_b} blocks, from 0"
            )
        pairs.append((int(i), int(j)))
    return list(dict.fromkeys(pairs))


def check_widths(
    model_a: nn.Module,
    model_b: nn.Module,
    every: tuple[list[Block], list[Block]],
    pairs: Sequence[tuple[int, int]],
) -> None:
    """Refuse blocks that cannot run on each other's inputs."""
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
