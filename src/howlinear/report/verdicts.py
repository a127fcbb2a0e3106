"""Can this block be replaced? A verdict in a word, with a sign, a colour and what is behind it.

    word, why = verdict(block, swap)
    LOOKS[word].sign

A measured swap decides where there is one; otherwise the profile's estimate does, and the word says
so. `records.verdicts` has the thresholds and the rule: the 99.5 % interval of KL must lie on one side of
a threshold, else the block is undecided. `why` repeats no number of the table of blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.verdicts import (
    HIGH_R2,
    MIN_WINDOWS,
    UNDECIDED,
    beyond_reach,
    cost_level,
    interval,
    writes_sink,
)
from howlinear.records.words import compact, finite, number, plural
from howlinear.report.runs import Run


class Look(NamedTuple):
    """How a verdict is shown."""

    sign: str
    colour: str
    measured: bool


LOOKS = {
    "safe": Look("✓", "safe", True),
    "safe with units": Look("✓+", "safe", True),
    UNDECIDED: Look("?", "undecided", True),
    "some cost": Look("~", "some", True),
    "costly": Look("✕", "costly", True),
    "likely safe": Look("✓", "safe", False),
    "likely some cost": Look("~", "some", False),
    "likely costly": Look("✕", "costly", False),
    "not measured": Look("–", "muted", False),
}
WORDS = tuple(LOOKS)
SAFE_WORDS = ("safe", "safe with units")
MEASURED = tuple(word for word, look in LOOKS.items() if look.measured)
ESTIMATED = ("likely safe", "likely some cost", "likely costly")


def verdict(b: BlockProfile, s: BlockSwap | None, safe: float) -> tuple[str, str]:
    """One of WORDS, and why."""
    kl = finite(s.kl) if s else None
    if s is None:
        word, reasons = _estimated(b, safe)
    elif kl is None or s.verdict not in MEASURED:  # the model has no next-token loss
        word, reasons = "not measured", ["The model has no next-token loss. Its map: cosine "]
        error = compact(finite(s.stream_error))
        reasons[0] += f"{number(finite(s.cosine))}, stream error {error}."
    else:
        word, reasons = _measured(s, kl)
    return word, " ".join([*reasons, *_remarks(b, word)])


def words(run: Run) -> dict[int, str]:
    """The verdict of each block, by index."""
    return {b.index: verdict(b, run.swaps.get(b.index), run.limit)[0] for b in run.blocks}


def _measured(s: BlockSwap, kl: float) -> tuple[str, list[str]]:
    units, reasons = len(s.units), []
    word = SAFE_WORDS[units > 0] if s.verdict == "safe" else str(s.verdict)
    if units:
        reasons.append(f"One matrix beside {plural(units, 'hidden unit')} of the block.")
    if s.verdict == UNDECIDED:
        reasons.append(_uncertainty(s, kl, finite(s.kl_se)))
    if (mean := finite(s.kl_mean)) is not None and kl > 0.9 * mean:
        reasons.append(f"A constant does about as well ({number(mean, 4)} nats).")
    return word, reasons


def _uncertainty(s: BlockSwap, kl: float, se: float | None) -> str:
    """Why there is no verdict."""
    low, high = interval(kl, math.nan if se is None else se, s.clusters)
    if math.isnan(low):
        return "There is no standard error: too few windows."
    reach = f"The 99.5 % interval of KL is {number(low, 4)} to {number(high, 4)} nats"
    few = f" on {s.windows} windows of at least {MIN_WINDOWS}" if s.windows < MIN_WINDOWS else ""
    return f"{reach}{few}: more held-out text decides (--tokens)."


def _estimated(b: BlockProfile, safe: float) -> tuple[str, list[str]]:
    nats = finite(b.expected_kl)
    if nats is None:
        return "not measured", ["Not swapped, and there is no estimate."]
    word = ESTIMATED[cost_level(nats, safe)]
    reasons = ["Estimated from the profile, not measured."]
    if word == ESTIMATED[2] and writes_sink(b):
        reasons.append("With the hidden units kept that write the sink, likely far less.")
    elif beyond_reach(b):
        reasons.append("The errors of many tokens are too large for a good estimate.")
    return word, reasons


def _remarks(b: BlockProfile, word: str) -> list[str]:
    """What a reader of this block's R2 alone would get wrong."""
    remarks, share = [], finite(b.first_share)
    if b.kind == "first-position only":
        of = "most" if share is None else f"{100 * share:.0f} %"
        remarks.append(f"An attention sink: the first position carries {of} of the variance.")
    elif b.r2 >= HIGH_R2 and word == "costly":
        remarks.append("R2 is high, but the model depends on the residual.")
    elif b.r2 < 0.6 and word in SAFE_WORDS:
        remarks.append("R2 is low, but the model hardly depends on the residual.")
    if b.kind == "outlier-concentrated":
        remarks.append("A few large features carry R2.")
    if finite(b.r2_scalar) is not None and b.r2_scalar - b.r2 >= 0.1:
        remarks.append("Constant offsets between features raise the scalar R2.")
    return remarks
