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
    switches: tuple[Choice, ...] = ()  # any of them at a time
    one_of: tuple[Choice, ...] = ()  # one at a time


def looks(i: int) -> tuple[str, str]:
    """Colour and shape of the i-th run or method."""
    return RUNS[i % len(RUNS)], SHAPES[i % len(SHAPES)]


def key(canvas: Canvas, entries: list[tuple[str, str, str, str]], x: float, y: float) -> None:
    """A legend in one line: (label, colour, line's mode, part), each with its own sample."""
    for label, colour, mode, part in entries:
        canvas.line([(x, y - 4), (x + 22, y - 4)], colour, mode, part=part)
        i = RUNS.index(colour) if colour in RUNS else 0
        canvas.marks.append(
            Mark("dot", ((x + 11, y - 4),), colour, "open" if mode else "", part, shape=looks(i)[1])
        )
        canvas.text((x + 28, y), label, "ink", "small", anchor="start", part=part)
        x += 40 + 6.1 * len(label)
