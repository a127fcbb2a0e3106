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
from howlinear.records.statistics import over_blocks, pearson, spearman
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
        return f"{len(self.blocks)} blocks; {', '.join(made)}"

    def save(self, folder: str | Path) -> None:
        """Write probe.json. Probes of other kinds or blocks on the same rows stay in it."""
        by_index, base = _read(RunFolder(folder), self.settings)
        for block in self.blocks:
            old = by_index.get(block.index)
            kept = {} if old is None else {k: v for k in KINDS if (v := getattr(old, k))}
            new = {k: v for k in KINDS if (v := getattr(block, k)) is not None}
            linear = block.linear if old is None else old.linear | block.linear
            by_index[block.index] = replace(block, linear=linear, **(kept | new))
        data = replace(self, blocks=[by_index[i] for i in sorted(by_index)]).to_dict()
        RunFolder(folder).write(data | {"base": data["base"] or base})


def _read(run: RunFolder, settings: dict[str, Any]) -> tuple[dict[int, BlockProbe], Any]:
    """Probes that probe.json has of the same rows, by block index, and its base.

    Costs on other tokens are left out. A file that cannot be read counts as empty.
    """
    try:
        data = run.read("probe")
        before, blocks = data["settings"], [BlockProbe.from_dict(b) for b in data["blocks"]]
        if any(before[name] != settings.get(name) for name in ("rows", "seed")):
            return {}, None
        base = data["base"]
        if any(before[name] != settings.get(name) for name in ("predicted", "protocol")):
            blocks, base = [_without_costs(b) for b in blocks], None
    except (ValueError, KeyError, TypeError):
        return {}, None
    return {b.index: b for b in blocks}, base


def _without_costs(block: BlockProbe) -> BlockProbe:
    kinds: dict[str, Any] = {
        kind: {name: value for name, value in record.items() if name != "swap"}
        for kind in ("linear", *KINDS)
        if (record := getattr(block, kind)) is not None
    }
    return replace(block, **kinds)


def summarise(blocks: Sequence[BlockProbe]) -> dict[str, Any]:
    """Over blocks: do the gain of products and the error of rounding correlate with 1 - R2?"""
    ways = [_way(b) for b in blocks if b.bilinear and "gain" in b.bilinear]
    usual = max(ways, key=ways.count, default=None)  # ranks and solvers are not mixed
    gains = [(b.bilinear["gain"], b.r2) for b in blocks if b.bilinear and _way(b) == usual]
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


def _way(block: BlockProbe) -> tuple[Any, Any]:
    """Rank and solver of the bilinear probe."""
    record = block.bilinear or {}
    return record.get("rank"), record.get("solver")
