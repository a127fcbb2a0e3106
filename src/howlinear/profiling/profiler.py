"""The one pass: text through the model, moments out, maps and scores of every block.

    model, tokenizer = load()
    ids = windows(text, tokenizer, 512)
    result = profile(model, ids)
    result.blocks[11].r2, result.blocks[11].r2_body, result.maps[11](x)

Rows go into one accumulator for each block and fold, first positions into another; both are small
or bounded, so memory does not grow with the text. Afterwards each fold is scored with the map
fitted on the others. Nothing is read twice and no activations are stored, except a bounded, seeded
sample of rows for `stream_error`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.linear.folds import Split, check_rows
from howlinear.linear.precision import HARMLESS
from howlinear.linear.stores import BlockStore, is_wide
from howlinear.models.families import Block, blocks, left_out
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.naming import BlockName, BlockNames, indices_of
from howlinear.profiling.gathering import Scope, at_first, finish, gather
from howlinear.profiling.passes import Course
from howlinear.profiling.scores import Measured, is_expert, measure_store
from howlinear.records.fields import BlockExpert, BlockProfile
from howlinear.records.files import blocks_of
from howlinear.records.statistics import summarise
from howlinear.records.words import plural
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder
from howlinear.run.tensors import Saved, save_moments, saved_maps, write_map


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Result):
    """What one pass measured: `blocks` are records, `maps[i]` is block i's fitted map."""

    blocks: list[BlockProfile]
    maps: Mapping[int, Affine]
    r2_by_feature: Mapping[int, Tensor]
    stores: list[BlockStore]
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    experts: list[BlockExpert] = field(default_factory=list)  # of mixtures, with experts=

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    @property
    def notes(self) -> list[str]:
        """Limits of the numbers: precision, rank, too few rows."""
        notes = list(self.about.get("merge_notes", []))
        if unread := self.settings.get("left_out"):
            notes.append(
                f"{unread['count']} feed-forward blocks outside the text stack are not measured, "
                f"such as {unread['path']}: name them by their paths to measure them"
            )
        if exact := self.settings.get("float64_blocks"):
            which = ", ".join(map(str, exact))
            notes.append(f"products in float64 for blocks {which}: in float32 R2 could move")
        if why := self.settings.get("no_expected_kl"):
            notes.append(f"no expected cost of swaps: {why}")
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
        read, folds = self.settings.get("documents"), self.settings.get("folds")
        if read is not None and folds is not None and read < folds:
            notes.append(
                f"the text read has {read} documents for {folds} folds: ± covers what varies within "
                "them, and is too small for other documents; give more tokens"
            )
        thin = min(b.rows_per_column for b in self.blocks)
        if thin < 20:
            notes.append(
                f"only {thin:.1f} rows a column: held-out R2 is low by about (1 - R2) / {thin:.0f}, "
                "give more tokens"
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
        return f"{plural(len(self.blocks), 'block')}, R2 {extremes((b.index, b.r2) for b in self.blocks)}"

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a line a block and the fields of its record as columns."""
        return imported("pandas", "to_dataframe").DataFrame([b.to_dict() for b in self.blocks])

    def plot(self, axes: Any = None) -> Any:
        """R2 over depth with its standard errors, drawn by matplotlib. Returns the axes."""
        if axes is None:
            _, axes = imported("matplotlib.pyplot", "plot").subplots()
        depth, r2s, errors, body = zip(
            *((b.index, *map(_or_nan, (b.r2, b.r2_se, b.r2_body))) for b in self.blocks),
            strict=True,
        )
        axes.errorbar(depth, r2s, yerr=errors, marker="o", label="R2")
        axes.plot(depth, body, linestyle="--", label="R2 without first positions")
        axes.set_xlabel("block")
        axes.set_ylabel("R2")
        axes.legend()
        return axes

    def W_skip(self, block: BlockName, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """A block's map as the skip connection of a transcoder, under the names of its parameters.

        {"W_skip": (d_out, d_in), "b_dec": (d_out,)}: y ~ x @ W_skip.T + b_dec, x being the block's input
        after its norm and y its output before the residual add. b_dec holds the whole intercept: a
        transcoder whose features add to it starts from this b_dec, without another mean of y.
        """
        chosen = indices_of(block, {b.index: b.path for b in self.blocks})
        if len(chosen) > 1:
            raise ValueError(f"{block!r} names {len(chosen)} blocks, expected one")
        affine = self.maps[chosen.pop()]
        return {"W_skip": affine.weight.to(dtype), "b_dec": affine.bias.to(dtype)}

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the run folder; profile.json last, because it marks the run as complete.

        Another run in the folder is refused, or removed with `overwrite`, and all that was derived
        from it. Saving the same profile again removes nothing.
        """
        run, folder = RunFolder(folder), Path(folder)
        if not (isinstance(self.maps, Saved) and self.maps.folder == folder):  # else they are there
            if overwrite:
                run.remove_results()
                run.remove_progress()
            elif not (run.has("profile") and run.read("profile") == self.to_dict()):
                run.check_unmeasured()
            for store in self.stores:
                save_moments(folder, store)
            for b in self.blocks:
                write_map(folder, b, self.maps[b.index], self.r2_by_feature[b.index])
        run.write(self.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read a run folder back. Maps are read when they are used, moments by `read_moments`."""
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


def imported(name: str, method: str) -> Any:
    """A package that is not required; ImportError in one line where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(f"{method} needs {package}: pip install {package}") from None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


@torch.inference_mode(False)  # expected costs need gradients, and sums are added to later
def profile(
    model: nn.Module,
    windows: WindowsLike,
    *,
    at: BlockNames = None,
    folds: int = 5,
    protocol: str = "default",
    experts: str | None = None,
    signal: bool = True,
    batch_size: int | None = None,
    course: Course | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Measure every block (or those `at`) on windows: a LongTensor (n, length), or batches of them.

    Batches may also be dicts of model inputs with masks, pixels or audio features; padding is left
    out. `at` is as in `blocks`. `experts` measures each expert of a mixture too: on tokens "routed" to it or "all".
    `signal` estimates what a swap costs, by a backward pass over 1020 tokens: `expected_kl`, None layer by
    layer, offloaded, without a next-token loss, and for inputs other than repeatable token ids.
    `batch_size` (8) is in windows. `course` is how the work is carried out: solver, precision, seed,
    processes, saves. `progress` is called with the number of tokens of each batch done.
    """
    text, course = as_windows(windows), course_with(course, batch_size, progress)
    chosen = blocks(model, at)
    scope, tokens = Scope(folds, protocol, experts, signal), text.tokens
    split = scope.split(text)
    if text.ids is not None:
        check_rows(len(text.ids), text.ids.shape[1], max(b.d_in for b in chosen), split)
    measured: list[Measured] = []
    kept: list[BlockStore] = []
    unexpected = scope.why_unexpected(model, text, course)
    for stores in gather(model, text, chosen, scope, course, unexpected):
        whole = [store for store in stores if not is_expert(store)]
        tokens = max([tokens, *course.ranks.gather(max([0, *(store.n for store in whole)]))])
        measured += _at_first(course, stores, _measure_all(stores, split, tokens))
        kept += whole if course.saves is None else []
        del stores, whole  # before the next ones are made
    settings = scope.settings(course, split, text) | {"tokens": tokens, "window": text.length}
    settings |= {"no_expected_kl": unexpected or None, **_unread(model, chosen)}
    return _assembled(course, measured, kept, settings)


def _unread(model: nn.Module, at: Sequence[Block]) -> dict[str, Any]:
    """How many blocks of other stacks are not measured, and the path of one; {} if there are none."""
    others = left_out(model)
    if not others or {b.path for b in at} & {b.path for b in others}:
        return {}
    return {"left_out": {"count": len(others), "path": others[0].path}}


def course_with(
    course: Course | None, batch_size: int | None, progress: Callable[[int], None] | None
) -> Course:
    """A course with this batch size and progress, where they are given."""
    course = course or Course()
    if batch_size is not None:
        course = replace(course, batch_size=batch_size)
    return course if progress is None else replace(course, progress=lambda label, tokens: progress)


def _assembled(
    course: Course, measured: list[Measured], kept: list[BlockStore], settings: dict[str, Any]
) -> Profile:
    """Records at every rank; maps and stores in memory unless they are in the run folder."""
    every = (*divided(measured), float64_blocks(measured))
    records, experts, settings["float64_blocks"] = course.ranks.share(every)
    if course.saves is not None and course.ranks.rank == 0:
        maps, features = saved_maps(course.saves.folder, records)
        return Profile(records, maps, features, [], settings, experts=experts)
    fitted = {
        m.record.index: m.map for m in measured if m.map and isinstance(m.record, BlockProfile)
    }
    return Profile(
        blocks=records,
        maps={
            b.index: replace(fitted[b.index][0], path=b.path) for b in records if b.index in fitted
        },
        r2_by_feature={index: r2s for index, (_, r2s) in fitted.items()},
        stores=sorted(kept, key=lambda store: store.block.index),
        settings=settings,
        experts=experts,
    )


def divided(measured: Sequence[Measured]) -> tuple[list[BlockProfile], list[BlockExpert]]:
    """The records of blocks, and those of experts, both in depth order."""
    records = [m.record for m in measured if isinstance(m.record, BlockProfile)]
    experts = [m.record for m in measured if isinstance(m.record, BlockExpert)]
    return (
        sorted(records, key=lambda b: b.index),
        sorted(experts, key=lambda e: (e.index, not e.expert.isdecimal(), e.expert.zfill(8))),
    )


def float64_blocks(measured: Sequence[Measured]) -> dict[int, float | None]:
    """Blocks whose products stayed in float64, and how far R2 could have moved; None: they lack rank."""
    shifts = {m.record.index: m.float32_shift for m in measured if m.float32_shift is not None}
    kept = {i: shift for i, shift in sorted(shifts.items()) if shift > HARMLESS}
    return {i: shift if math.isfinite(shift) else None for i, shift in kept.items()}


def _at_first(course: Course, stores: list[BlockStore], measured: list[Measured]) -> list[Measured]:
    """What all ranks measured, at rank 0; written there, and without maps, if the course saves."""
    if course.saves is not None:
        finish(course, stores)
    every = at_first(course.ranks, Measured, measured, [m.plain for m in measured])
    return [m if course.saves is None else m.saved(course.saves.folder) for m in every]


def _measure_all(stores: list[BlockStore], split: Split, tokens: int) -> list[Measured]:
    """Blocks in parallel, a core each: small factorisations do not use two cores well."""
    threads = torch.get_num_threads()
    alone = threads == 1 or len(stores) < 2 or is_wide([store.block for store in stores])
    if alone or stores[0].body[0].device.type != "cpu":
        return [measure_store(store, split, tokens) for store in stores]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda store: measure_store(store, split, tokens), stores))
    finally:
        torch.set_num_threads(threads)
