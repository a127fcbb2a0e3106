"""What a profile means in words. The thresholds are conventions, stated in docs/fields.md."""

from __future__ import annotations

import math

KINDS = (
    "broadly linear",
    "outlier-concentrated",
    "first-position only",
    "partly linear",
    "nonlinear",
)


def kind_of(r2: float, r2_body: float, median: float, first_share: float, rank_share: float) -> str:
    """A block's profile in plain words. The thresholds are conventions, stated in docs/fields.md."""
    if math.isnan(r2_body):  # every row is a first position
        r2_body = r2
    if first_share >= 0.5 and r2 - r2_body >= 0.2:
        return "first-position only"
    if r2_body >= 0.75 and median >= 0.5:
        return "broadly linear"
    if r2 >= 0.5 and (median < 0.5 * r2 or rank_share <= 0.02):
        return "outlier-concentrated"
    return "partly linear" if r2_body >= 0.4 else "nonlinear"


SAFETY = ("likely safe", "some cost", "costly", "sink", "unknown")


def safety_of(
    swap_signal: float | None, first_share: float | None, sink_shares: list[float] | None
) -> str:
    """May this block become one matrix? In plain words; conventions, stated in docs/fields.md."""
    if swap_signal is None or math.isnan(swap_signal):
        return "unknown"
    if swap_signal < 0.03:
        return "likely safe"
    if swap_signal < 0.1:
        return "some cost"
    made_by_few = sink_shares is not None and sum(sink_shares) >= 0.5
    return "sink" if made_by_few and (first_share or 0.0) >= 0.5 else "costly"
