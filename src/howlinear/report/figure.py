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
    canvas: Canvas  # as wide as the page, or as half of it
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    by_run: bool = True  # colours and shapes stand for runs
    choices: tuple[Choice, ...] = ()
    one_at_a_time: bool = False
    narrow: Canvas | None = None  # the same for a phone


WIDE, HALF, NARROW = 1080, 600, 360  # widths of drawings
LINE = 18  # pixels from one line of a legend to the next


def looks(i: int) -> tuple[str, str]:
    """Colour and shape of the i-th run or method."""
    return RUNS[i % len(RUNS)], SHAPES[i % len(SHAPES)]


def run_dot(panel: Panel, run: Run, at: tuple[float, float], about: str, **more: Any) -> None:
    """A point in the colour and shape of its run, unless said otherwise; `about` follows the run's name."""
    colour, shape = looks(run.number)
    look = {"colour": colour, "shape": shape, "part": run.part, "about": f"{run.name}, {about}"}
    panel.dot(*at, **{**look, **more})


@dataclass(frozen=True)
class Entry:
    """A line of a legend: a sample of a line (its mode, or None for no line), of a mark, or of both."""

    label: str
    colour: str
    shape: str = "circle"
    line: str | None = ""
    open: bool = False
    part: str = ""


def key(canvas: Canvas, entries: Sequence[Entry], x: float, y: float) -> float:
    """A legend on as many lines as it needs; returns the last line's y."""
    start = x
    for e in entries:
        sample = 14 if e.line is None else 28
        width = sample + 12 + 6.4 * len(e.label)
        if x + width > canvas.width and x > start:
            x, y = start, y + LINE
        middle = x + (5 if e.line is None else 11)
        if e.line is not None:
            canvas.line([(x, y - 4), (x + 22, y - 4)], e.colour, e.line, part=e.part)
        if e.shape:
            at, mode = ((middle, y - 4),), "open" if e.open else ""
            canvas.marks.append(Mark("dot", at, e.colour, mode, e.part, shape=e.shape))
        canvas.text((x + sample, y), e.label, "ink", "small", anchor="start", part=e.part)
        x += width
    canvas.height = max(canvas.height, y + 8)
    return y


def short(name: str, most: int = 40) -> str:
    """The end of a name: paths differ there."""
    return name if len(name) <= most else "…" + name[-most:]
