"""Maps for many blocks at once, each fitted on the inputs that it gets in the changed model.

    fitter = Refitter(model, at, windows)
    fitter.fit_alone({block: [(None, 4), (0, 768)]})            # maps of single blocks
    fitter.refit({block: (None, 4), other: (0, 768)})           # front to back, in one forward

All windows run as one batch. A layer in place of each block gets every row of the block at once, fits
the map and returns the map's output, so that later blocks get the inputs of the changed model. One
forward of the model refits all blocks.

Rows are weighted by 1/|h|, h the residual stream after the block in the original model, because later
layers read the stream after a norm. A map behind replaced blocks is fitted to one of two targets: the
block's own output on the new input ("output"), or the output that brings the residual stream back to
the original model's ("stream"), which corrects errors of earlier maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.moments import Moments
from howlinear.linear.precision import NARROW, is_resolved
from howlinear.linear.rows import Rows
from howlinear.linear.solving import solve
from howlinear.linear.unit_selection import Elimination, elimination, joint_map, unexplained_by_rank
from howlinear.models.families import Block
from howlinear.models.forward import Batch, Forward, run_rows
from howlinear.models.hooks import as_module, swapped
from howlinear.models.streams import inlets
from howlinear.models.units import hidden_count, hidden_units, taken
from howlinear.run.work import Advance, Work

TARGETS = ("output", "stream")
CHUNK = 4096  # rows at a time

Shape = tuple[int | None, int]  # rank of the matrix (None: full, 0: none), hidden units kept


def memory(at: Sequence[Block], hidden: Mapping[Block, int], rows: int) -> int:
    """Approximate bytes to run all rows at once, twice for the stream target, and to fit."""
    widest = max(at, key=lambda b: b.d_in + hidden[b])
    d, m = max(widest.d_in, widest.d_out), hidden[widest]
    return 2 * rows * (6 * d + 3 * m) * 4 + 4 * (d + m) * (2 * d + m) * 8


class Refitter:
    """Fits maps on one text; keeps row weights and orders of hidden units once they are computed."""

    def __init__(
        self, model: nn.Module, at: Sequence[Block], windows: Tensor, *, intercept: bool = True
    ) -> None:
        self.model, self.at, self.windows, self.intercept = model, list(at), windows, intercept
        self.like = next(model.parameters()).detach()
        self.weights: dict[Block, Tensor] = {}  # (n,)
        # orders of hidden units: without a matrix, and beside one
        self.ladders: dict[Block, tuple[Elimination, Elimination]] = {}
        self.rests: dict[Block, dict[Shape, float]] = {}  # share left unexplained, on fit rows

    def fit_alone(
        self,
        shapes: Mapping[Block, Sequence[Shape]],
        ranks: Mapping[Block, Mapping[int, Sequence[int]]] | None = None,
        advance: Advance | None = None,
    ) -> dict[Block, list[Map]]:
        """Maps of each block in the original model; fills `rests` for maps of other shapes.

        Without a matrix and with one of full rank, `rests` covers every number of hidden units that
        the elimination passes; at reduced rank those in `ranks` (hidden units -> ranks).
        """
        maps: dict[Block, list[Map]] = {}

        def receive(_: Batch, block: Block, rows: Rows) -> None:
            d, moments, rests = block.d_in, self._prepare(block, rows), self.rests[block]
            for k, wanted in ((ranks or {}).get(block) or {}).items():
                beyond = unexplained_by_rank(moments, d, self.units_of(block, (None, k))[0])
                rests |= {(r, k): rests[None, k] + float(beyond[r]) for r in wanted}
            maps[block] = []
            for rank, k in shapes[block]:
                units, hidden = self.units_of(block, (rank, k))
                fitted = joint_map(moments, d, units, rank, hidden, intercept=self.intercept)
                maps[block].append(fitted.to(self.like))
            if advance is not None:
                advance(len(rows.x))

        whole = Work(batch_size=len(self.windows))
        run_rows(self.model, self.windows, receive, at=list(shapes), work=whole)
        return maps

    def _prepare(self, block: Block, rows: Rows) -> Moments:
        """Moments of [x, all hidden units] and y; keeps row weights and orders of hidden units."""
        self.weights[block] = _weights(rows)
        hidden = hidden_units(self.model, block) if hidden_count(self.model, block) else None
        moments = _moments(block, rows.x, rows.y, self.weights[block], hidden)
        if hidden is None:
            explained = float(solve(moments)[1].square().sum() / moments.S_yy.sum())
            self.rests[block] = {(None, 0): 1 - explained}
            return moments
        alone, beside = (elimination(moments, block.d_in, matrix=m) for m in (False, True))
        self.ladders[block] = (alone, beside)
        self.rests[block] = {
            (rank, k): rest
            for rank, ladder in ((0, alone), (None, beside))
            for k, rest in ladder.unexplained.items()
        }
        return moments

    def refit(
        self,
        shapes: Mapping[Block, Shape],
        target: str = "output",
        advance: Advance | None = None,
        *,
        intercept: bool | None = None,
    ) -> dict[Block, Map]:
        """Maps of all these blocks together, each on the inputs that the maps before it produce."""
        if missing := {b: () for b in shapes if b not in self.weights}:
            self.fit_alone(missing)
        intercept = self.intercept if intercept is None else intercept
        both = target == "stream"
        fits = _Refit(self, shapes, intercept, advance)
        with fits.streams_read() if both else nullcontext(), swapped(self.model, fits.layers(both)):
            # with the stream target the first half of the batch is the original model's
            Forward(self.model)({"input_ids": self.windows.repeat(1 + both, 1)})
        return fits.maps

    def units_of(self, block: Block, shape: Shape) -> tuple[tuple[int, ...], nn.Module | None]:
        """The hidden units that a map of this shape keeps, and a module that computes them."""
        rank, k = shape
        units = tuple(self.ladders[block][rank != 0].order[:k]) if k else ()
        return units, taken(self.model, block, units) if units else None


class _Refit:
    """One forward of all rows, in which each replaced block fits its map and returns its output."""

    def __init__(
        self,
        fitter: Refitter,
        shapes: Mapping[Block, Shape],
        intercept: bool,
        advance: Advance | None,
    ) -> None:
        self.fitter, self.model, self.shapes = fitter, fitter.model, shapes
        self.intercept, self.advance = intercept, advance
        self.units = {b: fitter.units_of(b, shape) for b, shape in shapes.items()}
        self.maps: dict[Block, Map] = {}
        self.streams: dict[Block, Tensor] = {}  # the residual stream before each block
        self.direct: set[Block] = set()  # blocks whose input is the stream itself

    def layers(self, both: bool) -> dict[Block, Callable[[Tensor], Tensor]]:
        """What runs in place of each block; with `both`, the batch has the original's half first."""
        run = self.run_both if both else self.run
        return {b: partial(run, b, as_module(self.model, b)) for b in self.shapes}

    @contextmanager
    def streams_read(self) -> Iterator[None]:
        """Inside, streams are kept where they can be read and the block's output adds to them."""

        def keep(block: Block, _: nn.Module, args: tuple[Any, ...]) -> None:
            self.streams[block] = args[0]

        few = {"input_ids": self.fitter.windows[:1, :8]}
        paths = inlets(self.model, list(self.shapes), few)
        paths = {b: path for b, path in paths.items() if path is not None and not b.out_norm}
        self.direct = {b for b, path in paths.items() if path == ""}
        with ExitStack() as stack:
            for block in paths.keys() - self.direct:
                module = self.model.get_submodule(str(paths[block]))
                stack.enter_context(module.register_forward_pre_hook(partial(keep, block)))
            yield

    def run(self, block: Block, module: nn.Module, x: Tensor) -> Tensor:
        return self.fit(block, x, module(x))

    def run_both(self, block: Block, module: nn.Module, x: Tensor) -> Tensor:
        """The original's output, and that of a map which brings the stream back to the original's."""
        before = x if block in self.direct else self.streams.pop(block, None)
        original, x = x.chunk(2)
        y = module(original)
        if before is None:
            return torch.cat([y, self.fit(block, x, module(x))])
        stream, changed = before.chunk(2)
        return torch.cat([y, self.fit(block, x, y + (stream - changed) / block.scale)])

    def fit(self, block: Block, x: Tensor, wanted: Tensor) -> Tensor:
        """Fit the block's map to these rows; its output."""
        rank, (units, hidden) = self.shapes[block][0], self.units[block]
        flat, y = x.reshape(-1, block.d_in), wanted.reshape(-1, block.d_out)
        alone = rank == 0 and hidden is not None
        moments = _moments(block, flat, y, self.fitter.weights[block], hidden, alone)
        d, columns = 0 if alone else block.d_in, range(len(units))
        fitted = joint_map(moments, d, columns, rank, hidden, intercept=self.intercept)
        if isinstance(fitted, UnitMap):
            fitted = replace(fitted, units=units)  # numbers in the block, not columns
            if alone and isinstance(fitted.affine, Factored):
                nothing = fitted.write.new_zeros(0, block.d_in)
                fitted = replace(fitted, affine=replace(fitted.affine, into=nothing))
        self.maps[block] = fitted = fitted.to(self.fitter.like)
        if self.advance is not None:
            self.advance(len(flat))
        return fitted(x)


def _weights(rows: Rows) -> Tensor:
    """(n,) 1/|h|, scaled to mean 1; all 1 where the stream is not known."""
    if rows.inverse_stream is None:
        return torch.ones(len(rows.x), dtype=torch.float64)
    return rows.inverse_stream / rows.inverse_stream.mean()


def _moments(
    block: Block,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    hidden: nn.Module | None,
    alone: bool = False,
) -> Moments:
    """Moments of [x, hidden units], or of hidden units alone, and y; in float32 where that is harmless."""

    def summed(precision: str) -> Moments:
        moments = None
        for xs, ys, w in zip(x.split(CHUNK), y.split(CHUNK), weight.split(CHUNK), strict=True):
            parts = ([] if alone else [xs]) + ([] if hidden is None else [hidden(xs)])
            joint = torch.cat(parts, 1)
            if moments is None:
                moments = Moments(joint.shape[1], block.d_out)
                moments.precision = precision if joint.shape[1] >= NARROW else "float64"
            moments.update(joint, ys, w)
        assert moments is not None
        return moments

    moments = summed("mixed")
    return moments if moments.precision == "float64" or is_resolved(moments) else summed("float64")
