"""From what replacing each block costs to what becomes of each block. Numbers in, numbers out.

    path = descent(options)                    # every step of every block, the cheapest parameter first
    chosen = after(path, within(path, 0.05))   # what an expected loss of 0.05 nats a token buys

An option is one way to replace one block: its cost, measured with this block alone replaced, and the
parameters that it saves. Costs are taken to add up, which they do only roughly, so that whoever
follows a plan measures what it really costs and moves along the path.

Of a block's options only the lower convex hull over (saved, cost) is of use. Its edges, those of all
blocks in order of their slope, are the path: the greedy solution of the knapsack, which is the best
there is at each of its steps.
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

    option: Option
    saved: int  # by this step
    cost: float

    @property
    def slope(self) -> float:
        return self.cost / self.saved


def hull(options: Iterable[Option]) -> list[Option]:
    """Of one block: the options that cost least a parameter, given those before them."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.saved, o.cost)):
        while found:
            before = found[-2] if len(found) > 1 else None
            if _slope(before, option) > _slope(before, found[-1]):
                break
            found.pop()
        if option.saved > (found[-1].saved if found else 0):
            found.append(option)
    return found


def _slope(a: Option | None, b: Option) -> float:
    saved, cost = (a.saved, a.cost) if a else (0, 0.0)
    return (b.cost - cost) / (b.saved - saved)


def descent(options: Iterable[Option]) -> list[Step]:
    """All steps of all blocks, the cheapest parameter first; a block's own come in their order."""
    steps: list[Step] = []
    by_block = groupby(sorted(options, key=lambda o: o.index), key=lambda o: o.index)
    for _, own in by_block:
        saved, cost = 0, 0.0
        for option in hull(o for o in own if o.saved > 0):
            steps.append(Step(option, option.saved - saved, option.cost - cost))
            saved, cost = option.saved, option.cost
    return sorted(steps, key=lambda s: (s.slope, s.option.index, s.option.saved))


def expected(known: Sequence[tuple[float, float]], rest: float) -> float:
    """The cost of an option that leaves `rest`, from the (rest, cost) of options that were measured.

    Power laws between neighbours; beyond the last ones cost grows as rest does, which is what a
    smooth loss does with small errors.
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
    """What is chosen for each block, by index, when so many steps are gone."""
    return {s.option.index: s.option for s in path[:steps]}


def within(path: Sequence[Step], cost: float) -> int:
    """How many steps an expected cost allows."""
    return sum(total <= cost for total in accumulate(max(s.cost, 0.0) for s in path))


def saving(path: Sequence[Step], parameters: int) -> int:
    """How many steps it takes to save so many parameters; all of them if that is not enough."""
    return min(sum(t < parameters for t in accumulate(s.saved for s in path)) + 1, len(path))


def to_dict(chosen: Sequence[BlockPlan], about: Mapping[str, Any]) -> dict[str, Any]:
    """`plan.json`: a few lines a block, to be read and edited by hand."""
    return {
        "kind": "plan",
        "schema": SCHEMA,
        **about,
        "blocks": [b.to_dict() for b in sorted(chosen, key=lambda b: b.index)],
    }


def from_dict(data: Mapping[str, Any]) -> list[BlockPlan]:
    """What a plan says of each block; ValueError in one line where it makes no sense."""
    blocks = data.get("blocks")
    if not isinstance(blocks, list) or not blocks:
        raise ValueError("the plan has no blocks: list those to replace under blocks")
    chosen = []
    for block in blocks:
        if not isinstance(block, dict):
            raise ValueError(f"the plan's blocks hold {block!r:.40}, expected one object a block")
        found = BlockPlan.from_dict(block)
        if any(n is not None and n < 0 for n in (found.rank, found.units)):
            raise ValueError(f"the plan's block {found.index} has a negative rank or units")
        chosen.append(found)
    indices = [b.index for b in chosen]
    if len(set(indices)) < len(indices):
        twice = next(i for i in indices if indices.count(i) > 1)
        raise ValueError(f"the plan names block {twice} twice")
    return chosen
