"""Maps for many blocks at once, each fitted on the inputs that it gets in the changed model.

    fitter = Refitter(model, at, windows)
    fitter.survey({block: [(None, 4), (0, 768)]})               # maps of single blocks, orders of units
    fitter.refit({block: (None, 4), other: (0, 768)})           # all together, front to back

All windows go through the model one layer at a time (`walking`). Rows of a block go into moments batch by
batch; then the map is solved for and takes the block's place, so that later blocks get the inputs of
the changed model.

Hidden units and matrices of low rank are chosen by what their errors cost, by the gradients of the predictions
on some windows (`linear.metric`); by squares where there are no gradients.

Rows are weighted by 1/|h|, h the residual stream after the block, because later layers read the stream
after a norm. A map behind replaced blocks is fitted to y + a c: y is the block's own output on its new
input, c what would bring the residual stream back to the original model's, and a the share of c that
can be learned from the inputs, chosen on windows that were held out (`linear.blending`). For this the
original model runs beside the changed one, from the first replaced block on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from howlinear.compression.walking import Walk
from howlinear.linear.accumulators import merged
from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.blending import Blend, learned_share
from howlinear.linear.gradients import LENGTH
from howlinear.linear.metric import Metric
from howlinear.linear.moments import Moments
from howlinear.linear.precision import NARROW, is_resolved
from howlinear.linear.rows import Rows
from howlinear.linear.solving import solve
from howlinear.linear.unit_selection import (
    Elimination,
    eliminations,
    joint_map,
    unexplained_by_rank,
)
from howlinear.models.families import Block
from howlinear.models.forward import Batch, as_windows
from howlinear.models.offload import like
from howlinear.models.units import hidden_count, taken
from howlinear.profiling.gradients import gradient_products, why_no_gradients
from howlinear.profiling.passes import Course
from howlinear.run.work import Work

HELD_OUT = 5  # one batch in so many decides how much of the correction is learned
SENSED = 96  # windows that go forward and backward for the metrics, so many at a time:
AT_ONCE = 12

Shape = tuple[int | None, int]  # rank of the matrix (None: full, 0: none), hidden units kept


def memory(at: Sequence[Block], hidden: Mapping[Block, int], batch_tokens: int) -> int:
    """Approximate bytes of the widest block's moments and their factors, of a batch's rows, and of all
    blocks' products of gradients."""
    columns = max(b.d_in + hidden[b] for b in at)
    d_out = max(b.d_out for b in at)
    rows = 4 * batch_tokens * (2 * columns + 4 * d_out)
    return 6 * columns * (columns + d_out) * 8 + rows + len(at) * d_out**2 * (8 + 4)


