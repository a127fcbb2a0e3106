"""Maps for many blocks at once, each fitted on what the changed model really computes.

    shop = Workshop(model, at, windows)
    offers = shop.survey({block: [(None, 4), (0, 768)]})      # maps of single blocks, of the original
    maps = shop.refit({block: (None, 4), other: (0, 768)})    # front to back, in one forward

All windows run as one batch, so that a stand-in sees every row of its block at once: it fits its map
and answers with it, and the blocks behind it see what the replaced block gave. So one forward of the
model refits them all.

Rows weigh 1/|h|, h being the residual stream after the block in the original model: what follows
reads the stream after a norm. Two things can be asked of a map behind replaced blocks: to give what
the block itself gives on the new input ("output"), or to bring the residual stream back to where
the original model had it ("stream"), which makes good what blocks before it got wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.solving import solve
from howlinear.linear.unit_selection import Elimination, elimination, joint_map, unexplained_by_rank
from howlinear.models.families import Block, backbone, call_options
from howlinear.models.hooks import as_module, evaluating, swapped, tap
from howlinear.models.streams import inlets
from howlinear.models.units import hidden_count, hidden_units, taken

TARGETS = ("output", "stream")
CHUNK = 4096  # rows at a time

Shape = tuple[int | None, int]  # rank of the matrix (None: full, 0: none), hidden units kept


def memory(at: Sequence[Block], hidden: Mapping[Block, int], rows: int) -> int:
    """About how many bytes it takes to run all rows at once, twice for the stream, and to fit."""
    widest = max(at, key=lambda b: b.d_in + hidden[b])
    d, m = max(widest.d_in, widest.d_out), hidden[widest]
    return 2 * rows * (6 * d + 3 * m) * 4 + 4 * (d + m) * (2 * d + m) * 8


class Workshop:
    """A model, the text that its maps are fitted on, and what was learnt of its blocks so far."""

    def __init__(
        self, model: nn.Module, at: Sequence[Block], windows: Tensor, *, intercept: bool = True
    ) -> None:
        self.model, self.at, self.windows, self.intercept = model, list(at), windows, intercept
        self.like = next(model.parameters()).detach()
        self.weights: dict[Block, Tensor] = {}  # (n,)
        self.ladders: dict[
            Block, tuple[Elimination, Elimination]
        ] = {}  # units alone, and beside a matrix
        self.rests: dict[Block, dict[Shape, float]] = {}  # share left unexplained, on fit rows
        self.direct: set[Block] = set()  # blocks whose input is the stream itself

    def survey(
        self,
        shapes: Mapping[Block, Sequence[Shape]],
        ranks: Mapping[Block, Mapping[int, Sequence[int]]] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> dict[Block, list[Map]]:
        """Maps of each block of the original model, and what maps of other shapes would leave.

        Of hidden units, alone and beside a matrix, that is known for all numbers of them; beside a
        matrix of reduced rank for those in `ranks`: by number of units, the ranks.
        """
        found: dict[Block, list[Map]] = {}

        def receive(block: Block, rows: Rows) -> None:
            d, own = block.d_in, self._learn(block, rows)
            rests = self.rests[block]
            for k, wanted in ((ranks or {}).get(block) or {}).items():
                beyond = unexplained_by_rank(own, d, self.asked(block, (None, k))[0])
                rests |= {(r, k): rests[None, k] + float(beyond[r]) for r in wanted}
            found[block] = [
                joint_map(own, d, *self.asked(block, shape), intercept=self.intercept).to(self.like)
                for shape in shapes[block]
            ]
            if progress is not None:
                progress(len(rows.x))

        with tap(self.model, receive, at=list(shapes)):
            self._run(self.windows)
        return found

    def _learn(self, block: Block, rows: Rows) -> Moments:
        """Weights of the rows and the order of hidden units, where they come out alone."""
        self.weights[block] = _weights(rows)
        every = hidden_units(self.model, block) if hidden_count(self.model, block) else None
        own = _moments(block, rows.x, rows.y, self.weights[block], every)
        if every is None:
            self.rests[block] = {(None, 0): float(1 - _explained(own))}
            return own
        ladders = (
            elimination(own, block.d_in, matrix=False),
            elimination(own, block.d_in, matrix=True),
        )
        self.ladders[block] = ladders
        self.rests[block] = {
            (rank, k): rest
            for rank, ladder in zip((0, None), ladders, strict=True)
            for k, rest in ladder.unexplained.items()
        }
        return own

    def refit(
        self,
        shapes: Mapping[Block, Shape],
        target: str = "output",
        progress: Callable[[int], None] | None = None,
    ) -> dict[Block, Map]:
        """The maps of all these blocks together, each behind those before it."""
        if missing := {b: () for b in shapes if b not in self.weights}:
            self.survey(missing)
        maps: dict[Block, Map] = {}
        both = target == "stream"
        with ExitStack() as stack:
            streams = stack.enter_context(self._listening(list(shapes))) if both else {}
            stand_ins = {
                block: _StandIn(self, block, shape, maps, streams if both else None, progress)
                for block, shape in shapes.items()
            }
            stack.enter_context(swapped(self.model, stand_ins))
            self._run(self.windows.repeat(2, 1) if both else self.windows)
        return maps

    def asked(
        self, block: Block, shape: Shape
    ) -> tuple[tuple[int, ...], int | None, nn.Module | None]:
        """Which units, the rank, and the units as a module."""
        rank, k = shape
        units = tuple(self.ladders[block][rank != 0].order[:k]) if k else ()
        return units, rank, taken(self.model, block, units) if units else None

    @contextmanager
    def _listening(self, at: list[Block]) -> Iterator[dict[Block, Tensor]]:
        """The stream before each block, where it can be read and the block's output adds to it."""
        streams: dict[Block, Tensor] = {}

        def keep(block: Block, _: nn.Module, args: tuple[Any, ...]) -> None:
            streams[block] = args[0]

        ways = inlets(self.model, at, _inputs(self.model, self.windows[:1, :8]))
        handles = [
            self.model.get_submodule(path).register_forward_pre_hook(partial(keep, block))
            for block, path in ways.items()
            if path and not block.out_norm
        ]
        self.direct = {b for b, path in ways.items() if path == "" and not b.out_norm}
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, windows: Tensor) -> None:
        net = backbone(self.model)
        with torch.no_grad(), evaluating(self.model):
            net(**_inputs(self.model, windows), **call_options(net))


