"""The spectrum of the inputs and of the map, for a block that the reader chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howlinear.records.words import compact, finite
from howlinear.report.canvas import Canvas, Panel, Scale
from howlinear.report.figure import Choice, Figure, looks
from howlinear.report.runs import Run

READING = (
    "Left: how the variance of the block's inputs is spread over directions, largest first, as shares. "
    "Right: the singular values of the map. A steep fall means few directions. Axes are logarithmic, and "
    "the same for all blocks."
)
PANELS = (
    ("input_spectrum", "share of the inputs' variance", 58, 370),
    ("map_spectrum", "singular value of the map", 446, 758),
)
SHOWN = (1, 3, 10, 30, 100)  # directions in the table: profile.json has them all
FLOOR = 1e-9  # of the largest: what lies below is rounding to most eyes


def draw(runs: Sequence[Run]) -> Figure | None:
    found = {name: _all(runs, name) for name, *_ in PANELS}
    blocks = sorted({block for curves in found.values() for _, block, _ in curves})
    if not blocks:
        return None
    canvas = Canvas(780, 320)
    rows: list[tuple[object, ...]] = []
    for name, label, left, right in PANELS:
        curves = found[name]
        if not curves:
            continue
        panel = Panel(canvas, *_scales(curves, left, right))
        panel.frame("direction", "", label)
        for i, block, points in curves:
            _curve(panel, runs[i], i, block, points)
            rows.append(
                (runs[i].name, block, label, *(_at(points, k) for k in SHOWN), points[-1][1])
            )
    for block in blocks:
        canvas.text((408, 20), f"block {block}", mode="bold", part=f"b{block}")
    choices = tuple(Choice(f"b{block}", str(block), block == blocks[0]) for block in blocks)
    columns = ("run", "block", "of what", *(f"direction {k}" for k in SHOWN), "last")
    title = "The spectrum of inputs and map"
    return Figure("spectra", title, READING, canvas, columns, rows, one_of=choices)


Curve = tuple[int, int, list[tuple[float, float]]]  # run, block, (k, value)


def _all(runs: Sequence[Run], name: str) -> list[Curve]:
    found = []
    for i, run in enumerate(runs):
        for b in run.blocks:
            pairs = [p for p in getattr(b, name) or [] if len(p) == 2]
            points = [
                (float(k), float(v))
                for k, v in pairs
                if finite(k) and finite(v) and k > 0 and v > 0
            ]
            if points:
                found.append((i, b.index, points))
    return found


def _at(points: list[tuple[float, float]], k: int) -> float | None:
    """The value at the stored direction nearest to k, if there are that many."""
    near = min(points, key=lambda p: abs(p[0] - k))
    return near[1] if abs(near[0] - k) <= 0.15 * k else None


def _scales(curves: list[Curve], left: float, right: float) -> tuple[Scale, Scale]:
    values = [v for *_, points in curves for _, v in points]
    widest = max(k for *_, points in curves for k, _ in points)
    high = max(values)
    low = max(min(values), high * FLOOR)
    ends = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.0001))
    return (
        Scale(1.0, max(widest, 2.0), left, right, log=True),
        Scale(ends[0], ends[1], 270, 34, log=True),
    )


def _curve(panel: Panel, run: Run, i: int, block: int, points: list[tuple[float, float]]) -> None:
    colour, _ = looks(i)
    b = next(b for b in run.blocks if b.index == block)
    about = f"{run.name}, block {block}: {compact(points[0][1])} to {compact(points[-1][1])}; "
    about += f"participation {compact(b.input_participation)}, rank {b.effective_rank or '-'}"
    seen = [*points[:6], *points[6:-1:2], points[-1]] if len(points) > 7 else points
    panel.line(seen, colour, part=f"r{i} b{block}", about=about)
