"""The figures, in the order of the page. Each module has `draw(runs) -> Figure | None`."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.report.figure import Figure, name_runs
from howlinear.report.figures import (
    alike,
    depth,
    kinds,
    rest,
    signals,
    smaller,
    spectra,
    training,
)
from howlinear.report.runs import Run, numbered

MODULES = (depth, kinds, rest, alike, signals, smaller, training, spectra)


def draw(runs: Sequence[Run]) -> list[Figure]:
    """Every figure that these runs have the numbers for."""
    runs = numbered(runs)
    figures = [figure for module in MODULES if (figure := module.draw(runs)) is not None]
    for figure in figures if len(runs) > 1 else ():
        if figure.by_run:
            name_runs(figure.canvas, runs)
    return figures
