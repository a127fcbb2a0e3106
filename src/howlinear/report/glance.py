"""The answer at a glance: one sentence a run, and four numbers."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.report.markup import Markup, tag
from howlinear.report.runs import Run, inside
from howlinear.report.verdicts import ESTIMATED, verdict
from howlinear.words import number, ranges


def spaced(indices: list[int]) -> str:
    return ranges(indices).replace(",", ", ")


def answers(runs: Sequence[Run]) -> list[Markup]:
    return [_answer(run, len(runs) > 1) for run in runs]


def _answer(run: Run, named: bool) -> Markup:
    """What a reader should know who reads nothing else."""
    if not run.blocks:
        return tag("p", f"{run.name}: the log of a training, without a profile.")
    low, high = (f(run.blocks, key=lambda b: b.r2) for f in (min, max))
    said = [
        f"{len(run.blocks)} blocks. The best matrix explains between {number(low.r2, 2)} (block "
        f"{low.index}) and {number(high.r2, 2)} (block {high.index}) of what they write.",
        _sinks(run),
        _swaps(run),
    ]
    return tag("p", tag("b", f"{run.name}: ") if named else None, " ".join(filter(None, said)))


def _sinks(run: Run) -> str:
    sinks = [b.index for b in run.blocks if b.kind == "first-position only"]
    if not sinks:
        return ""
    which = "Block {} looks" if len(sinks) == 1 else "Blocks {} look"
    return f"{which.format(spaced(sinks))} linear only because of the first position of a window."


def _swaps(run: Run) -> str:
    words = {b.index: verdict(b, run.swaps.get(b.index))[0] for b in run.blocks}
    found = {w: [k for k, word in words.items() if word == w] for w in set(words.values())}
    base = inside(run.swap, "base", "perplexity")
    if base is None:
        return "Nothing was swapped yet: howlinear swap measures what replacing each block costs."
    safe, units = found.get("safe", []), found.get("safe with units", [])
    alone = f"One at a time, {len(safe)} can become one matrix for less than 3 % more perplexity"
    alone += f" ({spaced(safe)})" if safe else ""
    more = f", {len(units)} with hidden units kept ({spaced(units)})" if units else ""
    costly = found.get("costly", [])
    worst = f"; {len(costly)} cost more than 10 % ({spaced(costly)})" if costly else ""
    return f"{alone}{more}{worst}."


def tiles(run: Run) -> Markup:
    words = [verdict(b, run.swaps.get(b.index))[0] for b in run.blocks]
    mean = sum(b.r2 for b in run.blocks) / len(run.blocks)
    safe = sum(word.startswith("safe") for word in words)
    measured = sum(word not in (*ESTIMATED, "not measured") for word in words)
    facts = [(number(mean, 2), "mean R2 over blocks"), (str(len(run.blocks)), "blocks")]
    if measured:
        facts.append((f"{safe} of {measured}", "safe to replace, alone (< 3 %)"))
    base, tokens = (inside(run.swap, "base", k) for k in ("perplexity", "tokens"))
    if base is not None:
        facts.append((number(base, 1), f"perplexity as it is, {tokens or 0:.0f} tokens"))
    return tag("ul", *(tag("li", tag("b", a), b) for a, b in facts), class_="glance")
