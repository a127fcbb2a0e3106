"""The figures, in the order of the page. Each module has `draw(runs) -> Figure | None`."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.report.figure import Figure, key, looks, short
from howlinear.report.figures import alike, depth, kinds, rest, signals, smaller, spectra, training
from howlinear.report.runs import Run, numbered

MODULES = (depth, kinds, rest, alike, signals, smaller, training, spectra)


def draw(runs: Sequence[Run]) -> list[Figure]:
    """Every figure that these runs have the numbers for."""
    runs = numbered(runs)
    figures = [figure for module in MODULES if (figure := module.draw(runs)) is not None]
    if len(runs) > 1:  # a legend of runs beneath each drawing, for files and paper
        entries = [(short(run.name), *looks(run.number), "", run.part) for run in runs]
        for canvas in (figure.canvas for figure in figures if figure.by_run):
            key(canvas, entries, 58, canvas.height + 12)
    return figures
