"""Linearity over training: a heat map of R2 by block and step, from a monitor's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.words import number
from howlinear.report.canvas import Canvas
from howlinear.report.figure import Figure
from howlinear.report.runs import Run, inside, listed
from howlinear.report.styles import heat

READING = (
    "A column a measurement, in the order of steps; a row a block. Bright is linear, dark is not "
    "(0 or less)."
)
LEFT, WIDTH = 58, 640
CELLS, BLOCKS = 480, 256  # drawn at most: every n-th step beyond that, and no more blocks


def draw(runs: Sequence[Run]) -> Figure | None:
    logs = [(i, run, log) for i, run in enumerate(runs) if (log := measured(run.training))]
    if not logs:
        return None
    canvas = Canvas(780, 0)
    for i, run, log in logs:
        name = run.name if len(runs) > 1 else ""
        _map(canvas, log, name, f"r{i}")
    blocks = sorted({k for *_, log in logs for _, at in log for k in at})
    rows = [(r.name, step, *(at.get(k) for k in blocks)) for _, r, log in logs for step, at in log]
    columns = ("run", "step", *(f"block {k}" for k in blocks))
    title = "Linearity over training"
    return Figure("training", title, READING, canvas, columns, rows, by_run=False)


Log = list[tuple[int, dict[int, float]]]  # step, {block: R2}


def measured(rows: list[dict[str, Any]]) -> Log:
    """A log thinned to what can be drawn: the first and last steps remain, and so many blocks."""
    found = []
    for row in rows:
        pairs = [(inside(b, "index"), inside(b, "r2")) for b in listed(row, "blocks")[:BLOCKS]]
        at = {int(k): r2 for k, r2 in pairs if k is not None and k >= 0 and r2 is not None}
        if at:
            found.append((int(row["step"]), at))
    most = max(8, CELLS // max((len(at) for _, at in found), default=1))
    every = -(-len(found) // most)
    return [f for i, f in enumerate(found) if i % max(every, 1) == 0 or i == len(found) - 1]


def _map(canvas: Canvas, log: Log, name: str, part: str) -> None:
    blocks = sorted({k for _, at in log for k in at})
    cell, wide = min(22.0, max(7.0, 320 / len(blocks))), WIDTH / len(log)
    y, high = canvas.height + 34, cell * len(blocks)
    canvas.height = y + high + 44
    if name:
        canvas.text((LEFT, y - 12), name, mode="bold", anchor="start", part=part)
    apart = max(1, round(46 / wide))
    for c, (step, at) in enumerate(log):
        x = LEFT + c * wide
        for r, k in enumerate(blocks):
            if k in at:
                about = f"step {step}, block {k}: {number(at[k])}"
                other = (x + wide - 0.6, y + (r + 1) * cell - 0.6)
                canvas.box((x, y + r * cell), other, heat(at[k]), part, about)
        if c % apart == 0:
            canvas.text((x + wide / 2, y + high + 15), f"{step}", "muted", "small", part=part)
    for r in range(0, len(blocks), max(1, round(14 / cell))):
        at_left = (LEFT - 6, y + (r + 0.5) * cell + 4)
        canvas.text(at_left, str(blocks[r]), "muted", "small", anchor="end", part=part)
    canvas.text((LEFT - 36, y + high / 2), "block", turned=True, part=part)
    canvas.text((LEFT + WIDTH / 2, y + high + 31), "step", part=part)
    _scale(canvas, y, high, part)


def _scale(canvas: Canvas, y: float, height: float, part: str) -> None:
    steps = 24
    for i in range(steps):
        at, tall = y + i * height / steps, height / steps + 0.7
        canvas.box((716, at), (730, at + tall), heat(1 - i / (steps - 1)), part)
    for value in (0.0, 0.5, 1.0):
        place = (734, y + (1 - value) * height + 4)
        canvas.text(place, f"{value:g}", "muted", "small", anchor="start", part=part)
