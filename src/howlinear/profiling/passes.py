"""The pass: windows of a text through the model under taps, rows into stores.

    for stores in collected(model, windows, at, make, split, course=Course()):
        ...                     # stores of some blocks that have seen every row

A **course** says how the work is carried out: which part of the text is read here, by how many
processes, how many blocks at a time, layer by layer or not, and where a pass that is killed goes on
from. None of it changes what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import CELL, Split
from howlinear.linear.rows import Rows
from howlinear.linear.stores import BlockStore, name_of
from howlinear.models.experts import Expert, Mixture, mixtures, tap_experts
from howlinear.models.families import Block, backbone, call_options
from howlinear.models.hooks import tap
from howlinear.models.offload import device_of
from howlinear.run.ranks import ALONE, Ranks
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_store

Batch = Tensor | dict[str, Tensor]
Windows = Tensor | Iterable[Batch]
Advance = Callable[[int], None]  # called with tokens done

PRIMER = (8, 16)  # windows and tokens of each that sink units are chosen by


@dataclass(frozen=True)
class Course:
    """How a pass is carried out."""

    shard: tuple[int, int] = (0, 1)  # this part of so many, batches dealt out in turn
    ranks: Ranks = ALONE
    layerwise: bool = False  # see `layerwise`
    together: int | None = None  # blocks that are measured in one pass over the text; None: all
    saves: Saves | None = None

    def __post_init__(self) -> None:
        part, parts = self.shard
        if not 0 <= part < parts:
            raise ValueError(f"there is no part {part} of {parts} (--shard I/N, from 0)")
        if self.together is not None and self.together < 1:
            raise ValueError(f"blocks are measured at least one at a time, not {self.together}")

    def here(self, number: int) -> bool:
        """Is this batch of the text in this shard?"""
        return number % self.shard[1] == self.shard[0]

    def mine(self, number: int) -> bool:
        """And is it this rank that reads it?"""
        return self.here(number) and self.ranks.mine(number // self.shard[1])


@dataclass(frozen=True, eq=False)
class Piece:
    """One batch of the text, and where in the text it is."""

    number: int
    inputs: dict[str, Tensor]
    offsets: list[int]  # of each window, in tokens
    tokens: int


def pieces(windows: Windows, batch_size: int) -> Iterator[Piece]:
    """A text batch by batch. Pictures and sounds have no tokens to count: each is a cell."""
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size} (--batch-size)")
    tokens = 0
    given = windows.split(batch_size) if isinstance(windows, Tensor) else windows
    for number, batch in enumerate(given):
        inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
        main = inputs.get("input_ids", next(iter(inputs.values())))
        length = main.shape[1] if "input_ids" in inputs else CELL
        offsets = [tokens + i * length for i in range(len(main))]
        yield Piece(number, inputs, offsets, len(main) * length)
        tokens += len(main) * length


def primer(windows: Windows, first: Piece) -> dict[str, Tensor]:
    """The beginning of a text: the same few tokens for whoever reads whichever part of it."""
    inputs = {"input_ids": windows} if isinstance(windows, Tensor) else first.inputs
    plain = all(v.dim() == 2 and not v.is_floating_point() for v in inputs.values())
    if not plain or any("mask" in name for name in inputs):
        return inputs
    return {name: value[: PRIMER[0], : PRIMER[1]] for name, value in inputs.items()}


class Whole:
    """Runs the whole model on each batch, without its head."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.net = model, backbone(model)
        self.device = device_of(model)
        self.extra = call_options(self.net)

    def run(self, inputs: dict[str, Tensor]) -> None:
        on_device = {name: value.to(self.device) for name, value in inputs.items()}
        self.net(**on_device, **self.extra)


class _Enough(Exception):  # noqa: N818
    """Every block wanted has been heard in this forward."""


Make = Callable[[Sequence[Block], Callable[[], Any]], list[BlockStore]]


