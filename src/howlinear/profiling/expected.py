"""What replacing a block by a map is expected to cost, without running the model.

    expected = expected_kl(store.gradients, guess, store.known.norm)    # guess: the map's outputs, (n, d_out)
    expected.nats, expected.se, expected.share_beyond
    expected_by_units(store)            # {0: (nats, se), 1: ..., 2: ..., 4: ...}, held out

Notation: e_t the error of the map at token t, g_t a gradient of the predictions by the block's output there
(`profiling.gradients`), q_t = (g_t . e_t)^2 / 2: on average, for small errors, the KL divergence that the
token's error causes, in nats. The divergence of one prediction is bounded, so that a token counts
LIMIT (1 - exp(-q_t / LIMIT)): q_t while it is small, LIMIT at most. A few tokens with huge errors would
otherwise decide the mean. Products of errors at different positions are left out; TOGETHER stands for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from howlinear.linear.accumulators import merged
from howlinear.linear.affine import Affine
from howlinear.linear.gradients import GradientSample
from howlinear.linear.solving import solve
from howlinear.linear.stores import BlockStore
from howlinear.records.statistics import ratio

LIMIT = 8.0  # nats that the error of one token may cost
TOGETHER = (
    1.2  # cost of all errors of a window over the sum of each error's own, see docs/fields.md
)
UNITS = (0, 1, 2, 4)  # sink units that a map may keep


@dataclass(frozen=True)
class Expected:
    """The expected cost of one map."""

    nats: float  # KL divergence from the original predictions, a token
    se: float  # over documents, or windows; NaN for fewer than two
    share_beyond: float  # share of tokens with q > 1, beyond a second-order estimate


def expected_kl(
    sample: GradientSample, guess: Tensor, norm: Callable[[Tensor], Tensor] | None = None
) -> Expected:
    """The expected cost of a map whose outputs on the sampled rows are `guess` (n, d_out).

    `norm` is the output norm between block and residual add, if there is one.
    """
    guess = guess.double()
    error = guess - sample.y if norm is None else norm(guess) - norm(sample.y.double())
    q = torch.linalg.vecdot(sample.gradient.double(), error).square() / 2
    cost = -TOGETHER * LIMIT * torch.expm1(-q / LIMIT)
    clusters, number = sample.cluster.unique(return_inverse=True)
    sums = torch.zeros(len(clusters), 2, dtype=torch.float64)
    sums.index_add_(0, number, torch.stack([cost, torch.ones_like(cost)], 1))
    share = float((q > 1).double().mean()) if len(q) else math.nan
    return Expected(*ratio(sums.tolist()), share)


def held_out(sample: GradientSample, maps: Mapping[int, Affine]) -> tuple[GradientSample, Tensor]:
    """The sampled rows of held-out groups, and what the map that did not see them makes of each."""
    rows = sample.only(torch.isin(sample.group, torch.tensor(list(maps))))
    guess = torch.empty_like(rows.y, dtype=torch.float64)
    for group, affine in maps.items():
        at = rows.group == group
        x = rows.x[at, : affine.d_in].to(affine.weight)
        guess[at] = affine(x).cpu()
    return rows, guess


def expected_by_units(store: BlockStore) -> dict[int, tuple[float, float]]:
    """(nats, standard error) of the map that keeps the first k sink units, by k; {} without a sample.

    Each row is scored with the map fitted on the other folds: O(folds d^3) for each k.
    """
    sample, kept = store.gradients, len(store.known.units or ())
    costs: dict[int, tuple[float, float]] = {}
    for k in (k for k in UNITS if k <= kept and len(sample)):
        maps = {group: _without(store, group, k) for group in sample.group.unique().tolist()}
        expected = expected_kl(*held_out(sample, maps), store.known.norm)
        costs[k] = (expected.nats, expected.se)
    return costs


def _without(store: BlockStore, group: int, k: int) -> Affine:
    """The map of [x, k sink units] fitted on all rows but this group's."""
    others = [g for g, size in enumerate(store.sizes) if size and g != group]
    rows = [accumulator for g in others for accumulator in (store.body[g], store.first[g])]
    return solve(merged(rows, store.block.d_in + k))[0]
