"""Ours: prices once, then for each size the plan that removes as much, refitted."""

from __future__ import annotations

from typing import Any

from field.llama import Calibration, Made, clone
from howlinear.compression.prices import Losses, Sizes
from howlinear.compression.refitting import Refitter
from howlinear.compression.search import Search
from howlinear.export.install import install_maps
from howlinear.models.families import blocks
from howlinear.run.work import Work


class Ours:
    """`howlinear compress RUN --remove-params`, with one pricing for all sizes."""

    def __init__(self, choose: Any, report: Any, protocol: Any) -> None:
        self.texts, self.protocol = (choose, report), protocol

    def priced(self, calibration: Calibration) -> Search:
        model, work = calibration.model, Work()
        at = blocks(model)
        fitter = Refitter(model, at, calibration.ids, work=work)
        search = Search(fitter, Sizes(model, at), Losses(model, *self.texts, self.protocol, work))
        search.price("auto", "auto")
        return search

    def __call__(self, calibration: Calibration, target: int) -> Made:
        small = clone(calibration.model)
        if target <= 0:
            return Made(small)
        search = calibration.once("ours", lambda: self.priced(calibration))
        shapes = search.shapes_saving(target / search.sizes.total)
        install_maps(small, search.fitter.refit(shapes))
        return Made(small, f"{len(shapes)} blocks")
