"""R2 over training: a heat map by block and step, from a monitor's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.words import number
from howlinear.report.canvas import Canvas
from howlinear.report.figure import HALF, Figure
from howlinear.report.runs import Run, inside, listed
from howlinear.report.styles import heat

READING = (
    "Each column is a measurement, in the order of steps; each row is a block. The brightest colour is "
    "R2 1, the darkest 0 or less."
)
LEFT, RIGHT = 58, 74  # margins
CELLS, BLOCKS = 480, 256  # drawn at most; of more steps every n-th is drawn


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    logs = [(run, log) for run in runs if (log := measured(run.training))]
    if not logs:
        return None
    canvas = Canvas(width, 0)
    for run, log in logs:
        _map(canvas, log, run.name if len(runs) > 1 else "", run.part)
    blocks = sorted({k for _, log in logs for _, r2 in log for k in r2})
    rows = [(run.name, step, *map(r2.get, blocks)) for run, log in logs for step, r2 in log]
    columns = ("run", "step", *(f"block {k}" for k in blocks))
    title = "Linearity over training"
    return Figure("training", title, READING, canvas, columns, rows, by_run=False)


Log = list[tuple[int, dict[int, float]]]  # step, {block: R2}


def measured(rows: list[dict[str, Any]]) -> Log:
    """A log thinned to what can be drawn; its first and last steps remain."""
    log = []
    for row in rows:
        pairs = [(inside(b, "index"), inside(b, "r2")) for b in listed(row, "blocks")[:BLOCKS]]
        r2 = {int(k): value for k, value in pairs if k is not None and k >= 0 and value is not None}
        if r2:
            log.append((int(row["step"]), r2))
    most = max(8, CELLS // max((len(r2) for _, r2 in log), default=1))
    apart = max(1, -(-len(log) // most))
    return [step for i, step in enumerate(log) if i % apart == 0 or i == len(log) - 1]


def _map(canvas: Canvas, log: Log, name: str, part: str) -> None:
    blocks = sorted({k for _, r2 in log for k in r2})
    cell, wide = min(22.0, max(7.0, 320 / len(blocks))), (canvas.width - LEFT - RIGHT) / len(log)
    y, high = canvas.height + 34, cell * len(blocks)
    canvas.height = y + high + 44
    if name:
        canvas.text((LEFT, y - 12), name, mode="bold", anchor="start", part=part)
    apart = max(1, round(46 / wide))
    for c, (step, r2) in enumerate(log):
        x = LEFT + c * wide
        for r, k in enumerate(blocks):
            if k in r2:
                about = f"step {step}, block {k}: {number(r2[k])}"
                other = (x + wide - 0.6, y + (r + 1) * cell - 0.6)
                canvas.box((x, y + r * cell), other, heat(r2[k]), part=part, about=about)
        if c % apart == 0:
            canvas.text((x + wide / 2, y + high + 15), f"{step}", "muted", "small", part=part)
    for r in range(0, len(blocks), max(1, round(14 / cell))):
        at_left = (LEFT - 6, y + (r + 0.5) * cell + 4)
        canvas.text(at_left, str(blocks[r]), "muted", "small", anchor="end", part=part)
    canvas.text((LEFT - 36, y + high / 2), "block", turned=True, part=part)
    canvas.text(((LEFT + canvas.width - RIGHT) / 2, y + high + 31), "step", part=part)
    _scale(canvas, y, high, part)


def _scale(canvas: Canvas, y: float, height: float, part: str) -> None:
    steps, x = 24, canvas.width - 56
    for i in range(steps):
        at, tall = y + i * height / steps, height / steps + 0.7
        canvas.box((x, at), (x + 14, at + tall), heat(1 - i / (steps - 1)), part=part)
    for value in (0.0, 0.5, 1.0):
        place = (x + 18, y + (1 - value) * height + 4)
        canvas.text(place, f"{value:g}", "muted", "small", anchor="start", part=part)
