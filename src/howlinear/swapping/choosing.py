"""How many sink units a block's map keeps: the estimate chooses, a measurement confirms.

    kept = chosen_units(blocks, maps, rounds)           # {11: 2, 28: 1, ...}; all others 0

Blocks are tried whose squared error the most units lower by `MIN_GAIN`. There the profile's estimate
gives the cost in nats of a map with 0, 1, 2 or 4 units, without running the model. The smallest number
of units is chosen whose estimated cost is within `CLOSE` of the least. Where that is more than 0, the
map with units and the plain one are measured on text for choosing, on the same tokens of a few windows,
and the units stay if their gain exceeds what Student's t allows to chance (95 %).

Stores without gradients (profiled layer by layer, without a next-token loss) have no estimate. There the
share of the squared error that units remove takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from howlinear.losses.perplexity import Comparison
from howlinear.models.families import Block
from howlinear.profiling.expected import expected_by_units
from howlinear.records.statistics import student
from howlinear.run.tensors import read_store
from howlinear.swapping.maps import RunMaps
from howlinear.swapping.rounds import Rounds

CLOSE = 0.1  # share of the least cost that fewer units may cost more
MIN_GAIN = 0.03  # share of the squared error that units must remove

Estimate = Callable[[RunMaps, Block], dict[int, float]]  # cost by number of units; {} if unknown


def chosen_units(
    blocks: Sequence[Block], maps: RunMaps, rounds: Rounds, estimate: Estimate | None = None
) -> dict[int, int]:
    """The number of sink units of each block's map, by index."""
    wanted = {b: suggested(b, maps, estimate or expected) for b in blocks}
    trial = {(b, k): (b, maps.map(b, k)) for b, most in wanted.items() if most for k in (0, most)}
    tallies = rounds.measure(trial, {}, lambda *_: True)  # one round
    kept = {b.index: 0 for b in blocks}
    for b, most in wanted.items():
        if most and better(tallies[b, most].change, tallies[b, 0].change):
            kept[b.index] = most
    return kept


def suggested(block: Block, maps: RunMaps, estimate: Estimate) -> int:
    """The number of units to try: by estimated cost, where units remove enough of the squared error."""
    ladder = maps.ladder(block)
    if len(ladder) < 2:
        return 0
    errors = {k: maps.squared_error(block, k) for k in (0, ladder[-1])}
    if not errors[ladder[-1]] <= (1 - MIN_GAIN) * errors[0]:
        return 0
    costs = estimate(maps, block) if maps.weighting == "none" else {}
    return smallest_close(costs or {k: maps.squared_error(block, k) for k in ladder})


def smallest_close(costs: Mapping[int, float]) -> int:
    """The smallest number of units whose cost is within CLOSE of the least."""
    least = min(costs.values())
    return min(k for k, cost in costs.items() if cost <= (1 + CLOSE) * least)


def better(change: Comparison, plain: Comparison) -> bool:
    """Is a change's KL lower than that of plain least squares, beyond chance, on the same tokens?"""
    gain, se = change.gain_over(plain, by="divergence")
    return change.clusters > 1 and gain > student(change.clusters - 1) * se


def expected(maps: RunMaps, block: Block) -> dict[int, float]:
    """The profile's estimate of the cost in nats by number of units; {} where it has none."""
    costs = expected_by_units(read_store(Path(maps.folder), maps.records[block.index]))
    return {k: nats for k, (nats, _) in costs.items() if not math.isnan(nats)}
