"""How long a compression takes: before it starts from shapes, then from the steps that are done.

    steps = steps_of(model, at, tokens=29_696, length=512, fits=(0.5, 1), searched=True)
    course = Course(steps, seconds_each(model))
    course.left                                         # seconds, by the speed of one matrix product
    Work(progress=course.telling(bars))                 # labels end with the time to the end

Multiply-adds are counted as in `profiling.needs`: those of the model, of products of rows, and of
choosing hidden units. Solving and exporting are left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from howlinear.compression.prices import PRICED
from howlinear.compression.refitting import SURVEYED
from howlinear.linear.gradients import LENGTH
from howlinear.models.families import Block
from howlinear.profiling.needs import forward_work
from howlinear.records.words import duration
from howlinear.run.work import Advance, Progress

KEPT = 0.75  # hidden units of a block that a map keeps, about
Labelled = list[tuple[str, float]]  # steps by label, with their multiply-adds


def steps_of(
    model: nn.Module,
    at: Mapping[Block, int],
    *,
    tokens: int,
    length: int,
    held_out: int,
    fits: Sequence[float],
    searched: bool,
    written: int = 0,
    healed: int = 0,
) -> Labelled:
    """The steps of a compression of blocks with so many hidden units, under the labels that it reports.

    `fits`: the share of the tokens that each refit reads; a refit is followed by a measurement on the
    `held_out` tokens. Without a search no options are priced. The model writes some of the tokens first, and
    maps are healed on others.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    forward = forward_work(model, 1, length)
    predicted = forward + sum(p.numel() for p in (head.parameters() if head else ()))
    columns = {b: b.d_in + hidden for b, hidden in at.items()}
    steps: Labelled = [("the model writes text", written * predicted)]
    if searched:
        rows = min(tokens, SURVEYED * max(columns.values()))
        products = sum(c * (c // 2 + b.d_out) for b, c in columns.items())
        chosen = sum(6 * c**3 for c in columns.values())  # in float64, half as fast
        steps.append(("fitting options", rows * (forward + products) + chosen))
        steps.append(("pricing options", 2 * PRICED * LENGTH * predicted))
    kept = {b: KEPT * hidden or b.d_in for b, hidden in at.items()}
    outputs = sum(k * (k / 2 + 2 * b.d_out) for b, k in kept.items())  # y and its correction
    for share in fits:
        steps.append(("refitting", share * tokens * (2 * forward + outputs)))
        steps.append(("measuring", 2 * held_out * predicted))
    steps.append(("measuring", 2 * held_out * predicted))  # on the text for reporting
    return [*steps, ("healing", 4 * healed * predicted)] if healed else steps


class Course:
    """The steps to come, and how long they take at the speed of those that are done."""

    def __init__(self, steps: Labelled, seconds_each: float) -> None:
        """`seconds_each`: of a multiply-add, before any step is done."""
        self.to_come, self.rate = list(steps), seconds_each
        self.work = self.taken = 0.0  # multiply-adds and seconds of what is done
        self.running: float | None = None  # multiply-adds of the present step, if it was expected
        self.began = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds of the steps to come, the present one included."""
        return self.rate * ((self.running or 0) + sum(work for _, work in self.to_come))

    def reach(self, label: str) -> None:
        """The step of this label begins: the one before it, and those that were skipped, are done."""
        now = time.perf_counter()
        if self.running:
            self.work, self.taken = self.work + self.running, self.taken + now - self.began
            self.rate = self.taken / self.work
        labels = [name for name, _ in self.to_come]
        self.running, self.began = None, now
        name = label.partition(",")[0]  # healing, KL 0.2
        if name in labels:
            self.running = self.to_come[labels.index(name)][1]
            del self.to_come[: labels.index(name) + 1]

    def telling(self, progress: Progress) -> Progress:
        """The same progress; labels of steps that were expected end with the time to the end."""

        def begin(label: str, tokens: int) -> Advance:
            self.reach(label)
            expected = self.running is not None
            return progress(
                f"{label}, {duration(self.left)} to the end" if expected else label, tokens
            )

        return begin
