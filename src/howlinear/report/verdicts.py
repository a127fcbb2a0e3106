"""May this block be replaced? In plain words, with the numbers that say so.

    word, why = verdict(block, swap)

A measured swap decides where there is one; else the profile's own estimate does, and the text says
so. The bounds are those of `safety`: below 0.03 nats a token a swap is called safe, from 0.1 costly.
It is safe only if two standard errors more would still be; if not, it is "safe so far".
"""

from __future__ import annotations

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.verdicts import COSTLY, HIGH_R2, SAFE, cost_level
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
    else:
        word, why = _replaced(s) if cost is None else _measured(s, cost)
    return word, " ".join([why, *_remarks(b, cost)])


def _measured(s: BlockSwap, cost: float) -> tuple[str, str]:
    shown = f"{percent(cost)}{percent_se(cost, s.delta_nll_se)} perplexity"
    units, se = len(s.units), finite(s.delta_nll_se)
    kept = f"with {units} hidden unit{'s' if units > 1 else ''} kept"
    as_what = f"one matrix {kept} costs" if units else "one matrix costs"
    alone = f", without {percent(s.delta_nll_plain)}" if units else ""
    if cost < SAFE and se is not None and cost + 2 * se < SAFE:
        word, says = SAFE_WORDS[units > 0], "Safe to replace"
    elif cost < SAFE:
        word, says = "safe so far", "Cheap to replace, by what was measured"
    elif cost < COSTLY:
        word, says = "some cost", "Can be replaced at some cost"
    else:
        word, says = "costly", "Costly to replace"
    return word, f"{says}: {as_what} {shown}{alone}.{_unsure(cost, se)}{_constant(s, cost)}"


def _unsure(cost: float, se: float | None) -> str:
    """What the standard error leaves open."""
    if se is None:
        return " There is no standard error: too few windows."
    ends = cost - 2 * se, cost + 2 * se
    if not any(ends[0] < bound <= ends[1] for bound in (SAFE, COSTLY)):
        return ""
    return (
        f" Two standard errors reach from {percent(ends[0])} to {percent(ends[1])}: measure more."
    )


def _replaced(s: BlockSwap) -> tuple[str, str]:
    """A swap in a model that has no next-token loss."""
    like = f"cosine {number(finite(s.cosine))}, stream error {compact(finite(s.stream_error))}"
    return "not measured", f"The model has no next-token loss to tell a cost by. Its map: {like}."


def _constant(s: BlockSwap, cost: float) -> str:
    mean = finite(s.delta_nll_mean)
    if mean is None or cost > 0.9 * mean:
        return "" if mean is None else f" A constant does about as well ({percent(mean)})."
    return ""


def _estimated(b: BlockProfile) -> tuple[str, str]:
    signal = finite(b.swap_signal)
    if signal is None:
        return "not measured", "Not swapped, and there is no estimate: howlinear swap measures."
    word = ESTIMATED[cost_level(signal)]
    size = f"about {percent(signal)} perplexity by the profile's estimate, not yet measured"
    if b.safety == "sink":
        return word, f"As one matrix alone {size}; with its sink units kept likely far less."
    return word, f"{word.capitalize()}: {size}."


def _remarks(b: BlockProfile, cost: float | None) -> list[str]:
    """The traps that this block would lead into."""
    found = []
    if b.kind == "first-position only":
        found.append(
            f"R2 {number(b.r2, 2)} is the first position's doing: {number(b.r2_body, 2)} without it."
        )
    elif cost is not None and b.r2 >= HIGH_R2 and cost >= COSTLY:
        found.append(f"R2 {number(b.r2, 2)} promised better: the model cares about the rest.")
    elif cost is not None and b.r2 < 0.6 and cost < SAFE:
        found.append(f"R2 is only {number(b.r2, 2)}, but little depends on what is lost.")
    if b.kind == "outlier-concentrated":
        median = finite(b.r2_feature.get("median"))
        found.append(f"A few features carry R2: the median feature has {number(median, 2)}.")
    if finite(b.r2_scalar) is not None and b.r2_scalar - b.r2 >= 0.1:
        found.append(f"The scalar mean would show {number(b.r2_scalar, 2)}.")
    return found
