"""Which signal to believe: what plain least squares costs when swapped in, against each signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import spearman
from howlinear.records.words import compact, finite, percent
from howlinear.report.canvas import Canvas, Panel, Scale, reach
from howlinear.report.figure import Figure, looks
from howlinear.report.figures.depth import cost_ends, growth
from howlinear.report.runs import Run

SIGNALS: dict[str, Callable[[BlockProfile], float | None]] = {
    "1 - R2": lambda b: 1 - b.r2,
    "1 - R2 body": lambda b: None if finite(b.r2_body) is None else 1 - float(b.r2_body or 0.0),
    "residual norm": lambda b: b.residual_norm,
    "stream error": lambda b: b.stream_error,
    "swap signal": lambda b: b.swap_signal,
}
READING = (
    "Each panel holds one number that a profile gives without any swap against what the swap then "
    "cost, by plain least squares, both on log scales. ρ is the rank correlation: 1 would order the "
    "blocks perfectly, 0 not at all."
)
W, H, GAP = 190, 150, 66


def draw(runs: Sequence[Run]) -> Figure | None:
    points = {name: _points(runs, value) for name, value in SIGNALS.items()}
    points = {name: found for name, found in points.items() if len(found) > 2}
    if not points:
        return None
    costs = [cost for found in points.values() for *_, cost in found]
    low, high = cost_ends([growth(c) or 0.0 for c in costs])
    canvas = Canvas(3 * (W + GAP) + 12, -(-len(points) // 3) * (H + 90))
    rows: list[tuple[object, ...]] = []
    for n, (name, found) in enumerate(points.items()):
        x, y = GAP + (n % 3) * (W + GAP), 34 + (n // 3) * (H + 90)
        left, right = reach([v for *_, v, _ in found], log=True)
        panel = Panel(
            canvas, Scale(left, right, x, x + W, log=True), Scale(low, high, y + H, y, log=True)
        )
        by_run = [(i, _rank(found, i)) for i in sorted({i for i, *_ in found})]
        said = ", ".join("-" if rho is None else f"{rho:+.2f}" for _, rho in by_run)
        panel.frame(name, "perplexity, + %" if n % 3 == 0 else "", f"ρ = {said}")
        _dots(panel, runs, name, found)
        rows += [(runs[i].name, name, rho, sum(k == i for k, *_ in found)) for i, rho in by_run]
    columns = ("run", "signal", "rank correlation with cost", "blocks")
    return Figure("signals", "Which signal to believe", READING, canvas, columns, rows)


def _points(
    runs: Sequence[Run], value: Callable[[BlockProfile], float | None]
) -> list[tuple[int, int, float, float]]:
    """(run, block, signal, cost in nats) where both are known."""
    found = []
    for i, run in enumerate(runs):
        for b in run.blocks:
            s = run.swaps.get(b.index)
            signal, cost = finite(value(b)), finite(s.delta_nll_plain) if s else None
            if signal is not None and cost is not None:
                found.append((i, b.index, signal, cost))
    return found


def _rank(found: list[tuple[int, int, float, float]], run: int) -> float | None:
    own = [(signal, cost) for i, _, signal, cost in found if i == run]
    return spearman([s for s, _ in own], [c for _, c in own]) if len(own) > 2 else None


def _dots(
    panel: Panel, runs: Sequence[Run], name: str, found: list[tuple[int, int, float, float]]
) -> None:
    for i, block, signal, cost in found:
        colour, shape = looks(i)
        about = f"{runs[i].name}, block {block}: {name} {compact(signal)}, cost {percent(cost)}"
        shown = {"shape": shape, "part": f"r{i}", "about": about, "size": 2.8}
        panel.dot(signal, growth(cost) or 0.0, colour, **shown)
