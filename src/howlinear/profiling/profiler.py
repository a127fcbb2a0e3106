"""The one pass: text through the model, moments out, and what they say about every block.

    model, tokenizer = load()
    ids = windows(text, tokenizer, 512)
    result = profile(model, ids)
    result.blocks[11].r2, result.blocks[11].r2_body, result.maps[11](x)

Rows go into one accumulator for each block and fold, first positions into another; both are small
or bounded, so memory does not grow with the text. Afterwards each fold is scored with the map
fitted on the others. Nothing is read twice and no activations are stored, but for a bounded,
seeded sample of rows that `stream_error` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.linear.folds import Folds, RowSplit, Split, check_rows
from howlinear.linear.stores import SOLVERS, BlockStore, Known, OutNorm, is_wide, name_of
from howlinear.models import bfloat16
from howlinear.models.experts import SHARED, mixtures
from howlinear.models.families import Block, blocks
from howlinear.models.offload import device_of, is_offloaded, resident
from howlinear.models.units import sink_units
from howlinear.profiling.fisher import fisher
from howlinear.profiling.layerwise import layer_by_layer
from howlinear.profiling.passes import Course, Windows, collected, pieces
from howlinear.profiling.scores import Measured, MeasuredExpert, measure, measure_expert
from howlinear.records.fields import BlockExpert, BlockProfile
from howlinear.records.files import blocks_of
from howlinear.records.statistics import summarise
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder
from howlinear.run.saving import Saves
from howlinear.run.tensors import Saved, map_tensors, save_moments, saved_maps, write_map

PROTOCOLS = ("default", "paper")


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Result):
    """What one pass measured. `blocks` is what to read; `maps[i]` is block i's fitted map."""

    blocks: list[BlockProfile]
    maps: Mapping[int, Affine]
    r2_by_feature: Mapping[int, Tensor]
    stores: list[BlockStore]
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    experts: list[BlockExpert] = field(
        default_factory=list
    )  # of mixtures, where they were asked for

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        notes = list(self.about.get("merge_notes", []))
        if found := self.settings.get("precision_difference"):
            which = ", ".join(map(str, found))
            notes.append(
                f"sums in mixed precision: R2 of blocks {which} is off by at most "
                f"{max(found.values()):.1e} from float64"
            )
        lacking = [b.index for b in self.blocks if b.input_rank < b.d_in]
        if lacking:
            which = "all blocks" if len(lacking) == len(self.blocks) else f"blocks {lacking}"
            notes.append(f"inputs lack rank in {which}: the maps of least norm are given")
        unsure = [b for b in self.blocks if b.r2_body_se is not None and b.r2_body_se > 0.1]
        if unsure:
            listed = ", ".join(f"{b.index} (±{b.r2_body_se:.2f})" for b in unsure)
            notes.append(
                f"body R2 of blocks {listed} rests on a few rows: sinks beyond the first position"
            )
        thin = min(b.rows_per_column for b in self.blocks)
        if thin < 20:
            notes.append(
                f"only {thin:.1f} rows a column: held-out R2 is low by about (1 - R2) / {thin:.0f}, "
                "give more tokens (--tokens)"
            )
        return notes

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`profile.json`, field by field."""
        return "profile", {
            "settings": self.settings,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
            **({"experts": [e.to_dict() for e in self.experts]} if self.experts else {}),
        }

    def _runs(self) -> list[tuple[str, Sequence[BlockProfile]]]:
        return [("profile", self.blocks)]

    def _line(self) -> str:
        return f"{len(self.blocks)} blocks, R2 {extremes((b.index, b.r2) for b in self.blocks)}"

    def save(self, folder: str | Path) -> None:
        """Write the run folder; `profile.json` comes last, so that it stands for the whole."""
        run, folder = RunFolder(folder), Path(folder)
        if not (isinstance(self.maps, Saved) and self.maps.folder == folder):  # else they are there
            run.remove_results()
            run.remove_progress()
            for store in self.stores:
                save_moments(folder, store)
            for b in self.blocks:
                write_map(folder, b, self.maps[b.index], self.r2_by_feature[b.index])
        run.write(self.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read a run folder back. Maps are read when asked for, moments by `read_moments`."""
        run, folder = RunFolder(folder), Path(folder)
        data = run.read("profile")
        records = blocks_of(run.path("profile"), data, BlockProfile)
        single, settings = data.pop("experts", []), data.pop("settings", {})
        del data["blocks"]
        try:
            experts = [BlockExpert.from_dict(e) for e in single]
            if not isinstance(settings, dict):
                raise ValueError("settings are not as expected")
        except (ValueError, TypeError, AttributeError) as err:
            raise ValueError(f"{run.path('profile')}: {err}") from None
        maps, features = saved_maps(folder, records)
        about = {k: v for k, v in data.items() if k not in ("kind", "schema", "summary", "notes")}
        return cls(records, maps, features, [], settings, about, experts)


