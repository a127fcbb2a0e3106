"""Can this block be replaced? A verdict in words, with the numbers behind it.

    word, why = verdict(block, swap)

A measured swap decides where there is one; otherwise the profile's estimate does, and the text says
so. `records.verdicts` has the thresholds and the rule: the 99.5 % interval of KL must lie on one side of
a threshold, else the block is undecided.
"""

from __future__ import annotations

import math

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.verdicts import (
    HIGH_R2,
    MIN_WINDOWS,
    UNDECIDED,
    cost_level,
    interval,
    writes_sink,
)
from howlinear.records.words import compact, finite, number, percent, percent_se

ESTIMATED = ("likely safe", "likely some cost", "likely costly")
SAFE_WORDS = ("safe", "safe with units")
MEASURED = (*SAFE_WORDS, UNDECIDED, "some cost", "costly")
WORDS = (*MEASURED, *ESTIMATED, "not measured")
OPENINGS = {
    "safe": "Safe to replace",
    "some cost": "Can be replaced at some cost",
    "costly": "Costly to replace",
    UNDECIDED: "Not decided",
}


def verdict(b: BlockProfile, s: BlockSwap | None) -> tuple[str, str]:
    """One of WORDS, and why."""
    kl = finite(s.kl) if s else None
    if s is None:
        word, why = _estimated(b)
    elif kl is None or s.verdict not in OPENINGS:  # the model has no next-token loss
        word, why = "not measured", "The model has no next-token loss. Its map: cosine "
        why += f"{number(finite(s.cosine))}, stream error {compact(finite(s.stream_error))}."
    else:
        word, why = _measured(s, kl)
    return word, " ".join([why, *_remarks(b, word)])


def _measured(s: BlockSwap, kl: float) -> tuple[str, str]:
    units, se, growth = len(s.units), finite(s.kl_se), finite(s.delta_nll)
    opening = OPENINGS[str(s.verdict)]
    word = SAFE_WORDS[units > 0] if s.verdict == "safe" else str(s.verdict)
    kept = f" with {units} hidden unit{'s' if units > 1 else ''} kept" if units else ""
    without = f", {number(finite(s.kl_plain), 4)} without" if units else ""
    error = "" if se is None else f" ± {number(se, 4)}"
    perplexity = f"perplexity {percent(growth)}{percent_se(growth, finite(s.delta_nll_se))}"
    why = f"{opening}: one matrix{kept} costs {number(kl, 4)}{error} nats{without}; {perplexity}."
    if s.verdict == UNDECIDED:
        why += _uncertainty(s, kl, se)
    if (mean := finite(s.kl_mean)) is not None and kl > 0.9 * mean:
        why += f" A constant does about as well ({number(mean, 4)})."
    return word, why


def _uncertainty(s: BlockSwap, kl: float, se: float | None) -> str:
    """Why there is no verdict."""
    low, high = interval(kl, math.nan if se is None else se, s.clusters)
    if math.isnan(low):
        return " There is no standard error: too few windows."
    reach = f" The 99.5 % interval is {number(low, 4)} to {number(high, 4)} nats"
    few = f" on {s.windows} windows of at least {MIN_WINDOWS}" if s.windows < MIN_WINDOWS else ""
    return f"{reach}{few}: measure more."


def _estimated(b: BlockProfile) -> tuple[str, str]:
    nats = finite(b.expected_kl)
    if nats is None:
        return "not measured", "Not swapped, and there is no estimate: run howlinear swap."
    word = ESTIMATED[cost_level(nats)]
    size = f"expected {percent(nats)}{percent_se(nats, b.expected_kl_se)} perplexity, not measured"
    if word == ESTIMATED[2] and writes_sink(b):
        return word, f"One matrix alone: {size}; with its sink units kept likely far less."
    return word, f"{word.capitalize()}: {size}."


def _remarks(b: BlockProfile, word: str) -> list[str]:
    """What a reader of this block's R2 alone would get wrong."""
    r2, remarks = number(b.r2, 2), []
    if b.kind == "first-position only":
        body = number(b.r2_body, 2)
        remarks.append(f"R2 {r2} comes from the first position: without it R2 is {body}.")
    elif b.r2 >= HIGH_R2 and word == "costly":
        remarks.append(f"R2 {r2} is high, but the model depends on the residual.")
    elif b.r2 < 0.6 and word in SAFE_WORDS:
        remarks.append(f"R2 is only {r2}, but the model hardly depends on the residual.")
    if b.kind == "outlier-concentrated":
        median = finite(b.r2_feature.get("median"))
        remarks.append(f"A few features carry R2: the median feature has {number(median, 2)}.")
    if finite(b.r2_scalar) is not None and b.r2_scalar - b.r2 >= 0.1:
        remarks.append(f"Around one scalar mean R2 is {number(b.r2_scalar, 2)}.")
    return remarks
