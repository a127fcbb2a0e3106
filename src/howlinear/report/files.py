"""Figures as files: SVG and the numbers as CSV; PNG and PDF too where typst is installed.

write_figures(figures, "figures")   # figures/profile.svg, figures/profile.csv, ...
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from howlinear.records.files import atomic, check_writable
from howlinear.records.words import escaped, finite
from howlinear.report.canvas import Canvas
from howlinear.report.figure import Figure
from howlinear.report.svg import standalone

FORMULA = ("=", "+", "-", "@")  # a spreadsheet runs text that starts with one of these
Format = Literal["png", "pdf"]
CONVERTED: tuple[Format, ...] = ("png", "pdf")
CONVERTER = b"""#set document(title: sys.inputs.title, date: none)
#set page(width: auto, height: auto, margin: 0pt)
#image(bytes(sys.inputs.svg), format: "svg", alt: sys.inputs.title)
"""


def write_figures(figures: Iterable[Figure], folder: str | Path) -> list[Path]:
    """Writes every figure in every format there is; returns the paths."""
    folder = Path(folder)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = CONVERTED if find_spec("typst") else ()
    written = []
    for figure in figures:
        written.append(folder / f"{figure.name}.csv")
        with atomic(written[-1]) as temporary:
            write_csv(temporary, figure.columns, figure.rows)
        for name, canvas in drawings(figure).items():
            svg = standalone(canvas, figure.title)
            contents = {"svg": svg.encode()}
            contents |= {kind: converted(svg, figure.title, kind) for kind in kinds}
            for ending, content in contents.items():
                written.append(folder / f"{name}.{ending}")
                with atomic(written[-1]) as temporary:
                    temporary.write_bytes(content)
    return written


def check_folder(folder: Path) -> None:
    """Refuse a folder that figures cannot be written to."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder with `figures`")
    check_writable(folder / "figures", "name another folder with `figures`")


def drawings(figure: Figure) -> dict[str, Canvas]:
    """The drawing by file name, or one drawing per choice where a page shows one at a time (spectra-b3).

    Parts that a page hides at first are left out.
    """
    if not figure.one_at_a_time:
        off = {choice.part for choice in figure.choices if not choice.on}
        return {figure.name: _without(figure.canvas, off)}
    parts = [choice.part for choice in figure.choices]
    return {f"{figure.name}-{p}": _without(figure.canvas, {*parts} - {p}) for p in parts}


def _without(canvas: Canvas, parts: set[str]) -> Canvas:
    marks = [mark for mark in canvas.marks if parts.isdisjoint(mark.part.split())]
    return replace(canvas, marks=marks)


def converted(svg: str, title: str, kind: Format, system_fonts: bool = True) -> bytes:
    """A standalone SVG as PNG (2 pixels per CSS pixel) or as PDF; the same bytes every time."""
    import typst

    inputs = {"svg": svg, "title": title}
    return typst.compile(
        CONVERTER, format=kind, ppi=192, sys_inputs=inputs, ignore_system_fonts=not system_fonts
    )


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(map(cell, columns))
        out.writerows(map(cell, row) for row in rows)


def cell(value: object) -> object:
    """A number unchanged, None as an empty cell, text quoted where a spreadsheet would run it."""
    if isinstance(value, int | float):
        return "" if finite(value) is None else value
    text = "" if value is None else escaped(value)
    return f"'{text}" if text.startswith(FORMULA) else text
