"""What simpler methods cost that replace whole blocks: by swap cost, by R2, or removed outright."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from howlinear.compression.measuring import Losses
from howlinear.compression.prices import Sizes
from howlinear.compression.refitting import Refitter
from howlinear.models.families import Block, Replacement
from howlinear.profiling.profiler import Profile
from howlinear.records.files import read_json

BASELINES = ("swap", "r2", "zero")


class Baselines:
    """Blocks of a run replaced by its own maps, or by zero, in the order of a cost."""

    def __init__(
        self, folder: Path, run: Profile, fitter: Refitter, sizes: Sizes, losses: Losses
    ) -> None:
        self.folder, self.run, self.sizes, self.losses = folder, run, sizes, losses
        self.at, self.like = fitter.at, fitter.like

    def until(self, removed: int) -> list[tuple[str, int, dict[Block, Replacement]]]:
        """(method, parameters removed, maps) with one block replaced, two, ... up to `removed`."""
        costs = self._swap_costs()
        costs["r2"] = {b: -p.r2 for b, p in zip(self.at, self.run.blocks, strict=True)}
        points = []
        for method in BASELINES:
            gone = 0
            maps: dict[Block, Replacement] = {}
            for b in sorted(self.at, key=costs[method].__getitem__):
                if gone >= removed:
                    break
                kept = 0 if method == "zero" else self.run.maps[b.index].parameters
                gone += self.sizes.parameters[b] - kept
                maps = {**maps, b: self._replacement(b, method)}
                points.append((method, gone, maps))
        return points

    def _swap_costs(self) -> dict[str, dict[Block, float]]:
        """What replacing each block alone by plain least squares, or removing it, costs.

        From swap.json if it has all blocks: measured on the text reported on, which favours the
        baselines. Otherwise KL, which needs fewer tokens, on the text for choosing.
        """
        fields = {"swap": "delta_nll_plain", "zero": "delta_nll_zero"}
        with suppress(ValueError):
            swaps = {b["index"]: b for b in read_json(self.folder / "swap.json", "swap")["blocks"]}
            if all(b.index in swaps for b in self.at):
                return {
                    method: {b: float(swaps[b.index][name]) for b in self.at}
                    for method, name in fields.items()
                }
        variants = [(b, self._replacement(b, method)) for method in fields for b in self.at]
        costs = iter(self.losses.alone("measuring baselines", variants))
        return {method: {b: next(costs).kl for b in self.at} for method in fields}

    def _replacement(self, block: Block, method: str) -> Replacement:
        if method == "zero":
            return lambda x: x.new_zeros(*x.shape[:-1], block.d_out)
        return self.run.maps[block.index].to(self.like)
