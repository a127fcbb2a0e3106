"""Linearity over training: a heat map of R2 by block and step, from a monitor's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.report.canvas import Canvas
from howlinear.report.figure import Figure
from howlinear.report.runs import Run, inside, listed
from howlinear.report.styles import heat
from howlinear.words import number

READING = (
    "A column a measurement, in the order of steps; a row a block. Bright is linear, dark is not "
    "(0 or less)."
)
LEFT, WIDTH, MOST = 58, 640, 120  # columns drawn at most: every n-th beyond that


def draw(runs: Sequence[Run]) -> Figure | None:
    logs = [(run, table) for run in runs if (table := measured(run.training))]
    if not logs:
        return None
    heights = [62 + _cell(table) * _depth(table) + 34 for _, table in logs]
    canvas = Canvas(780, sum(heights))
    top = 0.0
    rows: list[tuple[object, ...]] = []
    for (run, table), height in zip(logs, heights, strict=True):
        _map(canvas, run, table, top, named=len(runs) > 1)
        top += height
        rows += [(run.name, step, k, r2) for step, blocks in table for k, r2 in blocks.items()]
    columns = ("run", "step", "block", "R2")
    return Figure("training", "Linearity over training", READING, canvas, columns, rows)


def measured(rows: list[dict[str, Any]]) -> list[tuple[int, dict[int, float]]]:
    """(step, {block: R2}) of a log, thinned to what can be drawn; the first and last remain."""
    found = []
    for row in rows:
        at = {
            int(k): r2
            for b in listed(row, "blocks")
            if (k := inside(b, "index")) is not None and (r2 := inside(b, "r2")) is not None
        }
        if at:
            found.append((int(row["step"]), at))
    every = -(-len(found) // MOST)
    return [f for i, f in enumerate(found) if i % max(every, 1) == 0 or i == len(found) - 1]


def _depth(table: list[tuple[int, dict[int, float]]]) -> int:
    return max(k for _, at in table for k in at) + 1


def _cell(table: list[tuple[int, dict[int, float]]]) -> float:
    return min(22.0, max(7.0, 320 / _depth(table)))


def _map(
    canvas: Canvas,
    run: Run,
    table: list[tuple[int, dict[int, float]]],
    top: float,
    named: bool,
) -> None:
    cell, wide, depth = _cell(table), WIDTH / len(table), _depth(table)
    y = top + 34
    if named:
        canvas.text((LEFT, top + 22), run.name, mode="bold", anchor="start")
    apart = max(1, round(46 / wide))
    for c, (step, at) in enumerate(table):
        x = LEFT + c * wide
        for k, r2 in at.items():
            about = f"{run.name}, step {step}, block {k}: R2 {number(r2)}"
            corner, other = (x, y + k * cell), (x + wide - 0.6, y + (k + 1) * cell - 0.6)
            canvas.box(corner, other, heat(r2), about=about)
        if c % apart == 0:
            place = (x + wide / 2, y + depth * cell + 15)
            canvas.text(place, f"{step}", "muted", "small")
    for k in range(0, depth, max(1, round(14 / cell))):
        canvas.text((LEFT - 6, y + (k + 0.5) * cell + 4), str(k), "muted", "small", anchor="end")
    canvas.text((LEFT - 36, y + depth * cell / 2), "block", turned=True)
    canvas.text((LEFT + WIDTH / 2, y + depth * cell + 31), "step")
    _scale(canvas, y, depth * cell)


def _scale(canvas: Canvas, y: float, height: float) -> None:
    steps = 24
    for i in range(steps):
        share = 1 - i / (steps - 1)
        at = y + i * height / steps
        canvas.box((716, at), (730, at + height / steps + 0.7), heat(share))
    for value in (0.0, 0.5, 1.0):
        canvas.text(
            (734, y + (1 - value) * height + 4), f"{value:g}", "muted", "small", anchor="start"
        )
