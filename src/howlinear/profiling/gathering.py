"""What a profile measures, and the stores that hold it: one for each block and expert.

    for stores in gather(model, as_windows(ids), at, Scope(folds=5), Course()):
        ...                     # stores of some blocks at a time, with every row

    shard = profile_shard(model, ids, at=at, scope=Scope(), course=Course(shard=(0, 8), saves=saves))
    shard.save(folder)          # its moments are there; `merge_runs` adds them to those of the others

Before the first row is read, sink units are chosen from the beginning of the text, and a sample of
windows goes forward and backward: its gradients say what a swap is expected to cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from howlinear.linear.folds import Folds, RowSplit, Split
from howlinear.linear.stores import BlockStore, name_of
from howlinear.models import bfloat16
from howlinear.models.experts import mixtures
from howlinear.models.families import Block
from howlinear.models.forward import Windows, WindowsLike, as_windows
from howlinear.profiling.gradients import sample_gradients, why_no_gradients
from howlinear.profiling.layerwise import layer_by_layer
from howlinear.profiling.passes import Course, Pass, whole_model
from howlinear.records.words import plural
from howlinear.report.results import Result
from howlinear.run.folder import RunFolder
from howlinear.run.work import Ranks

PROTOCOLS = ("default", "paper")


@dataclass(frozen=True)
class Scope:
    """What is measured."""

    folds: int = 5
    protocol: str = "default"
    experts: str | None = None  # each expert too: on the tokens "routed" to it, or on "all"
    signal: bool = True  # the expected cost of swaps, which takes a backward pass

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            expected = ", ".join(PROTOCOLS)
            raise ValueError(f"unknown protocol {self.protocol!r}, expected one of {expected}")
        if self.experts not in (None, "routed", "all"):
            raise ValueError(
                f"experts are measured on routed tokens or on all, not on {self.experts!r}"
            )

    def split(self, text: Windows) -> Split:
        """Which rows are held out."""
        if self.protocol == "default":
            return text.folds(self.folds)
        if text.ids is None:
            raise ValueError(
                "the paper protocol needs all windows at once: a LongTensor (n, length)"
            )
        return RowSplit(text.ids.numel())

    def why_unexpected(self, model: nn.Module, text: Windows, course: Course) -> str:
        """Why the cost of swaps is not estimated; "" where it is."""
        return why_no_gradients(model, text, course) if self.signal else "it was not asked for"

    def settings(self, course: Course, split: Split, text: Windows) -> dict[str, Any]:
        """Scope and course as profile.json has them; `folds` are those that there are."""
        folds = split if isinstance(split, Folds) else None
        return {
            "protocol": self.protocol,
            "folds": folds and folds.groups,
            "cells": folds and (len(folds.cells) or None),  # None: of a stream, or one split
            "documents": text.documents,
            "solver": course.solver,
            "precision": course.precision,
            "float64_blocks": {},  # until they are known
            "experts": self.experts,
            "seed": course.seed,
        }


def with_experts(model: nn.Module, at: Sequence[Block], experts: str | None) -> list[Block]:
    """The blocks, and with `experts` after each mixture its experts."""
    if experts is None:
        return list(at)
    by_block = {m.block: [m.expert(key) for key in m.keys] for m in mixtures(model, at)}
    if not by_block:
        raise ValueError(f"{type(model).__name__} has no mixtures of experts: drop `experts`")
    return [b for block in at for b in (block, *by_block.get(block, ()))]


def gather(
    model: nn.Module,
    text: Windows,
    at: Sequence[Block],
    scope: Scope,
    course: Course,
    unexpected: str = "",
) -> Iterator[list[BlockStore]]:
    """Stores of some blocks at a time that have seen every row of this course's part of the text.

    `unexpected` says why the cost of swaps is not estimated, if it is not.
    """
    parameter = next(model.parameters())
    bfloat16.check(parameter.dtype, parameter.device)
    every = with_experts(model, at, scope.experts)
    split, sampling = scope.split(text), None
    if not unexpected:
        sampling = partial(sample_gradients, model, text=text, split=split, course=course)
    reading = Pass(model, text, every, split, course, scope.experts == "all", sampling)
    yield from (layer_by_layer if course.layerwise else whole_model)(reading)


@dataclass(frozen=True, eq=False, repr=False)
class Shard(Result):
    """A part of a text that was read: its moments are in its folder."""

    blocks: list[dict[str, Any]]
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`shard.json`, field by field."""
        return "shard", {"settings": self.settings, "blocks": self.blocks}

    def _line(self) -> str:
        part, parts = self.settings["shard"]
        return f"{part} of {parts}, {plural(len(self.blocks), 'block')}, {self.settings['read']} tokens"

    @classmethod
    def load(cls, folder: str | Path) -> Shard:
        """Read shard.json back."""
        data = RunFolder(folder).read("shard")
        about = {k: v for k, v in data.items() if k not in ("kind", "schema")}
        return cls(about.pop("blocks"), about.pop("settings"), about)


def profile_shard(
    model: nn.Module, windows: WindowsLike, *, at: Sequence[Block], scope: Scope, course: Course
) -> Shard:
    """Read one shard and write its moments, which may be too few rows to fit a map."""
    text, places = as_windows(windows), list[dict[str, Any]]()
    unexpected = scope.why_unexpected(model, text, course)
    for stores in gather(model, text, at, scope, course, unexpected):
        places += finish(course, stores)
        del stores  # before the next ones are made
    places.sort(key=lambda place: int(place["index"]))
    batches = text.batches(course.batch_size)
    settings = scope.settings(course, scope.split(text), text) | {
        "tokens": text.tokens,
        "read": sum(batch.tokens for batch in batches if course.in_shard(batch.number)),
        "shard": list(course.shard),
        "no_expected_kl": unexpected or None,
    }
    return Shard(places, settings)


def at_first(ranks: Ranks, kind: Any, items: Sequence[Any], heads: Sequence[Any]) -> Iterator[Any]:
    """The items of all ranks at rank 0, one at a time; `kind.from_state` makes one from its head."""
    for owner, theirs in enumerate(ranks.gather(list(heads))):
        for i, head in enumerate(theirs):
            mine = ranks.rank == owner
            state = ranks.tensors_at_first(items[i].state_dict() if mine and owner else {}, owner)
            if ranks.rank == 0:
                yield items[i] if mine else kind.from_state(head, state)


def finish(course: Course, stores: list[BlockStore]) -> list[dict[str, Any]]:
    """Write moments of blocks that have seen all rows, at rank 0; the blocks as shard.json lists them."""
    assert course.saves is not None
    names, places = ("index", "path", "d_in", "d_out"), []
    for store in at_first(course.ranks, BlockStore, stores, [store.block for store in stores]):
        if name_of(store.block) not in course.saves.done:
            course.saves.finish(store)
        place = {name: getattr(store.block, name) for name in names}
        places.append({**place, "expert": store.block.expert, "rows": store.n})
    return places