class Refitter:
    """Fits maps on one text; keeps orders of hidden units once they are computed."""

    def __init__(
        self,
        model: nn.Module,
        at: Sequence[Block],
        windows: Tensor,
        *,
        intercept: bool = True,
        correction: float | None = None,
        units_only: bool = False,
        work: Work | None = None,
    ) -> None:
        """`correction`: the share a of all maps; None: learned, block by block. `units_only`: maps without
        a matrix are asked for, and a survey need not read x."""
        self.correction, self.units_only = correction, units_only
        self.model, self.at, self.windows, self.intercept = model, list(at), windows, intercept
        self.work = work or Work()
        self.like = like(model)
        # orders of hidden units: without a matrix, and beside one
        self.ladders: dict[Block, tuple[Elimination, Elimination]] = {}
        self.rests: dict[Block, dict[Shape, float]] = {}  # share left unexplained, on fit rows
        self.corrections: dict[Block, float | None] = {}  # a, of the last refit
        # (d_out, d_out) sum of g g', g the gradients by each block's output; {} without gradients
        self.products: dict[Block, Tensor] | None = None

    def survey(
        self,
        shapes: Mapping[Block, Sequence[Shape]],
        ranks: Mapping[Block, Mapping[int, Sequence[int]]] | None = None,
        label: str = "fitting options",
    ) -> dict[Block, list[Map]]:
        """Maps of each block in the original model; fills `rests` for maps of other shapes.

        Without a matrix and with one of full rank, `rests` covers every number of hidden units that the
        elimination passes; at reduced rank those in `ranks` (hidden units -> ranks).
        """
        self._read_gradients()
        walk = Walk(self.model, list(shapes), self.windows, self.work, label)
        maps: dict[Block, list[Map]] = {}
        for block, wanted in shapes.items():
            metric = self.metric(block)
            moments = self._all_rows(walk, block, metric)
            d, rests = 0 if self.units_only else block.d_in, self.rests[block]
            for k, lower in ((ranks or {}).get(block) or {}).items():
                beyond = unexplained_by_rank(moments, d, self.units_of(block, (None, k)))
                rests |= {(r, k): rests[None, k] + float(beyond[r : r + 1].sum()) for r in lower}
            maps[block] = []
            for shape in wanted:
                units = self.units_of(block, shape)
                hidden = taken(self.model, block, units) if units else None
                fitted = joint_map(moments, d, units, shape[0], hidden, intercept=self.intercept)
                fitted = _of_inputs(fitted, block) if self.units_only else fitted
                fitted = metric.restored(fitted) if metric else fitted
                maps[block].append(fitted.to(self.like))
        return maps

    def metric(self, block: Block) -> Metric | None:
        """What errors of the block's output cost, by direction; None without gradients."""
        self._read_gradients()
        products = (self.products or {}).get(block)
        return None if products is None else Metric.of(products)

    def _read_gradients(self) -> None:
        """Fill `products`, once. Before a walk begins: it is a step of its own."""
        if self.products is not None:
            return
        self.products = {}
        at = [b for b in self.at if not b.out_norm]  # with one, gradients are by the norm's output
        if not at or why_no_gradients(self.model, as_windows(self.windows), Course()):
            return
        windows = self.windows[:, :LENGTH]
        count = min(SENSED, len(windows))
        parts = windows[torch.arange(count) * len(windows) // count].split(AT_ONCE)
        mine = [part for i, part in enumerate(parts) if self.work.ranks.mine(i)]
        advance = self.work.begin("weighing errors", sum(part.numel() for part in mine))
        sums = {b: torch.zeros(b.d_out, b.d_out, dtype=torch.float64) for b in at}
        for part in mine:
            for block, products in gradient_products(self.model, at, part).items():
                sums[block] += products.cpu()
            advance(part.numel())
        self.products = {block: self.work.ranks.sum(total) for block, total in sums.items()}

    def some_windows(self, tokens: int) -> Tensor:
        """Windows evenly spaced over all, with at least so many tokens if there are."""
        count, every = -(-tokens // self.windows.shape[1]), len(self.windows)
        if count >= every:
            return self.windows
        return self.windows[torch.arange(count) * every // count]

    def _all_rows(self, walk: Walk, block: Block, metric: Metric | None) -> Moments:
        """Moments of [x, all hidden units] and y; keeps the orders of the units."""
        units = hidden_count(self.model, block)
        d = 0 if self.units_only else block.d_in
        sums = Sums(d + units, block.d_out)

        def receive(_: Batch, rows: Rows) -> None:
            joint = rows.x if rows.hidden is None else torch.cat([rows.x[:, :d], rows.hidden], 1)
            y = metric.scaled(rows.y) if metric else rows.y
            sums.update(joint, y, rows.inverse_stream)

        walk.read(block, receive, every=units > 0)
        moments = self.work.ranks.added(sums.total()[0])
        if not units:
            explained = float(solve(moments)[1].square().sum() / moments.S_yy.sum())
            self.rests[block] = {(None, 0): 1 - explained}
            return moments
        ladders = self.work.ranks.share(eliminations(moments, d))
        self.ladders[block] = ladders
        self.rests[block] = {
            (rank, k): rest
            for rank, ladder in zip((0, None), ladders, strict=True)
            for k, rest in ladder.unexplained.items()
        }
        return moments

    def refit(
        self,
        shapes: Mapping[Block, Shape],
        *,
        intercept: bool | None = None,
        windows: Tensor | None = None,
    ) -> dict[Block, Map]:
        """Maps of all these blocks together, each on the inputs that the maps before it produce.

        On all windows of the fitter, or on some. `corrections` has the share a of each block.
        """
        at = sorted(shapes, key=lambda b: b.index)
        if missing := {b: () for b in at if shapes[b][1] and b not in self.ladders}:
            self.survey(missing)
        if any(rank for rank, _ in shapes.values()):
            self._read_gradients()
        windows = self.windows if windows is None else windows
        changed, original = Walk(self.model, at, windows, self.work, "refitting", forks=True), None
        maps: dict[Block, Map] = {}
        for block in at:
            fit = _Fit(self, block, shapes[block], changed)
            if original is not None:
                fit.read_original(original)
            maps[block] = fit.fitted(self.intercept if intercept is None else intercept)
            self.corrections[block] = fit.share
            original = original or changed.fork()
            changed.replace(block, maps[block], fit.outputs)
        return maps

    def keep_units(self, block: Block, units: Sequence[int]) -> None:
        """Maps of this block keep these hidden units: no survey has to choose them."""
        self.ladders[block] = (Elimination(list(units), {}),) * 2

    def units_of(self, block: Block, shape: Shape) -> tuple[int, ...]:
        """The hidden units that a map of this shape keeps."""
        rank, k = shape
        return tuple(self.ladders[block][rank != 0].order[:k]) if k else ()


class _Fit:
    """The map of one block, on its rows in the changed model."""

    def __init__(self, fitter: Refitter, block: Block, shape: Shape, walk: Walk) -> None:
        self.fitter, self.block, self.walk = fitter, block, walk
        self.rank, self.units = shape[0], fitter.units_of(block, shape)
        self.alone = self.rank == 0 and len(self.units) > 0  # hidden units without x
        self.corrects = False  # is the original's residual stream known, to come back to?
        self.share: float | None = None  # of the correction
        self.metric = fitter.metric(block) if self.rank else None  # a matrix of low rank
        self.map: Map

    def read_original(self, walk: Walk) -> None:
        """Keep the residual stream of the original model, where the block's output adds to it."""

        self.corrects = self.block.stream is not None and not self.block.out_norm

        def receive(batch: Batch, rows: Rows) -> None:
            if self.corrects and rows.h is not None:
                self.walk.shelf.put("original", batch, rows.h)

        walk.read(self.block, receive)

    def fitted(self, intercept: bool) -> Map:
        """Read the block's rows and solve for its map."""
        block, k, ranks = self.block, len(self.units), self.fitter.work.ranks
        columns = (0 if self.alone else block.d_in) + k
        sums = Sums(columns, block.d_out * (1 + self.corrects), groups=1 + self.corrects)

        def receive(batch: Batch, rows: Rows) -> None:
            parts = [] if self.alone else [rows.x]
            joint = torch.cat(parts if rows.hidden is None else [*parts, rows.hidden], 1)
            self.walk.shelf.put("inputs", batch, joint)
            y, group = rows.y, 0
            if self.corrects and rows.h is not None:
                correction = (self.walk.shelf.get("original", batch) - rows.h) / block.scale
                y, group = torch.stack([y, correction], 1), int(self._held_out(batch))
            y = self.metric.scaled(y) if self.metric else y
            sums.update(joint, y.flatten(1), rows.inverse_stream, group)

        self.walk.read(block, receive, torch.tensor(self.units) if k else None)
        groups = [ranks.added(moments) for moments in sums.total()]
        rows: Moments | Blend = groups[0]
        if self.corrects:
            self.share = self.fitter.correction
            if self.share is None:
                self.share = learned_share(*groups, intercept=intercept)
            rows = Blend(merged(groups), self.share)
        self.map = self._solved(rows, intercept).to(self.fitter.like)
        return self.map

    def _held_out(self, batch: Batch) -> bool:
        """One batch in HELD_OUT; of fewer batches the last, if it is not the only one."""
        if self.walk.count < HELD_OUT:
            return 0 < batch.number == self.walk.count - 1
        return batch.number % HELD_OUT == HELD_OUT - 1

    def _solved(self, rows: Moments | Blend, intercept: bool) -> Map:
        block, k = self.block, len(self.units)
        hidden = taken(self.fitter.model, block, self.units) if k else None
        d = 0 if self.alone else block.d_in
        fitted = joint_map(rows, d, range(k), self.rank, hidden, intercept=intercept)
        if isinstance(fitted, UnitMap):
            fitted = replace(fitted, units=self.units)  # numbers in the block, not columns
        fitted = _of_inputs(fitted, block) if self.alone else fitted
        return self.metric.restored(fitted) if self.metric else fitted

    def outputs(self, batch: Batch) -> Tensor:
        """(n, d_out) of the map on the rows of a batch."""
        joint, fitted = self.walk.shelf.get("inputs", batch), self.map
        if not isinstance(fitted, UnitMap):
            return fitted(joint)
        x, h = joint[:, : joint.shape[1] - len(self.units)], joint[:, -len(self.units) :]
        affine = fitted.affine.bias.to(h) if self.alone else fitted.affine(x)
        return torch.addmm(affine, h, fitted.write.t().to(h))


def _of_inputs(fitted: Map, block: Block) -> Map:
    """A map that was fitted on hidden units alone, with the inputs of its block."""
    assert isinstance(fitted, UnitMap)
    assert isinstance(fitted.affine, Factored)
    nothing = fitted.write.new_zeros(0, block.d_in)
    return replace(fitted, affine=replace(fitted.affine, into=nothing))


class Sums:
    """Moments of rows in one or two groups; products are in float32 where that is harmless.

    The first rows of the first group decide it.
    """

    def __init__(self, columns: int, d_out: int, groups: int = 1) -> None:
        self.groups = [Moments(columns, d_out) for _ in range(groups)]
        self.decided = columns < NARROW
        self.first: list[tuple[int, tuple[Tensor, Tensor, Tensor | None]]] = []  # rows by group

    def update(self, x: Tensor, y: Tensor, weight: Tensor | None, group: int = 0) -> None:
        """Add rows to a group."""
        if self.decided:
            self.groups[group].update(x, y, weight)
            return
        self.first.append((group, (x, y.clone(), weight)))  # y may be the model's own
        columns = self.groups[0].d_in
        if sum(len(rows[0]) for g, rows in self.first if g == 0) > columns + columns // 2:
            self._sum("mixed")
            if not is_resolved(self.groups[0]):
                self.groups = [Moments(columns, self.groups[0].d_out) for _ in self.groups]
                self._sum("float64")
            self.first.clear()
            self.decided = True

    def _sum(self, precision: str) -> None:
        for moments in self.groups:
            moments.precision = precision
        for group, rows in self.first:
            self.groups[group].update(*rows)

    def total(self) -> list[Moments]:
        """Of all rows, by group."""
        if not self.decided:
            self._sum("float64")
        return self.groups
