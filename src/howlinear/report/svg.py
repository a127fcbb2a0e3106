"""Marks -> SVG, inside a page (styled by it) or as a file that stands alone.

svg(figure.canvas, "R2 over depth", label="profile-title")  # inside a page
standalone(figure.canvas, "R2 over depth")                  # a file
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from howlinear.report.canvas import Canvas, Mark, Point
from howlinear.report.markup import Markup, tag
from howlinear.report.styles import LIGHT, stylesheet

CORNERS = {  # by shape: angles in degrees from the right, and distances in radii
    **{
        shape: [(at + 120 * k, 1.3) for k in range(3)]
        for shape, at in (("right", 0), ("up", 90), ("left", 180), ("down", 270))
    },
    "diamond": [(90 * k, 1.35) for k in range(4)],
    "square": [(45 + 90 * k, 1.25) for k in range(4)],
}
STROKES = {  # by shape: pairs of ends, in radii from the centre
    "cross": (((-1, -1), (1, 1)), ((-1, 1), (1, -1))),
    "plus": (((-1.3, 0), (1.3, 0)), ((0, -1.3), (0, 1.3))),
}


def standalone(canvas: Canvas, title: str) -> str:
    """A file with its own styles, light on white; marks say their numbers in titles."""
    style = tag("style", Markup(stylesheet(LIGHT)))
    ground = tag("rect", width="100%", height="100%", fill=LIGHT["paper"])
    return str(svg(canvas, title, style, ground, xmlns="http://www.w3.org/2000/svg")) + "\n"


def svg(
    canvas: Canvas,
    title: str | None,
    *before: Markup,
    label: str | None = None,
    name: str = "",
    **attributes: str,
) -> Markup:
    """A drawing of the class `name` with a title that has the id `label`.

    Without a title it is hidden from screen readers.
    """
    w, h = f"{canvas.width:g}", f"{canvas.height:g}"
    return tag(
        "svg",
        None if title is None else tag("title", title, id=label),
        *before,
        *(_element(mark) for mark in canvas.marks),
        class_=f"hl {name}".strip(),
        viewBox=f"0 0 {w} {h}",
        width=w,
        height=h,
        role=None if title is None else "img",
        aria_hidden="true" if title is None else None,
        aria_labelledby=label,
        **attributes,
    )


def _element(mark: Mark) -> Markup:
    name, attributes = DRAW[mark.kind](mark)
    title = tag("title", mark.about) if mark.about else None
    literal = mark.colour if mark.colour.startswith("#") else None
    colour = mark.colour if literal is None else ""
    classes = " ".join(filter(None, (mark.kind[0], colour, mark.mode, mark.part)))
    return tag(name, title, mark.text, class_=classes, **attributes, fill=literal)


# The name and the attributes of the element of each kind of mark.
Element = tuple[str, dict[str, str | None]]


def _line(mark: Mark) -> Element:
    return "polyline", {"points": _points(mark.points)}


def _box(mark: Mark) -> Element:
    (x, y), (right, bottom) = mark.points
    size = {"width": _short(right - x), "height": _short(bottom - y)}
    return "rect", {"x": _short(x), "y": _short(y), **size}


def _text(mark: Mark) -> Element:
    ((x, y),) = mark.points
    turn = f"rotate(-90 {_short(x)} {_short(y)})" if mark.turned else None
    anchor = None if mark.anchor == "start" else mark.anchor
    return "text", {"x": _short(x), "y": _short(y), "text_anchor": anchor, "transform": turn}


def _dot(mark: Mark) -> Element:
    ((x, y),) = mark.points
    r = mark.size
    if mark.shape == "circle":
        return "circle", {"cx": _short(x), "cy": _short(y), "r": _short(r)}
    if mark.shape in STROKES:
        ends = [[(x + r * u, y + r * v) for u, v in stroke] for stroke in STROKES[mark.shape]]
        return "path", {"d": "".join(f"M{_points([a])}L{_points([b])}" for a, b in ends)}
    corners = [(math.radians(angle), far * r) for angle, far in CORNERS[mark.shape]]
    outline = [(x + far * math.cos(a), y - far * math.sin(a)) for a, far in corners]
    return "polygon", {"points": _points(outline)}


DRAW = {"line": _line, "box": _box, "text": _text, "dot": _dot}


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
