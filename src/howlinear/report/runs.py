"""The content of a run folder, as a report uses it.

    run = read_run("runs/demo")
    run.blocks[3].r2, run.swaps[3].delta_ppl

A folder has a profile, or the log of a training, or both; the other files may be missing. Files may
come from strangers: an unexpected value is refused in one line, or left out where `inside` and
`listed` read it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from howlinear.records.fields import BlockProbe, BlockProfile, BlockSwap
from howlinear.records.verdicts import SAFE
from howlinear.records.words import finite, ranges, short_names, title
from howlinear.run.folder import COURSE, RunFolder, records_of

UNTRAINED = "control-random-init"
ADDED = ("swap", "probe", UNTRAINED)  # kinds of which a page shows several sets of settings


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    folder: str = "RUN"  # as it was named, for commands that a page suggests
    number: int = 0  # among the runs of a report: decides colour and shape
    about: dict[str, Any] = field(default_factory=dict)  # profile.json without its blocks
    blocks: list[BlockProfile] = field(default_factory=list)
    swap: dict[str, Any] = field(default_factory=dict)
    swaps: dict[int, BlockSwap] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    probes: dict[int, BlockProbe] = field(default_factory=dict)
    compress: dict[str, Any] = field(default_factory=dict)
    untrained: dict[int, tuple[float, float]] = field(default_factory=dict)  # lowest, highest R2
    left_out: list[str] = field(default_factory=list)  # notes on what is left out or differs
    training: list[dict[str, Any]] = field(default_factory=list)  # rows of a monitor's log

    def fact(self, *keys: str) -> Any:
        """A value inside `about`, or None."""
        return _nested(self.about, keys)

    @property
    def part(self) -> str:
        """The class of its marks: a page switches a run's marks on and off together."""
        return f"r{self.number}"

    @property
    def model(self) -> str:
        return str(self.fact("model", "id") or self.name)

    @property
    def title(self) -> str:
        """The model's name, without folders where it is an absolute path."""
        return title(self.model)

    @property
    def limit(self) -> float:
        """Nats per token below which a swap is called safe."""
        return inside(self.swap, "settings", "safe") or SAFE

    def depth(self, index: int, relative: bool) -> float:
        """A block's place on the axis: its index, or from 0 to 1 beside runs of other depths."""
        last = max((b.index for b in self.blocks), default=0)
        return index / last if relative and last else float(index)


def numbered(runs: Sequence[Run]) -> list[Run]:
    return [replace(run, number=i) for i, run in enumerate(runs)]


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Several runs, under the shortest distinct names."""
    paths = [Path(f) for f in folders]
    names = short_names(paths) if len(paths) > 1 else [paths[0].absolute().name]
    return [replace(read_run(path), name=n) for path, n in zip(paths, names, strict=True)]


def read_run(folder: str | Path) -> Run:
    run = RunFolder(folder)
    profiled = run.has("profile") or not run.monitor.exists()
    about = run.read("profile") if profiled else {}
    blocks, left_out = _with_r2(run.path("profile"), about) if profiled else ([], [])
    files = {
        kind: run.check_same_weights(kind)
        for kind in ("swap", "probe", "compress", UNTRAINED)
        if run.has(kind)
    }
    untrained = [b for each in reversed(run.sets(UNTRAINED)) for b in listed(each, "blocks")]
    probes = _probes(run)
    return Run(
        run.folder.absolute().name,
        folder=shlex.quote(str(folder)),
        about=about,
        blocks=blocks,
        swap=files.get("swap", {}),
        swaps=run.newest("swap", BlockSwap),
        probe=files.get("probe", {}),
        probes={i: p for i, p in probes.items() if finite(p.r2) is not None},
        compress=files.get("compress", {}),
        untrained=_ranges(untrained),
        left_out=left_out + [n for kind in ADDED for n in _other_settings(run, kind)],
        training=run.training(),
    )


def _with_r2(path: Path, about: dict[str, Any]) -> tuple[list[BlockProfile], list[str]]:
    """Blocks with an R2 in depth order, and a note on those without."""
    blocks = records_of(path, about, BlockProfile)
    missing = [i for i, b in blocks.items() if finite(b.r2) is None or finite(b.r2_scalar) is None]
    if len(missing) == len(blocks):
        raise ValueError(f"{path} has no R2 of any block: do their outputs vary?")
    note = [f"blocks without R2 are left out: {ranges(missing)}"] if missing else []
    return [b for i, b in blocks.items() if i not in missing], note


def _probes(run: RunFolder) -> dict[int, BlockProbe]:
    """The newest probe of each kind, by block index in depth order."""
    probes: dict[int, BlockProbe] = {}
    for each in run.sets("probe"):
        for index, older in records_of(run.path("probe"), each, BlockProbe).items():
            probes[index] = probes[index].beside(older) if index in probes else older
    return dict(sorted(probes.items()))


def _other_settings(run: RunFolder, kind: str) -> list[str]:
    """Notes on blocks that were measured with other settings than the newest result."""
    newest, *earlier = run.sets(kind) or [{}]
    seen = {b.get("index") for b in listed(newest, "blocks")}
    notes = []
    for each in earlier:
        indices = {b.get("index") for b in listed(each, "blocks")}
        shown = indices if kind == "probe" else indices - seen
        settings = each.get("settings")
        if shown and isinstance(settings, dict):
            described = _described({k: v for k, v in settings.items() if k not in COURSE})
            blocks = ranges(sorted(i for i in shown if isinstance(i, int)))
            notes.append(f"{kind} of blocks {blocks} with other settings: {described}")
        seen |= indices
    return notes


def _described(settings: Mapping[str, Any]) -> str:
    parts = ((k, _described(v) if isinstance(v, dict) else v) for k, v in settings.items())
    return ", ".join(f"{k} {v}" for k, v in parts if v is not None)


def _ranges(blocks: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Lowest and highest R2 by block index."""
    by_index = {}
    for b in blocks:
        index, low, high = (inside(b, key) for key in ("index", "low", "high"))
        if index is not None and low is not None and high is not None:
            by_index[int(index)] = low, high
    return by_index


def inside(data: Any, *keys: str) -> float | None:
    """A finite number within nested values, or None."""
    return finite(_nested(data, keys))


def _nested(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def listed(data: Any, key: str) -> list[dict[str, Any]]:
    """The dicts of a list within a dict; empty if there is no such list."""
    items = _nested(data, [key])
    return [d for d in items if isinstance(d, dict)] if isinstance(items, list) else []
