"""What kind of linear: R2 against the median over features, sized by effective rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howlinear.records.fields import BlockProfile
from howlinear.records.words import number
from howlinear.report.canvas import Canvas, Mark, Panel, Scale, r2_floor
from howlinear.report.figure import Figure, looks
from howlinear.report.runs import Run, inside

READING = (
    "On the diagonal most features are as linear as the whole; far above it a few large features "
    "carry R2. A larger mark has a higher effective rank: a small one high up is linear in a "
    "direction or two. Numbers name the blocks farthest from the diagonal."
)
NAMED = 6  # blocks named in the drawing, a run


def draw(runs: Sequence[Run]) -> Figure | None:
    points = [
        (i, run, b, median)
        for i, run in enumerate(runs)
        for b in run.blocks
        if (median := inside(b.r2_feature, "median")) is not None
    ]
    if not points:
        return None
    canvas = Canvas(560, 400)
    low = r2_floor(v for _, _, b, m in points for v in (m, b.r2))
    panel = Panel(canvas, Scale(low, 1.0, 58, 430), Scale(low, 1.0, 350, 20))
    panel.frame("median R2 of an output feature", "R2 of the block")
    panel.line([(low, low), (1.0, 1.0)], "axis", "dash thin")
    for i, run, b, median in sorted(points, key=lambda p: -_size(p[2])):  # large ones beneath
        colour, shape = looks(i)
        about = f"{run.name}, block {b.index}: R2 {number(b.r2)}, median {number(median)}, "
        about += f"effective rank {b.effective_rank or '-'} of {b.d_out}; {b.kind}"
        shown = {"mode": "open", "shape": shape, "part": f"r{i}", "size": _size(b)}
        panel.dot(median, b.r2, colour, about=about, **shown)
    for i in range(len(runs)):
        own = sorted((p for p in points if p[0] == i), key=lambda p: -abs(p[2].r2 - p[3]))
        places = [panel.at(median, b.r2) for _, _, b, median in own[:NAMED]]
        texts = [
            ((x - _size(p[2]) - 4, y + 4), str(p[2].index))
            for (x, y), p in zip(places, own, strict=False)
        ]
        canvas.labels(texts, part=f"r{i}", anchor="end")
    _sizes(canvas)
    rows = [(run.name, b.index, b.r2, m, b.effective_rank, b.kind) for _, run, b, m in points]
    columns = ("run", "block", "R2", "median feature", "effective rank", "kind")
    return Figure("kinds", "What kind of linear", READING, canvas, columns, rows)


def _size(b: BlockProfile) -> float:
    return radius(b.effective_rank or 1)


def radius(rank: int) -> float:
    return 3.0 + 3.2 * math.log10(max(rank, 1))


def _sizes(canvas: Canvas) -> None:
    canvas.text((450, 40), "effective rank", "muted", "small", anchor="start")
    for k, rank in enumerate((1, 10, 100, 1000)):
        at = (462.0, 62.0 + 28 * k)
        canvas.marks.append(Mark("dot", (at,), "muted", "open", size=radius(rank)))
        canvas.text((482, at[1] + 4), str(rank), "muted", "small", anchor="start")
