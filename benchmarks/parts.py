"""Where the time of a command goes: seconds of its parts.

    python benchmarks/parts.py profile                          # of the built-in model, into a folder of its own
    python benchmarks/parts.py probe runs/demo --blocks 12-13
    python benchmarks/parts.py control matched runs/demo --blocks 12-13
    python benchmarks/parts.py control random-init runs/demo --blocks 12-13 --seeds 1
    python benchmarks/parts.py control cross-feed built-in built-in --pairs 12:13

The command runs as it is typed, on a copy of the run folder that is removed afterwards. The functions of
PARTS are timed, each without what it calls of the others; `rest` is all else, imports for the most part.
Results are not printed.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its signal.py would hide the standard library's

import contextlib
import functools
import importlib
import io
import os
import pkgutil
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import howlinear
from howlinear.cli.app import main as command
from howlinear.run.folder import RunFolder

PARTS = {  # module: functions, or methods as Class.method
    "load": {"models.loading": ["load", "describe"]},
    "text": {
        "models.corpus": ["open_text"],
        "models.cutting": ["windows", "spread_windows"],
        "profiling.merging": ["fit_windows"],
        "losses.protocols": ["held_out_tokens"],
    },
    "forward": {"models.forward": ["Forward.__call__"]},
    "fresh weights": {"controls.random_init": ["untrained"]},
    "blocks on other inputs": {"controls.feeding": ["Output.__call__"]},
    "blocks on Gaussian inputs": {"controls.feeding": ["on_gaussian"]},
    "Gaussian maps": {"controls.gaussian": ["expected_map", "transport", "whitening"]},
    "expected costs": {"profiling.gradients": ["sample_gradients"]},
    "precision": {"linear.stores": ["BlockStore._decide"]},
    "sums": {"linear.moments": ["Moments.update"]},
    "solving": {
        "linear.scoring": ["cross_validate"],
        "profiling.profiler": ["_measure_all"],  # whose threads cannot be timed by themselves
        "linear.unit_selection": ["joint_map"],
    },
    "bilinear": {"probing.bilinear": ["probe_products"]},
    "degree": {"probing.polynomials": ["degrees"]},
    "units": {"probing.ladder": ["regressions"]},
    "where": {"probing.reading": ["probe_residual"]},
    "quantised": {"probing.rounding": ["rounding_errors"]},
    "trained": {"probing.training": ["train", "baselines"]},
    "healing": {"probing.healing": ["probe_healing"]},
    "scores of layers": {"probing.samples": ["outcome"]},
    "cost of swaps": {"losses.sweeps": ["Sweeper.run"]},
    "writing": {"run.folder": ["RunFolder.add", "RunFolder.write"]},
}


class Parts:
    """Seconds of each part, without those of parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: list[str] = ["rest"]
        self.since = time.perf_counter()

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        self.count()
        self.running.append(part)
        try:
            yield
        finally:
            self.count()
            self.running.pop()

    def count(self) -> None:
        """Add the time since the last call to the part that runs."""
        now, part = time.perf_counter(), self.running[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            with self.inside(part):
                return function(*args, **options)

        return run


def watch(parts: Parts) -> None:
    """Time every function of PARTS, wherever it is imported."""
    for module in pkgutil.walk_packages(howlinear.__path__, "howlinear."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    ours = [m for name, m in sys.modules.items() if name.split(".")[0] == "howlinear"]
    for part, by_module in PARTS.items():
        for name, functions in by_module.items():
            module = importlib.import_module(f"howlinear.{name}")
            for function in functions:
                owner, _, method = function.rpartition(".")
                if owner:
                    cls = getattr(module, owner)
                    setattr(cls, method, parts.timed(part, getattr(cls, method)))
                    continue
                original = getattr(module, function)
                replacement = parts.timed(part, original)
                for place in ours:
                    for key, value in list(vars(place).items()):
                        if value is original:
                            setattr(place, key, replacement)


def copied(argument: str, folder: Path) -> str:
    """A run folder's copy, with links to its large files; any other argument as it is."""
    if not RunFolder(argument).has("profile"):
        return argument
    copy = folder / "run"
    copy.mkdir()
    for path in Path(argument).resolve().iterdir():
        if path.is_dir():
            os.symlink(path, copy / path.name)
        elif path.name == "profile.json":
            shutil.copy(path, copy)
    return str(copy)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    parts = Parts()
    watch(parts)
    with tempfile.TemporaryDirectory() as place:
        sys.argv[1:] = [copied(argument, Path(place)) for argument in sys.argv[1:]]
        named = "run" in [Path(a).name for a in sys.argv]
        if sys.argv[1] == "profile" or (sys.argv[1] == "control" and not named):
            sys.argv += ["-o", f"{place}/new"]
        parts.since = began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            command()
        parts.count()
        total = time.perf_counter() - began
    for part, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
        if seconds >= 0.005 * total:
            print(f"{part:26} {seconds:8.1f} s {seconds / total:6.1%}")
    print(f"{'all':26} {total:8.1f} s")


if __name__ == "__main__":
    main()
