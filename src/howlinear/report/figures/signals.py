"""Which signal predicts the cost of a swap: the cost of plain least squares against each signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import over_blocks, spearman
from howlinear.records.words import compact, finite, number
from howlinear.report.canvas import Canvas, Panel, Scale, reach
from howlinear.report.figure import NARROW, WIDE, Figure, run_dot
from howlinear.report.figures.depth import cost_ends
from howlinear.report.runs import Run

Signal = Callable[[BlockProfile], float | None]
SIGNALS: dict[str, Signal] = {
    "1 - R2": lambda b: 1 - b.r2,
    "1 - R2 body": lambda b: None if finite(b.r2_body) is None else 1 - float(b.r2_body or 0.0),
    "residual norm": lambda b: b.residual_norm,
    "stream error": lambda b: b.stream_error,
    "expected KL": lambda b: b.expected_kl,
}
READING = (
    "Each panel shows one number of the profile, which needs no swap, against the measured cost of the "
    "swap by plain least squares (KL), both on log scales. ρ is the rank correlation: 1 orders the blocks "
    "perfectly, 0 not at all. The table has its 95 % interval over blocks; below 8 blocks there is none."
)
W, H, GAP, EDGE = 160, 150, 44, 60  # a panel, between panels, left of the first
Point = tuple[Run, int, float, float]  # block, signal, cost in nats per token


def draw(runs: Sequence[Run], width: float = WIDE) -> Figure | None:
    panels = {name: _points(runs, signal) for name, signal in SIGNALS.items()}
    panels = {name: points for name, points in panels.items() if len(points) > 2}
    if not panels:
        return None
    low, high = cost_ends([cost for points in panels.values() for *_, cost in points])
    across, wide = (1, width - EDGE - 12) if width == NARROW else (5, W)
    canvas = Canvas(width, -(-len(panels) // across) * (H + 90))
    rows: list[tuple[object, ...]] = []
    for n, (name, points) in enumerate(panels.items()):
        x, y = EDGE + (n % across) * (wide + GAP), 34 + (n // across) * (H + 90)
        left, right = reach([signal for *_, signal, _ in points], log=True)
        scales = Scale(left, right, x, x + wide, log=True), Scale(low, high, y + H, y, log=True)
        panel = Panel(canvas, *scales)
        ranked = [_ranked(run, points) for run in runs if any(p[0] is run for p in points)]
        rho = ", ".join(number(row[1], 2, "+") for row in ranked)
        panel.frame(name, "KL, nats" if n % across == 0 else "", f"ρ = {rho}")
        for run, block, signal, cost in points:
            about = f"block {block}: {name} {compact(signal)}, KL {compact(cost)} nats"
            run_dot(panel, run, (signal, cost), about, size=2.8)
        rows += [(run_name, name, *numbers) for run_name, *numbers in ranked]
    columns = ("run", "signal", "rank correlation with cost", "low", "high", "blocks")
    return Figure("signals", "Which signal predicts the cost", READING, canvas, columns, rows)


def _points(runs: Sequence[Run], signal_of: Signal) -> list[Point]:
    """Blocks whose signal and cost are both known."""
    points = []
    for run in runs:
        for b in run.blocks:
            s = run.swaps.get(b.index)
            signal, cost = finite(signal_of(b)), finite(s.kl_plain) if s else None
            if signal is not None and cost is not None:
                points.append((run, b.index, signal, cost))
    return points


def _ranked(run: Run, points: list[Point]) -> tuple[Any, ...]:
    """The run's name, its rank correlation of signal and cost with its interval, and its blocks."""
    signals, costs = zip(*(p[2:] for p in points if p[0] is run), strict=True)
    rho = over_blocks(spearman, signals, costs)
    return run.name, rho.value, rho.low, rho.high, len(costs)
