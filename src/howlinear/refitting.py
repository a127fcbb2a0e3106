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

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.affine import Affine, Factored, UnitMap
from howlinear.families import Block, Rows, as_module, backbone, call_options, swapped, tap
from howlinear.joint import elimination, joint_map
from howlinear.moments import Moments
from howlinear.perplexity import evaluating
from howlinear.streams import inlets
from howlinear.units import hidden_units, taken

TARGETS = ("output", "stream")
CHUNK = 4096  # rows at a time

Map = Affine | Factored | UnitMap
Shape = tuple[int | None, int]  # rank of the matrix (None: full, 0: none), hidden units kept


class Workshop:
    """A model, the text that its maps are fitted on, and what was learnt of its blocks so far."""

    def __init__(self, model: nn.Module, at: Sequence[Block], windows: Tensor) -> None:
        self.model, self.at, self.windows = model, list(at), windows
        self.like = next(model.parameters()).detach()
        self.weights: dict[Block, Tensor] = {}  # (n,)
        self.orders: dict[tuple[Block, bool], list[int]] = {}  # of units, beside a matrix or not

    def survey(
        self,
        shapes: Mapping[Block, Sequence[Shape]],
        progress: Callable[[int], None] | None = None,
    ) -> dict[Block, list[Map]]:
        """Maps of each block of the original model; the order of units is kept for `refit`."""
        found: dict[Block, list[Map]] = {}

        def receive(block: Block, rows: Rows) -> None:
            weight = self.weights[block] = _weights(rows)
            if not shapes[block]:
                return
            every = hidden_units(self.model, block) if any(k for _, k in shapes[block]) else None
            own = _moments(block, rows.x, rows.y, weight, every)
            for matrix in {rank != 0 for rank, k in shapes[block] if k}:
                self.orders[block, matrix] = elimination(own, block.d_in, matrix=matrix)
            found[block] = [
                joint_map(own, block.d_in, *self._asked(block, shape)).to(self.like)
                for shape in shapes[block]
            ]
            if progress is not None:
                progress(len(rows.x))

        with tap(self.model, receive, at=list(shapes)):
            self._run(self.windows)
        return found

    def refit(
        self,
        shapes: Mapping[Block, Shape],
        target: str = "output",
        progress: Callable[[int], None] | None = None,
    ) -> dict[Block, Map]:
        """The maps of all these blocks together, each behind those before it."""
        missing = {b: [s] for b, s in shapes.items() if not self._known(b, s)}
        if missing:
            self.survey(missing)
        maps: dict[Block, Map] = {}
        both = target == "stream"
        ways = inlets(self.model, list(shapes), _inputs(self.model, self.windows[:1, :8]))
        with ExitStack() as stack:
            streams = stack.enter_context(_listening(self.model, ways)) if both else {}
            stand_ins = {
                block: partial(
                    self._fit,
                    block,
                    as_module(self.model, block),
                    shape,
                    maps,
                    streams,
                    both,
                    progress,
                )
                for block, shape in shapes.items()
            }
            stack.enter_context(swapped(self.model, stand_ins))
            self._run(self.windows.repeat(2, 1) if both else self.windows)
        return maps

    def _fit(
        self,
        block: Block,
        module: nn.Module,
        shape: Shape,
        maps: dict[Block, Map],
        streams: dict[Block, Tensor],
        both: bool,
        progress: Callable[[int], None] | None,
        x: Tensor,
    ) -> Tensor:
        """In place of the block: fit its map to all rows, then be that map."""
        if not both:
            y = wanted = module(x)
        else:  # the first half of the batch is the original model's
            original, x = x.chunk(2)
            y = module(original)
            wanted = module(x) if block not in streams else y + _drift(streams.pop(block))
        units, rank, hidden = self._asked(block, shape)
        flat = x.reshape(-1, block.d_in)
        own = _moments(block, flat, wanted.reshape(-1, block.d_out), self.weights[block], hidden)
        every = range(len(units))
        fitted = joint_map(own, block.d_in, every, rank, hidden).to(self.like)
        if isinstance(fitted, UnitMap):
            fitted = UnitMap(fitted.affine, units, fitted.write, fitted.hidden)
        maps[block] = fitted
        if progress is not None:
            progress(len(flat))
        return torch.cat([y, fitted(x)]) if both else fitted(x)

    def _known(self, block: Block, shape: Shape) -> bool:
        rank, k = shape
        return block in self.weights and (not k or (block, rank != 0) in self.orders)

    def _asked(
        self, block: Block, shape: Shape
    ) -> tuple[tuple[int, ...], int | None, nn.Module | None]:
        """Which units, the rank, and the units as a module."""
        rank, k = shape
        units = tuple(self.orders[block, rank != 0][:k]) if k else ()
        return units, rank, taken(self.model, block, units) if units else None

    def _run(self, windows: Tensor) -> None:
        net = backbone(self.model)
        with torch.no_grad(), evaluating(self.model):
            net(**_inputs(self.model, windows), **call_options(net))


def _inputs(model: nn.Module, windows: Tensor) -> dict[str, Tensor]:
    ids = windows.to(next(model.parameters()).device)
    config: Any = model.config
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _weights(rows: Rows) -> Tensor:
    """(n,) of mean 1; all alike where the stream is not known."""
    if rows.stream is None:
        return torch.ones(len(rows.x), dtype=torch.float64)
    weight = rows.stream.double().rsqrt()
    return weight / weight.mean()


def _moments(
    block: Block, x: Tensor, y: Tensor, weight: Tensor, hidden: nn.Module | None
) -> Moments:
    """Of [x, hidden units] and y."""
    rows = None
    for xs, ys, w in zip(x.split(CHUNK), y.split(CHUNK), weight.split(CHUNK), strict=True):
        joint = xs if hidden is None else torch.cat([xs, hidden(xs)], 1)
        rows = rows or Moments(joint.shape[1], block.d_out)
        rows.update(joint, ys, w)
    assert rows is not None
    return rows


def _drift(before: Tensor) -> Tensor:
    """How far the changed model's stream, the second half of the batch, is from the original's."""
    original, changed = before.chunk(2)
    return original - changed


@contextmanager
def _listening(model: nn.Module, ways: Mapping[Block, str | None]) -> Any:
    """The stream before each block, where it can be read and is what the block's output adds to."""
    streams: dict[Block, Tensor] = {}

    def keep(block: Block, _: nn.Module, args: tuple[Any, ...]) -> None:
        streams[block] = args[0]

    handles = [
        model.get_submodule(path or block.entry).register_forward_pre_hook(partial(keep, block))
        for block, path in ways.items()
        if path is not None and not block.out_norm
    ]
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()
