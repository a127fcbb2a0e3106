"""From what each option costs to a plan: which option each block takes. Numbers in, numbers out.

    path = descent(options)                    # steps of all blocks, lowest cost per parameter first
    chosen = after(path, within(path, 0.05))   # options for an expected cost of 0.05 nats a token

An option is one way to replace one block: its cost, measured with this block alone replaced, and the
parameters that it saves. Costs are assumed to add up, which holds only roughly: `search` measures
the real cost of a plan and moves along the path.

Only options on the lower convex hull over (saved, cost) of a block are used. The edges of all hulls in
order of their slope are the path: the greedy solution of the knapsack problem, optimal at each step.

A stock model has one width for all blocks: there each step narrows every block (`even_descent`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

from howlinear.records.fields import BlockPlan
from howlinear.records.files import SCHEMA


@dataclass(frozen=True)
class Budget:
    """How much perplexity may rise, or how many of the feed-forward parameters go; as shares."""

    perplexity: float | None = None
    parameters: float | None = None

    @property
    def nats(self) -> float:
        """The rise in perplexity as nats per token."""
        return math.log1p(self.perplexity or 0.0)


@dataclass(frozen=True)
class Option:
    """One way to replace a block: a matrix of some rank, beside some of its hidden units."""

    index: int  # of the block
    rank: int | None  # of the matrix; None: full, 0: no matrix
    units: int
    saved: int  # parameters
    cost: float  # nats a token


@dataclass(frozen=True)
class Step:
    """From one option of a block to the next one, or from the block itself to the first."""

    options: tuple[Option, ...]  # one; or one of each block, where all change together
    saved: int  # by this step
    cost: float

    @property
    def slope(self) -> float:
        return self.cost / self.saved


def hull(options: Iterable[Option]) -> list[Option]:
    """Options of one block on the lower convex hull over (saved, cost)."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.saved, o.cost)):
        while kept:
            before = kept[-2] if len(kept) > 1 else None
            if _slope(before, option) > _slope(before, kept[-1]):
                break
            kept.pop()
        if option.saved > (kept[-1].saved if kept else 0):
            kept.append(option)
    return kept


def _slope(a: Option | None, b: Option) -> float:
    saved, cost = (a.saved, a.cost) if a else (0, 0.0)
    return (b.cost - cost) / (b.saved - saved)


def descent(options: Iterable[Option]) -> list[Step]:
    """Steps of all blocks, lowest cost per parameter first; steps of one block keep their order."""
    steps: list[Step] = []
    by_block = groupby(sorted(options, key=lambda o: o.index), key=lambda o: o.index)
    for _, of_block in by_block:
        saved, cost = 0, 0.0
        for option in hull(o for o in of_block if o.saved > 0):
            steps.append(Step((option,), option.saved - saved, option.cost - cost))
            saved, cost = option.saved, option.cost
    return sorted(steps, key=lambda s: (s.slope, s.options[0].index, s.options[0].saved))


def even_descent(options: Iterable[Option]) -> list[Step]:
    """Steps of all blocks together, the widest first: all keep the same number of hidden units."""
    by_units: dict[int, list[Option]] = {}
    for option in options:
        by_units.setdefault(option.units, []).append(option)
    count = max(map(len, by_units.values()), default=0)
    widths = [k for k, each in by_units.items() if len(each) == count]
    steps, saved, cost = [], 0, 0.0
    for k in sorted(widths, reverse=True):
        total, price = sum(o.saved for o in by_units[k]), sum(o.cost for o in by_units[k])
        steps.append(Step(tuple(by_units[k]), total - saved, price - cost))
        saved, cost = total, price
    return steps


def expected(known: Sequence[tuple[float, float]], rest: float) -> float:
    """The cost of an option that leaves a share `rest`, from measured (rest, cost).

    Power laws between neighbours; beyond the ends cost is proportional to rest, as for a smooth loss
    and small errors.
    """
    points = sorted((r, c) for r, c in known if r > 0 and c > 0)
    if not points or rest <= 0:
        return 0.0
    for (r0, c0), (r1, c1) in pairwise(points):
        if r0 <= rest <= r1 and r0 < r1:
            power = math.log(c1 / c0) / math.log(r1 / r0)
            return c0 * (rest / r0) ** power
    near, cost = points[0] if rest < points[0][0] else points[-1]
    return cost * rest / near


def after(path: Sequence[Step], steps: int) -> dict[int, Option]:
    """The option of each block, by block index, after the first `steps` steps."""
    return {o.index: o for s in path[:steps] for o in s.options}


def within(path: Sequence[Step], cost: float) -> int:
    """The number of steps that an expected cost allows."""
    return sum(total <= cost for total in accumulate(max(s.cost, 0.0) for s in path))


def saving(path: Sequence[Step], options: Sequence[Option], parameters: int) -> dict[int, Option]:
    """The option of each block, by block index, that together save so many parameters; all steps if too few.

    The last step may save far more than is missing: the cheapest option of any block that suffices replaces it.
    """
    steps = sum(total < parameters for total in accumulate(s.saved for s in path))
    if steps >= len(path):
        return after(path, len(path))
    chosen = after(path, steps)
    if len(path[steps].options) > 1:  # of all blocks
        return after(path, steps + 1)
    missing = parameters - sum(o.saved for o in chosen.values())

    def added(option: Option) -> tuple[float, int]:
        before = chosen.get(option.index)
        return option.cost - (before.cost if before else 0.0), option.saved

    def enough(option: Option) -> bool:
        before = chosen.get(option.index)
        return option.saved - (before.saved if before else 0) >= missing

    last = min(filter(enough, options), key=added)
    return chosen | {last.index: last}


def to_dict(chosen: Sequence[BlockPlan], about: Mapping[str, Any]) -> dict[str, Any]:
    """`plan.json`: a few lines per block, to be read and edited by hand."""
    return {
        "kind": "plan",
        "schema": SCHEMA,
        **about,
        "blocks": [b.to_dict() for b in sorted(chosen, key=lambda b: b.index)],
    }


def from_dict(data: Mapping[str, Any]) -> list[BlockPlan]:
    """The blocks of a plan, checked."""
    blocks = data.get("blocks")
    if not isinstance(blocks, list) or not blocks:
        raise ValueError("the plan has no blocks: list those to replace under blocks")
    chosen = []
    for block in blocks:
        if not isinstance(block, dict):
            raise ValueError(f"the plan's blocks hold {block!r:.40}, expected one object a block")
        entry = BlockPlan.from_dict(block)
        if any(n is not None and n < 0 for n in (entry.rank, entry.units)):
            raise ValueError(f"the plan's block {entry.index} has a negative rank or units")
        chosen.append(entry)
    indices = [b.index for b in chosen]
    if len(set(indices)) < len(indices):
        twice = next(i for i in indices if indices.count(i) > 1)
        raise ValueError(f"the plan names block {twice} twice")
    return chosen


def check_blocks(plan: Iterable[BlockPlan], paths: Mapping[int, str]) -> None:
    """Refuse a plan with blocks that a run, whose blocks have these paths, has not measured."""
    for p in plan:
        if paths.get(p.index) != p.path:
            raise ValueError(f"the plan's block {p.index} ({p.path}) is not in the run")


def check_units(plan: Iterable[BlockPlan], hidden: Mapping[int, int]) -> None:
    """Refuse a plan that keeps more hidden units than blocks have, by block index."""
    for p in plan:
        if p.units > hidden[p.index]:
            raise ValueError(
                f"the plan keeps {p.units} units of block {p.index}, which has {hidden[p.index]}"
            )
