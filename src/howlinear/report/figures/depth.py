"""The profile over depth: R2 with error bars, body and scalar; below it the cost of each swap."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import compact, finite, number
from howlinear.report.canvas import Canvas, Panel, Scale, r2_floor, reach
from howlinear.report.figure import Choice, Figure, key, looks, run_dot
from howlinear.report.runs import Run

WIDTH, LEFT, RIGHT = 780, 58, 768
TITLE = "How linear each block is"
READING = (
    "Solid: R2 with its standard error. Dashed: R2 without first positions (body); where it is far "
    "below the solid line, only the attention sink is linear. Dotted: R2 around one scalar mean, "
    "never below R2. Triangles at an edge lie beyond it."
)
COSTS = (
    " Below, on a log scale: KL divergence of the predictions, in nats per token, when the map replaces "
    "this block alone (filled), and with plain least squares and no hidden units kept (open)."
)
UNTRAINED = " Grey: the range of the same architecture untrained."
COLUMNS = ("run", "block", "R2", "se", "body", "scalar", "KL, nats", "se", "plain, nats")
SERIES = (("R2", "", "main"), ("body", "dash", "body"), ("scalar", "dots", "scalar"))


def draw(runs: Sequence[Run]) -> Figure | None:
    measured = [run for run in runs if run.blocks]
    if not measured:
        return None
    swapped = any(s.kl is not None for run in runs for s in run.swaps.values())
    canvas = Canvas(WIDTH, 470 if swapped else 330)
    models, depths = {run.model for run in measured}, {run.blocks[-1].index for run in measured}
    relative = len(models) > 1 and len(depths) > 1
    x = _depths(measured, relative)
    low = r2_floor(finite(v) for run in runs for b in run.blocks for v in (b.r2, b.r2_body))
    panel = Panel(canvas, x, Scale(low, 1.0, 270, 34))
    axis = "depth (first block 0, last block 1)" if relative else "block"
    panel.frame("" if swapped else axis, "R2")
    for run in runs:
        _r2(panel, run, relative)
    key(canvas, [(label, "muted", "circle", mode, part) for label, mode, part in SERIES], LEFT, 20)
    if swapped:
        _costs(canvas, x, runs, relative, axis)
    untrained = any(run.untrained for run in runs)
    return Figure(
        "profile",
        f"{TITLE}, and what replacing it costs" if swapped else TITLE,
        READING + (COSTS if swapped else "") + (UNTRAINED if untrained else ""),
        canvas,
        COLUMNS,
        [_row(run, b) for run in runs for b in run.blocks],
        choices=(Choice("body", "body"), Choice("scalar", "scalar mean", on=len(runs) == 1)),
    )


def _depths(runs: Sequence[Run], relative: bool) -> Scale:
    if relative:
        return Scale(-0.02, 1.02, LEFT, RIGHT)
    indices = [b.index for run in runs for b in run.blocks]
    return Scale(min(indices) - 0.6, max(indices) + 0.6, LEFT, RIGHT)


def _r2(panel: Panel, run: Run, relative: bool) -> None:
    colour, _ = looks(run.number)
    at = [(run.depth(b.index, relative), b) for b in run.blocks]
    for name, mode in (("r2_scalar", "dots thin"), ("r2_body", "dash"), ("r2", "")):
        series = "main" if name == "r2" else name.removeprefix("r2_")
        values = [(x, finite(getattr(b, name))) for x, b in at]
        panel.line(values, colour, mode, part=f"{run.part} {series}")
    _untrained(panel, run, relative)
    for x, b in at:
        if b.r2_se is not None:
            panel.whisker(x, b.r2 - b.r2_se, b.r2 + b.r2_se, colour, f"{run.part} main")
        if (body := finite(b.r2_body)) is not None:
            about = f"block {b.index}: body {_with_se(body, b.r2_body_se)}"
            run_dot(panel, run, (x, body), about, part=f"{run.part} body", mode="open", size=2.6)
        about = f"block {b.index}: R2 {_with_se(b.r2, b.r2_se)}, body {number(b.r2_body)}, "
        about += f"scalar {number(b.r2_scalar)}; {b.kind}"
        run_dot(panel, run, (x, b.r2), about, part=f"{run.part} main")


def _untrained(panel: Panel, run: Run, relative: bool) -> None:
    part = f"{run.part} untrained"
    for index, (low, high) in run.untrained.items():
        x = run.depth(index, relative)
        about = f"{run.name}, block {index} untrained: R2 {number(low)} to {number(high)}"
        if panel.y.holds(high):
            ends = [panel.at(x, low - 0.004), panel.at(x, high + 0.004)]  # visible if they agree
            panel.canvas.line(ends, "muted", "wide soft", part=part, about=about)
        else:
            panel.dot(x, high, "muted", mode="soft", part=part, about=about)


def _with_se(value: float, se: float | None) -> str:
    return number(value) + ("" if finite(se) is None else f" ± {number(se)}")


def cost_ends(costs: Sequence[float | None]) -> tuple[float, float]:
    """Ends of a log scale of costs in nats: from 0.0001 on, a decade or more."""
    low, high = reach([c for cost in costs if (c := finite(cost)) is not None], log=True)
    low = max(low, 1e-4)
    return low, max(high, 10 * low)


def _costs(canvas: Canvas, x: Scale, runs: Sequence[Run], relative: bool, axis: str) -> None:
    swaps = [s for run in runs for s in run.swaps.values()]
    low, high = cost_ends([c for s in swaps for c in (s.kl, s.kl_plain)])
    panel = Panel(canvas, x, Scale(low, high, 425, 305, log=True))
    panel.frame(axis, "KL, nats")
    for run in runs:
        for s in run.swaps.values():
            _cost(panel, run, s, run.depth(s.index, relative))


def _cost(panel: Panel, run: Run, s: BlockSwap, x: float) -> None:
    plain, cost, se = (finite(v) for v in (s.kl_plain, s.kl, s.kl_se))
    if plain is not None and s.units:
        about = f"block {s.index}: plain least squares {compact(plain)} nats"
        run_dot(panel, run, (x, plain), about, mode="open")
    if cost is None:
        return
    if se is not None:
        colour, _ = looks(run.number)
        panel.whisker(x, cost - se, cost + se, colour, run.part)
    error = "" if se is None else f" ± {compact(se)}"
    about = f"block {s.index}: KL {compact(cost)}{error} nats"
    about += f", {len(s.units)} hidden units kept" if s.units else ", one matrix"
    run_dot(panel, run, (x, cost), about)


def _row(run: Run, b: BlockProfile) -> tuple[object, ...]:
    s = run.swaps.get(b.index)
    costs = (s.kl, s.kl_se, s.kl_plain) if s else (None, None, None)
    return (run.name, b.index, b.r2, b.r2_se, b.r2_body, b.r2_scalar, *costs)
