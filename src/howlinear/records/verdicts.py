"""Verdicts on a block and the thresholds they use: conventions, stated in docs/fields.md.

Costs are in nats per token. Below `SAFE` a swap is called safe, from `COSTLY` on costly.
"""

from __future__ import annotations

import math

from howlinear.records.fields import BlockSwap
from howlinear.records.words import finite, percent

SAFE, COSTLY = 0.03, 0.1  # nats per token
HIGH_R2, LOW_R2 = 0.75, 0.4
FIRST_SHARE = 0.5  # share of a block's variance that first positions carry

KINDS = (
    "constant",
    "broadly linear",
    "outlier-concentrated",
    "first-position only",
    "partly linear",
    "nonlinear",
)
SAFETY = ("likely safe", "some cost", "costly", "sink", "unknown")


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


def safety_of(
    swap_signal: float | None, first_share: float | None, sink_shares: list[float] | None
) -> str:
    """One of SAFETY, from the estimated cost of replacing a block by one matrix."""
    if swap_signal is None or math.isnan(swap_signal):
        return "unknown"
    level = cost_level(swap_signal)
    few_units = sink_shares is not None and sum(sink_shares) >= 0.5
    if level == 2 and few_units and (first_share or 0.0) >= FIRST_SHARE:
        return "sink"
    return SAFETY[level]


def safety_with(estimate: str, swap: BlockSwap | None) -> str:
    """A block's safety in words: the measured cost of a swap where there is one, else the estimate."""
    cost = None if swap is None else finite(swap.delta_nll)
    return estimate if cost is None else f"measured {percent(cost)}"
