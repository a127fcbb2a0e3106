"""A figure: a drawing, how to read it, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from howlinear.report.canvas import SHAPES, Canvas, Mark, Panel
from howlinear.report.runs import Run
from howlinear.report.styles import RUNS


@dataclass(frozen=True)
class Choice:
    """A part of a drawing that the reader may show or hide."""

    part: str
    label: str
    on: bool = True


@dataclass(frozen=True)
class Figure:
    name: str  # of its files
    title: str
    reading: str  # what it shows and how to read it, in a few sentences
    canvas: Canvas
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    by_run: bool = True  # colours and shapes stand for runs
    choices: tuple[Choice, ...] = ()
    one_at_a_time: bool = False


LINE = 18  # pixels from one line of a legend to the next


def looks(i: int) -> tuple[str, str]:
    """Colour and shape of the i-th run or method."""
    return RUNS[i % len(RUNS)], SHAPES[i % len(SHAPES)]


def run_dot(panel: Panel, run: Run, at: tuple[float, float], about: str, **more: Any) -> None:
    """A point in the colour and shape of its run; `about` follows the run's name."""
    colour, shape = looks(run.number)
    panel.dot(
        *at, colour, **{"shape": shape, "part": run.part, "about": f"{run.name}, {about}", **more}
    )


Entry = tuple[str, str, str, str, str]  # label, colour, shape, line's mode, part


def key(canvas: Canvas, entries: Sequence[Entry], x: float, y: float) -> None:
    """A legend with a sample of each entry's line and mark, on as many lines as it needs."""
    start = x
    for label, colour, shape, mode, part in entries:
        width = 40 + 6.4 * len(label)
        if x + width > canvas.width and x > start:
            x, y = start, y + LINE
        canvas.line([(x, y - 4), (x + 22, y - 4)], colour, mode, part=part)
        at, filled = ((x + 11, y - 4),), "open" if mode else ""
        canvas.marks.append(Mark("dot", at, colour, filled, part, shape=shape))
        canvas.text((x + 28, y), label, "ink", "small", anchor="start", part=part)
        x += width
    canvas.height = max(canvas.height, y + 8)


def short(name: str, most: int = 40) -> str:
    """The end of a name: paths differ there."""
    return name if len(name) <= most else "…" + name[-most:]
