"""What the residual is made of: the gain of products of inputs, and of hidden units kept."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProbe
from howlinear.records.statistics import over_blocks, pearson
from howlinear.records.words import between, number
from howlinear.report.canvas import Canvas, Panel, Point, Scale, r2_floor, reach
from howlinear.report.figure import HALF, NARROW, Figure, looks, run_dot
from howlinear.report.runs import Run, inside, listed

READING = (
    "Products: R2 gained by adding a layer of products to the map, against what the map leaves (1 - R2). "
    "If the points lie on no line, products alone do not make up the residual. Hidden units: R2 when some of "
    "the block's own hidden units are kept beside the matrix; each line is a block."
)
Gain = tuple[Run, BlockProbe, float, float | None]  # with the gain and its standard error
Kept = tuple[Run, BlockProbe, list[Point]]  # with (hidden units kept, R2)
Place = tuple[float, float, float]  # left, right and top of a panel


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    probes = [(run, p) for run in runs for p in run.probes.values()]
    gains: list[Gain] = [
        (run, p, gain, inside(p.bilinear, "gain_se"))
        for run, p in probes
        if (gain := inside(p.bilinear, "gain")) is not None
    ]
    kept: list[Kept] = [(run, p, steps) for run, p in probes if len(steps := _steps(p)) > 1]
    if not gains and not kept:
        return None
    canvas, places = _panels(width, bool(gains) + bool(kept))
    if gains:
        _draw_gains(canvas, gains, places.pop(0))
    if kept:
        _draw_kept(canvas, kept, places.pop(0))
    counts = sorted({k for *_, steps in kept for k, _ in steps})
    rows = []
    for run, p in probes:
        gain, se = (inside(p.bilinear, name) for name in ("gain", "gain_se"))
        r2_with = dict(_steps(p)).get
        rows.append((run.name, p.index, 1 - p.r2, gain, se, *map(r2_with, counts)))
    columns = ("run", "block", "1 - R2", "gain", "se", *(f"R2, {k:g} units" for k in counts))
    return Figure("rest", "What the residual is made of", READING, canvas, columns, rows)


def _steps(p: BlockProbe) -> list[Point]:
    """(hidden units kept, R2)"""
    steps = [(inside(s, "k"), inside(s, "r2")) for s in listed(p.units, "steps")]
    return [(k, r2) for k, r2 in steps if k is not None and r2 is not None and k >= 0]


def _panels(width: float, count: int) -> tuple[Canvas, list[Place]]:
    """Side by side, or one above another where it is narrow; alone as wide as the drawing."""
    if width == NARROW:
        places = [(58.0, width - 12, 330.0 * i) for i in range(count)]
    else:
        each = width / count
        places = [(each * i + 58, each * (i + 1) - 12, 0.0) for i in range(count)]
    return Canvas(width, 330 + max(top for *_, top in places)), places


def _draw_gains(canvas: Canvas, gains: list[Gain], place: Place) -> None:
    xs, ys = [1 - p.r2 for _, p, *_ in gains], [gain for *_, gain, _ in gains]
    ends = [gain + sign * (se or 0.0) for *_, gain, se in gains for sign in (-1, 1)]
    low, high = reach([0.0, *ends])
    left, right, top = place
    scales = Scale(0.0, max(1.0, *xs), left, right), Scale(low, high, top + 280, top + 34)
    panel = Panel(canvas, *scales)
    r = over_blocks(pearson, xs, ys).to_dict()
    correlation = "" if r["value"] is None else f", r = {between(r, 2)}"
    panel.frame("1 - R2", "gain", f"products{correlation}")
    _name(panel, [(run, p, (1 - p.r2, gain)) for run, p, gain, _ in gains])
    for run, p, gain, se in gains:
        if se is not None:
            panel.whisker(1 - p.r2, gain - se, gain + se, looks(run.number)[0], run.part)
        about = f"block {p.index}: 1 - R2 {number(1 - p.r2)}, gain {number(gain, 4)}"
        about += "" if se is None else f" ± {number(se, 4)}"
        run_dot(panel, run, (1 - p.r2, gain), about)


def _name(panel: Panel, points: list[tuple[Run, BlockProbe, Point]]) -> None:
    """Block indices beside points, run by run."""
    for part in sorted({run.part for run, *_ in points}):
        places = [(panel.at(*at), str(p.index)) for run, p, at in points if run.part == part]
        panel.canvas.labels([((x + 6, y - 5), text) for (x, y), text in places], part=part)


def _draw_kept(canvas: Canvas, kept: list[Kept], place: Place) -> None:
    most = max(k for *_, steps in kept for k, _ in steps)
    low = r2_floor(r2 for *_, steps in kept for _, r2 in steps)
    left, right, top = place
    scales = Scale(1.0, most + 1, left, right, log=True), Scale(low, 1.0, top + 280, top + 34)
    panel = Panel(canvas, *scales)
    panel.frame("hidden units kept + 1", "R2", "matrix and hidden units")
    _name(panel, [(run, p, (steps[0][0] + 1, steps[0][1])) for run, p, steps in kept])
    for run, p, steps in kept:
        some = steps[:: max(1, len(steps) // 5)]
        values = ", ".join(f"{number(r2)} with {k:g}" for k, r2 in some)
        about = f"{run.name}, block {p.index}: R2 {values} hidden units"
        line = [(k + 1, r2) for k, r2 in steps]
        panel.line(line, looks(run.number)[0], part=run.part, about=about)
