"""Verdicts on a block and the thresholds they use: conventions, stated in docs/fields.md.

    verdict_of(kl=0.012, se=0.001, clusters=30, windows=32)         # "safe"
    interval(0.012, 0.001, 30)                                      # (0.0093, 0.0155)

Costs are in nats per token. Below `SAFE` a swap is called safe, from `COSTLY` on costly; a user may set
the first, and the second keeps its ratio to it. A verdict is given where the `LEVEL` interval of KL
lies within one range. The interval is by Student's t over clusters (documents, else windows) and on the
log scale, since KLs of clusters are skewed: a few are large, and a sample without them looks certain.

Sweeps look at a block's interval after 8, 16, 32, ... windows and stop when there is a verdict, and every
look is a chance to be wrong. `LEVEL` keeps the chance that a block that costs as much as the threshold
is ever called safe below 5 %, for KLs of clusters as skewed as those of the built-in model (log-normal
with a standard deviation of 0.8 times the mean, up to 512 clusters): tests/test_verdicts.py.
"""

from __future__ import annotations

import math

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.statistics import student
from howlinear.records.words import finite, number, percent, percent_se

SAFE, COSTLY = 0.03, 0.1  # nats per token
LEVEL = 0.995  # of the interval of KL that a verdict needs
MIN_WINDOWS = 16  # below, no block is called safe
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
VERDICTS = ("safe", "some cost", "costly", "undecided")
UNDECIDED = VERDICTS[-1]


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


def cost_level(nats: float, safe: float = SAFE) -> int:
    """0: safe, 1: some cost, 2: costly."""
    return (nats >= safe) + (nats >= costly_from(safe))


def costly_from(safe: float) -> float:
    """The nats per token from which a swap is called costly, where `safe` are called safe."""
    return COSTLY * (safe / SAFE)


def interval(kl: float, se: float, clusters: int) -> tuple[float, float]:
    """The `LEVEL` interval of KL; NaN for fewer than two clusters."""
    if clusters < 2 or not math.isfinite(se):
        return math.nan, math.nan
    if not kl > 0:
        return kl, kl
    factor = math.exp(min(student(clusters - 1, LEVEL) * se / kl, 700.0))
    return kl / factor, kl * factor


def verdict_of(kl: float, se: float, clusters: int, windows: int, safe: float = SAFE) -> str:
    """One of VERDICTS, from KL in nats per token over so many windows of so many clusters."""
    low, high = interval(kl, se, clusters)
    if math.isnan(low) or cost_level(low, safe) != (level := cost_level(high, safe)):
        return UNDECIDED
    return UNDECIDED if level == 0 and windows < MIN_WINDOWS else VERDICTS[level]


def candidates(kl: float, se: float, clusters: int, safe: float = SAFE) -> tuple[str, str]:
    """The cheapest and the costliest verdict that the interval of an undecided block holds."""
    low, high = interval(kl, se, clusters)
    if math.isnan(low):
        return VERDICTS[0], VERDICTS[2]
    return VERDICTS[cost_level(low, safe)], VERDICTS[cost_level(high, safe)]


def writes_sink(b: BlockProfile) -> bool:
    """Do a few hidden units write most of the block's first position, and that most of its output?"""
    few_units = b.sink_shares is not None and sum(b.sink_shares) >= 0.5
    return few_units and (finite(b.first_share) or 0.0) >= FIRST_SHARE


def beyond_reach(b: BlockProfile) -> bool:
    """Is the expected cost only a guide, because errors are too large for an estimate?"""
    return (finite(b.expected_beyond) or 0.0) >= BEYOND


def cost_in_words(b: BlockProfile, swap: BlockSwap | None) -> str:
    """The cost of a swap: measured where it was, else expected; "unknown" without both."""
    measured, expected = finite(swap.kl) if swap else None, finite(b.expected_kl)
    if swap is not None and measured is not None:
        return f"measured {number(measured, 4)} nats, {swap.verdict}"
    if expected is None:
        return "unknown"
    return f"expected {percent(expected)}{percent_se(expected, b.expected_kl_se)}"
