"""Runs of different machines, texts or days -> one run, as if one machine had read it all.

    result = merge_runs(["runs/0", "runs/1"], "runs/all")
    fit_windows(text, tokenizer, result.settings)       # of the shards that were added up

Moments add up; scores and maps are computed from the sums, one block at a time, so that memory for
two blocks suffices. Runs that cannot add up (another model, other folds, the same rows twice) are
refused with what differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howlinear.linear.folds import Folds, RowSplit, Split
from howlinear.linear.stores import BlockStore, name_of
from howlinear.models.cutting import spread_windows, windows
from howlinear.models.documents import Documents
from howlinear.profiling.profiler import Profile, divided, float64_blocks
from howlinear.profiling.scores import Measured, measure_store
from howlinear.run.folder import RunFolder
from howlinear.run.tensors import read_store, save_moments, saved_maps

# what must be the same in model and settings
MODEL = ("family", "revision", "parameters", "dtype", "quantization", "weights")
SETTINGS = (
    "protocol",
    "folds",
    "solver",
    "precision",
    "experts",
    "seed",
    "window",
    "bos",
)


@dataclass(frozen=True)
class BlockId:
    """A block or expert as a run lists it."""

    index: int
    path: str
    d_in: int
    d_out: int
    expert: str = ""

    @classmethod
    def read(cls, data: dict[str, Any]) -> BlockId:
        names = ("index", "path", "d_in", "d_out")
        block = cls(**{name: data[name] for name in names}, expert=data.get("expert", ""))
        if [type(value) for value in astuple(block)] != [int, str, int, int, str]:
            raise ValueError
        return block


@dataclass(frozen=True)
class Head:
    """profile.json or shard.json of a run."""

    folder: Path
    data: dict[str, Any]
    blocks: list[BlockId]

    @classmethod
    def read(cls, folder: Path) -> Head:
        run = RunFolder(folder)
        kind = "shard" if run.has("shard") else "profile"
        if not run.has(kind) and run.has("progress"):
            raise ValueError(f"{folder} is not finished: run its command again, it resumes")
        data = run.read(kind)
        parts = [data.get(name) for name in ("model", "corpus", "settings")]
        listed = data.get("blocks")
        if not all(isinstance(part, dict) for part in parts) or not isinstance(listed, list):
            raise ValueError(f"{run.path(kind)} lacks model, corpus, settings or blocks")
        try:
            blocks = [BlockId.read(b) for b in [*listed, *data.get("experts", [])]]
            head = cls(folder, data, blocks)
            head._check()
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{run.path(kind)}: its settings or blocks are damaged") from None
        return head

    def _check(self) -> None:
        shards, of, whole = self.shards
        counts = [*shards, of, whole, self.settings.get("tokens"), self.settings.get("read", 0)]
        fine = all(type(n) is int for n in counts) and set(shards) <= set(range(of))
        fine = fine and isinstance(self.text, str | None)
        if not fine or len(set(map(name_of, self.blocks))) < len(self.blocks):
            raise ValueError

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.data["settings"])

    @property
    def shards(self) -> tuple[list[int], int, int]:
        """(numbers of the shards that were read, of how many, tokens of all of them)."""
        settings = self.settings
        if merged := settings.get("shards"):
            return list(merged["read"]), merged["of"], merged["tokens"]
        part, parts = settings.get("shard") or (0, 1)
        return [part], parts, settings["tokens"]

    @property
    def cut(self) -> tuple[Any, ...]:
        """How the text was cut into shards."""
        return *self.shards[1:], *map(self.settings.get, ("batch_size", "cells", "spread"))

    @property
    def tokens(self) -> int:
        """Tokens that this run or shard has read."""
        return int(self.settings.get("read", self.settings["tokens"]))

    @property
    def text(self) -> Any:
        """Fingerprint of the text."""
        return self.data["corpus"].get("fingerprint")


def merge_runs(
    folders: Sequence[str | Path],
    out: str | Path,
    progress: Callable[[int], None] | None = None,
    *,
    overwrite: bool = False,
) -> Profile:
    """Add the runs up and write the sum; `progress` is called with 1 for each block done.

    A run that is in `out` already is refused, or removed with `overwrite`.
    """
    out, heads = Path(out), [Head.read(Path(folder)) for folder in folders]
    if len(heads) < 2:
        raise ValueError("one run has nothing to be added to: name two or more")
    if any(out.resolve() == h.folder.resolve() for h in heads):
        raise ValueError(f"{out} is one of the runs: name another folder with `out`")
    if not overwrite:
        RunFolder(out).check_unmeasured()
    check_addable(heads)
    notes, settings = check_shards(heads), _settings(heads)
    folds = settings.get("folds")
    split: Split = Folds(folds) if type(folds) is int else RowSplit(settings["tokens"])
    part = out.with_name(f".{out.name}.part")  # renamed when it is whole
    shutil.rmtree(part, ignore_errors=True)
    measured = list[Measured]()
    try:
        for block in heads[0].blocks:
            store = _added(heads, block, notes)
            save_moments(part, store)
            measured.append(measure_store(store, split, settings["tokens"]).saved(part))
            if progress is not None and not block.expert:
                progress(1)
        _replace(out, part, overwrite)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # what an interruption or a full disk leaves
    settings["float64_blocks"] = float64_blocks(measured)
    records, experts = divided(measured)
    return Profile(records, *saved_maps(out, records), [], settings, _about(heads, notes), experts)


def _replace(out: Path, part: Path, overwrite: bool) -> None:
    """Put moments and maps into the folder, in place of the run that it holds."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        RunFolder(out).remove_results()
        RunFolder(out).remove_progress()
    for name in ("moments", "maps"):
        (part / name).rename(out / name)


