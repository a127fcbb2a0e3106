"""Each block on inputs that share only some moments with its own: the block, or its inputs?

    matched(model, windows).blocks[0]["r2"]["gaussian"]["value"]

Rows are read twice: once for the mean and covariance of every block's input, once to run the blocks on
them. The model runs once where its rows fit into memory (`feeding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from howlinear.controls.feeding import (
    InputMoments,
    Output,
    TwiceRead,
    feed,
    input_moments,
    on_gaussian,
)
from howlinear.controls.gaussian import expected_map, whitening
from howlinear.controls.results import Control, estimate, mean
from howlinear.linear.affine import Affine
from howlinear.linear.folds import check_rows
from howlinear.linear.moments import Moments
from howlinear.models.families import Block, blocks
from howlinear.models.forward import Windows, WindowsLike, as_windows
from howlinear.models.hooks import as_module, evaluating
from howlinear.models.naming import BlockNames
from howlinear.probing.samples import Cast
from howlinear.records.statistics import Sums, over_blocks, pearson, r2s
from howlinear.run.work import Work

SCALES = (0.5, 2.0, 4.0)


def matched(
    model: nn.Module,
    windows: WindowsLike,
    *,
    at: BlockNames = None,
    folds: int = 5,
    seed: int = 0,
    work: Work | None = None,
) -> Control:
    """R2 of each block on its own inputs and on Gaussian, whitened and scaled ones.

    Gaussian inputs have the mean and covariance of the block's own. Beside them stands the map that
    the block's weights and those two moments predict.
    """
    with evaluating(model):
        text = as_windows(windows).read()
        return _matched(model, text, blocks(model, at), folds, seed, work or Work())


def _matched(
    model: nn.Module, windows: Windows, measured: list[Block], folds: int, seed: int, work: Work
) -> Control:
    split, tokens = windows.folds(folds), windows.tokens
    check_rows(len(windows), windows.all_ids.shape[1], max(b.d_in for b in measured), split)
    runs = {b.index: Cast(as_module(model, b)) for b in measured}
    rows = TwiceRead(model, windows, measured, work)
    stats = input_moments(rows, "inputs")
    predicted, notes = _predicted_maps(model, measured, stats)
    outputs = {b: _outputs(b, runs[b.index], stats[b.index]) for b in measured}
    scores = feed(rows, outputs, split, "blocks on their inputs, moved", predicted)
    drawn: dict[int, dict[Any, Sums]] = {}
    advance = work.begin("blocks on Gaussian inputs", tokens)
    for k, b in enumerate(measured):
        if work.ranks.mine(k):
            i = b.index
            drawn[i] = on_gaussian(runs[i], b, stats[i], windows, split, seed, predicted.get(i))
        advance(tokens // len(measured))
    drawn = work.ranks.joined(drawn)
    records = [_row(b, scores[b.index], drawn[b.index]) for b in measured]
    settings = {
        "tokens": tokens,
        "window": windows.length,
        "folds": split.groups,
        "seed": seed,
        "scales": list(SCALES),
    }
    return Control("matched", records, _summary(records), settings, notes)


def _outputs(block: Block, run: Cast, stats: InputMoments) -> dict[Any, Output]:
    """The block on its own inputs, on whitened and on scaled ones."""
    return {
        "own": Output(run, block.d_out),
        "whitened": Output(run, block.d_out, whitening(*stats)),
        **{f"x{s:g}": Output(run, block.d_out, partial(torch.mul, other=s)) for s in SCALES},
    }


def _predicted_maps(
    model: nn.Module, at: Sequence[Block], stats: dict[int, InputMoments]
) -> tuple[dict[int, Affine], list[str]]:
    """Gaussian maps by block index, and the reasons why some blocks have none."""
    maps, notes = {}, []
    for b in at:
        try:
            maps[b.index] = expected_map(model, b, *stats[b.index])
        except ValueError as reason:
            notes.append(str(reason))
    return maps, notes


def _row(block: Block, scores: dict[Any, Sums], drawn: dict[Any, Sums]) -> dict[str, Any]:
    """R2 of one block on each kind of input, and R2 of its predicted map on own and drawn ones."""
    predicted = None
    if "predicted" in scores:
        predicted = {
            "r2": estimate([scores.pop("predicted")], True),
            "r2_gaussian": r2s(drawn.pop("predicted"))[0],
        }
    by_inputs = scores | drawn
    return {
        "index": block.index,
        "path": block.path,
        "r2": {name: estimate([sums], True) for name, sums in by_inputs.items()},
        "predicted": predicted,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean R2 on each kind of input, and its correlation over depth with R2 on own inputs."""
    values = {name: [r["r2"][name]["value"] for r in rows] for name in rows[0]["r2"]}
    summary: dict[str, Any] = {
        name: {
            "mean": mean(v),
            "pearson_with_own": over_blocks(pearson, values["own"], v).to_dict(),
        }
        for name, v in values.items()
    }
    predicted = [r["predicted"]["r2"]["value"] for r in rows if r["predicted"]]
    if predicted:
        summary["predicted"] = {"mean": mean(predicted)}
    return summary


def memory(at: Sequence[Block], folds: int) -> int:
    """Bytes of sums that `matched` takes."""
    outputs = 2 + len(SCALES)
    return sum(8 * folds * Moments(b.d_in, outputs * b.d_out).size for b in at)
