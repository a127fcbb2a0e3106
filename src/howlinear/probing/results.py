"""What probes of a run's blocks found: the fields of probe.json, merging, and a summary over blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from howlinear.losses.perplexity import Loss
from howlinear.probing.kinds import KINDS, Layers
from howlinear.records.fields import BlockProbe
from howlinear.records.files import blocks_of
from howlinear.records.statistics import over_blocks, pearson, spearman
from howlinear.records.words import plural
from howlinear.report.results import Result
from howlinear.run.folder import RunFolder


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Result):
    """`layers[i][kind]` are layers, by name, that can be swapped in for block i."""

    blocks: list[BlockProbe]
    layers: dict[int, dict[str, Layers]]
    base: Loss | None  # of the original model; None: no costs were measured
    settings: dict[str, Any]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """The fields of `probe.json`."""
        return "probe", {
            "settings": self.settings,
            "base": None if self.base is None else self.base.to_dict(),
            "summary": self.summary,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def _line(self) -> str:
        made = [kind for kind in KINDS if any(getattr(b, kind) is not None for b in self.blocks)]
        return f"{plural(len(self.blocks), 'block')}; {', '.join(made)}"

    def save(self, folder: str | Path) -> None:
        """Write probe.json. Probes of other kinds and blocks on the same rows stay beside these."""
        run, data = RunFolder(folder), self.to_dict()
        before = run.alike(data)
        if before is None:
            run.add(data)
            return
        old = {b.index: b for b in blocks_of(run.path("probe"), before, BlockProbe)}
        whole = old | {b.index: b.beside(old.get(b.index)) for b in self.blocks}
        left = [part for b in self.blocks if (part := _replaced(old.get(b.index), b))]
        data = replace(self, blocks=[whole[i] for i in sorted(whole)]).to_dict()
        data["base"] = data["base"] or before.get("base")
        other = [before | {"blocks": [b.to_dict() for b in left]}] if left else []
        run.add(data, before, other)


def _replaced(old: BlockProbe | None, new: BlockProbe) -> BlockProbe | None:
    """The kinds of `old` that `new` replaces by ones of another rank, solver or number of starts."""
    if old is None:
        return None
    pairs = {k: (getattr(old, k) or {}, getattr(new, k) or {}) for k in KINDS}
    measured = {k: pair for k, pair in pairs.items() if all(pair) and "skipped" not in pair[0]}
    differ = {k for k, (before, now) in measured.items() if _way(before) != _way(now)}
    others: dict[str, Any] = {k: None for k in KINDS if k not in differ}
    return replace(old, **others) if differ else None


def summarise(blocks: Sequence[BlockProbe]) -> dict[str, Any]:
    """Over blocks: do the gain of products and the error of rounding correlate with 1 - R2?"""
    ways = [_way(b.bilinear) for b in blocks if b.bilinear and "gain" in b.bilinear]
    usual = max(ways, key=ways.count, default=None)  # ranks and solvers are not mixed
    gains = [(b.bilinear["gain"], b.r2) for b in blocks if b.bilinear and _way(b.bilinear) == usual]
    rounded = [
        (b.quantised["int4"].get("error"), b.r2)
        for b in blocks
        if b.quantised and isinstance(b.quantised.get("int4"), dict)
    ]
    summary: dict[str, Any] = {}
    for name, pairs in (("bilinear_gain", gains), ("int4_error", rounded)):
        finite = [p for p in pairs if all(isinstance(v, float) and v == v for v in p)]
        if not finite:
            continue
        values, rests = [v for v, _ in finite], [1 - r2 for _, r2 in finite]
        summary[name] = {
            "blocks": len(values),
            "median": median(values),
            "max": max(values),
            "pearson_with_1_minus_r2": over_blocks(pearson, values, rests).to_dict(),
            "spearman_with_1_minus_r2": over_blocks(spearman, values, rests).to_dict(),
        }
    return summary


def _way(record: dict[str, Any]) -> tuple[Any, ...]:
    """How a layer was fitted: its rank, the solver and the number of random starts."""
    seeds = record.get("seeds")
    return record.get("rank"), record.get("solver"), len(seeds) if isinstance(seeds, list) else None
