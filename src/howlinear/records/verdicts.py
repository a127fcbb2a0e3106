"""Verdicts on a block and the thresholds they use: conventions, stated in docs/fields.md.

Costs are in nats per token. Below `SAFE` a swap is called safe, from `COSTLY` on costly.
"""

from __future__ import annotations

import math

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import finite, percent, percent_se

SAFE, COSTLY = 0.03, 0.1  # nats per token
HIGH_R2, LOW_R2 = 0.75, 0.4
FIRST_SHARE = 0.5  # share of a block's variance that first positions carry
BEYOND = 0.05  # share of tokens whose errors are too large for an estimate of second order

KINDS = (
    "constant",
    "broadly linear",
    "outlier-concentrated",
    "first-position only",
    "partly linear",
    "nonlinear",
)


def kind_of(r2: float, r2_body: float, median: float, first_share: float, rank_share: float) -> str:
    """One of KINDS. `median` is the median feature's R2, `rank_share` effective rank over width."""
    if math.isnan(r2):  # no variance to explain: the map is exact
        return "constant"
    if math.isnan(r2_body):  # every row is a first position
        r2_body = r2
    if first_share >= FIRST_SHARE and r2 - r2_body >= 0.2:
        return "first-position only"
    if r2_body >= HIGH_R2 and median >= 0.5:
        return "broadly linear"
    if r2 >= 0.5 and (median < 0.5 * r2 or rank_share <= 0.02):
        return "outlier-concentrated"
    return "partly linear" if r2_body >= LOW_R2 else "nonlinear"


def cost_level(nats: float) -> int:
    """0: safe, 1: some cost, 2: costly."""
    return (nats >= SAFE) + (nats >= COSTLY)


def writes_sink(b: BlockProfile) -> bool:
    """Do a few hidden units write most of the block's first position, and that most of its output?"""
    few_units = b.sink_shares is not None and sum(b.sink_shares) >= 0.5
    return few_units and (finite(b.first_share) or 0.0) >= FIRST_SHARE


def beyond_reach(b: BlockProfile) -> bool:
    """Is the expected cost only a guide, because errors are too large for an estimate?"""
    return (finite(b.expected_beyond) or 0.0) >= BEYOND


def cost_in_words(b: BlockProfile, swap: BlockSwap | None) -> str:
    """The cost of a swap: measured where it was, else expected; "unknown" without both."""
    measured, expected = finite(swap.delta_nll) if swap else None, finite(b.expected_kl)
    if measured is not None:
        return f"measured {percent(measured)}"
    if expected is None:
        return "unknown"
    return f"expected {percent(expected)}{percent_se(expected, b.expected_kl_se)}"
