"""What the residual is made of: what products gain, and what kept hidden units bring."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProbe
from howlinear.records.statistics import pearson
from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Panel, Scale, r2_floor, reach
from howlinear.report.figure import Figure, looks
from howlinear.report.runs import Run, inside, listed

READING = (
    "Left: how much R2 a layer of products gains on the map, against what the map leaves (1 - R2). "
    "Points on no line mean that what is left is not made of products alone. Right: R2 when so many "
    "of the block's own hidden units are kept beside the matrix; each line is a block."
)


def draw(runs: Sequence[Run]) -> Figure | None:
    gains = [
        (i, run, p, gain)
        for i, run in enumerate(runs)
        for p in run.probes.values()
        if (gain := inside(p.bilinear, "gain")) is not None
    ]
    kept = [(i, run, p, _steps(p)) for i, run in enumerate(runs) for p in run.probes.values()]
    kept = [k for k in kept if len(k[3]) > 1]
    if not gains and not kept:
        return None
    canvas = Canvas(780, 330)
    if gains:
        _gains(canvas, gains)
    if kept:
        _units(canvas, kept)
    places = sorted({k for *_, steps in kept for k, _ in steps})
    gained = {(i, p.index): (gain, inside(p.bilinear, "gain_se")) for i, _, p, gain in gains}
    steps_of = {(i, p.index): dict(steps) for i, _, p, steps in kept}
    rows = [
        (
            *(run.name, p.index, 1 - p.r2, *gained.get((i, p.index), (None, None))),
            *(steps_of.get((i, p.index), {}).get(k) for k in places),
        )
        for i, run in enumerate(runs)
        for p in run.probes.values()
    ]
    columns = ("run", "block", "1 - R2", "gain", "se", *(f"R2, {k:g} units" for k in places))
    return Figure("rest", "What the rest is made of", READING, canvas, columns, rows)


def _steps(p: BlockProbe) -> list[tuple[float, float]]:
    found = [(inside(s, "k"), inside(s, "r2")) for s in listed(p.units, "steps")]
    return [(k, r2) for k, r2 in found if k is not None and r2 is not None and k >= 0]


def _gains(canvas: Canvas, gains: list[tuple[int, Run, BlockProbe, float]]) -> None:
    xs, ys = [1 - p.r2 for *_, p, _ in gains], [gain for *_, gain in gains]
    ses = [inside(p.bilinear, "gain_se") or 0.0 for *_, p, _ in gains]
    ends = [y + sign * se for y, se in zip(ys, ses, strict=True) for sign in (-1, 1)]
    low, high = reach([0.0, *ends])
    panel = Panel(canvas, Scale(0.0, max(1.0, *xs), 58, 370), Scale(low, high, 280, 34))
    together = pearson(xs, ys) if len(xs) > 2 else None
    said = "" if together is None else f", correlation {together:+.2f} over {len(xs)}"
    panel.frame("1 - R2", "gain", f"gain of products{said}")
    _name(panel, [(i, p, 1 - p.r2, gain) for i, _, p, gain in gains])
    for i, run, p, gain in gains:
        colour, shape = looks(i)
        se = inside(p.bilinear, "gain_se")
        if se is not None:
            panel.whisker(1 - p.r2, gain - se, gain + se, colour, f"r{i}")
        about = f"{run.name}, block {p.index}: 1 - R2 {number(1 - p.r2)}, gain {number(gain, 4)}"
        about += "" if se is None else f" ± {number(se, 4)}"
        panel.dot(1 - p.r2, gain, colour, shape=shape, part=f"r{i}", about=about)


def _name(panel: Panel, points: list[tuple[int, BlockProbe, float, float]]) -> None:
    """Block numbers beside points, a run at a time."""
    for run in sorted({i for i, *_ in points}):
        own = [(panel.at(x, y), str(p.index)) for i, p, x, y in points if i == run]
        panel.canvas.labels([((x + 6, y - 5), text) for (x, y), text in own], part=f"r{run}")


def _units(
    canvas: Canvas, kept: list[tuple[int, Run, BlockProbe, list[tuple[float, float]]]]
) -> None:
    most = max(k for *_, steps in kept for k, _ in steps)
    x = Scale(1.0, most + 1, 446, 752, log=True)
    panel = Panel(
        canvas, x, Scale(r2_floor(r2 for *_, steps in kept for _, r2 in steps), 1.0, 280, 34)
    )
    panel.frame("hidden units kept, and one", "R2", "the matrix and some units")
    _name(panel, [(i, p, steps[0][0] + 1, steps[0][1]) for i, _, p, steps in kept])
    for i, run, p, steps in kept:
        colour, _ = looks(i)
        said = ", ".join(f"{number(r2)} with {k:g}" for k, r2 in steps[:: max(1, len(steps) // 5)])
        about = f"{run.name}, block {p.index}: R2 {said} units"
        panel.line([(k + 1, r2) for k, r2 in steps], colour, part=f"r{i}", about=about)
