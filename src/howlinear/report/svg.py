"""Marks -> SVG, inside a page (styled by it) or as a file that stands alone.

svg(figure.canvas, "profile", "R2 over depth")             # inside a page
standalone(figure.canvas, "R2 over depth")                 # a file
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from howlinear.report.canvas import Canvas, Mark, Point
from howlinear.report.markup import Markup, tag
from howlinear.report.styles import LIGHT, stylesheet

CORNERS = {  # of shapes, as angles from the right and shares of the radius
    **{
        shape: [(at + 120 * k, 1.3) for k in range(3)]
        for shape, at in (("right", 0), ("up", 90), ("left", 180), ("down", 270))
    },
    "diamond": [(90 * k, 1.35) for k in range(4)],
    "square": [(45 + 90 * k, 1.25) for k in range(4)],
}
STROKES = {  # pairs of ends, in radii from the middle
    "cross": (((-1, -1), (1, 1)), ((-1, 1), (1, -1))),
    "plus": (((-1.3, 0), (1.3, 0)), ((0, -1.3), (0, 1.3))),
}


def svg(canvas: Canvas, name: str, title: str) -> Markup:
    return _svg(canvas, title, label=f"{name}-title")


def sample(canvas: Canvas) -> Markup:
    """A drawing beside a text that says it all."""
    return _svg(canvas, None, aria_hidden="true")


def standalone(canvas: Canvas, title: str) -> str:
    """A file: its own styles, light on white, the numbers in the marks' titles."""
    style = tag("style", Markup(stylesheet(LIGHT)))
    ground = tag("rect", width="100%", height="100%", fill=LIGHT["paper"])
    return str(_svg(canvas, title, style, ground, xmlns="http://www.w3.org/2000/svg")) + "\n"


def _svg(
    canvas: Canvas, title: str | None, *before: Markup, label: str | None = None, **attributes: str
) -> Markup:
    w, h = f"{canvas.width:g}", f"{canvas.height:g}"
    return tag(
        "svg",
        None if title is None else tag("title", title, id=label),
        *before,
        *(_element(mark) for mark in canvas.marks),
        class_="hl",
        viewBox=f"0 0 {w} {h}",
        width=w,
        height=h,
        role=None if title is None else "img",
        aria_labelledby=label,
        **attributes,
    )


def _element(mark: Mark) -> Markup:
    title = tag("title", mark.about) if mark.about else None
    return DRAW[mark.kind](mark, title)


def _classes(kind: str, mark: Mark) -> str:
    return " ".join(filter(None, (kind, mark.colour, mark.mode, mark.part)))


def _line(mark: Mark, title: Markup | None) -> Markup:
    return tag("polyline", title, class_=_classes("l", mark), points=_points(mark.points))


def _box(mark: Mark, title: Markup | None) -> Markup:
    (x, y), (right, bottom) = mark.points
    literal = mark.colour if mark.colour.startswith("#") else None
    plain = _classes("b", mark) if literal is None else " ".join(filter(None, ("b", mark.part)))
    size = {"width": _short(right - x), "height": _short(bottom - y)}
    return tag("rect", title, class_=plain, x=_short(x), y=_short(y), **size, fill=literal)


def _text(mark: Mark, title: Markup | None) -> Markup:
    ((x, y),) = mark.points
    turn = f"rotate(-90 {_short(x)} {_short(y)})" if mark.turned else None
    anchor = None if mark.anchor == "start" else mark.anchor
    place = {"x": _short(x), "y": _short(y), "text_anchor": anchor, "transform": turn}
    return tag("text", mark.text, class_=_classes("t", mark), **place)


def _dot(mark: Mark, title: Markup | None) -> Markup:
    ((x, y),) = mark.points
    if mark.shape == "circle":
        place = {"cx": _short(x), "cy": _short(y), "r": _short(mark.size)}
        return tag("circle", title, class_=_classes("d", mark), **place)
    if mark.shape in STROKES:
        ends = (f"M{_points([a])}L{_points([b])}" for a, b in strokes(mark))
        return tag("path", title, class_=_classes("d", mark), d="".join(ends))
    return tag("polygon", title, class_=_classes("d", mark), points=_points(outline(mark)))


DRAW = {"line": _line, "box": _box, "text": _text, "dot": _dot}


def outline(mark: Mark) -> list[Point]:
    """The corners of a dot that is not round."""
    ((x, y),) = mark.points
    return [
        (x + far * mark.size * math.cos(a), y - far * mark.size * math.sin(a))
        for a, far in ((math.radians(angle), far) for angle, far in CORNERS[mark.shape])
    ]


def strokes(mark: Mark) -> list[tuple[Point, Point]]:
    """The lines of a dot that is made of lines."""
    ((x, y),) = mark.points
    r = mark.size
    return [
        ((x + r * a, y + r * b), (x + r * c, y + r * d)) for (a, b), (c, d) in STROKES[mark.shape]
    ]


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