class _StandIn:
    """In place of a block while all rows pass: fits the block's map to them, and is that map."""

    def __init__(
        self,
        shop: Workshop,
        block: Block,
        shape: Shape,
        maps: dict[Block, Map],
        streams: dict[Block, Tensor] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.shop, self.block, self.maps, self.streams = shop, block, maps, streams
        self.module = as_module(shop.model, block)
        self.units, self.rank, self.hidden = shop.asked(block, shape)
        self.progress = progress

    def __call__(self, x: Tensor) -> Tensor:
        if self.streams is None:
            return self.fit(x, self.module(x))
        # The first half of the batch is the original model's.
        if self.block in self.shop.direct:
            self.streams[self.block] = x
        original, x = x.chunk(2)
        y = self.module(original)
        before = self.streams.pop(self.block, None)
        wanted = self.module(x) if before is None else y + _drift(before)
        return torch.cat([y, self.fit(x, wanted)])

    def fit(self, x: Tensor, wanted: Tensor) -> Tensor:
        block, shop = self.block, self.shop
        flat = x.reshape(-1, block.d_in)
        weight = shop.weights[block]
        y, alone = wanted.reshape(-1, block.d_out), self.rank == 0 and self.hidden is not None
        rows = _moments(block, flat, y, weight, self.hidden, alone)
        d, every = 0 if alone else block.d_in, range(len(self.units))
        fitted = joint_map(rows, d, every, self.rank, self.hidden, intercept=shop.intercept)
        if isinstance(fitted, UnitMap):  # by their numbers in the block
            fitted = replace(fitted, units=self.units)
            if alone and isinstance(fitted.affine, Factored):
                nothing = fitted.write.new_zeros(0, block.d_in)
                fitted = replace(fitted, affine=replace(fitted.affine, into=nothing))
        fitted = fitted.to(shop.like)
        self.maps[block] = fitted
        if self.progress is not None:
            self.progress(len(flat))
        return fitted(x)


def _inputs(model: nn.Module, windows: Tensor) -> dict[str, Tensor]:
    ids = windows.to(next(model.parameters()).device)
    config: Any = model.config
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _weights(rows: Rows) -> Tensor:
    """(n,) of mean 1; all alike where the stream is not known."""
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
    """Of [x, hidden units], or hidden units alone, and y."""
    rows = None
    for xs, ys, w in zip(x.split(CHUNK), y.split(CHUNK), weight.split(CHUNK), strict=True):
        parts = ([] if alone else [xs]) + ([] if hidden is None else [hidden(xs)])
        joint = torch.cat(parts, 1)
        rows = rows or Moments(joint.shape[1], block.d_out)
        rows.update(joint, ys, w)
    assert rows is not None
    return rows


def _explained(rows: Moments) -> float:
    return float(solve(rows)[1].square().sum() / rows.S_yy.sum())


def _drift(before: Tensor) -> Tensor:
    """How far the changed model's stream, the second half of the batch, is from the original's."""
    original, changed = before.chunk(2)
    return original - changed
