"""Runs side by side: the R2 of each block in one run against the same block in another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from howlinear.records.statistics import agreement, fold_sums, same_windows
from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Panel, Point, Scale, r2_floor
from howlinear.report.figure import HALF, Figure, looks, short
from howlinear.report.runs import Run

READING = (
    "Every point is a block, at its R2 in one run and in the other. On the diagonal the text (or the "
    "model) makes no difference. r is the correlation over depth with its 95 % interval over folds."
)
COLUMNS = (
    *("run", "other run", "correlation", "low", "high", "rank corr.", "low", "high"),
    *("mean shift", "low", "high", "largest", "low", "high"),
)
SIDE, GAP = 210, 66


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    pairs = [(a, b) for a, b in combinations(runs, 2) if _comparable(a, b)]
    if len(runs) > 4:  # compare with the first run only, so that panels stay few
        pairs = [(a, b) for a, b in pairs if a is runs[0]]
    if not pairs:
        return None
    across = int(width // (SIDE + GAP))
    canvas = Canvas(width, -(-len(pairs) // across) * (SIDE + 84))
    rows: list[tuple[object, ...]] = []
    for n, (a, b) in enumerate(pairs):
        corner = (GAP + (n % across) * (SIDE + GAP), 30 + (n // across) * (SIDE + 84))
        rows.append(_pair(canvas, corner, a, b))
    return Figure("alike", "Runs side by side", READING, canvas, COLUMNS, rows)


def _comparable(a: Run, b: Run) -> bool:
    return bool(a.blocks) and [x.index for x in a.blocks] == [x.index for x in b.blocks]


def _pair(canvas: Canvas, corner: Point, a: Run, b: Run) -> tuple[object, ...]:
    """One panel; its row of numbers."""
    result = agreement(
        fold_sums(a.blocks), fold_sums(b.blocks), paired=same_windows(a.about, b.about)
    )
    r = result["pearson"]
    x, y = corner
    low = r2_floor(c.r2 for c in (*a.blocks, *b.blocks))
    panel = Panel(canvas, Scale(low, 1.0, x, x + SIDE), Scale(low, 1.0, y + SIDE, y))
    interval = "" if r["low"] is None else f" [{number(r['low'], 2)}, {number(r['high'], 2)}]"
    panel.frame(short(a.name, 28), short(b.name, 28), f"r = {number(r['value'], 2)}{interval}")
    panel.line([(low, low), (1.0, 1.0)], "axis", "dash thin")
    colour, shape = looks(b.number)
    for u, v in zip(a.blocks, b.blocks, strict=True):
        about = f"block {u.index}: {number(u.r2)} in {a.name}, {number(v.r2)} in {b.name}"
        panel.dot(u.r2, v.r2, colour, shape=shape, part=f"{a.part} {b.part}", about=about)
    others = ("pearson", "spearman", "mean_shift", "largest_shift")
    estimates = (result[key][part] for key in others for part in ("value", "low", "high"))
    return (a.name, b.name, *estimates)
