"""The profile of several checkpoints of one training run.

training = read_training(folder / "control-checkpoints.json", asked)
training.measure(model, windows, "step1000")
training.blocks[3]["r2"]                # of block 3, at every checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from howlinear.profiling.passes import Course
from howlinear.profiling.profiler import profile
from howlinear.records.fields import MONITORED
from howlinear.records.files import read_json
from howlinear.report.results import Result
from howlinear.run.work import Work


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

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """One row per block, with its R2 at every checkpoint."""
        if not self.checkpoints:
            return []
        first = self.checkpoints[0]["blocks"]
        return [
            {
                "index": b["index"],
                "r2": [c["blocks"][i]["r2"] for c in self.checkpoints],
                "r2_body": [c["blocks"][i]["r2_body"] for c in self.checkpoints],
            }
            for i, b in enumerate(first)
        ]

    def measure(
        self,
        model: nn.Module,
        windows: Tensor,
        name: str,
        *,
        at: str | None = None,
        work: Work | None = None,
    ) -> None:
        """Profile one more checkpoint."""
        work = work or Work()
        profiled = profile(
            model,
            windows,
            at=at,
            folds=self.settings["folds"],
            signal=False,
            course=Course(work.ranks, work.batch_size),
            progress=work.begin(f"profiling {name}", windows.numel() // work.ranks.count),
        )
        if self.checkpoints and len(profiled.blocks) != len(self.checkpoints[0]["blocks"]):
            raise ValueError(f"{name} has {len(profiled.blocks)} blocks, unlike the ones before it")
        rows = [{field: getattr(b, field) for field in MONITORED} for b in profiled.blocks]
        self.checkpoints.append({"name": name, "tokens": windows.numel(), "blocks": rows})

    def sort(self, names: Sequence[str]) -> None:
        """In the order of `names`; checkpoints of earlier calls that are not among them come last."""
        place = {name: i for i, name in enumerate(names)}
        self.checkpoints.sort(key=lambda c: place.get(c["name"], len(place)))

    def _file(self) -> tuple[str, dict[str, Any]]:
        return "control-checkpoints", {
            "asked": self.settings,
            "summary": {"measured": self.measured},
            "checkpoints": self.checkpoints,
            "blocks": self.blocks,
        }

    def _line(self) -> str:
        names = self.measured
        which = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
        return f"{len(names)} checkpoints{which}, {len(self.blocks)} blocks"


def read_training(path: Path, settings: dict[str, Any]) -> Training:
    """The checkpoints that an earlier call with the same settings measured; none if there is no file."""
    if not path.exists():
        return Training(settings)
    data = read_json(path, "control-checkpoints")
    if data.get("asked") != settings:
        raise ValueError(f"{path} was measured with other settings: name another folder with -o")
    checkpoints: Any = data.get("checkpoints")
    if not (isinstance(checkpoints, list) and all(map(_is_checkpoint, checkpoints))):
        raise ValueError(f"{path} is damaged: remove it")
    return Training(settings, checkpoints)


def _is_checkpoint(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and isinstance(data.get("name"), str)
        and isinstance(data.get("blocks"), list)
        and all(isinstance(b, dict) and set(MONITORED) <= b.keys() for b in data["blocks"])
    )
