"""Marks -> PNG or PDF, by matplotlib (extra `plot`). The same drawing as the SVG, light on white."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from howlinear.report.canvas import Canvas, Mark
from howlinear.report.styles import DASHES, LIGHT, TEXT, WIDTHS
from howlinear.report.svg import STROKES, outline, strokes

POINTS = 72 / 96  # of a CSS pixel


def paint(canvas: Canvas, path: Path, kind: str, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(canvas.width / 96, canvas.height / 96), dpi=192)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0))
    axes.axis("off")
    for z, mark in enumerate(canvas.marks):
        artist = PAINT[mark.kind](mark)
        artist.set(zorder=z, alpha=0.45 if "soft" in mark.mode.split() else None)
        axes.add_artist(artist)
    told = {"Title": title}
    if kind == "pdf":
        told["CreationDate"] = None  # type: ignore[assignment]
    with warnings.catch_warnings():  # signs that the font lacks are drawn as boxes
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, format=kind, metadata=told)


def _colour(mark: Mark) -> str:
    return LIGHT.get(mark.colour, mark.colour)


def _line(mark: Mark) -> Any:
    from matplotlib.lines import Line2D

    modes = mark.mode.split()
    width = next((WIDTHS[m] for m in modes if m in WIDTHS), WIDTHS[""]) * POINTS
    dash = next((DASHES[m] for m in modes if m in DASHES), None)
    style: Any = "-" if dash is None else (0, tuple(d * POINTS / width for d in dash))
    xs, ys = zip(*mark.points, strict=True)
    return Line2D(xs, ys, color=_colour(mark), linewidth=width, linestyle=style)


def _box(mark: Mark) -> Any:
    from matplotlib.patches import Rectangle

    (x, y), (right, bottom) = mark.points
    return Rectangle((x, y), right - x, bottom - y, facecolor=_colour(mark), linewidth=0)


def _text(mark: Mark) -> Any:
    from matplotlib.text import Text

    ((x, y),) = mark.points
    modes = mark.mode.split()
    size = TEXT["small" if "small" in modes else ""] * POINTS
    align: Any = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
    return Text(
        x,
        y,
        mark.text,
        color=_colour(mark),
        fontsize=size,
        fontweight="bold" if "bold" in modes else "normal",
        horizontalalignment=align,
        verticalalignment="center" if mark.turned else "baseline",
        rotation=90 if mark.turned else 0,
        parse_math=False,
    )


def _dot(mark: Mark) -> Any:
    from matplotlib.patches import Circle, PathPatch, Polygon
    from matplotlib.path import Path as Outline

    ((x, y),) = mark.points
    fill = LIGHT["paper"] if "open" in mark.mode.split() else _colour(mark)
    look = {"edgecolor": _colour(mark), "facecolor": fill, "linewidth": 1.4 * POINTS}
    if mark.shape == "circle":
        return Circle((x, y), mark.size, **look)
    if mark.shape in STROKES:
        ends = [end for stroke in strokes(mark) for end in stroke]
        return PathPatch(Outline(ends, [1, 2] * (len(ends) // 2)), **look)
    return Polygon(outline(mark), closed=True, **look)


PAINT = {"line": _line, "box": _box, "text": _text, "dot": _dot}
