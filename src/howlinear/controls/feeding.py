"""Blocks on inputs that are not their own, or changed before they enter: R2 by cross-validation.

    rows = TwiceRead(model, windows, at, work)
    stats = input_moments(rows, "inputs")               # block index -> (mean, covariance)
    outputs = {block: {"own": Output(run, d), "x2": Output(run, d, move=double)}}
    feed(rows, outputs, Folds(5), "scaled inputs")      # block index -> name -> fold sums
    on_gaussian(run, block, stats[3], windows, Folds(5), seed=0)    # fold sums

Least squares does not depend on how inputs are written: regressing f(Ax + c) on x gives the R2 of f
on Ax + c, for every invertible A. So the outputs of several blocks, and of one block on scaled, moved
or whitened inputs, share one set of sums and one factorisation with x on its left side.

Rows are read twice. Where they take less than half of the free memory, they are kept and the model runs
once; otherwise it runs twice, and no activations are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.gaussian import draw, symmetric_root
from howlinear.linear.affine import Affine
from howlinear.linear.folds import Folds
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.scoring import cross_validate, score
from howlinear.models.families import Block
from howlinear.models.forward import Batch, Receive, WindowsLike, as_windows, run_rows
from howlinear.models.offload import like
from howlinear.probing.samples import Cast
from howlinear.records.statistics import Sums
from howlinear.run import room
from howlinear.run.work import Work

GAUSSIAN_ROWS = 4096  # drawn at a time
KEPT = 2  # of the free memory: rows that take at most one part are kept

RowFunction = Callable[[Tensor], Tensor]  # (..., d_in) -> (..., d_out)
InputMoments = tuple[Tensor, Tensor]  # mean (d_in,), covariance (d_in, d_in)


@dataclass(frozen=True)
class Output:
    """One thing to regress on the inputs x of a block: run(x), or run(move(x))."""

    run: RowFunction
    d_out: int
    move: RowFunction | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x if self.move is None else self.move(x))


class TwiceRead:
    """Rows of blocks that are read twice; the model runs once where they fit into memory."""

    def __init__(
        self, model: nn.Module, windows: WindowsLike, at: Sequence[Block], work: Work
    ) -> None:
        self.model, self.windows, self.work = model, as_windows(windows), work
        self.at = sorted(at, key=lambda b: b.index)
        self.kept: dict[Block, list[tuple[Batch, Rows]]] = {}
        free, weight = room.available_memory(), like(model)
        on_cpu = weight.device.type == "cpu"  # `free` says nothing of other devices
        self.keeps = on_cpu and free is not None and self._bytes(weight.itemsize) <= free // KEPT

    def _bytes(self, itemsize: int) -> int:
        """Of the rows of one rank."""
        columns = sum(b.d_in + b.d_out for b in self.at)
        return itemsize * columns * self.windows.tokens // self.work.ranks.count

    def read(self, receive: Receive, label: str) -> None:
        """The first reading: the model runs. `receive(batch, block, rows)`, batch by batch."""

        def take(batch: Batch, block: Block, rows: Rows) -> None:
            receive(batch, block, rows)
            if self.keeps:
                self.kept.setdefault(block, []).append((batch, rows.copied()))

        self._run(take if self.keeps else receive, label)

    def read_again(self, receive: Receive, label: str) -> None:
        """The second reading: rows of each block in the same order. They are not kept any longer."""
        if not self.keeps:
            self._run(receive, label)
            return
        tokens = self.windows.tokens // self.work.ranks.count
        advance = self.work.begin(label, tokens * len(self.at))
        for block in self.at:
            for batch, rows in self.kept.pop(block, ()):
                with torch.no_grad():
                    receive(batch, block, rows)
                advance(batch.tokens)

    def _run(self, receive: Receive, label: str) -> None:
        run_rows(self.model, self.windows, receive, at=self.at, work=self.work, label=label)


def input_moments(rows: TwiceRead, label: str) -> dict[int, InputMoments]:
    """Mean and covariance of the inputs of each block, by block index."""
    sums = {b.index: Moments(b.d_in, 1) for b in rows.at}

    def receive(_: Batch, block: Block, rows: Rows) -> None:
        sums[block.index].update(rows.x, rows.x[..., :1])

    rows.read(receive, label)
    sums = {i: rows.work.ranks.added(m) for i, m in sums.items()}
    return {i: (m.mean_x, m.gram()[0] / m.weight) for i, m in sums.items()}


def feed(
    read: TwiceRead,
    outputs: Mapping[Block, Mapping[Any, Output]],
    split: Folds,
    label: str,
    predicted: Mapping[int, Affine] | None = None,
) -> dict[int, dict[Any, Sums]]:
    """Cross-validated sums of each block's outputs on its inputs, by block index.

    The first output of a block is "own", what the block itself computes. `predicted` has maps of
    that one, by block index, to score on the same rows.
    """
    columns = {b: _columns(outputs[b]) for b in outputs}
    groups = {
        b: [Moments(b.d_in, max(c.stop for c in columns[b].values())) for _ in range(split.groups)]
        for b in outputs
    }

    def receive(batch: Batch, block: Block, rows: Rows) -> None:
        assert rows.shape is not None
        B, L = rows.shape
        x = rows.x.view(B, L, -1)
        parts = [rows.y if name == "own" else o(x) for name, o in outputs[block].items()]
        y = torch.cat([part.view(B, L, -1) for part in parts], -1)
        shift = groups[block][0].shift_for(
            x, y
        )  # one for all: their sums then add without correction
        for g, w, p in split.pieces(batch.offsets, L):
            groups[block][g].shift = shift
            groups[block][g].update(x[w, p], y[w, p])

    read.read_again(receive, label)
    ranks = read.work.ranks
    scores: dict[int, dict[Any, Sums]] = {}
    for k, b in enumerate(read.at):
        collected = [ranks.collect(m, k % ranks.count) for m in groups.pop(b)]
        if ranks.mine(k):
            folds = [m for m in collected if m is not None and m.n]
            scores[b.index] = _cross_validated(folds, columns[b], (predicted or {}).get(b.index))
    return ranks.joined(scores)


def _columns(outputs: Mapping[Any, Output]) -> dict[Any, slice]:
    """Where each output is among the columns of y."""
    columns, start = {}, 0
    for name, output in outputs.items():
        columns[name] = slice(start, start + output.d_out)
        start += output.d_out
    return columns


def _cross_validated(
    groups: list[Moments], columns: dict[Any, slice], predicted: Affine | None
) -> dict[Any, Sums]:
    """[SS_res, SS_tot] of each fold by the map of the others, for each part of the outputs.

    "predicted" are those of a map of the first columns of y that is not fitted.
    """
    scores, sums = cross_validate(groups), dict[Any, Sums]()
    for name, part in columns.items():
        sums[name] = [[one.sums(part) for one in scores]]
    if predicted is not None:
        pad, more = nn.functional.pad, groups[0].d_out - predicted.d_out
        weight, bias = pad(predicted.weight, (0, 0, 0, more)), pad(predicted.bias, (0, more))
        padded = Affine(weight, bias, predicted.rank)
        sums["predicted"] = [[score(padded, m).sums(slice(predicted.d_out)) for m in groups]]
    return sums


@torch.no_grad()
def on_gaussian(
    run: Cast,
    block: Block,
    stats: InputMoments,
    windows: WindowsLike,
    split: Folds,
    seed: int,
    predicted: Affine | None = None,
) -> dict[Any, Sums]:
    """Fold sums on as many Gaussian rows as the text has ("gaussian"), and of a predicted map there.

    Rows are float32, or float64 for a block in float64.
    """
    dtype = torch.promote_types(next(run.parameters()).dtype, torch.float32)
    generator, root = torch.Generator().manual_seed(seed), symmetric_root(stats[1])
    groups = [Moments(block.d_in, block.d_out) for _ in range(split.groups)]
    sizes = [0] * split.groups
    for batch in as_windows(windows).batches():
        length = batch.tokens // len(batch)
        for g, w, _ in split.pieces(batch.offsets, length):
            sizes[g] += (w.stop - w.start) * length
    for moments, size in zip(groups, sizes, strict=True):
        for start in range(0, size, GAUSSIAN_ROWS):
            x = draw(stats[0], root, min(GAUSSIAN_ROWS, size - start), generator).to(dtype)
            moments.update(x, run(x))
    folds = [m for m in groups if m.n]
    return _cross_validated(folds, {"gaussian": slice(None)}, predicted)
