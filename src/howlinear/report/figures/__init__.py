"""The figures, in the order of the page. Each module has `draw(runs, width) -> Figure | None`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from howlinear.report.figure import NARROW, Entry, Figure, key, looks, short
from howlinear.report.figures import alike, depth, kinds, rest, signals, smaller, spectra, training
from howlinear.report.runs import Run, numbered

MODULES = (depth, kinds, rest, alike, signals, smaller, training, spectra)


def draw(runs: Sequence[Run]) -> list[Figure]:
    """Every figure that these runs have the numbers for, each also as narrow as a phone."""
    runs = numbered(runs)
    figures = []
    for module in MODULES:
        figure, narrow = module.draw(runs), module.draw(runs, NARROW)
        if figure is not None and narrow is not None:
            figures.append(replace(figure, narrow=narrow.canvas))
    if len(runs) > 1:  # a legend of runs beneath each drawing, for files and paper
        for figure in figures:
            if figure.by_run:
                for canvas in filter(None, (figure.canvas, figure.narrow)):
                    entries = [
                        Entry(short(run.name), *looks(run.number), part=run.part) for run in runs
                    ]
                    key(canvas, entries, 12, canvas.height + 12)
    return figures
