"""The search for a layer, stopped and chosen by rows that are not fitted.

fitted = Fitted(seed=0)
fitted.check(steps, score, layer)       # every few steps; keeps the layer with the highest score
record, layer = best_of([fitted, ...], scores)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Fitted:
    """The layer with the highest score on the rows kept for stopping, and the search for it.

    `about` are more fields of the record.
    """

    layer: nn.Module

    def __init__(self, seed: int, **about: Any) -> None:
        self.began, self.about, self.seed = time.perf_counter(), about, seed
        self.steps, self.seconds, self.converged = 0, 0.0, False
        self.best, self.chosen_at = -math.inf, 0
        self.curve: list[tuple[int, float]] = []  # step, score on the rows kept for stopping

    def check(self, steps: int, score: float, layer: nn.Module) -> bool:
        """Note the score after so many steps; is it the highest? The first one counts as such."""
        self.steps, self.seconds = steps, time.perf_counter() - self.began
        higher = not self.curve or score > self.best
        self.curve.append((steps, score))
        if higher:
            self.layer, self.best, self.chosen_at = layer, score, steps
        return higher

    def to_dict(self) -> dict[str, Any]:
        names = ("seed", "steps", "seconds", "converged", "chosen_at", "curve")
        return self.about | {name: getattr(self, name) for name in names}


def best_of(
    tried: Sequence[Fitted], scores: Callable[[Any], dict[str, Any]]
) -> tuple[dict[str, Any], Any]:
    """The record and the layer of the seed that is best on the rows kept for stopping."""
    best = max(tried, key=lambda fitted: fitted.best)
    by_seed = [fitted.to_dict() | scores(fitted.layer) for fitted in tried]
    record = {**by_seed[tried.index(best)], "seeds": by_seed}
    record.pop("curve")
    return record, best.layer


def descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of gradient descent."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
