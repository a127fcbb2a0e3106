"""One shard of a text: its moments are written, and `merge_runs` adds them to those of the others.

shard = profile_shard(model, ids, at=at, scope=Scope(), course=Course(shard=(0, 8), saves=saves))
shard.save(folder)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from howlinear.linear.stores import BlockStore, name_of
from howlinear.models.families import Block
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.profiling.gathering import Scope, gather
from howlinear.profiling.passes import Course
from howlinear.report.results import Result
from howlinear.run.folder import RunFolder
from howlinear.run.ranks import Ranks
from howlinear.run.saving import Saves


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
        return f"{part} of {parts}, {len(self.blocks)} blocks, {self.settings['read']} tokens"

    def save(self, folder: str | Path) -> None:
        RunFolder(folder).write(self.to_dict())


def profile_shard(
    model: nn.Module, windows: WindowsLike, *, at: Sequence[Block], scope: Scope, course: Course
) -> Shard:
    """Read one shard and write its moments, which may be too few rows to fit a map."""
    assert course.saves is not None
    text, places = as_windows(windows), list[dict[str, Any]]()
    for stores in gather(model, text, at, scope, course):
        places += [finish(course.saves, store) for store in stores_at_first(course.ranks, stores)]
        del stores  # before the next ones are made
    places.sort(key=lambda place: int(place["index"]))
    batches = text.batches(course.batch_size)
    settings = scope.settings(course) | {
        "tokens": text.tokens,
        "read": sum(batch.tokens for batch in batches if course.in_shard(batch.number)),
        "shard": list(course.shard),
    }
    return Shard(places, settings)


def stores_at_first(ranks: Ranks, stores: list[BlockStore]) -> Iterator[BlockStore]:
    """The stores of all ranks at rank 0, one at a time."""
    for owner, blocks in enumerate(ranks.gather([store.block for store in stores])):
        for i, block in enumerate(blocks):
            mine = ranks.rank == owner
            state = ranks.tensors_at_first(stores[i].state_dict() if mine and owner else {}, owner)
            if ranks.rank == 0:
                yield stores[i] if mine else BlockStore.from_state(block, state)


def finish(saves: Saves, store: BlockStore) -> dict[str, Any]:
    """Write the moments of a block that has seen all rows; the block as shard.json lists it."""
    if name_of(store.block) not in saves.done:
        saves.finish(store)
    names = ("index", "path", "d_in", "d_out")
    place = {name: getattr(store.block, name) for name in names}
    return {**place, "expert": getattr(store.block, "expert", ""), "rows": store.n}
