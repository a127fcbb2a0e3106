"""Texts or models side by side: the R2 of each block in one run against another's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from howlinear.records.jackknife import alike, same_windows, sums_of
from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Panel, Scale, r2_floor
from howlinear.report.figure import Figure, looks, short
from howlinear.report.runs import Run

READING = (
    "Every point is a block, at its R2 in one run and in the other. On the diagonal the text (or the "
    "model) makes no difference. r is the correlation over depth with its 95 % interval over folds."
)
SIDE, GAP, COLUMNS = 190, 66, 3


def draw(runs: Sequence[Run]) -> Figure | None:
    pairs = [p for p in combinations(range(len(runs)), 2) if _comparable(runs[p[0]], runs[p[1]])]
    if len(runs) > 4:  # against the first alone: six panels and no more than one a run
        pairs = [p for p in pairs if p[0] == 0]
    if not pairs:
        return None
    lines = -(-len(pairs) // COLUMNS)
    canvas = Canvas(min(len(pairs), COLUMNS) * (SIDE + GAP) + 12, lines * (SIDE + 84))
    rows: list[tuple[object, ...]] = []
    for n, (i, j) in enumerate(pairs):
        corner = (GAP + (n % COLUMNS) * (SIDE + GAP), 30 + (n // COLUMNS) * (SIDE + 84))
        rows.append(_pair(canvas, corner, (i, runs[i]), (j, runs[j])))
    columns = (
        "run",
        "other run",
        "correlation",
        "low",
        "high",
        "rank corr.",
        "mean shift",
        "largest",
    )
    return Figure("alike", "Runs side by side", READING, canvas, columns, rows)


def _comparable(a: Run, b: Run) -> bool:
    return bool(a.blocks) and [x.index for x in a.blocks] == [x.index for x in b.blocks]


def _pair(
    canvas: Canvas, corner: tuple[float, float], one: tuple[int, Run], two: tuple[int, Run]
) -> tuple[object, ...]:
    (i, a), (j, b) = one, two
    found = alike(sums_of(a.blocks), sums_of(b.blocks), paired=same_windows(a.about, b.about))
    r = found["pearson"]
    x, y = corner
    low = r2_floor(c.r2 for c in (*a.blocks, *b.blocks))
    panel = Panel(canvas, Scale(low, 1.0, x, x + SIDE), Scale(low, 1.0, y + SIDE, y))
    said = number(r["value"], 2)
    if r["low"] is not None:
        said += f" [{number(r['low'], 2)}, {number(r['high'], 2)}]"
    panel.frame(short(a.name, 28), short(b.name, 28), f"r = {said}")
    panel.line([(low, low), (1.0, 1.0)], "axis", "dash thin")
    colour, shape = looks(j)
    for u, v in zip(a.blocks, b.blocks, strict=True):
        about = f"block {u.index}: {number(u.r2)} in {a.name}, {number(v.r2)} in {b.name}"
        panel.dot(u.r2, v.r2, colour, shape=shape, part=f"r{i} r{j}", about=about)
    return (
        *(a.name, b.name, r["value"], r["low"], r["high"], found["spearman"]["value"]),
        *(found["mean_shift"]["value"], found["largest_shift"]["value"]),
    )
