"""A figure: a drawing, how to read it, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from howlinear.report.canvas import SHAPES, Canvas, Mark
from howlinear.report.styles import RUNS


@dataclass(frozen=True)
class Choice:
    """A part of a drawing that the reader may show or hide."""

    part: str
    label: str
    on: bool = True


@dataclass(frozen=True)
class Figure:
    name: str  # of files
    title: str
    reading: str  # what it shows and how to read it, in a sentence or two
    canvas: Canvas
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    by_run: bool = True  # do colours and shapes stand for runs?
    switches: tuple[Choice, ...] = ()  # any of them at a time
    one_of: tuple[Choice, ...] = ()  # one at a time


LINE = 18  # pixels from one line of a legend to the next


def looks(i: int) -> tuple[str, str]:
    """Colour and shape of the i-th run or method."""
    return RUNS[i % len(RUNS)], SHAPES[i % len(SHAPES)]


Entry = tuple[str, str, str, str, str]  # label, colour, shape, line's mode, part


def key(canvas: Canvas, entries: Sequence[Entry], x: float, y: float) -> None:
    """A legend, each entry with a sample of its own; it goes on in a line below where it must."""
    start = x
    for label, colour, shape, mode, part in entries:
        wide = 40 + 6.4 * len(label)
        if x + wide > canvas.width and x > start:
            x, y = start, y + LINE
        canvas.line([(x, y - 4), (x + 22, y - 4)], colour, mode, part=part)
        at, filled = ((x + 11, y - 4),), "open" if mode else ""
        canvas.marks.append(Mark("dot", at, colour, filled, part, shape=shape))
        canvas.text((x + 28, y), label, "ink", "small", anchor="start", part=part)
        x += wide
    canvas.height = max(canvas.height, y + 8)


def name_runs(canvas: Canvas, names: Sequence[str]) -> None:
    """Which mark is which run, beneath the drawing: files and paper have no switches."""
    entries = [(short(name), *looks(i), "", f"r{i}") for i, name in enumerate(names)]
    key(canvas, entries, 58, canvas.height + 12)


def short(name: str, most: int = 40) -> str:
    """The end of a name: paths differ there."""
    return name if len(name) <= most else "…" + name[-most:]
