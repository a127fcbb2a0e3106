"""A drawing as values: marks on a canvas, and the scales and axes that place them.

    canvas = Canvas(640, 240)
    panel = Panel(canvas, Scale(0, 29, 40, 630), Scale(0, 1, 210, 10))
    panel.frame("block", "R2")
    panel.dot(3, 0.35, "c0", about="block 3: 0.35")

Coordinates are pixels from the top left. Colours are names that a stylesheet resolves (`styles`),
so the same marks serve a page in light and in dark, and files. Marks of one `part` are shown or
hidden together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[float, float]
# one per run: runs differ in more than colour
SHAPES = ("circle", "square", "diamond", "cross", "plus")


@dataclass(frozen=True)
class Mark:
    kind: str  # line, dot, box or text
    points: tuple[Point, ...]  # a box: two corners
    colour: str
    mode: str = ""  # words separated by blanks: dash, dots, thin, open, soft, bold, small, halo
    part: str = ""
    about: str = ""  # text of the tooltip
    text: str = ""
    size: float = 3.2  # radius of a dot
    shape: str = "circle"
    anchor: str = "middle"
    turned: bool = False


@dataclass
class Canvas:
    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, mode: str = "", **more: Any) -> None:
        if len(points) > 1:
            self.marks.append(Mark("line", tuple(points), colour, mode, **more))

    def text(self, at: Point, text: str, colour: str = "ink", mode: str = "", **more: Any) -> None:
        self.marks.append(Mark("text", (at,), colour, mode, text=text, **more))

    def labels(self, texts: Sequence[tuple[Point, str]], part: str, anchor: str = "start") -> None:
        """Small texts; one that would overlap an earlier one is left out."""
        taken: list[tuple[float, float, float]] = []
        for (x, y), text in texts:
            wide = max(16.0, 6.2 * len(text))
            if all(abs(x - u) > (wide + w) / 2 or abs(y - v) > 11 for u, v, w in taken):
                taken.append((x, y, wide))
                self.text((x, y), text, "ink", "small halo", part=part, anchor=anchor)

    def box(self, corner: Point, other: Point, colour: str, **more: Any) -> None:
        self.marks.append(Mark("box", (corner, other), colour, **more))


@dataclass(frozen=True)
class Scale:
    """Data from `low` to `high` at pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * self.share(value)

    def share(self, value: float) -> float:
        """Position between low (0) and high (1); values beyond are 0 or 1."""
        low, high = self.low, self.high
        if self.log:
            if value <= 0:
                return 0.0
            value, low, high = math.log(value), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def holds(self, value: float) -> bool:
        slack = 0.0 if self.log else 1e-9 * (self.high - self.low)
        return self.low - slack <= value <= self.high + slack

    def ticks(self, count: int = 5) -> list[float]:
        return (
            _decades(self.low, self.high, count) if self.log else _round(self.low, self.high, count)
        )


def _round(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, with 2 and 5 times each of them where there is room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    apart = max(1, math.ceil((last - first) / 7))
    powers = [10.0**e for e in range(first, last + 1, apart)]
    inside = [t for t in powers if low * 0.999 <= t <= high * 1.001]
    finer = [t for p in powers for m in (1, 2, 5) if low * 0.999 <= (t := m * p) <= high * 1.001]
    return finer if apart == 1 and len(finer) <= 2 * count else inside


def reach(values: Sequence[float], *, log: bool = False, room: float = 0.06) -> tuple[float, float]:
    """Ends of a scale for these values with a margin; a log scale uses the positive values only."""
    used = [v for v in values if not log or v > 0]
    if not used:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = min(used), max(used)
    if log:
        low = max(low, high * 1e-12, 1e-300)  # smaller values stand at the edge
        span = max((high / low) ** room, 1.3)
        return low / span, max(high, low) * span
    span = (high - low) * room or abs(high) * room or 1.0
    return low - span, high + span


def r2_floor(values: Iterable[float | None]) -> float:
    """The lower end of a scale of R2: the lowest value, between -0.5 and 0."""
    return max(-0.5, min([0.0, *(v for v in values if v is not None)]))


@dataclass(frozen=True)
class Panel:
    """Two scales, and marks that they place."""

    canvas: Canvas
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        return self.x(x), self.y(y)

    def frame(self, x_label: str = "", y_label: str = "", title: str = "") -> None:
        """Axes, grid and labels."""
        left, right = self.x.start, self.x.end
        bottom, top = self.y.start, self.y.end
        for tick in self.y.ticks(max(2, round(abs(bottom - top) / 45))):
            at = self.y(tick)
            self.canvas.line([(left, at), (right, at)], "grid")
            self.canvas.text((left - 6, at + 3.5), f"{tick:g}", "muted", "small", anchor="end")
        for tick in self.x.ticks(max(2, round((right - left) / 75))):
            at = self.x(tick)
            self.canvas.line([(at, bottom), (at, bottom + 4)], "axis")
            self.canvas.text((at, bottom + 15), f"{tick:g}", "muted", "small")
        self.canvas.line([(left, top), (left, bottom), (right, bottom)], "axis")
        middle = (left + right) / 2
        if x_label:
            self.canvas.text((middle, bottom + 31), x_label)
        if y_label:
            self.canvas.text((left - 42, (top + bottom) / 2), y_label, turned=True)
        if title:
            self.canvas.text((left, top - 9), title, mode="bold", anchor="start")

    def dot(self, x: float, y: float, colour: str, **more: Any) -> None:
        """A point; one beyond a scale becomes a triangle at the edge that points outwards."""
        for scale, value, ends in ((self.x, x, ("left", "right")), (self.y, y, ("down", "up"))):
            if not scale.holds(value):
                more = {**more, "shape": ends[scale.share(value) > 0.5]}
        self.canvas.marks.append(Mark("dot", (self.at(x, y),), colour, **more))

    def limit(self, y: float) -> None:
        """A dashed line at a value that a verdict depends on."""
        self.line([(self.x.low, y), (self.x.high, y)], "axis", "dash thin")

    def zones(self, limits: Sequence[float], names: Sequence[tuple[str, str]]) -> None:
        """Lines at the limits, and right of the panel the name and colour of each zone, from the bottom."""
        ends = [self.y.low, *limits, self.y.high]
        for y in limits:
            self.limit(y)
        for (text, colour), low, high in zip(names, ends[:-1], ends[1:], strict=True):
            middle = (self.y(low) + self.y(high)) / 2
            self.canvas.text((self.x.end + 8, middle + 4), text, colour, "small", anchor="start")

    def whisker(self, x: float, low: float, high: float, colour: str, part: str) -> None:
        """An error bar, cut at the edge of the scale."""
        self.canvas.line([self.at(x, low), self.at(x, high)], colour, "thin", part=part)

    def line(
        self, values: Sequence[tuple[float, float | None]], colour: str, mode: str = "", **more: str
    ) -> None:
        """A line through points, interrupted where a value is None."""
        piece: list[Point] = []
        for x, y in [*values, (0.0, None)]:
            if y is not None:
                piece.append(self.at(x, y))
                continue
            self.canvas.line(piece, colour, mode, **more)
            piece = []