def collected(
    model: nn.Module,
    windows: Windows,
    at: Sequence[Block],
    make: Make,
    split: Split,
    *,
    batch_size: int,
    course: Course,
    all_tokens: bool = False,
    progress: Advance | None = None,
) -> Iterator[list[BlockStore]]:
    """Stores of some blocks at a time that have seen every row of this shard.

    `make` makes stores without rows for some blocks; it is given a function that runs the model on
    the beginning of the text. Of several ranks, each gets stores of some of the blocks.
    """
    size = course.together or len(at)
    groups = [list(at[i : i + size]) for i in range(0, len(at), size)]
    if len(groups) > 1 and not isinstance(windows, Tensor | Sequence):
        raise ValueError("a stream is read once: to measure in groups give windows as a list")
    done = course.ranks.share(course.saves.done if course.saves else set())
    runner = Whole(model)
    for group in groups:
        if all(name_of(b) in done for b in group):
            assert course.saves is not None
            first = course.ranks.rank == 0
            if progress is not None:
                progress(
                    sum(p.tokens for p in pieces(windows, batch_size) if course.mine(p.number))
                )
            yield [read_store(course.saves.folder, b) for b in group] if first else []
            continue
        source = pieces(windows, batch_size)
        start = next(source, None)
        if start is None:
            raise ValueError("the text is empty: there is no window to read")
        beginning = primer(windows, start)
        stores = make(group, partial(runner.run, beginning))
        mine = (p for p in chain([start], source) if course.mine(p.number))
        _read(runner, mine, stores, split, course.saves, all_tokens, progress)
        yield course.ranks.collect_all(stores)


def _read(
    runner: Whole,
    mine: Iterable[Piece],
    stores: list[BlockStore],
    split: Split,
    saves: Saves | None,
    all_tokens: bool,
    progress: Advance | None,
) -> None:
    """Run every batch through the model and its rows into the stores."""
    begun = saves.resume(stores) if saves else 0
    with torch.no_grad(), Hearing(runner.model, stores, split, all_tokens) as hearing:
        # not inference mode: what a model in training caches, it must train with
        for done, piece in enumerate(mine, 1):
            if done > begun:
                with hearing.of(piece, stop=True):
                    runner.run(piece.inputs)
                if saves:
                    saves.tick(stores, done)
            if progress is not None:
                progress(piece.tokens)


class Hearing:
    """Inside a `with`, rows of the blocks and experts that run go into their stores."""

    def __init__(
        self, model: nn.Module, stores: Sequence[BlockStore], split: Split, all_tokens: bool
    ) -> None:
        self.model, self.split, self.all_tokens = model, split, all_tokens
        places: list[Any] = [store.block for store in stores]
        self.whole = [b for b in places if not b.expert]
        self.stores = dict(zip(map(name_of, places), stores, strict=True))
        wanted = {b.index for b in places if b.expert}
        self.mixtures = [m for m in mixtures(model) if m.block.index in wanted] if wanted else []
        self.stack, self.heard, self.stop = ExitStack(), 0, False

    def __enter__(self) -> Hearing:
        if self.mixtures:  # first: they are heard before the layer that they are part of ends
            tapped = tap_experts(
                self.model, self._expert, at=self.mixtures, all_tokens=self.all_tokens
            )
            self.stack.enter_context(tapped)
        if self.whole:
            units: dict[int, Tensor | None] = {
                b.index: torch.tensor(known)
                for b in self.whole
                if (known := self.stores[name_of(b)].known.units)
            }
            self.stack.enter_context(tap(self.model, self._block, at=self.whole, units=units))
        return self

    def __exit__(self, *why: Any) -> bool | None:
        return self.stack.__exit__(*why)

    @contextmanager
    def of(self, piece: Piece, stop: bool) -> Iterator[None]:
        """What runs inside runs this batch; it may be stopped when every block is heard."""
        self.piece, self.heard, self.stop = piece, 0, stop
        with suppress(_Enough):
            yield

    def _block(self, block: Block, rows: Rows) -> None:
        self._update(block, rows)
        self.heard += 1
        if self.stop and self.heard == len(self.whole) and self._last(block):
            raise _Enough  # what the model would do from here on, nobody needs

    def _last(self, block: Block) -> bool:
        return all(m.block.index <= block.index for m in self.mixtures)

    def _expert(self, mixture: Mixture, key: Expert, rows: Rows, weights: Tensor | None) -> None:
        expert = mixture.expert(key)
        if name_of(expert) in self.stores:
            self._update(expert, rows)

    def _update(self, block: Block, rows: Rows) -> None:
        try:
            self.stores[name_of(block)].update(rows, self.piece.offsets, self.split)
        except ValueError as err:
            name = f"block {block.index} ({block.path}), batch {self.piece.number}"
            raise ValueError(f"{name}: {err}") from None
