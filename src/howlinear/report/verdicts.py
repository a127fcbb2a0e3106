"""Can this block be replaced? A verdict in words, with the numbers behind it.

    word, why = verdict(block, swap)

A measured swap decides where there is one; otherwise the profile's estimate does, and the text says
so. `records.verdicts` has the thresholds. A block is "safe" if its cost plus two standard errors is
below the threshold too, and "safe so far" if only the cost is.
"""

from __future__ import annotations

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.verdicts import COSTLY, HIGH_R2, SAFE, cost_level, writes_sink
from howlinear.records.words import compact, finite, number, percent, percent_se

ESTIMATED = ("likely safe", "likely some cost", "likely costly")
SAFE_WORDS = ("safe", "safe with units")
MEASURED = (*SAFE_WORDS, "safe so far", "some cost", "costly")
WORDS = (*MEASURED, *ESTIMATED, "not measured")


def verdict(b: BlockProfile, s: BlockSwap | None) -> tuple[str, str]:
    """One of WORDS, and why."""
    cost = finite(s.delta_nll) if s else None
    if s is None:
        word, why = _estimated(b)
    elif cost is None:  # the model has no next-token loss
        word, why = "not measured", "The model has no next-token loss. Its map: cosine "
        why += f"{number(finite(s.cosine))}, stream error {compact(finite(s.stream_error))}."
    else:
        word, why = _measured(s, cost)
    return word, " ".join([why, *_remarks(b, cost)])


def _measured(s: BlockSwap, cost: float) -> tuple[str, str]:
    units, se = len(s.units), finite(s.delta_nll_se)
    if cost < SAFE and se is not None and cost + 2 * se < SAFE:
        word, opening = SAFE_WORDS[units > 0], "Safe to replace"
    elif cost < SAFE:
        word, opening = "safe so far", "Cheap to replace, but not measured precisely enough"
    elif cost < COSTLY:
        word, opening = "some cost", "Can be replaced at some cost"
    else:
        word, opening = "costly", "Costly to replace"
    kept = f" with {units} hidden unit{'s' if units > 1 else ''} kept" if units else ""
    without = f", without {percent(s.delta_nll_plain)}" if units else ""
    growth = f"{percent(cost)}{percent_se(cost, se)} perplexity{without}"
    why = f"{opening}: one matrix{kept} costs {growth}.{_uncertainty(cost, se)}"
    if (mean := finite(s.delta_nll_mean)) is not None and cost > 0.9 * mean:
        why += f" A constant does about as well ({percent(mean)})."
    return word, why


def _uncertainty(cost: float, se: float | None) -> str:
    """A remark where another verdict lies within two standard errors."""
    if se is None:
        return " There is no standard error: too few windows."
    low, high = cost - 2 * se, cost + 2 * se
    if cost_level(low) == cost_level(high):
        return ""
    return f" Two standard errors reach from {percent(low)} to {percent(high)}: measure more."


def _estimated(b: BlockProfile) -> tuple[str, str]:
    nats = finite(b.expected_kl)
    if nats is None:
        return "not measured", "Not swapped, and there is no estimate: run howlinear swap."
    word = ESTIMATED[cost_level(nats)]
    size = f"expected {percent(nats)}{percent_se(nats, b.expected_kl_se)} perplexity, not measured"
    if word == ESTIMATED[2] and writes_sink(b):
        return word, f"One matrix alone: {size}; with its sink units kept likely far less."
    return word, f"{word.capitalize()}: {size}."


def _remarks(b: BlockProfile, cost: float | None) -> list[str]:
    """What a reader of this block's R2 alone would get wrong."""
    r2, remarks = number(b.r2, 2), []
    if b.kind == "first-position only":
        body = number(b.r2_body, 2)
        remarks.append(f"R2 {r2} comes from the first position: without it R2 is {body}.")
    elif cost is not None and b.r2 >= HIGH_R2 and cost >= COSTLY:
        remarks.append(f"R2 {r2} is high, but the model depends on the residual.")
    elif cost is not None and b.r2 < 0.6 and cost < SAFE:
        remarks.append(f"R2 is only {r2}, but the model hardly depends on the residual.")
    if b.kind == "outlier-concentrated":
        median = finite(b.r2_feature.get("median"))
        remarks.append(f"A few features carry R2: the median feature has {number(median, 2)}.")
    if finite(b.r2_scalar) is not None and b.r2_scalar - b.r2 >= 0.1:
        remarks.append(f"Around one scalar mean R2 is {number(b.r2_scalar, 2)}.")
    return remarks
