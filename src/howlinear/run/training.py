"""The state of a training under way: what it goes on from when it is interrupted.

    state = TrainingState(folder, asked, every=60)  # seconds between saves
    saved = state.read()                        # (facts, tensors) of the same request, or None
    if state.due: state.write(step, facts, tensors)
    state.remove()                              # the training is complete

Two files in the folder: STEP.safetensors, with a checksum, and state.json, written after it, which names
it. The older tensors are removed when the newer state is complete. A state of another request (other
settings, texts or weights to start from) and a damaged one are not used: `problem` says why.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.tensors import read_tensors, write_tensors


class TrainingState:
    """What is on disk of a training; nothing without a folder. `asked` must be the same to go on."""

    def __init__(self, folder: Path | None, asked: Mapping[str, Any], every: float = 60) -> None:
        self.folder, self.asked, self.every = folder, clean(asked), every
        self.problem = ""  # why a state in the folder was not used
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Have `every` seconds passed since the last save?"""
        return self.folder is not None and time.monotonic() - self._last >= self.every

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The last state that was written for the same request."""
        if self.folder is None or not self.folder.is_dir():
            return None
        try:
            about = read_json(self.folder / "state.json", "training")
            before = about.get("asked")
            if differ := [n for n in self.asked if (before or {}).get(n) != self.asked[n]]:
                raise ValueError(f"it has other {', '.join(differ)}")
            tensors = read_tensors(self._path(int(about["step"])), kind="training")
            return dict(about["facts"]), tensors
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            self.problem = f"the state in {self.folder} was not used: {problem}"
            return None

    def write(self, step: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the state after so many steps, and remove the one before.

        Where that fails (a full disk), the training goes on without saves, and `problem` says so.
        """
        assert self.folder is not None
        path = self._path(step)
        about = {"kind": "training", "schema": SCHEMA, "asked": self.asked}
        try:
            write_tensors(path, tensors, kind="training")
            write_json(self.folder / "state.json", {**about, "step": step, "facts": facts})
            for older in self.folder.glob("*.safetensors"):
                if older != path:
                    older.unlink()
        except OSError as problem:
            self.problem, self.every = f"no state was saved in {self.folder}: {problem}", math.inf
        self._last = time.monotonic()

    def remove(self) -> None:
        """The training is complete."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{step}.safetensors"
