"""The figures, in the order of the page. Each module has `draw(runs) -> Figure | None`."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.report.figure import Figure
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
from howlinear.report.runs import Run

EVERY = (depth, kinds, rest, alike, signals, smaller, training, spectra)


def draw(runs: Sequence[Run]) -> list[Figure]:
    """Every figure that these runs have the numbers for."""
    made = (module.draw(runs) for module in EVERY)
    return [figure for figure in made if figure is not None]
