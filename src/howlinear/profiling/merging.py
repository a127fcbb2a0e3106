"""Runs of different machines, texts or days -> one run, as if one machine had read it all.

    result = merge_runs(["runs/0", "runs/1"], "runs/all")

Moments add up; scores and maps are made anew from the sums, block by block, so that two blocks' worth
of memory suffices. Runs that cannot add up (another model, other folds, the same rows twice) are
refused with what differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from howlinear.linear.folds import Folds, RowSplit, Split
from howlinear.linear.stores import BlockStore, name_of
from howlinear.profiling.profiler import Profile, check_store, twin_differences
from howlinear.profiling.scores import measure, measure_expert
from howlinear.records.fields import BlockExpert, BlockProfile
from howlinear.records.files import read_json
from howlinear.run.folder import RunFolder
from howlinear.run.tensors import read_store, save_moments, saved_maps, write_map

# what must be the same: (part of the head, names in it)
MODEL = ("family", "revision", "parameters", "dtype", "quantization", "weights")
SETTINGS = ("protocol", "folds", "solver", "precision", "experts", "seed", "window", "bos")


@dataclass(frozen=True)
class Piece:
    """One block as a head lists it."""

    index: int
    path: str
    d_in: int
    d_out: int
    expert: str = ""


@dataclass(frozen=True)
class Head:
    """What a run or a shard says of itself."""

    folder: Path
    data: dict[str, Any]
    blocks: list[Piece]

    @classmethod
    def read(cls, folder: Path) -> Head:
        kind = "shard" if (folder / "shard.json").is_file() else "profile"
        if not (folder / f"{kind}.json").is_file() and (folder / "progress.json").is_file():
            raise ValueError(f"{folder} is not finished: run its command again, it goes on")
        data = read_json(folder / f"{kind}.json", kind)
        parts = [data.get(name) for name in ("model", "corpus", "settings")]
        listed = data.get("blocks")
        if not all(isinstance(part, dict) for part in parts) or not isinstance(listed, list):
            raise ValueError(f"{folder / kind}.json lacks model, corpus, settings or blocks")
        names = ("index", "path", "d_in", "d_out")
        problem = f"{folder / kind}.json: its settings or blocks are damaged"
        try:
            listed = [*listed, *data.get("experts", [])]
            blocks = [
                Piece(**{name: b[name] for name in names}, expert=b.get("expert", ""))
                for b in listed
            ]
        except (KeyError, TypeError, AttributeError):
            raise ValueError(problem) from None
        for b in blocks:
            numbers = all(type(n) is int and n >= 0 for n in (b.index, b.d_in, b.d_out))
            if not numbers or not isinstance(b.path, str) or not isinstance(b.expert, str):
                raise ValueError(problem)
        settings, text = data["settings"], data["corpus"].get("fingerprint")
        shard = settings.get("shard") or [0, 1]
        counts = [settings.get("tokens"), settings.get("read", 0)]
        fine = isinstance(shard, list) and len(shard) == 2 and all(type(n) is int for n in shard)
        fine = fine and 0 <= shard[0] < shard[1] and all(type(n) is int for n in counts)
        if (
            not fine
            or not isinstance(text, str | None)
            or len(set(map(name_of, blocks))) < len(blocks)
        ):
            raise ValueError(problem)
        return cls(folder, data, blocks)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.data["settings"])

    @property
    def shard(self) -> tuple[int, int]:
        part, parts = self.settings.get("shard") or (0, 1)
        return int(part), int(parts)

    @property
    def tokens(self) -> int:
        """Tokens that this one has read."""
        return int(self.settings.get("read", self.settings["tokens"]))

    @property
    def text(self) -> Any:
        return self.data["corpus"].get("fingerprint")


def merge_runs(
    folders: Sequence[str | Path], out: str | Path, progress: Callable[[int], None] | None = None
) -> Profile:
    """Add the runs up and write the sum; `progress` hears of each block done."""
    out, heads = Path(out), [Head.read(Path(folder)) for folder in folders]
    if len(heads) < 2:
        raise ValueError("one run has nothing to be added to: name two or more")
    if any(out.resolve() == h.folder.resolve() for h in heads):
        raise ValueError(f"{out} is one of the runs: name another folder with -o")
    check_addable(heads)
    notes = check_shards(heads)
    settings = heads[0].settings | {"tokens": sum(h.tokens for h in heads)}
    for name in ("shard", "read"):
        settings.pop(name, None)
    folds = settings.get("folds")
    split: Split = Folds(folds) if type(folds) is int else RowSplit(settings["tokens"])
    part = out.with_name(f".{out.name}.part")  # the whole is there, or nothing of it
    shutil.rmtree(part, ignore_errors=True)
    records: list[BlockProfile] = []
    experts: list[BlockExpert] = []
    differences: dict[int, float] = {}
    for b in heads[0].blocks:
        store = _added(heads, b, notes)
        save_moments(part, store)
        if b.expert:
            found = measure_expert(store, split, settings["tokens"])
            experts.append(found.record)
            if found.affine is not None and found.r2_by_feature is not None:
                write_map(part, found.record, found.affine, found.r2_by_feature)
            continue
        check_store(store, split)
        measured = measure(store, split)
        write_map(part, measured.record, measured.affine, measured.r2_by_feature)
        records.append(measured.record)
        differences |= twin_differences([store], [measured], split)
        if progress is not None:
            progress(1)
    out.mkdir(parents=True, exist_ok=True)
    RunFolder(out).remove_results()
    RunFolder(out).remove_progress()
    for name in ("moments", "maps"):
        (part / name).rename(out / name)
    part.rmdir()
    maps, features = saved_maps(out, records)
    settings["precision_difference"] = differences or None
    return Profile(records, maps, features, [], settings, _about(heads, notes), experts)


def check_addable(heads: Sequence[Head]) -> None:
    """Refuse runs of different models, protocols or blocks, and say what differs."""
    first = heads[0]
    for other in heads[1:]:
        pairs = [(name, h.data["model"].get(name)) for name in MODEL for h in (first, other)]
        pairs += [(name, h.settings.get(name)) for name in SETTINGS for h in (first, other)]
        for (name, one), (_, two) in zip(pairs[::2], pairs[1::2], strict=True):
            if one != two:
                raise ValueError(
                    f"{other.folder} and {first.folder} do not add up: {name} is {two} and {one}"
                )
        one_has, two_has = set(first.blocks), set(other.blocks)
        odd = [b for b in [*first.blocks, *other.blocks] if (b in one_has) != (b in two_has)]
        if odd:
            which = first.folder if odd[0] in one_has else other.folder
            raise ValueError(
                f"{other.folder} and {first.folder} do not add up: only {which} has block "
                f"{odd[0].index} ({odd[0].path}, {odd[0].d_in} to {odd[0].d_out})"
            )


def check_shards(heads: Sequence[Head]) -> list[str]:
    """Refuse the same rows twice; say what is missing of a text that was divided."""
    notes = []
    by_text: dict[Any, list[Head]] = {}
    for head in heads:
        by_text.setdefault(head.text, []).append(head)
    for own in by_text.values():
        seen: dict[int, Head] = {}
        first = own[0]
        for head in own:
            same = [first.shard[1] == head.shard[1]]
            same += [
                first.settings.get(n) == head.settings.get(n) for n in ("tokens", "batch_size")
            ]
            if not all(same) or head.shard[0] in seen:
                twin = seen.get(head.shard[0], first)
                raise ValueError(
                    f"{head.folder} and {twin.folder} have read the same rows of one text: add runs "
                    "of different texts, or of different shards made with the same settings"
                )
            seen[head.shard[0]] = head
        missing = sorted(set(range(first.shard[1])) - seen.keys())
        if missing:
            notes.append(
                f"shards {missing} of {first.shard[1]} are missing: {first.data['corpus'].get('name')}"
            )
    return notes


def _added(heads: Sequence[Head], block: Piece, notes: list[str]) -> BlockStore:
    """Everybody's rows of one block."""
    total = read_store(heads[0].folder, block)
    weight = total.n
    for head in heads[1:]:
        more = read_store(head.folder, block)
        total, more = _with_units_in_common(total, more, notes)
        care = total.known.care
        if care is not None and more.known.care is not None:
            care = care + (more.known.care - care) * (more.n / max(weight + more.n, 1))
        weight += more.n
        try:
            total.merge(more)
        except ValueError as err:
            raise ValueError(f"{head.folder}, block {block.index} ({block.path}): {err}") from None
        total.known = replace(total.known, care=care)
    return total


def _with_units_in_common(
    a: BlockStore, b: BlockStore, notes: list[str]
) -> tuple[BlockStore, BlockStore]:
    """Two texts may choose different sink units: those that both chose first stay."""
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
        about.pop("asked", None)  # several texts: there is no one text to hold out from
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
            "shard": list(h.shard) if h.shard[1] > 1 else None,
            "tokens": h.tokens,
        }
        for h in heads
    ]
    about["merge_notes"] = notes
    return about
