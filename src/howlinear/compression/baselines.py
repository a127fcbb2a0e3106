"""Baselines that replace whole blocks by the run's maps or by zero, in the order of a cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from howlinear.compression.prices import Losses, Sizes
from howlinear.linear.affine import Affine
from howlinear.losses.sweeps import Variant
from howlinear.models.families import Block, Replacement
from howlinear.models.offload import like
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockSwap
from howlinear.run.folder import RunFolder, records_of


def baselines(
    folder: RunFolder, run: Profile, sizes: Sizes, losses: Losses, removed: int
) -> list[tuple[str, int, dict[Block, Replacement]]]:
    """(method, parameters removed, maps) with one block replaced, two, ... up to `removed`."""
    linear = {b: run.maps[b.index].to(like(losses.model)) for b in sizes.parameters}
    costs = _swap_costs(folder, linear, losses)
    costs["r2"] = {
        b: -math.inf if math.isnan(p.r2) else -p.r2  # constant output: the map is exact
        for b, p in zip(linear, run.blocks, strict=True)
    }
    points = []
    for method in ("swap", "r2", "zero"):
        gone = 0
        maps: dict[Block, Replacement] = {}
        for b in sorted(linear, key=costs[method].__getitem__):
            if gone >= removed:
                break
            gone += sizes.parameters[b] - (0 if method == "zero" else linear[b].parameters)
            maps = {**maps, b: _zero(b) if method == "zero" else linear[b]}
            points.append((method, gone, maps))
    return points


def _swap_costs(
    folder: RunFolder, linear: Mapping[Block, Affine], losses: Losses
) -> dict[str, dict[Block, float]]:
    """What replacing each block alone by plain least squares, or removing it, costs.

    KL from swap.json if it has all blocks with the same settings and baselines: measured on the text
    reported on, which favours the baselines. Otherwise KL on the text for choosing.
    """
    for each in folder.sets("swap"):
        with suppress(ValueError, KeyError, TypeError):  # a block without costs
            swaps: dict[int, Any] = records_of(folder.path("swap"), each, BlockSwap)
            return {
                "swap": {b: float(swaps[b.index].kl_plain) for b in linear},
                "zero": {b: float(swaps[b.index].kl_zero) for b in linear},
            }
    variants: list[Variant] = [*linear.items(), *((b, _zero(b)) for b in linear)]
    costs = iter(losses.alone("measuring baselines", variants))
    return {method: {b: next(costs).kl for b in linear} for method in ("swap", "zero")}


def _zero(block: Block) -> Replacement:
    return lambda x: x.new_zeros(*x.shape[:-1], block.d_out)
