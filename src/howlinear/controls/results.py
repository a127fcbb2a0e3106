"""The result of a control, and what several controls compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from howlinear.models.forward import WindowsLike
from howlinear.models.naming import BlockNames
from howlinear.profiling.passes import Course
from howlinear.profiling.profiler import Profile, profile
from howlinear.records.statistics import Sums, jackknife
from howlinear.records.words import known, plural
from howlinear.report.results import Result
from howlinear.run.work import Advance, Work


@dataclass(frozen=True, repr=False)
class Control(Result):
    """The fields of `control-KIND.json`."""

    kind: str
    blocks: list[dict[str, Any]]
    summary: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        return f"control-{self.kind}", {
            "settings": self.settings,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": self.blocks,
        }

    def _line(self) -> str:
        return f"{self.kind}, {plural(len(self.blocks), 'block')}"


def estimate(
    runs: list[Sums], paired: bool, statistic: Callable[..., float] = lambda r2s: r2s[0]
) -> dict[str, Any]:
    """A statistic of the R2s of these fold sums, by default the R2 of one, with its interval."""
    return jackknife(statistic, runs, paired=paired).to_dict()


def mean(values: Sequence[float]) -> float:
    """Of the values that are numbers: a block with constant output has no R2."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def profiled(
    model: nn.Module,
    windows: WindowsLike,
    work: Work,
    *,
    at: BlockNames,
    folds: int,
    advance: Advance,
) -> Profile:
    """A profile without expected costs of swaps, shared by the ranks of `work`."""
    return profile(
        model,
        windows,
        at=at,
        folds=folds,
        signal=False,
        course=Course(work.ranks, work.batch_size),
        progress=advance,
    )
