"""Smaller models: perplexity against the share of feed-forward parameters removed, by method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Panel, Scale, reach
from howlinear.report.figure import HALF, Entry, Figure, key, looks
from howlinear.report.runs import Run, inside, listed

READING = (
    "Every method that howlinear compress tried, at every size, on text that was not used to choose "
    "among them. Lower is better; the dashed line is the original model. Triangles at the edge lie "
    "beyond it."
)
HEIGHT = 330
MOST = 4  # multiples of the lowest perplexity; a model beyond is unusable and stands at the edge


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    tables = [(run, table) for run in runs if (table := by_method(run.compress))]
    if not tables:
        return None
    canvas = Canvas(width, HEIGHT * len(tables))
    rows: list[tuple[object, ...]] = []
    for n, (run, table) in enumerate(tables):
        _panel(canvas, run, table, HEIGHT * n, run.part if len(runs) > 1 else "")
        rows += [(run.name, m, 100 * x, y, se) for m, steps in table.items() for x, y, se in steps]
    columns = ("run", "method", "removed, %", "perplexity", "se of its change")
    title = "Perplexity against parameters removed"
    return Figure("smaller", title, READING, canvas, columns, rows, by_run=False)


Table = dict[str, list[tuple[float, float, float | None]]]


def by_method(data: dict[str, Any]) -> Table:
    """{method: [(share removed, perplexity, standard error of the change)]}, each by size."""
    table: Table = {}
    for point in listed(data, "curve"):
        x, y = inside(point, "share"), inside(point, "perplexity")
        if x is not None and 0 <= x <= 1 and y is not None and y > 0:
            steps = table.setdefault(str(point.get("method")), [])
            steps.append((x, y, inside(point, "delta_ppl_se")))
    return {method: sorted(steps, key=lambda s: s[:2]) for method, steps in table.items()}


def _panel(canvas: Canvas, run: Run, table: Table, top: float, part: str) -> None:
    points = [step for steps in table.values() for step in steps]
    base = inside(run.compress, "change", "original", "perplexity")
    least = min([y for _, y, _ in points] + ([base] if base else []))
    low, high = reach([min(y, MOST * least) for _, y, _ in points] + [least], log=True)
    x = Scale(0.0, 104 * max(share for share, *_ in points) or 1.0, 58, canvas.width - 12)
    panel = Panel(canvas, x, Scale(low, high, top + 280, top + 62, log=True))
    panel.frame("feed-forward parameters removed, %", "perplexity")
    if part:
        canvas.text((canvas.width - 12, top + 40), run.name, mode="bold", anchor="end", part=part)
    if base:
        panel.line([(x.low, base), (x.high, base)], "axis", "dash thin")
    entries = []
    for i, (method, steps) in enumerate(table.items()):
        colour, shape = looks(i)
        entries.append(Entry(method, colour, shape, part=part))
        panel.line([(100 * share, y) for share, y, _ in steps], colour, part=part)
        for share, y, se in steps:
            removed = f"{number(100 * share, 1)} % removed"
            about = f"{run.name}, {method}: {removed}, perplexity {number(y, 2)}"
            if se is not None:
                panel.whisker(100 * share, max(y - se, low), y + se, colour, part)
                about += f" ± {number(se, 2)}"
            panel.dot(100 * share, y, colour, shape=shape, part=part, about=about)
    key(canvas, entries, 58, top + 22)
