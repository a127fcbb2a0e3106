"""What kind of linear: R2 against the median over features, sized by effective rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howlinear.records.fields import BlockProfile
from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Mark, Panel, Scale, r2_floor
from howlinear.report.figure import HALF, NARROW, Figure, run_dot
from howlinear.report.runs import Run, inside

READING = (
    "On the diagonal most features are as linear as the whole block; far above it a few large features "
    "carry R2. A larger mark has a higher effective rank: a small mark high up is linear in one or two "
    "directions. Numbers name the blocks farthest from the diagonal."
)
NAMED = 6  # blocks named in the drawing, per run

Point = tuple[Run, BlockProfile, float]  # with the median R2 of an output feature


def draw(runs: Sequence[Run], width: float = HALF) -> Figure | None:
    points: list[Point] = [
        (run, b, median)
        for run in runs
        for b in run.blocks
        if (median := inside(b.r2_feature, "median")) is not None
    ]
    if not points:
        return None
    narrow = width == NARROW
    canvas = Canvas(width, 360 if narrow else 400)
    low = r2_floor(v for _, b, median in points for v in (median, b.r2))
    panel = Panel(
        canvas,
        Scale(low, 1.0, 58, width - (82 if narrow else 130)),
        Scale(low, 1.0, canvas.height - 50, 20),
    )
    panel.frame("median R2 of an output feature", "R2 of the block")
    panel.line([(low, low), (1.0, 1.0)], "axis", "dash thin")
    for run, b, median in sorted(
        points, key=lambda p: -_radius(p[1].effective_rank)
    ):  # large marks beneath
        about = f"block {b.index}: R2 {number(b.r2)}, median {number(median)}, "
        about += f"effective rank {b.effective_rank or '-'} of {b.d_out}; {b.kind}"
        run_dot(panel, run, (median, b.r2), about, mode="open", size=_radius(b.effective_rank))
    for run in runs:
        _name(panel, [p for p in points if p[0] is run])
    _sizes(canvas, panel.x.end + 20)
    rows = [(run.name, b.index, b.r2, m, b.effective_rank, b.kind) for run, b, m in points]
    columns = ("run", "block", "R2", "median feature", "effective rank", "kind")
    return Figure("kinds", "What kind of linear", READING, canvas, columns, rows)


def _name(panel: Panel, points: list[Point]) -> None:
    """Index of the blocks of one run that lie farthest from the diagonal."""
    farthest = sorted(points, key=lambda p: -abs(p[1].r2 - p[2]))[:NAMED]
    texts = []
    for _, b, median in farthest:
        x, y = panel.at(median, b.r2)
        texts.append(((x - _radius(b.effective_rank) - 4, y + 4), str(b.index)))
    if farthest:
        panel.canvas.labels(texts, part=farthest[0][0].part, anchor="end")


def _radius(rank: int | None) -> float:
    return 3.0 + 3.2 * math.log10(max(rank or 1, 1))


def _sizes(canvas: Canvas, x: float) -> None:
    canvas.text((x, 40), "rank", "muted", "small", anchor="start")
    for k, rank in enumerate((1, 10, 100, 1000)):
        at = (x + 12, 62.0 + 28 * k)
        canvas.marks.append(Mark("dot", (at,), "muted", "open", size=_radius(rank)))
        canvas.text((x + 29, at[1] + 4), str(rank), "muted", "small", anchor="start")
