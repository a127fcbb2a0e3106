"""The pass: a text through the model under taps, rows into stores.

    for stores in whole_model(Pass(model, text, at, split, Course(), make)):
        ...                     # stores of some blocks that have seen every row

A **course** says how a profile is carried out: which part of the text is read here, by how many
processes, how many blocks at a time, layer by layer or not, with which solver, and where a pass that
is interrupted resumes. None of it changes what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import Split
from howlinear.linear.rows import Rows
from howlinear.linear.stores import SOLVERS, BlockStore, name_of
from howlinear.models.experts import Expert, Mixture, mixtures, tap_experts
from howlinear.models.families import Block
from howlinear.models.forward import Batch, Forward, StopForward, Windows
from howlinear.models.hooks import tap
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_store
from howlinear.run.work import Advance, Work

PRIMER = (8, 16)  # windows, and tokens of each, that sink units are chosen by


@dataclass(frozen=True)
class Course(Work):
    """How a profile is carried out."""

    shard: tuple[int, int] = (0, 1)  # this part of so many; batches are dealt out in turn
    layerwise: bool = False  # see `layerwise`
    together: int | None = None  # blocks that are measured in one pass over the text; None: all
    saves: Saves | None = None
    solver: str = "moments"
    precision: str = "float64"  # of products; "mixed" makes them in float32
    seed: int = 0  # of the row sample and of the swap signal

    def __post_init__(self) -> None:
        super().__post_init__()
        part, parts = self.shard
        if not 0 <= part < parts:
            raise ValueError(f"there is no part {part} of {parts} (--shard I/N, from 0)")
        if self.together is not None and self.together < 1:
            raise ValueError(f"blocks are measured at least one at a time, not {self.together}")
        if self.solver not in SOLVERS:
            expected = ", ".join(SOLVERS)
            raise ValueError(
                f"unknown solver {self.solver!r}, expected one of {expected} (--solver)"
            )

    def in_shard(self, number: int) -> bool:
        """Is this batch of the text in this shard?"""
        return number % self.shard[1] == self.shard[0]

    def mine(self, number: int) -> bool:
        """Is this batch in this shard, and does this rank read it?"""
        return self.in_shard(number) and self.ranks.mine(number // self.shard[1])


# Makes stores without rows for some blocks; is given a function that runs the model on the
# beginning of the text.
Make = Callable[[Sequence[Block], Callable[[], Any]], list[BlockStore]]


@dataclass(frozen=True, eq=False)
class Pass:
    """What is read, which blocks and experts are measured, and how."""

    model: nn.Module
    text: Windows
    at: list[Block]
    split: Split
    course: Course
    make: Make
    all_tokens: bool = False  # experts see all tokens, not those routed to them

    def batches(self) -> Iterator[Batch]:
        """The batches that this rank reads."""
        every = self.text.batches(self.course.batch_size)
        return (batch for batch in every if self.course.mine(batch.number))

    def beginning(self, first: Batch) -> dict[str, Tensor]:
        """The first few tokens of the text as model inputs: the same for every rank and shard."""
        inputs = {"input_ids": self.text.ids} if self.text.ids is not None else first.inputs
        plain = all(v.dim() == 2 and not v.is_floating_point() for v in inputs.values())
        if not plain or any("mask" in name for name in inputs):
            return inputs
        return {name: value[: PRIMER[0], : PRIMER[1]] for name, value in inputs.items()}

    def begin(self, passes: int) -> Advance:
        """Announce the tokens that this rank will run; when they are done, that maps are solved for."""
        left = passes * -(-self.text.tokens // (self.course.shard[1] * self.course.ranks.count))
        advance = self.course.begin("profiling", left)

        def done(tokens: int) -> None:
            nonlocal left
            advance(tokens)
            left -= tokens
            if left <= 0 < left + tokens:
                self.course.begin("solving")

        return done

    def finished(self, group: Sequence[Block]) -> list[BlockStore]:
        """Stores of blocks that were finished before an interruption, at rank 0."""
        saves = self.course.saves
        if saves is None or self.course.ranks.rank:
            return []
        return [read_store(saves.folder, block) for block in group]

    def read(
        self,
        batches: Iterable[Batch],
        stores: Sequence[BlockStore],
        run: Callable[[Batch], object],
        advance: Advance,
        *,
        begun: int,
        stop: bool,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Run every batch but the first `begun`, its rows into the stores; save when due.

        With `stop` a forward ends as soon as every block has run.
        """
        saves = self.course.saves if stores else None
        with Recorder(self, stores, stop) as recorder:
            for done, batch in enumerate(batches, 1):
                if done > begun:
                    recorder.start(batch)
                    run(batch)
                    if saves and saves.due:
                        before_save()
                        saves.tick(stores, done)
                advance(batch.tokens)


