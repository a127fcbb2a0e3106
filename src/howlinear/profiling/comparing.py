"""Profiles side by side: correlations, mean shifts, and maps of one text scored on another.

    result = compare_runs(["runs/wikitext", "runs/code"])       # or profiles: compare_runs([a, b])
    result.pairs[0]["pearson"], result.pairs[0]["mean_shift"], result.crossed[0]["r2"]

Everything is read from run folders; no model is loaded. Runs of one model on different texts are
also crossed: the map that was fitted on one text is scored on the moments of the other, rows that
it never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from howlinear.linear.accumulators import merged
from howlinear.linear.scoring import score
from howlinear.linear.stores import PARTS
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import agreement, fold_sums, jackknife, r2s, same_windows
from howlinear.records.words import short_names, signed
from howlinear.report.results import Result
from howlinear.run.tensors import Saved, read_moments


@dataclass(frozen=True, repr=False)
class RunComparison(Result):
    """Comparisons of all pairs of runs, and the profiles that they were made from."""

    names: list[str]
    profiles: list[Profile]
    pairs: list[dict[str, Any]]
    crossed: list[dict[str, Any]]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """A row a depth: each run's R2 and its standard error."""
        deepest = max(self.profiles, key=lambda p: len(p.blocks))
        return [
            {
                "index": b.index,
                "runs": [_shown(p.blocks[i]) if i < len(p.blocks) else None for p in self.profiles],
            }
            for i, b in enumerate(deepest.blocks)
        ]

    def _file(self) -> tuple[str, dict[str, Any]]:
        return "compare", {
            "runs": [
                {
                    "name": name,
                    "model": p.about.get("model"),
                    "corpus": p.about.get("corpus"),
                    "settings": p.settings,
                }
                for name, p in zip(self.names, self.profiles, strict=True)
            ],
            "pairs": self.pairs,
            "crossed": self.crossed,
            "notes": self.notes,
            "blocks": self.blocks,
        }

    def _runs(self) -> list[tuple[str, Sequence[BlockProfile]]]:
        return [(name, p.blocks) for name, p in zip(self.names, self.profiles, strict=True)]

    def _line(self) -> str:
        shifts = [
            f"{pair['a']} to {pair['b']} {signed(pair['mean_shift']['value'], 3)}"
            for pair in self.pairs[:3]
        ]
        more = ", ..." if len(self.pairs) > 3 else ""
        return f"{len(self.names)} runs; mean shift of R2 {', '.join(shifts) or '-'}{more}"


def compare_runs(runs: Sequence[str | Path | Profile]) -> RunComparison:
    """Compare every run, a folder or a `Profile`, with every other."""
    if len(runs) < 2:
        raise ValueError("one run has nothing to be compared with: name two or more")
    profiles = [run if isinstance(run, Profile) else Profile.load(run) for run in runs]
    names = _names(runs)
    notes = []
    if len({p.settings.get("protocol") for p in profiles}) > 1:
        notes.append("the runs follow different protocols: their numbers are not of one kind")
    pairs = []
    for i, j in combinations(range(len(runs)), 2):
        if len(profiles[i].blocks) != len(profiles[j].blocks):
            notes.append(
                f"{names[i]} and {names[j]} have {len(profiles[i].blocks)} and "
                f"{len(profiles[j].blocks)} blocks: no depth of one is a depth of the other"
            )
            continue
        if [b.index for b in profiles[i].blocks] != [b.index for b in profiles[j].blocks]:
            notes.append(f"{names[i]} and {names[j]} hold blocks of different depths")
        sums = [fold_sums(profiles[k].blocks) for k in (i, j)]
        paired = same_windows(
            *({**p.about, "settings": p.settings} for p in (profiles[i], profiles[j]))
        )
        pair = agreement(*sums, paired=paired)
        if (at := pair["largest_shift_at"]) is not None:
            pair["largest_shift_at"] = profiles[i].blocks[at].index
        pairs.append({"a": names[i], "b": names[j], **pair})
    crossed = []
    for i, j in permutations(range(len(runs)), 2):
        if _crossable(profiles[i], profiles[j]):
            scored = crossed_r2(profiles[i], profiles[j])
            crossed.append({"fit": names[i], "scored": names[j], **scored})
    return RunComparison(names, profiles, pairs, crossed, notes)


def _names(runs: Sequence[str | Path | Profile]) -> list[str]:
    """Short names of folders; profiles are numbered."""
    paths = [Path(run) for run in runs if not isinstance(run, Profile)]
    folders = iter(short_names(paths) if paths else [])
    named = enumerate(runs, 1)
    return [f"profile {i}" if isinstance(run, Profile) else next(folders) for i, run in named]


def crossed_r2(fitted: Profile, scored: Profile) -> dict[str, Any]:
    """R2 of one run's maps on the rows of another, each fold around its own mean."""
    assert isinstance(scored.maps, Saved)
    sums: list[list[list[float]]] = []
    for block in scored.blocks:
        parts = read_moments(scored.maps.folder, block)
        affine, folds = fitted.maps[block.index], []
        for g in range(len(parts[PARTS[0]])):
            rows = merged([parts[part][g] for part in PARTS], block.d_in)
            if rows.n:
                folds.append(score(affine, rows).sums())
        sums.append(folds)
    mean = jackknife(lambda a: sum(a) / len(a), [sums], paired=True)
    return {"mean": mean.to_dict(), "r2": r2s(sums)}


def _shown(b: BlockProfile) -> dict[str, Any]:
    return {"path": b.path, "r2": b.r2, "r2_se": b.r2_se, "r2_body": b.r2_body}


def _crossable(a: Profile, b: Profile) -> bool:
    """The same weights on different texts, with the moments of the second in a run folder."""
    if not isinstance(b.maps, Saved):
        return False
    weights = [(p.about.get("model") or {}).get("weights") for p in (a, b)]
    texts = [(p.about.get("corpus") or {}).get("fingerprint") for p in (a, b)]
    same = [(x.index, x.d_in, x.d_out) for x in a.blocks] == [
        (x.index, x.d_in, x.d_out) for x in b.blocks
    ]
    return same and weights[0] is not None and weights[0] == weights[1] and texts[0] != texts[1]
