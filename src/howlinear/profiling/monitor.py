"""Watch linearity form while a model trains.

    monitor = LinearityMonitor(model, windows, every=500, path="run/monitor.jsonl")
    for step, batch in enumerate(loader):
        logged = monitor.step(step)             # {"linearity/block_07/r2": 0.81, ...} or None
        ...                                     # train on the batch
    monitor.finish(step + 1)                    # the weights that came out

    trainer.add_callback(LinearityCallback(trainer, windows, every=500))        # transformers

A measurement is a profile of the weights of the moment on a small text that stays the same: the
numbers are those of `profile(model, windows)`. Training is not affected: dropout is off during a
measurement and on again afterwards, no gradient is touched and no random number is drawn.
Measurements that would take more than `max_overhead` of the time that training itself took so far
are left out; the first and the last are always made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from howlinear.linear.folds import check_rows
from howlinear.models.families import Block, blocks
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.hooks import evaluating
from howlinear.models.naming import BlockNames
from howlinear.profiling.profiler import Profile, profile
from howlinear.records.fields import MONITORED
from howlinear.records.files import SCHEMA, atomic, clean, read_monitor
from howlinear.records.words import plural
from howlinear.report.results import extremes

logger = logging.getLogger(__name__)

LOGGED = ("r2", "r2_se", "r2_body", "effective_rank")  # of each block, to the trainer's log


class LinearityMonitor:
    """Profiles of a model in training, on windows (n, length) that stay the same.

    `every` is a number of steps, or the steps to measure at. `path` is a JSONL file that gets a line
    with each measurement; a training that is resumed continues the same file.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: WindowsLike,
        *,
        every: int | Collection[int] = 500,
        at: BlockNames = None,
        folds: int = 5,
        batch_size: int = 8,
        max_overhead: float | None = 0.05,
        path: str | Path | None = None,
    ) -> None:
        if isinstance(every, int) and every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        if max_overhead is not None and not max_overhead > 0:
            raise ValueError(f"max_overhead must be positive, or None for no bound: {max_overhead}")
        # of a compiled model the original: hooks on the wrapper do not run
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.blocks: list[Block] = blocks(self.model, at)
        text, widest = as_windows(windows).read(), max(b.d_in for b in self.blocks)
        split, ids = text.folds(folds), text.all_ids
        check_rows(ids.shape[0], ids.shape[1], widest, split)
        self.windows, self.every, self.folds = ids, every, folds
        self._cells = list(split.cells)
        self.batch_size, self.max_overhead = batch_size, max_overhead
        self.rows: list[dict[str, Any]] = []
        self.latest: Profile | None = None
        self.spent = 0.0  # seconds that measurements took
        self.skipped = 0  # measurements that were due and would have taken too long
        self._began: float | None = None
        self._cost = 0.0  # of the last measurement
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.exists():
            header, self.rows = read_monitor(self._path)
            if any(header.get(name) != value for name, value in self._header.items()):
                raise ValueError(f"{path} is of another text, model or setting: name another path")

    def to_dict(self) -> dict[str, Any]:
        """The file's header, and its other lines as `rows`."""
        data: dict[str, Any] = clean({**self._header, "rows": self.rows})
        return data

    def _repr_html_(self) -> str:
        from howlinear.report.notebook import training_html

        return training_html(repr(self).strip("<>"), clean(self.rows))

    def __repr__(self) -> str:
        text = f"{plural(len(self.blocks), 'block')}, {len(self.rows)} measurements"
        if self.rows and self.rows[-1]["blocks"]:
            r2s = ((b["index"], b["r2"]) for b in self.rows[-1]["blocks"])
            text += f"; at step {self.rows[-1]['step']} R2 {extremes(r2s)}"
        return f"<LinearityMonitor: {text}>"

    @property
    def overhead(self) -> float:
        """Time spent on measurements over time spent on training, since the first step."""
        if self._began is None:
            return math.nan
        trained = time.perf_counter() - self._began - self.spent
        return self.spent / trained if trained > 0 else math.inf

    def step(self, step: int) -> dict[str, float] | None:
        """Measure if a measurement is due. What to log, or None."""
        if self._began is None:
            self._began = time.perf_counter()
            self.rows = [row for row in self.rows if row["step"] < step]  # of an earlier training
            return self.measure(step)
        due = step % self.every == 0 if isinstance(self.every, int) else step in self.every
        if not due or self._measured(step):
            return None
        trained = time.perf_counter() - self._began - self.spent
        if self.max_overhead is not None and self.spent + self._cost > self.max_overhead * trained:
            self.skipped += 1
            return None
        return self.measure(step)

    def finish(self, step: int) -> dict[str, float] | None:
        """Measure the final weights, unless that is done."""
        return None if self._measured(step) else self.measure(step)

    def measure(self, step: int) -> dict[str, float]:
        """Measure now. Weights that are not finite are reported in the log and the file, not raised."""
        began = time.perf_counter()
        row: dict[str, Any] = {"step": step}
        try:
            device = next(self.model.parameters()).device.type
            with evaluating(self.model), torch.autocast(device, enabled=False):
                self.latest = profile(
                    self.model,
                    self.windows,
                    at=self.blocks,
                    folds=self.folds,
                    signal=False,
                    batch_size=self.batch_size,
                )
            row["blocks"] = [
                {name: getattr(b, name) for name in MONITORED} for b in self.latest.blocks
            ]
        except ValueError as err:
            logger.warning("step %d is not measured: %s", step, err)
            row |= {"problem": str(err), "blocks": []}
        self._cost = time.perf_counter() - began
        self.spent += self._cost
        overhead = self.overhead if self.rows else None  # nothing is trained before the first
        self.rows.append(row | {"seconds": self._cost, "overhead": overhead})
        self._write()
        return self._to_log(row)

    def _measured(self, step: int) -> bool:
        return bool(self.rows) and self.rows[-1]["step"] == step

    def _to_log(self, row: dict[str, Any]) -> dict[str, float]:
        digits = len(str(max(b.index for b in self.blocks)))
        logs = {
            f"linearity/block_{b['index']:0{max(digits, 2)}}/{name}": float(b[name])
            for b in row["blocks"]
            for name in LOGGED
            if b[name] is not None
        }
        if row["blocks"]:
            logs["linearity/r2_mean"] = sum(b["r2"] for b in row["blocks"]) / len(row["blocks"])
        return logs | {"linearity/overhead": self.overhead}

    # -- the file ---------------------------------------------------------------------------------

    @property
    def _header(self) -> dict[str, Any]:
        ids = self.windows.cpu().contiguous()
        return {
            "kind": "monitor",
            "schema": SCHEMA,
            "windows": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
            "tokens": ids.numel(),
            "window": ids.shape[1],
            "folds": self.folds,
            "cells": self._cells,
            "paths": [b.path for b in self.blocks],
        }

    def _write(self) -> None:
        """Rewrite the whole file, a few kilobytes: never half of a line."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(clean(line), allow_nan=False) for line in (self._header, *self.rows))
        with atomic(self._path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class LinearityCallback(TrainerCallback):
    """A monitor for transformers' Trainer, whose own log carries the numbers to wherever it reports.

    `trainer.add_callback(LinearityCallback(trainer, windows, every=500))`; options are the
    monitor's. `path` is monitor.jsonl in the trainer's output folder unless said.
    """

    def __init__(self, trainer: Any, windows: Tensor, **options: Any) -> None:
        if getattr(trainer, "is_fsdp_enabled", False) or trainer.is_deepspeed_enabled:
            raise ValueError(
                "weights that are spread over devices (FSDP, DeepSpeed) cannot be measured while "
                "they train: measure checkpoints, `howlinear control checkpoints`"
            )
        options.setdefault("path", Path(trainer.args.output_dir) / "monitor.jsonl")
        self.trainer = trainer
        self.monitor = LinearityMonitor(trainer.model, windows, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log(state, control, self.monitor.step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log(state, control, self.monitor.step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log(state, control, self.monitor.finish)

    def _log(self, state: Any, control: Any, measure: Any) -> None:
        if not state.is_world_process_zero:
            return
        logs = measure(state.global_step)
        if logs:
            due = control.should_log
            self.trainer.log(logs)
            control.should_log = due  # a log counts as the step's own, which is yet to come
