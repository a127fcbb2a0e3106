"""The profile over depth: R2 with error bars, body and scalar; beneath it what a swap costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import finite, number, percent, percent_se
from howlinear.report.canvas import Canvas, Panel, Scale, r2_floor, reach
from howlinear.report.figure import Choice, Figure, key, looks
from howlinear.report.runs import Run

UNTRAINED = " Grey: where the same architecture lies untrained."
WIDTH, LEFT, RIGHT = 780, 58, 768
READING = (
    "Solid: R2 with its standard error. Dashed: the same without first positions (body); where it "
    "falls far below, what is linear is the attention sink alone. Dotted: around one scalar mean, "
    "never below R2. Triangles at an edge lie beyond it."
)
COSTS = (
    " Beneath: by how much perplexity grows when the block alone becomes its map, on a log scale "
    "(filled), and by plain least squares without hidden units kept (open)."
)


def draw(runs: Sequence[Run]) -> Figure | None:
    runs = list(runs)
    if not any(run.blocks for run in runs):
        return None
    swapped = any(s.delta_nll is not None for run in runs for s in run.swaps.values())
    canvas = Canvas(WIDTH, 470 if swapped else 330)
    measured = [run for run in runs if run.blocks]
    models, depths = {run.model for run in measured}, {_last(run) for run in measured}
    relative = len(models) > 1 and len(depths) > 1
    x = across(runs, relative)
    low = r2_floor(finite(v) for run in runs for b in run.blocks for v in (b.r2, b.r2_body))
    top = Panel(canvas, x, Scale(low, 1.0, 270, 34))
    axis = "depth (first block 0, last block 1)" if relative else "block"
    top.frame("" if swapped else axis, "R2")
    for i, run in enumerate(runs):
        _r2(top, run, i, relative)
    series = (("R2", "", "main"), ("body", "dash", "body"), ("scalar", "dots", "scalar"))
    key(canvas, [(label, "muted", "circle", mode, part) for label, mode, part in series], LEFT, 20)
    if swapped:
        _costs(canvas, x, runs, relative, axis)
    several, untrained = len(runs) > 1, any(run.untrained for run in runs)
    switches = (Choice("body", "body"), Choice("scalar", "scalar mean", on=not several))
    return Figure(
        "profile",
        "How linear each block is, and what replacing it costs"
        if swapped
        else "How linear each block is",
        READING + (COSTS if swapped else "") + (UNTRAINED if untrained else ""),
        canvas,
        ("run", "block", "R2", "se", "body", "scalar", "cost, nats", "se", "plain, nats"),
        [_row(run, b) for run in runs for b in run.blocks],
        switches=switches,
    )


def across(runs: Sequence[Run], relative: bool) -> Scale:
    if relative:
        return Scale(-0.02, 1.02, LEFT, RIGHT)
    every = [b.index for run in runs for b in run.blocks]
    return Scale(min(every) - 0.6, max(every) + 0.6, LEFT, RIGHT)


def _last(run: Run) -> int:
    return max((b.index for b in run.blocks), default=0)


def _r2(panel: Panel, run: Run, i: int, relative: bool) -> None:
    colour, shape = looks(i)
    part = f"r{i}"
    at = [(run.depth(b.index, relative), b) for b in run.blocks]
    for name, mode in (("r2_scalar", "dots thin"), ("r2_body", "dash"), ("r2", "")):
        series = "main" if name == "r2" else name.removeprefix("r2_")
        values = [(x, finite(getattr(b, name))) for x, b in at]
        panel.line(values, colour, mode, part=f"{part} {series}")
    _untrained(panel, run, part, relative)
    for x, b in at:
        if b.r2_se is not None:
            panel.whisker(x, b.r2 - b.r2_se, b.r2 + b.r2_se, colour, f"{part} main")
        if (body := finite(b.r2_body)) is not None:
            about = f"{run.name}, block {b.index}: body {pm(body, b.r2_body_se)}"
            shown = {"mode": "open", "part": f"{part} body", "about": about, "size": 2.6}
            panel.dot(x, body, colour, shape=shape, **shown)
        about = f"{run.name}, block {b.index}: R2 {pm(b.r2, b.r2_se)}, body {number(b.r2_body)}, "
        about += f"scalar {number(b.r2_scalar)}; {b.kind}"
        panel.dot(x, b.r2, colour, shape=shape, part=f"{part} main", about=about)


def _untrained(panel: Panel, run: Run, part: str, relative: bool) -> None:
    for index, (low, high) in run.untrained.items():
        x, part_of = run.depth(index, relative), f"{part} untrained"
        about = f"{run.name}, block {index} untrained: R2 {number(low)} to {number(high)}"
        if panel.y.holds(high):
            ends = [panel.at(x, low - 0.004), panel.at(x, high + 0.004)]  # seen if it is a point
            panel.canvas.line(ends, "muted", "wide soft", part_of, about)
        else:
            panel.dot(x, high, "muted", mode="soft", part=part_of, about=about)


def pm(value: float | None, se: float | None) -> str:
    return number(value) + ("" if finite(se) is None else f" ± {number(se)}")


def growth(nats: float | None) -> float | None:
    """A cost in nats as growth of perplexity, in percent."""
    found = finite(nats)
    return None if found is None else 100 * math.expm1(min(found, 60.0))


def cost_ends(costs: list[float]) -> tuple[float, float]:
    """Ends of a log scale of costs in percent: a hundredth at least, and a decade."""
    low, high = reach(costs, log=True)
    low = max(low, 0.01)
    return low, max(high, 10 * low)


def _costs(canvas: Canvas, x: Scale, runs: list[Run], relative: bool, axis: str) -> None:
    every = [s for run in runs for s in run.swaps.values()]
    costs = [growth(c) for s in every for c in (s.delta_nll, s.delta_nll_plain)]
    low, high = cost_ends([c for c in costs if c is not None])
    panel = Panel(canvas, x, Scale(low, high, 425, 305, log=True))
    panel.frame(axis, "perplexity, + %")
    for i, run in enumerate(runs):
        for s in run.swaps.values():
            _cost(panel, run, i, s, run.depth(s.index, relative))


def _cost(panel: Panel, run: Run, i: int, s: BlockSwap, x: float) -> None:
    colour, shape = looks(i)
    part = f"r{i}"
    plain, cost = growth(s.delta_nll_plain), growth(s.delta_nll)
    if plain is not None and s.units:
        about = f"{run.name}, block {s.index}: plain least squares {percent(s.delta_nll_plain)}"
        panel.dot(x, plain, colour, mode="open", shape=shape, part=part, about=about)
    if cost is None:
        return
    if (se := finite(s.delta_nll_se)) is not None:
        ends = [growth((s.delta_nll or 0.0) + sign * se) or 0.0 for sign in (-1, 1)]
        panel.whisker(x, ends[0], ends[1], colour, part)
    about = f"{run.name}, block {s.index}: perplexity {percent(s.delta_nll)}"
    about += percent_se(s.delta_nll, s.delta_nll_se)
    about += f", {len(s.units)} hidden units kept" if s.units else ", one matrix"
    panel.dot(x, cost, colour, shape=shape, part=part, about=about)


def _row(run: Run, b: BlockProfile) -> tuple[object, ...]:
    s = run.swaps.get(b.index)
    costs = (s.delta_nll, s.delta_nll_se, s.delta_nll_plain) if s else (None, None, None)
    return (run.name, b.index, b.r2, b.r2_se, b.r2_body, b.r2_scalar, *costs)
