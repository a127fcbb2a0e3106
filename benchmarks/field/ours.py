"""Ours: prices once, then for each size the plan that removes as much, refitted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from field.llama import Calibration, Made, clone, spread_rows
from howlinear.compression.plan import descent
from howlinear.compression.prices import Losses, Sizes, price_options
from howlinear.compression.refitting import Refitter
from howlinear.compression.search import Search
from howlinear.export.install import install_maps
from howlinear.models.cutting import mixed
from howlinear.models.families import blocks
from howlinear.models.generated import generated_windows
from howlinear.run.work import Work


class Ours:
    """`howlinear compress RUN --remove-params`, with one pricing for all sizes.

    With a tokenizer the model writes half of the windows itself, in place of the calibration's.
    """

    def __init__(
        self, choose: Any, report: Any, protocol: Any, tokenizer: Any = None, bos: str = "auto"
    ) -> None:
        self.texts, self.protocol, self.tokenizer, self.bos = (
            (choose, report),
            protocol,
            tokenizer,
            bos,
        )

    def windows(self, calibration: Calibration) -> Tensor:
        ids = calibration.ids
        if self.tokenizer is None:
            return ids
        count, length = len(ids) // 2, ids.shape[1]
        more = generated_windows(calibration.model, self.tokenizer, count, length, bos=self.bos)
        return mixed([spread_rows(ids, len(ids) - count), more])

    def priced(self, calibration: Calibration) -> tuple[Search, Any]:
        model, work = calibration.model, Work()
        at = blocks(model)
        fitter = Refitter(model, at, self.windows(calibration), work=work)
        search = Search(fitter, Sizes(model, at), Losses(model, *self.texts, self.protocol, work))
        return search, descent(price_options(fitter, search.sizes, search.losses, "auto", "auto"))

    def __call__(self, calibration: Calibration, target: int) -> Made:
        small = clone(calibration.model)
        if target <= 0:
            return Made(small)
        search, path = calibration.once(f"ours {id(self)}", lambda: self.priced(calibration))
        shapes = search.shapes_saving(path, target / search.sizes.total)
        install_maps(small, search.fitter.refit(shapes))
        return Made(small, f"{len(shapes)} blocks")
