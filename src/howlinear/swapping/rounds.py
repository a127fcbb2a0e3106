"""Swaps measured in rounds: further windows for what is not decided yet.

    rounds = Rounds(sweeper, windows, protocol, positions)
    tallies = rounds.measure({("11", "plain"): (block, affine)}, {}, decided, after_round)
    tallies["11", "plain"].cost.change.kl

Windows come in an order of which every beginning is spread over the text (`cutting.spread_order`), so a
tally is about the first `windows` of them, and further ones add up. Whether a swap is decided is looked
at after 8, 16, 32, ... windows and after the last one. A tally is kept in swap.json, cluster by cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from howlinear.losses.perplexity import Comparison
from howlinear.losses.protocols import EvalProtocol
from howlinear.losses.sweeps import SwapCost, Sweeper, Together, Variant
from howlinear.models.families import Block
from howlinear.models.forward import Windows, WindowsLike, as_windows
from howlinear.records.files import clean
from howlinear.records.words import duration, plural

FIRST_LOOK = 8  # windows; fewer have too few degrees of freedom for any verdict
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Tally:
    """What a swap costs on the first so many windows."""

    windows: int
    cost: SwapCost

    def plus(self, windows: int, cost: SwapCost) -> Tally:
        return Tally(self.windows + windows, self.cost + cost)

    @property
    def change(self) -> Comparison:
        assert self.cost.change is not None
        return self.cost.change

    def to_dict(self) -> dict[str, Any]:
        """Sums as JSON, exact: [cluster, tokens, nll, nll changed, KL, agreeing tokens] of each cluster."""
        sums = self.change.sums
        rows = [[i, *sums[i].tolist()] for i in (sums[:, 0] > 0).nonzero()[:, 0].tolist()]
        return clean({"windows": self.windows, "sums": rows, "errors": self.cost.errors.tolist()})

    @classmethod
    def from_dict(cls, data: Any, block: Block, protocol: EvalProtocol) -> Tally:
        """Checked; ValueError if it is not what `to_dict` gives."""
        try:
            windows, rows, errors = (data[name] for name in ("windows", "sums", "errors"))
            sums = torch.zeros(1 + max(row[0] for row in rows), 5, dtype=torch.float64)
            for cluster, *values in rows:  # null: not finite, as JSON has it
                known = [math.nan if value is None else value for value in values]
                sums[cluster] = torch.tensor(known, dtype=torch.float64)
            known = [math.nan if value is None else float(value) for value in errors]
            errors = torch.tensor(known, dtype=torch.float64)
            if type(windows) is not int or windows < 1 or errors.shape != (5,):
                raise ValueError("windows or errors are missing")
            if min(row[0] for row in rows) < 0:
                raise ValueError("a cluster has no number")
        except (TypeError, KeyError, ValueError, IndexError, RuntimeError) as err:
            raise ValueError(f"the sums of {block} are damaged ({err})") from None
        return cls(windows, SwapCost(block, Comparison(protocol, *sums.unbind(1)), errors))


class Rounds:
    """Windows to be scored, some at a time."""

    def __init__(
        self,
        sweeper: Sweeper,
        windows: WindowsLike,
        protocol: EvalProtocol,
        positions: int | None = None,
        label: str = "swapping",
    ) -> None:
        self.sweeper, self.protocol, self.label = sweeper, protocol, label
        self.positions = positions
        self.inputs = _with_clusters(as_windows(windows))

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.inputs["input_ids"])

    def measure(
        self,
        variants: Mapping[K, Variant | Together],
        tallies: Mapping[K, Tally],
        decided: Callable[[K, Tally], bool],
        after_round: Callable[[dict[K, Tally]], None] = lambda _: None,
    ) -> dict[K, Tally]:
        """Tallies of all variants, each with windows until it is decided or there are no more.

        `tallies` are what earlier rounds gave. The variants with the fewest windows go first.
        """
        known, seconds, scored = dict(tallies), 0.0, 0
        while open_ones := [
            key
            for key in variants
            if key not in known or (known[key].windows < len(self) and not decided(key, known[key]))
        ]:
            begun = {key: known[key].windows if key in known else 0 for key in open_ones}
            start = min(begun.values())
            end = min([next_look(start), len(self), *(n for n in begun.values() if n > start)])
            keys = [key for key, n in begun.items() if n == start]
            if scored:
                most = duration(sum(len(self) - n for n in begun.values()) * seconds / scored)
                self.sweeper.work.begin(f"{plural(len(begun), 'swap')} undecided: {most} at most")
            began = time.perf_counter()
            costs = self._run([variants[key] for key in keys], start, end)
            seconds += time.perf_counter() - began
            scored += len(keys) * (end - start)
            for key, cost in zip(keys, costs, strict=True):
                new = Tally(end - start, cost)
                known[key] = known[key].plus(end - start, cost) if key in known else new
            after_round(known)
        return known

    def _run(self, variants: list[Variant | Together], start: int, end: int) -> list[SwapCost]:
        part = {name: value[start:end] for name, value in self.inputs.items()}
        options: dict[str, Any] = {"protocol": self.protocol, "positions": self.positions}
        label = f"{self.label}, windows {start + 1} to {end}"
        return self.sweeper.run(variants, part, first=start, label=label, **options)


def next_look(windows: int) -> int:
    """The next of 8, 16, 32, 64, ... windows."""
    look = FIRST_LOOK
    while look <= windows:
        look *= 2
    return look


def _with_clusters(windows: Windows) -> dict[str, Tensor]:
    """Windows in memory, with the numbers of their documents, else of themselves."""
    if windows.inputs is None or "input_ids" not in windows.inputs:
        raise ValueError("a sweep in rounds needs all windows at once: token ids (n, length)")
    own = torch.arange(len(windows)) if windows.document is None else windows.document
    return {**windows.inputs, "document": own}
