"""Figures as files: SVG and the numbers as CSV always, PNG and PDF where matplotlib is installed.

write_figures(figures, "figures")   # figures/profile.svg, figures/profile.csv, ...
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from howlinear.records.escaping import escaped
from howlinear.records.files import atomic
from howlinear.records.words import finite
from howlinear.report.canvas import Canvas
from howlinear.report.figure import Figure
from howlinear.report.svg import standalone

FORMULA = ("=", "+", "-", "@")  # what a spreadsheet takes for a formula


def write_figures(figures: Iterable[Figure], folder: str | Path) -> list[Path]:
    """Every figure in every format there is; the paths written."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder with --figures")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        written.append(folder / f"{figure.name}.csv")
        with atomic(written[-1]) as temporary:
            write_csv(temporary, figure.columns, figure.rows)
        for name, canvas in drawings(figure).items():
            for kind in ("svg", "png", "pdf") if find_spec("matplotlib") else ("svg",):
                written.append(folder / f"{name}.{kind}")
                with atomic(written[-1]) as temporary:
                    _write(canvas, figure.title, kind, temporary)
    return written


def drawings(figure: Figure) -> dict[str, Canvas]:
    """By name: the drawing, or one for each of what a page shows one at a time (spectra-b3)."""
    if not figure.one_of:
        return {figure.name: figure.canvas}
    every = {choice.part for choice in figure.one_of}
    own = {part: every - {part} for part in every}
    return {
        f"{figure.name}-{c.part}": Canvas(
            figure.canvas.width,
            figure.canvas.height,
            [m for m in figure.canvas.marks if not own[c.part] & set(m.part.split())],
        )
        for c in figure.one_of
    }


def _write(canvas: Canvas, title: str, kind: str, path: Path) -> None:
    if kind == "svg":
        path.write_text(standalone(canvas, title), encoding="utf-8")
        return
    from howlinear.report.painting import paint

    paint(canvas, path, kind, title)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(map(cell, columns))
        out.writerows(map(cell, row) for row in rows)


def cell(value: object) -> object:
    """A number as it is, nothing as nothing, text so that no spreadsheet runs it."""
    if isinstance(value, int | float):
        return "" if finite(value) is None else value
    text = "" if value is None else escaped(value)
    return f"'{text}" if text.startswith(FORMULA) else text
