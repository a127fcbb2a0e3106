"""The summary at the top of the page: a few sentences per run, and four numbers."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.verdicts import COSTLY, SAFE
from howlinear.records.words import number, percent, ranges
from howlinear.report.markup import Markup, tag
from howlinear.report.runs import Run, inside
from howlinear.report.verdicts import MEASURED, SAFE_WORDS, verdict

PHRASES = {
    "safe": f"can become one matrix for less than {percent(SAFE)[1:]} more perplexity",
    "safe with units": "can with hidden units kept",
    "safe so far": "seem so, but may cost more within two standard errors",
    "costly": f"cost {percent(COSTLY)[1:]} or more",
}


def summaries(runs: Sequence[Run]) -> list[Markup]:
    return [_summary(run, named=len(runs) > 1) for run in runs]


def _summary(run: Run, named: bool) -> Markup:
    if not run.blocks:
        return tag("p", f"{run.name}: the log of a training, without a profile.")
    low, high = (f(run.blocks, key=lambda b: b.r2) for f in (min, max))
    sentences = [
        f"{len(run.blocks)} blocks. The best matrix explains between {number(low.r2, 2)} (block "
        f"{low.index}) and {number(high.r2, 2)} (block {high.index}) of the variance of their outputs.",
        _sinks(run),
        _swaps(run),
    ]
    return tag("p", tag("b", f"{run.name}: ") if named else None, " ".join(filter(None, sentences)))


def _listed(indices: list[int]) -> str:
    return ranges(indices).replace(",", ", ")


def _sinks(run: Run) -> str:
    sinks = [b.index for b in run.blocks if b.kind == "first-position only"]
    if not sinks:
        return ""
    subject = f"Block {sinks[0]} looks" if len(sinks) == 1 else f"Blocks {_listed(sinks)} look"
    return f"{subject} linear only because of the first position of a window."


def _swaps(run: Run) -> str:
    if not run.swaps:
        return "Nothing was swapped yet: howlinear swap measures what replacing each block costs."
    if inside(run.swap, "base", "perplexity") is None:
        return "The model has no next-token loss, so swaps have no cost in perplexity."
    by_word: dict[str, list[int]] = {}
    for b in run.blocks:
        by_word.setdefault(verdict(b, run.swaps.get(b.index))[0], []).append(b.index)
    parts = [
        f"{len(by_word[word])} {phrase} ({_listed(by_word[word])})"
        for word, phrase in PHRASES.items()
        if word in by_word
    ]
    count = sum(len(by_word.get(word, [])) for word in MEASURED)
    return f"Of {count} swapped one at a time, {'; '.join(parts) or 'all cost something'}."


def tiles(run: Run) -> Markup:
    words = [verdict(b, run.swaps.get(b.index))[0] for b in run.blocks]
    mean = sum(b.r2 for b in run.blocks) / len(run.blocks)
    measured = sum(word in MEASURED for word in words)
    facts = [(number(mean, 2), "mean R2 over blocks"), (str(len(run.blocks)), "blocks")]
    if measured:
        safe, so_far = sum(w in SAFE_WORDS for w in words), words.count("safe so far")
        more = f", {so_far} more so far" if so_far else ""
        facts.append((f"{safe} of {measured}", f"safe to replace, alone{more}"))
    base, tokens = (inside(run.swap, "base", k) for k in ("perplexity", "tokens"))
    if base is not None:
        facts.append((number(base, 1), f"perplexity of the original, {tokens or 0:.0f} tokens"))
    return tag("ul", *(tag("li", tag("b", a), b) for a, b in facts), class_="glance")
