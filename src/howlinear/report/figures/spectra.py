"""The spectrum of the inputs and of the map, for a block that the reader chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howlinear.records.fields import BlockProfile
from howlinear.records.words import compact, finite
from howlinear.report.canvas import Canvas, Panel, Point, Scale
from howlinear.report.figure import HALF, NARROW, Choice, Figure, looks
from howlinear.report.runs import Run

READING = (
    "First the share of the inputs' variance in each direction, largest first, then the singular "
    "values of the map. A steep fall means few directions. Axes are logarithmic and the same for all blocks."
)
PANELS = {
    "input_spectrum": "share of the inputs' variance",
    "map_spectrum": "singular value of the map",
}
SHOWN = (1, 3, 10, 30, 100)  # directions in the table; profile.json has all of them
FLOOR = 1e-9  # lower end of the scale, as a share of the largest value


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    spectra = {name: _curves(runs, name) for name in PANELS}
    blocks = sorted({b.index for curves in spectra.values() for _, b, _ in curves})
    if not blocks:
        return None
    narrow = width == NARROW
    canvas = Canvas(width, 620 if narrow else 320)
    rows: list[tuple[object, ...]] = []
    for n, (name, label) in enumerate(PANELS.items()):
        if not spectra[name]:
            continue
        left, top = (0.0, 300.0 * n) if narrow else (width / 2 * n, 0.0)
        right = width - 16 if narrow else left + width / 2 - 16
        panel = Panel(canvas, *_scales(spectra[name], left + 52, right, top))
        panel.frame("direction", "", label)
        for run, b, points in spectra[name]:
            _draw_curve(panel, run, b, points)
            shown = (_at(points, k) for k in SHOWN)
            rows.append((run.name, b.index, label, *shown, points[-1][1]))
    for block in blocks:
        canvas.text((width - 16, 16), f"block {block}", mode="bold", anchor="end", part=f"b{block}")
    choices = tuple(Choice(f"b{block}", str(block), block == blocks[0]) for block in blocks)
    columns = ("run", "block", "spectrum", *(f"direction {k}" for k in SHOWN), "last")
    title = "The spectrum of inputs and map"
    return Figure(
        "spectra", title, READING, canvas, columns, rows, choices=choices, one_at_a_time=True
    )


Curve = tuple[Run, BlockProfile, list[Point]]  # with (direction, value)


def _curves(runs: Sequence[Run], name: str) -> list[Curve]:
    curves = []
    for run in runs:
        for b in run.blocks:
            pairs = [[finite(v) or 0.0 for v in p] for p in getattr(b, name) or [] if len(p) == 2]
            if points := [(k, value) for k, value in pairs if k > 0 and value > 0]:
                curves.append((run, b, points))
    return curves


def _at(points: list[Point], k: int) -> float | None:
    """The value at the stored direction nearest to k, if one lies within 15 %."""
    near = min(points, key=lambda p: abs(p[0] - k))
    return near[1] if abs(near[0] - k) <= 0.15 * k else None


def _scales(curves: list[Curve], left: float, right: float, top: float) -> tuple[Scale, Scale]:
    values = [value for *_, points in curves for _, value in points]
    last = max(k for *_, points in curves for k, _ in points)
    low, high = max(min(values), max(values) * FLOOR), max(values)
    ends = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.0001))
    return (
        Scale(1.0, max(last, 2.0), left, right, log=True),
        Scale(ends[0], ends[1], top + 270, top + 40, log=True),
    )


def _draw_curve(panel: Panel, run: Run, b: BlockProfile, points: list[Point]) -> None:
    about = f"{run.name}, block {b.index}: {compact(points[0][1])} to {compact(points[-1][1])}; "
    about += f"participation {compact(b.input_participation)}, rank {b.effective_rank or '-'}"
    drawn = [*points[:6], *points[6:-1:2], points[-1]] if len(points) > 7 else points
    panel.line(drawn, looks(run.number)[0], part=f"{run.part} b{b.index}", about=about)