def profile(
    model: nn.Module,
    windows: Windows,
    *,
    at: Sequence[Block] | str | None = None,
    folds: int = 5,
    protocol: str = "default",
    solver: str = "moments",
    precision: str = "float64",
    experts: str | None = None,
    batch_size: int = 8,
    seed: int = 0,
    course: Course | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Measure every block (or those `at`) on windows: a LongTensor (n, length), or batches of them.

    Batches may also be dicts of model inputs with masks, pixels or audio features; padding is left
    out. `precision` "mixed" makes products in float32, and keeps float64 beside it for three blocks to
    tell the difference. `experts` measures each expert of a mixture too: on the tokens "routed" to it,
    or on "all". `course` divides the work. `progress` is called with the number of tokens of each batch done.
    """
    course = course or Course()
    parameter = next(model.parameters())
    bfloat16.check(parameter.dtype, parameter.device)
    at = blocks(model, at) if at is None or isinstance(at, str) else list(at)
    split = split_of(protocol, folds, windows)
    if isinstance(windows, Tensor):
        check_rows(len(windows), windows.shape[1], max(b.d_in for b in at), split)
    every = with_experts(model, at, experts)
    found: list[Found] = []
    kept: list[BlockStore] = []
    groups = gathered(
        model,
        windows,
        at=every,
        split=split,
        solver=solver,
        precision=precision,
        all_tokens=experts == "all",
        batch_size=batch_size,
        seed=seed,
        course=course,
        progress=progress,
    )
    rows = windows.numel() if isinstance(windows, Tensor) else 0
    differences: dict[int, float] = {}
    for stores in groups:
        whole = [store for store in stores if not is_expert(store)]
        _check_stores(whole, split)
        rows = max([rows, *course.ranks.gather(max([0, *(store.n for store in whole)]))])

        def work(store: BlockStore, tokens: int = rows) -> Measured | MeasuredExpert:
            alone = is_expert(store)
            return measure_expert(store, split, tokens) if alone else measure(store, split)

        measured = _spread(work, stores)
        differences |= course.ranks.joined(twin_differences(stores, measured, split))
        found += _handed_over(course, stores, measured)
        kept += whole if course.saves is None else []
        del stores, whole, measured  # before the next ones are made
    found.sort(key=lambda m: m.record.index)  # stable: experts stay in order after their layer
    told = [m.record for m in found]
    records: list[BlockProfile] = course.ranks.share(
        [r for r in told if isinstance(r, BlockProfile)]
    )
    single: list[BlockExpert] = course.ranks.share([r for r in told if isinstance(r, BlockExpert)])
    single.sort(key=lambda e: (e.index, not e.expert.isdecimal(), e.expert.zfill(8)))
    settings = {
        "protocol": protocol,
        "folds": folds if isinstance(split, Folds) else None,
        "solver": solver,
        "precision": precision,
        "precision_difference": differences or None,
        "experts": experts,
        "seed": seed,
        "tokens": rows,
        "window": windows.shape[1] if isinstance(windows, Tensor) else None,
    }
    if course.saves is not None and course.ranks.rank == 0:
        folder = course.saves.folder
        maps, features = saved_maps(folder, records)
        return Profile(records, maps, features, [], settings, experts=single)
    mapped = [f for f in found if isinstance(f.record, BlockProfile) and f.affine is not None]
    return Profile(
        blocks=records,
        maps={f.record.index: f.affine for f in mapped if f.affine is not None},
        r2_by_feature={
            f.record.index: f.r2_by_feature for f in mapped if f.r2_by_feature is not None
        },
        stores=sorted(kept, key=lambda store: store.block.index),
        settings=settings,
        experts=single,
    )


@dataclass(frozen=True, eq=False)
class Found:
    """A record, and its map where that is kept in memory."""

    record: BlockProfile | BlockExpert
    affine: Affine | None = None
    r2_by_feature: Tensor | None = None


def with_experts(model: nn.Module, at: Sequence[Block], experts: str | None) -> list[Block]:
    """The blocks, and after each mixture its experts, where they are asked for."""
    if experts is None:
        return list(at)
    if experts not in ("routed", "all"):
        raise ValueError(f"experts are measured on routed tokens or on all, not on {experts!r}")
    found = {m.block: [m.expert(key) for key in m.keys] for m in mixtures(model, at)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no mixtures of experts: drop --experts")
    return [b for block in at for b in (block, *found.get(block, ()))]


def is_expert(store: BlockStore) -> bool:
    return bool(getattr(store.block, "expert", ""))


@dataclass(frozen=True, eq=False, repr=False)
class Shard(Result):
    """A part of a text, read: its moments are in its folder and wait to be added up."""

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
    model: nn.Module,
    windows: Tensor,
    *,
    at: Sequence[Block],
    split: Split,
    solver: str,
    precision: str = "float64",
    experts: str | None = None,
    batch_size: int,
    seed: int,
    course: Course,
    progress: Callable[[int], None] | None = None,
) -> Shard:
    """Read one shard and write its moments; there may be too few rows to fit anything by."""
    assert course.saves is not None
    found: list[dict[str, Any]] = []
    groups = gathered(
        model,
        windows,
        at=with_experts(model, at, experts),
        split=split,
        solver=solver,
        precision=precision,
        all_tokens=experts == "all",
        batch_size=batch_size,
        seed=seed,
        course=course,
        progress=progress,
    )
    for stores in groups:
        found += [_finished(course.saves, store) for store in _at_first(course, stores)]
        del stores  # before the next ones are made
    found.sort(key=lambda b: int(b["index"]))
    read = [p.tokens for p in pieces(windows, batch_size) if course.here(p.number)]
    settings = {
        "solver": solver,
        "precision": precision,
        "experts": experts,
        "seed": seed,
        "tokens": windows.numel() if isinstance(windows, Tensor) else 0,
        "read": sum(read),
        "shard": list(course.shard),
    }
    return Shard(found, settings)


def _finished(saves: Saves, store: BlockStore) -> dict[str, Any]:
    """Write a store where it stays; what shard.json says of it."""
    if name_of(store.block) not in saves.done:
        saves.finish(store)
    names = ("index", "path", "d_in", "d_out")
    place = {name: getattr(store.block, name) for name in names}
    return {**place, "expert": getattr(store.block, "expert", ""), "rows": store.n}


def gathered(
    model: nn.Module,
    windows: Windows,
    *,
    at: Sequence[Block],
    split: Split,
    solver: str,
    precision: str = "float64",
    all_tokens: bool = False,
    batch_size: int,
    seed: int,
    course: Course,
    progress: Callable[[int], None] | None = None,
) -> Iterator[list[BlockStore]]:
    """Stores of some blocks at a time that have seen every row of this course's part of the text."""
    if solver not in SOLVERS:
        raise ValueError(
            f"unknown solver {solver!r}, expected one of {', '.join(SOLVERS)} (--solver)"
        )
    care: dict[int, Tensor] = {}
    if isinstance(windows, Tensor) and not course.layerwise and not is_offloaded(model):
        care = fisher(model, [b for b in at if not b.expert], windows, seed) or {}

    def where(block: Block) -> torch.device:
        path = block.entry if block.expert in ("", SHARED) else block.entry.rpartition(".")[0]
        device = device_of(model.get_submodule(path))
        return torch.device("cpu") if device.type == "mps" else device  # which has no float64

    whole = [b for b in at if not b.expert]
    checked = (whole[0], whole[len(whole) // 2], whole[-1])

    def make(group: Sequence[Block], run: Callable[[], Any]) -> list[BlockStore]:
        # on unlike machines a tie may be broken otherwise: what the first one says holds
        sinks = course.ranks.share(sink_units(model, [b for b in group if not b.expert], run))
        known = [
            Known(has_stream=False)
            if b.expert
            else _known(model, b, sinks.get(b.index), care.get(b.index))
            for b in group
        ]
        stores = []
        for b, k in zip(group, known, strict=True):
            like = (b, split.groups, solver, seed, where(b), k)
            stores.append(BlockStore(*like, precision))
            if precision != "float64" and not b.expert and b in checked:
                stores[-1].twin = BlockStore(*like)
        return stores

    way = layer_by_layer if course.layerwise else collected
    yield from way(
        model,
        windows,
        at,
        make,
        split,
        batch_size=batch_size,
        course=course,
        all_tokens=all_tokens,
        progress=progress,
    )


def twin_differences(
    stores: Sequence[BlockStore], measured: Sequence[Measured | MeasuredExpert], split: Split
) -> dict[int, float]:
    """How far R2 is from that of float64 sums, where a block has both."""
    return {
        store.block.index: abs(m.record.r2 - measure(store.twin, split).record.r2)
        for store, m in zip(stores, measured, strict=True)
        if store.twin is not None and isinstance(m, Measured)
    }


def _known(
    model: nn.Module,
    block: Block,
    sinks: tuple[list[int], list[float]] | None,
    care: Tensor | None,
) -> Known:
    units, shares = sinks or (None, None)
    norm = None
    if block.out_norm:
        module = model.get_submodule(block.out_norm)
        with resident([module]):
            norm = OutNorm.of(module, block.d_out)
    return Known(units, shares, norm, care, has_stream=norm is not None or block.out_norm is None)


def _at_first(course: Course, stores: list[BlockStore]) -> Iterator[BlockStore]:
    """The stores of all ranks at the first one, one at a time."""
    ranks = course.ranks
    for owner, own in enumerate(ranks.gather([store.block for store in stores])):
        for i, block in enumerate(own):
            mine = ranks.rank == owner
            state = ranks.tensors_at_first(stores[i].state_dict() if mine and owner else {}, owner)
            if ranks.rank == 0:
                yield stores[i] if mine else BlockStore.from_state(block, state)


def _handed_over(
    course: Course, stores: list[BlockStore], measured: list[Measured | MeasuredExpert]
) -> list[Found]:
    """What each rank measured, at the first one, which writes it if it is to be written."""
    saves, ranks, found = course.saves, course.ranks, list[Found]()
    if saves is not None:
        for store in _at_first(course, stores):
            _finished(saves, store)
    for owner, records in enumerate(ranks.gather([m.record for m in measured])):
        for i, record in enumerate(records):
            mine = ranks.rank == owner
            parts = ranks.tensors_at_first(_parts(measured[i]) if mine else {}, owner)
            if ranks.rank:
                continue
            if saves is None:
                found.append(Found(record, *_affine(parts)))
                continue
            found.append(Found(record))  # the map is where it belongs
            if parts:
                write_map(saves.folder, record, *_affine(parts))
    return found


def _parts(measured: Measured | MeasuredExpert) -> dict[str, Tensor]:
    """The map as tensors that can travel."""
    affine = measured.affine
    if affine is None or measured.r2_by_feature is None:
        return {}
    return map_tensors(affine, measured.r2_by_feature)


def _affine(parts: dict[str, Tensor]) -> tuple[Any, Any]:
    if not parts:
        return None, None
    affine = Affine(parts["weight"], parts["bias"], int(parts["rank"]))
    return affine, parts["r2_by_feature"]


def split_of(protocol: str, folds: int, windows: Windows) -> Split:
    if protocol == "default":
        return Folds(folds)
    if protocol != "paper":
        raise ValueError(f"unknown protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
    if not isinstance(windows, Tensor):
        raise ValueError("the paper protocol needs all windows at once: a LongTensor (n, length)")
    return RowSplit(windows.numel())


def _check_stores(stores: Sequence[BlockStore], split: Split) -> None:
    for store in stores:
        check_store(store, split)


def check_store(store: BlockStore, split: Split) -> None:
    """The same check for streams, whose length is known only afterwards."""
    sizes = store.sizes
    fewest = min(sum(sizes) - sizes[f] for f in split.held(sizes))
    if fewest <= store.block.d_in:
        raise ValueError(
            f"too little text: block {store.block.index} ({store.block.path}) has {fewest} rows to "
            f"fit {store.block.d_in} columns; about {40 * store.block.d_in} tokens are needed (--tokens)"
        )


def _spread(work: Callable[[BlockStore], Any], stores: list[BlockStore]) -> list[Any]:
    """Blocks in parallel, a core each: small factorisations do not use two cores well."""
    threads = torch.get_num_threads()
    alone = threads == 1 or len(stores) < 2 or is_wide([store.block for store in stores])
    if alone or stores[0].body[0].device.type != "cpu":
        return [work(store) for store in stores]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, stores))
    finally:
        torch.set_num_threads(threads)
