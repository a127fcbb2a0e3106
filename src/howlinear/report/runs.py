"""What a report is made from: the files of a run folder, read and checked.

    run = read_run("runs/demo")
    run.blocks[3].r2, run.swaps[3].delta_ppl

A folder has a profile, or the log of a training, or both; the rest may be missing. Files come from
outside: what is not as expected is refused in one line, and what a nested value should have been is
looked at before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from howlinear.records.fields import BlockProbe, BlockProfile, BlockSwap
from howlinear.records.files import blocks_of, read_json, read_monitor
from howlinear.records.words import finite, ranges, short_names


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    number: int = 0  # among the runs of a report: decides colour and shape
    about: dict[str, Any] = field(default_factory=dict)  # profile.json without its blocks
    blocks: list[BlockProfile] = field(default_factory=list)
    swap: dict[str, Any] = field(default_factory=dict)
    swaps: dict[int, BlockSwap] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    probes: dict[int, BlockProbe] = field(default_factory=dict)
    compress: dict[str, Any] = field(default_factory=dict)
    untrained: dict[int, tuple[float, float]] = field(default_factory=dict)  # lowest, highest R2
    left_out: list[str] = field(default_factory=list)  # what the page does not show, and why
    training: list[dict[str, Any]] = field(default_factory=list)  # rows of a monitor's log

    def fact(self, *keys: str) -> Any:
        """A value inside `about`, or None."""
        found: Any = self.about
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    @property
    def part(self) -> str:
        """The class of its marks: a page switches a run's marks on and off together."""
        return f"r{self.number}"

    @property
    def model(self) -> str:
        return str(self.fact("model", "id") or self.name)

    def depth(self, index: int, relative: bool) -> float:
        """Where a block stands: its index, or from 0 to 1 beside runs of other depths."""
        last = max((b.index for b in self.blocks), default=0)
        return index / last if relative and last else float(index)


def numbered(runs: Sequence[Run]) -> list[Run]:
    return [replace(run, number=i) for i, run in enumerate(runs)]


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Several runs, under the shortest names that tell them apart."""
    paths = [Path(f) for f in folders]
    names = short_names(paths) if len(paths) > 1 else [paths[0].absolute().name]
    return [replace(read_run(path), name=n) for path, n in zip(paths, names, strict=True)]


def read_run(folder: str | Path) -> Run:
    folder = Path(folder)
    parts: dict[str, Any] = {"name": folder.absolute().name, "left_out": []}
    if (folder / "profile.json").exists() or not (folder / "monitor.jsonl").exists():
        parts["about"] = read_json(folder / "profile.json", "profile")
        parts["blocks"] = _in_order(folder, parts["about"], parts["left_out"])
    for kind in ("swap", "probe", "compress", "control-random-init"):
        if (folder / f"{kind}.json").exists():
            parts[kind] = _of_the_same(folder, kind, parts.get("about", {}))
    pairs: list[tuple[str, type[Any]]] = [("swap", BlockSwap), ("probe", BlockProbe)]
    for kind, record in pairs:
        if kind in parts:
            found = blocks_of(folder / f"{kind}.json", parts[kind], record)
            parts[f"{kind}s"] = {b.index: b for b in sorted(found, key=lambda b: b.index)}
    parts["probes"] = {i: p for i, p in parts.get("probes", {}).items() if finite(p.r2) is not None}
    parts["untrained"] = _bands(listed(parts.pop("control-random-init", {}), "blocks"))
    if (folder / "monitor.jsonl").exists():
        _, parts["training"] = read_monitor(folder / "monitor.jsonl")
    return Run(**parts)


def _in_order(folder: Path, about: dict[str, Any], left_out: list[str]) -> list[BlockProfile]:
    """Blocks by index, each once; those without an R2 are told and left out."""
    path = folder / "profile.json"
    blocks = sorted(blocks_of(path, about, BlockProfile), key=lambda b: b.index)
    if len({b.index for b in blocks}) < len(blocks):
        raise ValueError(f"{path} lists a block twice")
    missing = [b.index for b in blocks if finite(b.r2) is None or finite(b.r2_scalar) is None]
    if len(missing) == len(blocks):
        raise ValueError(f"{path} has no R2 of any block: do their outputs vary?")
    if missing:
        left_out.append(f"blocks without R2 are left out: {ranges(missing)}")
    return [b for b in blocks if b.index not in missing]


def _of_the_same(folder: Path, kind: str, about: dict[str, Any]) -> dict[str, Any]:
    """A file beside the profile, refused if it is about other weights."""
    data = read_json(folder / f"{kind}.json", kind)
    weights = [d["model"].get("weights") for d in (data, about) if isinstance(d.get("model"), dict)]
    if len(set(map(str, weights))) > 1:
        raise ValueError(
            f"{folder / kind}.json is about other weights than {folder / 'profile.json'}: "
            "make it again, or delete it"
        )
    return data


def _bands(blocks: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    found = [tuple(inside(b, k) for k in ("index", "low", "high")) for b in blocks]
    return {
        int(i): (a, b) for i, a, b in found if i is not None and a is not None and b is not None
    }


def inside(data: Any, *keys: str) -> float | None:
    """A finite number within nested values, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return finite(data)


def listed(data: Any, key: str) -> list[dict[str, Any]]:
    """A list of dicts within a dict; what is none of it is left out."""
    found = data.get(key) if isinstance(data, Mapping) else None
    return [d for d in found if isinstance(d, dict)] if isinstance(found, list) else []
