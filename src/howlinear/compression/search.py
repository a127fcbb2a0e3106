"""How far along the path of options a budget reaches: fit, measure, move, fit again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from howlinear.compression.plan import (
    Budget,
    Option,
    Step,
    after,
    descent,
    even_descent,
    saving,
    within,
)
from howlinear.compression.prices import Losses, Sizes, price_options
from howlinear.compression.refitting import Refitter, Shape
from howlinear.linear.affine import Map
from howlinear.losses.perplexity import Comparison
from howlinear.models.families import Block

TOGETHER = 0.5  # maps that are fitted together cost about so much of the sum of their prices
HALF = 0.8  # what maps fitted on all windows cost, of what those fitted on half of them cost
ROUNDS = 4  # fits of all windows in search of the budget
USUAL = (0.5, 1.0, 1.0)  # shares of the windows that the fits of a usual search read
AIM, CLOSE = 0.9, 0.8  # of the budget: what the search aims at, and where it ends


@dataclass(frozen=True, eq=False)
class Trial:
    """Maps fitted together, and what they cost on the text for choosing where a search needs it."""

    shapes: dict[Block, Shape]
    maps: dict[Block, Map]
    corrections: dict[Block, float | None]  # see `refitting`
    change: Comparison | None = None

    @property
    def nats(self) -> float:
        return math.nan if self.change is None else self.change.delta_nll


class Search:
    """Fits and measures sets of replaced blocks: those named, or after `price` those within a budget."""

    def __init__(self, fitter: Refitter, sizes: Sizes, losses: Losses) -> None:
        self.fitter, self.sizes, self.losses = fitter, sizes, losses
        self.unmet = ""  # why `within` could not meet the budget
        self.by_index = {b.index: b for b in fitter.at}
        self.options: list[Option] = []
        self.path: list[Step] = []

    def fitted(self, shapes: dict[Block, Shape], **options: Any) -> Trial:
        """Fit these shapes."""
        maps = self.fitter.refit(shapes, **options)
        return Trial(shapes, maps, {b: self.fitter.corrections[b] for b in maps})

    def measured(self, trial: Trial) -> Trial:
        """With its cost on the text for choosing."""
        if self.losses.reason:
            return trial
        (change,) = self.losses.together([trial.maps], self.losses.choose)
        return replace(trial, change=change)

    def trial(self, shapes: dict[Block, Shape], **options: Any) -> Trial:
        """Fit these shapes and measure them."""
        return self.measured(self.fitted(shapes, **options))

    def price(self, rank: int | str, units: int | str) -> None:
        """What each option of each block costs, and the path from the cheapest on."""
        self.options = price_options(self.fitter, self.sizes, self.losses, rank, units)
        self.path = even_descent(self.options) if self.sizes.even else descent(self.options)

    def shapes_after(self, steps: int) -> dict[Block, Shape]:
        return self._shapes(after(self.path, steps))

    def shapes_saving(self, share: float) -> dict[Block, Shape]:
        """What removes at least this share of the feed-forward parameters."""
        return self._shapes(saving(self.path, self.options, self._parameters(share)))

    def _shapes(self, chosen: dict[int, Option]) -> dict[Block, Shape]:
        return {self.by_index[i]: (o.rank, o.units) for i, o in sorted(chosen.items())}

    def _parameters(self, share: float) -> int:
        """Parameters that steps must save: those asked for, and those that the kind of export adds."""
        return math.ceil(share * self.sizes.total) + self.sizes.added

    def within(self, budget: Budget) -> Trial:
        """The longest part of the path that the budget allows, fitted; else the nearest, and `unmet`."""
        if not self.path:
            raise ValueError("no way to replace a block saves parameters")
        if budget.parameters is None:
            return self._within_nats(budget.nats)
        most = sum(s.saved for s in self.path)
        if self._parameters(budget.parameters) > most:
            share = (most - self.sizes.added) / self.sizes.total
            self.unmet = (
                f"{budget.parameters:.1%} of the feed-forward parameters cannot go: this plan, the "
                f"smallest, removes {share:.1%}"
            )
        return self.fitted(self.shapes_saving(budget.parameters))

    def _within_nats(self, nats: float) -> Trial:
        """Costs of blocks do not add up: fit on half of the windows, measure, correct, fit on all."""
        path, half = self.path, self.fitter.some_windows(self.fitter.windows.numel() // 2)
        level = nats / TOGETHER
        first = self.trial(self.shapes_after(max(within(path, level), 1)), windows=half)
        level *= min(max(AIM * nats / (HALF * max(first.nats, 0.0) + 1e-12), 0.1), 4.0)
        low, high = (0.0, 0.0), None  # (expected, measured) below and above the budget
        fits, fails = 0, len(path) + 1  # numbers of steps
        best, nearest = None, first
        for left in range(ROUNDS, 0, -1):
            steps = min(max(within(path, level), fits + 1), fails - 1)
            if steps <= fits:
                break
            if left == 1 and best is None:
                steps = 1
            new = self.trial(self.shapes_after(steps))
            if new.nats <= nats:
                best, low, fits = new, (level, new.nats), steps
                if new.nats >= CLOSE * nats:
                    break
            else:
                high, fails, nearest = (level, new.nats), steps, new
            level = _next_level(low, high, nats)
        if best is None:
            self.unmet = (
                f"no plan costs less than {math.expm1(nats):.1%} more perplexity: this one, the "
                f"nearest, costs {math.expm1(nearest.nats):.1%} on the text for choosing"
            )
        return best or nearest


def _next_level(low: tuple[float, float], high: tuple[float, float] | None, nats: float) -> float:
    """The expected cost at which the measured cost may meet the budget, from the last two trials."""
    if high is None:
        return low[0] * AIM * nats / low[1] if low[1] > 0 else 2 * low[0]
    return low[0] + (high[0] - low[0]) * (AIM * nats - low[1]) / (high[1] - low[1])
