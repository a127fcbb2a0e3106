"""The profile of several checkpoints of one training run.

training = read_training(RunFolder("runs/control"), settings)
training.measure(model, windows, "step1000", describe(model, "org/model", "step1000"))
training.blocks[3]["r2"]                # of block 3, at every checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from howlinear.controls.results import profiled
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.naming import BlockNames
from howlinear.records.fields import MONITORED
from howlinear.records.words import plural
from howlinear.report.results import Result
from howlinear.run.folder import RunFolder, model_difference
from howlinear.run.work import Work

KIND = "control-checkpoints"
ABOUT = ("model", "corpus", "command", "versions")


@dataclass(repr=False)
class Training(Result):
    """Profiles of checkpoints; the fields of `control-checkpoints.json`."""

    settings: dict[str, Any]  # the field `asked`: a later call with the same ones adds checkpoints
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> list[str]:
        """Names of the checkpoints that are there."""
        return [c["name"] for c in self.checkpoints]

    def commit(self, name: str) -> str | None:
        """The commit on the hub that was measured as this checkpoint, if it is there and has one."""
        commits = {c["name"]: c["model"].get("revision") for c in self.checkpoints}
        return commits.get(name)

    def holds(self, name: str, about: dict[str, Any]) -> bool:
        """Is this checkpoint there? ValueError if the one that is there has other weights."""
        for checkpoint in self.checkpoints:
            if checkpoint["name"] == name:
                if difference := model_difference(checkpoint["model"], about):
                    raise ValueError(
                        f"{name} has changed since it was measured: {difference}; name another folder "
                        "with `out` to measure it again"
                    )
                return True
        return False

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """One row per block, with its R2 at every checkpoint."""
        by_block = zip(*(c["blocks"] for c in self.checkpoints), strict=True)
        return [
            {
                "index": records[0]["index"],
                "r2": [r["r2"] for r in records],
                "r2_body": [r["r2_body"] for r in records],
            }
            for records in by_block
        ]

    def measure(
        self,
        model: nn.Module,
        windows: WindowsLike,
        name: str,
        about: dict[str, Any],
        *,
        at: BlockNames = None,
        work: Work | None = None,
    ) -> None:
        """Profile one more checkpoint; `about` is what `models.loading.describe` says of it."""
        text, work = as_windows(windows).read(), work or Work()
        cells = list(text.folds(self.settings["folds"]).cells)
        if self.checkpoints and self.checkpoints[0].get("cells") != cells:
            raise ValueError(
                f"{name} is held out in other folds than {self.measured[0]} was: name another folder "
                "with `out`"
            )
        advance = work.begin(f"profiling {name}", text.tokens // work.ranks.count)
        options: dict[str, Any] = {"at": at, "folds": self.settings["folds"], "advance": advance}
        records = profiled(model, text, work, **options).blocks
        if self.checkpoints and len(records) != len(self.checkpoints[0]["blocks"]):
            raise ValueError(f"{name} has {len(records)} blocks, unlike the ones before it")
        rows = [{field: getattr(b, field) for field in MONITORED} for b in records]
        measured = {"name": name, "model": about, "tokens": text.tokens, "cells": cells}
        self.checkpoints.append({**measured, "blocks": rows})

    def sort(self, names: Sequence[str]) -> None:
        """In the order of `names`; checkpoints of earlier calls that are not among them come last."""
        place = {name: i for i, name in enumerate(names)}
        self.checkpoints.sort(key=lambda c: place.get(c["name"], len(place)))

    def _file(self) -> tuple[str, dict[str, Any]]:
        return KIND, {
            "asked": self.settings,
            "summary": {"measured": self.measured},
            "checkpoints": self.checkpoints,
            "blocks": self.blocks,
        }

    def _line(self) -> str:
        names = self.measured
        which = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
        return f"{len(names)} checkpoints{which}, {plural(len(self.blocks), 'block')}"


def read_training(run: RunFolder, settings: dict[str, Any]) -> Training:
    """The checkpoints that an earlier call with the same settings measured; none if there is no file."""
    if not run.has(KIND):
        return Training(settings)
    data, path = run.read(KIND), run.path(KIND)
    if data.get("asked") != settings:
        raise ValueError(f"{path} was measured with other settings: name another folder with `out`")
    checkpoints: Any = data.get("checkpoints")
    if not (isinstance(checkpoints, list) and all(map(_is_checkpoint, checkpoints))):
        raise ValueError(f"{path} is damaged, or does not say which weights it is about: remove it")
    about = {k: v for k, v in data.items() if k in ABOUT}
    return Training(settings, checkpoints, about)


def _is_checkpoint(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and isinstance(data.get("name"), str)
        and isinstance(data.get("model"), dict)
        and isinstance(data.get("blocks"), list)
        and all(isinstance(b, dict) and set(MONITORED) <= b.keys() for b in data["blocks"])
    )
