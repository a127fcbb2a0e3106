"""The pass: a text through the model under taps, rows into stores.

    for stores in whole_model(Pass(model, text, at, split, Course())):
        ...                     # stores of some blocks that have seen every row

A **course** says how a profile is carried out: which part of the text is read here, by how many
processes, how many blocks at a time, layer by layer or not, with which solver, and where a pass that
is interrupted resumes. None of it changes what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import Split
from howlinear.linear.rows import Rows
from howlinear.linear.stores import SOLVERS, BlockStore, Known, OutNorm, name_of
from howlinear.models.experts import SHARED, Expert, Mixture, mixtures, tap_experts
from howlinear.models.families import Block
from howlinear.models.forward import Batch, Forward, StopForward, Windows
from howlinear.models.hooks import tap
from howlinear.models.offload import device_of, resident
from howlinear.models.units import sink_units
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_store
from howlinear.run.work import Advance, Work

PRECISIONS = ("auto", "float64", "mixed")
PRIMER = (8, 16)  # windows, and tokens of each, that sink units are chosen by


@dataclass(frozen=True)
class Course(Work):
    """How a profile is carried out."""

    shard: tuple[int, int] = (0, 1)  # this part of so many; batches are dealt out in turn
    layerwise: bool = False  # see `layerwise`
    together: int | None = None  # blocks that are measured in one pass over the text; None: all
    saves: Saves | None = None
    solver: str = "moments"
    precision: str = "auto"  # of products: float64, "mixed" (float32), or each block by itself
    seed: int = 0  # of the samples of rows and of gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        part, parts = self.shard
        if not 0 <= part < parts:
            raise ValueError(f"there is no part {part} of {parts} (`shard`, from 0)")
        if self.together is not None and self.together < 1:
            raise ValueError(f"blocks are measured at least one at a time, not {self.together}")
        if self.precision not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ValueError(
                f"unknown precision {self.precision!r}, expected one of {expected} (`precision`)"
            )
        if self.solver not in SOLVERS:
            expected = ", ".join(SOLVERS)
            raise ValueError(
                f"unknown solver {self.solver!r}, expected one of {expected} (`solver`)"
            )

    def in_shard(self, number: int) -> bool:
        """Is this batch of the text in this shard?"""
        return number % self.shard[1] == self.shard[0]

    def mine(self, number: int) -> bool:
        """Is this batch in this shard, and does this rank read it?"""
        return self.in_shard(number) and self.ranks.mine(number // self.shard[1])


@dataclass(frozen=True, eq=False)
class Pass:
    """What is read, which blocks and experts are measured, and how."""

    model: nn.Module
    text: Windows
    at: list[Block]
    split: Split
    course: Course
    all_tokens: bool = False  # experts see all tokens, not those routed to them
    sampling: Callable[[Sequence[BlockStore]], None] | None = None  # see `gradients`

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

    def make(self, group: Sequence[Block], run: Callable[[], object]) -> list[BlockStore]:
        """Stores without rows; `run` runs the model on the beginning of the text."""
        whole = [block for block in group if not block.expert]
        # machines of different kinds may break ties differently: rank 0 decides
        sinks = self.course.ranks.share(sink_units(self.model, whole, run))
        return [self._store(block, sinks.get(block.index)) for block in group]

    def _store(self, block: Block, sinks: tuple[list[int], list[float]] | None) -> BlockStore:
        course = self.course
        known = Known(has_stream=False) if block.expert else self._known(block, sinks)
        path = block.entry if block.expert in ("", SHARED) else block.entry.rpartition(".")[0]
        device = device_of(self.model.get_submodule(path))
        if device.type == "mps":  # it has no float64
            device = torch.device("cpu")
        like = (block, self.split.groups, course.solver, course.seed, device, known)
        return BlockStore(*like, course.precision)

    def _known(self, block: Block, sinks: tuple[list[int], list[float]] | None) -> Known:
        units, shares = sinks or (None, None)
        norm = None
        if block.out_norm:
            module = self.model.get_submodule(block.out_norm)
            with resident([module]):
                norm = OutNorm.of(module, block.d_out)
        has_stream = norm is not None or block.out_norm is None
        return Known(units, shares, norm, has_stream)

    def read(
        self,
        batches: Iterable[Batch],
        stores: Sequence[BlockStore],
        run: Callable[[Batch], object],
        advance: Advance,
    ) -> None:
        """Run every batch that is not in the stores yet, its rows into them; save when due."""
        saves = self.course.saves if stores else None
        begun = saves.resume(stores) if saves else 0
        with _recording(self, stores) as start:
            for done, batch in enumerate(batches, 1):
                if done > begun:
                    start(batch)
                    run(batch)
                    if saves:
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
        if reading.sampling is not None:
            reading.sampling(stores)
        mine = (batch for batch in chain([first], source) if course.mine(batch.number))
        reading.read(mine, stores, lambda batch: forward(batch.inputs), advance)
        yield course.ranks.collect_all(stores)


@contextmanager
def _recording(reading: Pass, stores: Sequence[BlockStore]) -> Iterator[Callable[[Batch], None]]:
    """Inside, rows of blocks and experts that run go into their stores.

    Call the result with each batch before it runs. Except layer by layer, a forward ends as soon as
    every block has run.
    """
    model, by_name = reading.model, {name_of(store.block): store for store in stores}
    places: list[Any] = [store.block for store in stores]
    whole = [b for b in places if not b.expert]
    layers = {b.index for b in places if b.expert}
    mixed = [m for m in mixtures(model) if m.block.index in layers] if layers else []
    last = max((b.index for b in whole), default=-1)
    stop = not reading.course.layerwise and last >= max(layers, default=-1)
    missing = set[Block]()
    current: Batch

    def start(batch: Batch) -> None:
        nonlocal current
        current = batch
        missing.update(whole)

    def take(block: Block, rows: Rows) -> None:
        if store := by_name.get(name_of(block)):  # else an expert of another group
            _update(store, rows, current, reading)
        missing.discard(block)
        if stop and not missing:
            raise StopForward

    def take_expert(mixture: Mixture, key: Expert, rows: Rows, _: Tensor | None) -> None:
        take(mixture.expert(key), rows)

    sinks = {b.index: by_name[name_of(b)].known.units for b in whole}
    units = {i: torch.tensor(numbers) for i, numbers in sinks.items() if numbers}
    with (  # experts first: they run before the layer that they are part of ends
        tap_experts(model, take_expert, at=mixed, all_tokens=reading.all_tokens),
        tap(model, take, at=whole, units=units),
    ):
        yield start


def _update(store: BlockStore, rows: Rows, batch: Batch, reading: Pass) -> None:
    try:
        store.update(rows, batch.offsets, reading.split)
    except ValueError as err:
        name = f"block {store.block.index} ({store.block.path}), batch {batch.number}"
        named = reading.model.named_parameters()
        damaged = (n for n, p in named if not p.is_meta and not bool(p.isfinite().all()))
        weight = next((f"; the weight {n} is not finite" for n in damaged), "")
        raise ValueError(f"{name}: {err}{weight}") from None