def whole_model(reading: Pass) -> Iterator[list[BlockStore]]:
    """Stores of some blocks at a time that have seen every row of this shard.

    Of several ranks, each gets the stores of some of the blocks.
    """
    course, at = reading.course, reading.at
    size = course.together or len(at)
    groups = [at[i : i + size] for i in range(0, len(at), size)]
    if len(groups) > 1 and not reading.text.repeatable:
        raise ValueError("a stream is read once: to measure in groups give windows as a list")
    done = course.ranks.share(course.saves.done if course.saves else set())
    forward, advance = Forward(reading.model), reading.begin(len(groups))
    for group in groups:
        if all(name_of(block) in done for block in group):
            advance(sum(batch.tokens for batch in reading.batches()))
            yield reading.finished(group)
            continue
        source = reading.text.batches(course.batch_size)
        first = next(source, None)
        if first is None:
            raise ValueError("the text is empty: there is no window to read")
        stores = reading.make(group, partial(forward, reading.beginning(first)))
        mine = (batch for batch in chain([first], source) if course.mine(batch.number))
        begun = course.saves.resume(stores) if course.saves else 0
        reading.read(
            mine, stores, lambda batch: forward(batch.inputs), advance, begun=begun, stop=True
        )
        yield course.ranks.collect_all(stores)


class Recorder:
    """Inside a `with`, rows of the blocks and experts that run go into their stores.

    With `stop`, a forward ends when every block has run (`models.forward.StopForward`).
    """

    def __init__(self, reading: Pass, stores: Sequence[BlockStore], stop: bool) -> None:
        self.model, self.split, self.all_tokens = reading.model, reading.split, reading.all_tokens
        places: list[Any] = [store.block for store in stores]
        self.whole = [b for b in places if not b.expert]
        self.stores = dict(zip(map(name_of, places), stores, strict=True))
        layers = {b.index for b in places if b.expert}
        known = mixtures(self.model) if layers else []
        self.mixtures = [m for m in known if m.block.index in layers]
        self.deepest = max((m.block.index for m in self.mixtures), default=-1)
        self.stack, self.count, self.stop = ExitStack(), 0, stop

    def __enter__(self) -> Recorder:
        if self.mixtures:  # first: experts run before the layer that they are part of ends
            tapped = tap_experts(
                self.model, self._expert, at=self.mixtures, all_tokens=self.all_tokens
            )
            self.stack.enter_context(tapped)
        if self.whole:
            units: dict[int, Tensor | None] = {
                b.index: torch.tensor(sinks)
                for b in self.whole
                if (sinks := self.stores[name_of(b)].known.units)
            }
            self.stack.enter_context(tap(self.model, self._block, at=self.whole, units=units))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)

    def start(self, batch: Batch) -> None:
        """The next forward runs this batch."""
        self.batch, self.count = batch, 0

    def _block(self, block: Block, rows: Rows) -> None:
        self._update(block, rows)
        self.count += 1
        if self.stop and self.count == len(self.whole) and block.index >= self.deepest:
            raise StopForward

    def _expert(self, mixture: Mixture, key: Expert, rows: Rows, weights: Tensor | None) -> None:
        expert = mixture.expert(key)
        if name_of(expert) in self.stores:
            self._update(expert, rows)

    def _update(self, block: Block, rows: Rows) -> None:
        try:
            self.stores[name_of(block)].update(rows, self.batch.offsets, self.split)
        except ValueError as err:
            name = f"block {block.index} ({block.path}), batch {self.batch.number}"
            raise ValueError(f"{name}: {err}") from None
