"""How long a compression takes: before it starts from shapes, then from the steps that are done.

    steps = steps_of(model, hidden, tokens=29_696, length=512, held_out=4096, fits=(0.5, 1))
    left = TimeLeft(steps, seconds_each(model))
    left.seconds                                        # by the speed of one matrix product
    Work(progress=left.following(progress, say))        # says so when it is far from what was said

Multiply-adds are counted as in `profiling.needs`: those of the model, of products of rows, and of
choosing hidden units. Left out are solving, exporting, baselines, costs on other texts, and fits of a
search that takes more of them than usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from howlinear.compression.prices import OPTION_TOKENS, PRICED
from howlinear.compression.refitting import SENSED
from howlinear.linear.gradients import LENGTH
from howlinear.models.families import Block
from howlinear.models.offload import is_offloaded
from howlinear.profiling.needs import forward_work
from howlinear.records.words import duration
from howlinear.run.work import Advance, Progress

KEPT = 0.75  # hidden units of a block that a map keeps, about
PRICES = 3  # options of a block that are priced, at most
SOON = 10.0  # seconds: a shorter rest is not stated again
PRIOR = 0.3  # of all work: so much counts at the speed expected before. The first steps differ from the rest
Labelled = list[tuple[str, float]]  # steps by label, with their multiply-adds


def steps_of(
    model: nn.Module,
    hidden: Mapping[Block, int],
    *,
    tokens: int,
    length: int,
    held_out: int,
    fits: Sequence[float],
    weighed: str = "units",
    priced: str = "gradients",
    sizes: int = 1,
    ranks: int = 1,
) -> Labelled:
    """The steps of compressing blocks with so many hidden units, by the labels that `compress_model` reports.

    Errors are `weighed` for hidden "units", which are then ordered, or for the matrices of low rank ("matrices"),
    or not (""), and never with weights on disk. Options are `priced` by "gradients", by "swaps", or not ("").
    `fits` are the shares of the tokens that each refit of a search reads; other `sizes` that are reported on
    are fitted after it. `ranks` processes divide all but the elimination and the prices.
    """
    forward = forward_work(model, 1, length)
    predicted = prediction_work(model, length)
    steps: Labelled = []
    if weighed and not is_offloaded(model):
        rows = min(SENSED, tokens // length) * min(LENGTH, length)
        steps.append(("weighing errors", 2 * rows * predicted / ranks))
    if weighed == "units":
        read = tokens * (forward + _products(hidden)) / ranks
        steps.append(("fitting options", read + _elimination(hidden)))
    if priced == "gradients":
        steps.append(("pricing options", 2 * PRICED * LENGTH * predicted))
    elif priced:
        swaps = PRICES * len(hidden)
        steps.append(("measuring options", swaps * OPTION_TOKENS * predicted / ranks))
    refit = ("refitting", tokens * (2 * forward + _kept_products(hidden)) / ranks)
    measured = ("measuring", 2 * held_out * predicted / ranks)
    for share in fits:
        steps += [(refit[0], share * refit[1]), measured]
    return steps + (sizes - bool(fits)) * [refit] + sizes * [measured]


def _products(hidden: Mapping[Block, int]) -> int:
    """Of [x, units] with one another and with y, per token."""
    columns = {b: b.d_in + m for b, m in hidden.items()}
    return sum(c * (c // 2 + b.d_out) for b, c in columns.items())


def _kept_products(hidden: Mapping[Block, int]) -> float:
    """Of the units that maps keep with one another, with y and with its correction, per token."""
    kept = {b: KEPT * m or b.d_in for b, m in hidden.items()}
    return sum(k * (k / 2 + 2 * b.d_out) for b, k in kept.items())


def _elimination(hidden: Mapping[Block, int]) -> int:
    """In float64, half as fast: counted twice."""
    return sum(6 * (b.d_in + m) ** 3 for b, m in hidden.items())


def prediction_work(model: nn.Module, length: int) -> int:
    """Multiply-adds of a forward with the language-model head, per token."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return forward_work(model, 1, length) + sum(
        p.numel() for p in (head.parameters() if head else ())
    )


class TimeLeft:
    """How long the steps to come take: at the speed expected before, more and more at that of the steps done."""

    def __init__(self, steps: Labelled, seconds_each: float) -> None:
        """`seconds_each`: of a multiply-add, before any step is done."""
        self.to_come, self.rate = list(steps), seconds_each
        self.prior = PRIOR * sum(work for _, work in steps), seconds_each
        self.done = self.taken = 0.0  # multiply-adds and seconds of the steps that are done
        self.present: tuple[str, float] | None = None  # None: a step that was not expected
        self.began = time.perf_counter()
        self.said = self.seconds

    @property
    def seconds(self) -> float:
        """Of the steps to come and the present one, which has just begun."""
        steps = [self.present, *self.to_come] if self.present else self.to_come
        return self.rate * sum(work for _, work in steps)

    def begin(self, label: str) -> None:
        """A step begins: the one before it is done; steps that were expected before this one are left out."""
        name, now = label.partition(",")[0], time.perf_counter()  # "healing, KL 0.2" begins often
        labels = [expected for expected, _ in self.to_come]
        if self.present and self.present[0] == name and name not in labels:
            return
        if self.present:
            self.done, self.taken = self.done + self.present[1], self.taken + now - self.began
            work, rate = self.prior
            self.rate = (self.taken + rate * work) / (self.done + work)
        self.present, self.began = None, now
        if name in labels:
            self.present = self.to_come[labels.index(name)]
            del self.to_come[: labels.index(name) + 1]

    def following(self, progress: Progress, say: Callable[[str], None]) -> Progress:
        """The same progress. The time to the end is said again once it is half, or twice, what was said."""

        def begin(label: str, tokens: int) -> Advance:
            self.begin(label)
            if (
                self.present
                and self.seconds > SOON
                and not self.said / 2 < self.seconds < 2 * self.said
            ):
                self.said = self.seconds
                say(f"{duration(self.seconds)} to the end")
            return progress(label, tokens)

        return begin