def check_addable(heads: Sequence[Head]) -> None:
    """Refuse runs of different models, protocols or blocks; name what differs."""
    first = heads[0]
    for other in heads[1:]:
        refused = f"{other.folder} and {first.folder} do not add up"
        for part, name in [("model", n) for n in MODEL] + [("settings", n) for n in SETTINGS]:
            one, two = (head.data[part].get(name) for head in (first, other))
            if one != two:
                raise ValueError(f"{refused}: {name} is {two} and {one}")
        odd = set(first.blocks) ^ set(other.blocks)
        for block in (*first.blocks, *other.blocks):
            if block in odd:
                which = first.folder if block in first.blocks else other.folder
                raise ValueError(
                    f"{refused}: only {which} has block {block.index} ({block.path}, "
                    f"{block.d_in} to {block.d_out})"
                )


def check_shards(heads: Sequence[Head]) -> list[str]:
    """Refuse the same rows twice; notes about shards that are missing."""
    notes = []
    by_text: dict[Any, list[Head]] = {}
    for head in heads:
        by_text.setdefault(head.text, []).append(head)
    for same_text in by_text.values():
        seen: dict[int, Head] = {}
        first = same_text[0]
        for head in same_text:
            shards, of, _ = head.shards
            twins = [seen[shard] for shard in shards if shard in seen]
            if twins or head.cut != first.cut:
                twin = twins[0] if twins else first
                raise ValueError(
                    f"{head.folder} and {twin.folder} have read the same rows of one text: add runs "
                    "of different texts, or of different shards made with the same settings"
                )
            seen |= dict.fromkeys(shards, head)
        if missing := sorted(set(range(of)) - seen.keys()):
            name = first.data["corpus"].get("name")
            notes.append(f"shards {missing} of {of} are missing: {name}")
    return notes


def _settings(heads: Sequence[Head]) -> dict[str, Any]:
    """Settings of the sum; if shards of its text are missing, which ones were read."""
    settings = heads[0].settings | {"tokens": sum(h.tokens for h in heads)}
    for name in ("shard", "shards", "read"):
        settings.pop(name, None)
    if any(h.text != heads[0].text for h in heads):
        numbers = [h.settings.get("documents") for h in heads]
        known = [n for n in numbers if type(n) is int]
        settings["documents"] = sum(known) if len(known) == len(numbers) else None
        settings["cells"] = None
    _, of, whole = heads[0].shards
    read = sorted(shard for h in heads for shard in h.shards[0])
    if len(read) < of and all(h.text == heads[0].text for h in heads):
        settings["shards"] = {"read": read, "of": of, "tokens": whole}
    return settings


def fit_windows(text: Documents, tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The windows of a text that a run with these settings holds: all, or those of its shards."""
    shards = settings.get("shards") or {"read": [0], "of": 1, "tokens": settings["tokens"]}
    cut = {"tokens": shards["tokens"], "bos": settings.get("bos", "auto")}
    if settings.get("spread"):
        every = spread_windows(text, tokenizer, settings["window"], **cut)
    else:  # the paper's protocol
        every = {"input_ids": windows(text, tokenizer, settings["window"], **cut)}
    batches = torch.arange(len(every["input_ids"])) // (settings.get("batch_size") or 1)
    read = torch.isin(batches % shards["of"], torch.tensor(shards["read"]))
    return {name: value[read] for name, value in every.items()}


def _added(heads: Sequence[Head], block: BlockId, notes: list[str]) -> BlockStore:
    """Rows of one block from all runs."""
    total = read_store(heads[0].folder, block)
    for head in heads[1:]:
        more = read_store(head.folder, block)
        total, more = _with_units_in_common(total, more, notes)
        try:
            total.merge(more)
        except ValueError as err:
            raise ValueError(f"{head.folder}, block {block.index} ({block.path}): {err}") from None
    return total


def _with_units_in_common(
    a: BlockStore, b: BlockStore, notes: list[str]
) -> tuple[BlockStore, BlockStore]:
    """Two texts may choose different sink units: the first ones that they share are kept."""
    one, two = a.known.units or [], b.known.units or []
    if one == two:
        return a, b
    pairs = zip(one, two, strict=False)
    least = min(len(one), len(two))
    same = next((k for k, (u, v) in enumerate(pairs) if u != v), least)
    notes.append(
        f"block {a.block.index} has sink units {one} in one text and {two} in another: "
        f"{one[:same] or 'none'} kept"
    )
    return a.narrow(same), b.narrow(same)


def _about(heads: Sequence[Head], notes: list[str]) -> dict[str, Any]:
    first = heads[0].data
    about: dict[str, Any] = {
        name: first[name] for name in ("model", "corpus", "asked", "versions") if name in first
    }
    if any(h.text != heads[0].text for h in heads):
        about.pop("asked", None)  # several texts: no one text to hold out from
        names = dict.fromkeys(str(h.data["corpus"].get("name")) for h in heads)
        about["corpus"] = {
            "name": " + ".join(names),
            "part": first["corpus"].get("part"),
            "fingerprint": "+".join(dict.fromkeys(str(h.text) for h in heads)),
        }
    about["merged"] = [
        {
            "run": str(h.folder),
            "command": h.data.get("command"),
            "corpus": h.data["corpus"].get("name"),
            "shards": h.shards[0] if h.shards[1] > 1 else None,
            "tokens": h.tokens,
        }
        for h in heads
    ]
    about["merge_notes"] = notes
    return about
