"""The page's texts: a summary of each run, where residuals are large, how to read the page, how it was made."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProbe
from howlinear.records.verdicts import COSTLY, SAFE, UNDECIDED, costly_from
from howlinear.records.words import number, percent, plural, ranges
from howlinear.report.markup import Markup, definitions, joined, scrolled, table, tag
from howlinear.report.runs import Run, inside, listed
from howlinear.report.verdicts import MEASURED, SAFE_WORDS, verdict

PHRASES = {
    "safe": "can become one matrix for less than {safe:.3g} nats per token",
    "safe with units": "can with hidden units kept",
    "some cost": "cost {safe:.3g} to {costly:.3g} nats per token",
    "costly": "cost {costly:.3g} nats or more",
    "undecided": "are undecided",
}
WHERE = (
    "The first position's share of the squared residual and of the rows, and the tokens with the "
    "largest residuals, as multiples of the mean squared residual."
)
TOKENS = 6
WORDS = {
    "R2": "the share of the variance of a block's output, on held-out text, that the exact "
    "least-squares map of its input explains. 1: one matrix and a bias reproduce the block. 0: a constant "
    "does as well. The variance is taken around the mean of each output feature.",
    "± se": "a standard error over folds. Folds share fit rows, so it is an approximation.",
    "body": "R2 without the first position of each window. Where it is far below R2, only the "
    "attention sink is linear.",
    "scalar": "R2 around one mean of all features: constant offsets between features count as "
    "explained, so it is never below R2. It is the paper's convention (arXiv 2606.19379).",
    "feature": "the median R2 of an output feature. Where it is far below R2, a few large features carry R2.",
    "rank": "the smallest rank of a matrix that reaches 90 % of R2.",
    "expected": "the expected growth of perplexity when plain least squares replaces the block, from one backward "
    "pass.",
    "KL": "the divergence of the predictions from the original's, in nats per token, when the map replaces "
    "this block alone, on text that was used neither to fit nor to choose. Where the model is calibrated, "
    "perplexity grows by as much: 0.03 nats are 3 %.",
    "perplexity": "its growth on the same tokens. It also depends on which words followed there, so for cheap "
    "blocks it is less certain than KL.",
    "verdict": f"by the 99.5 % interval of KL. safe: below {SAFE:g} nats per token ({percent(SAFE)} perplexity), "
    f"unless --safe says otherwise; costly: {COSTLY:g} nats ({percent(COSTLY)}) or more, in the same ratio; "
    "undecided: the interval holds a threshold, or there are fewer than 16 windows. Blocks were replaced "
    "one at a time: costs of several do not simply add up.",
}
REMARK = (
    "R2 does not predict which blocks are safe to replace: the cost of a swap depends on how much the "
    "rest of the model depends on the residual. Look at the measured cost."
)


def summary(run: Run, named: bool) -> Markup:
    if not run.blocks:
        return tag("p", f"{run.name}: the log of a training, without a profile.")
    low, high = (f(run.blocks, key=lambda b: b.r2) for f in (min, max))
    sentences = [
        f"{plural(len(run.blocks), 'block')}. The best matrix explains between {number(low.r2, 2)} (block "
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
    safe = inside(run.swap, "settings", "safe") or SAFE
    limits = {"safe": safe, "costly": costly_from(safe)}
    parts = [
        f"{len(by_word[word])} {phrase.format(**limits)} ({_listed(by_word[word])})"
        for word, phrase in PHRASES.items()
        if word in by_word
    ]
    count = sum(len(by_word.get(word, [])) for word in MEASURED)
    return f"Of {count} swapped one at a time, {'; '.join(parts)}." if count else ""


def tiles(run: Run) -> Markup:
    words = [verdict(b, run.swaps.get(b.index))[0] for b in run.blocks]
    mean = sum(b.r2 for b in run.blocks) / len(run.blocks)
    measured = sum(word in MEASURED for word in words)
    facts = [(number(mean, 2), "mean R2 over blocks"), (str(len(run.blocks)), "blocks")]
    if measured:
        safe, open_ones = sum(w in SAFE_WORDS for w in words), words.count(UNDECIDED)
        more = f", {open_ones} undecided" if open_ones else ""
        facts.append((f"{safe} of {measured}", f"safe to replace, alone{more}"))
    base, tokens = (inside(run.swap, "base", k) for k in ("perplexity", "tokens"))
    if base is not None:
        facts.append((number(base, 1), f"perplexity of the original, {tokens or 0:.0f} tokens"))
    return tag("ul", *(tag("li", tag("b", a), b) for a, b in facts), class_="glance")


def where(runs: Sequence[Run]) -> Markup | None:
    rows = [
        tag("tr", tag("td", run.name, class_="words"), *cells, class_=f"r{i}")
        for i, run in enumerate(runs)
        for p in run.probes.values()
        if (cells := _cells(p))
    ]
    if not rows:
        return None
    names = ("run", "block", "first position, % of residual", "% of rows", "tokens")
    head = tag("tr", *(tag("th", n, scope="col", class_="words") for n in names))
    title = "Where the residual is large"
    wide = scrolled(table(head, rows), title)
    return tag("section", tag("h2", title), tag("p", WHERE, class_="reading"), wide)


def _cells(p: BlockProbe) -> list[Markup]:
    first = next((s for s in listed(p.where, "positions") if inside(s, "from") == 0), {})
    tokens = listed(p.where, "tokens")[:TOKENS]
    if not first and not tokens:
        return []
    shares = [inside(first, key) for key in ("share", "rows")]
    parts = [tag("td", "-" if v is None else number(100 * v, 1)) for v in shares]
    shown = []
    for t in tokens:
        visible = str(t.get("text")).replace(" ", "␣")
        shown.append(joined(tag("code", visible), f" {number(inside(t, 'times_mean'), 1)}  "))
    return [tag("td", p.index), *parts, tag("td", *shown, class_="words")]


def guide() -> Markup:
    heading = tag("h2", "How to read this page")
    return tag("section", heading, tag("p", REMARK), definitions(WORDS.items()))


def methods(runs: Sequence[Run]) -> Markup:
    lists = (definitions(_facts(run)) for run in runs)
    return tag("section", tag("h2", "How the numbers were made"), *lists, id="methods")


def _facts(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to reproduce the numbers."""
    files = [run.about, *(data for data in (run.swap, run.probe, run.compress) if data)]
    lists = (data.get("notes") for data in files)
    notes = [note for some in lists if isinstance(some, list) for note in some]
    model = ("revision", "dtype", "parameters", "weights")
    return [
        ("run", run.name),
        ("model", run.model),
        *((name, _text(run.fact("model", name))) for name in model),
        ("text", " ".join(_text(run.fact("corpus", k)) for k in ("name", "part")).strip()),
        ("tokens", _text(run.fact("settings", "tokens"))),
        ("settings", _pairs(run.fact("settings"))),
        ("swapped on", _pairs(run.swap.get("base"))),
        ("commands", "; ".join(_text(data["command"]) for data in files if data.get("command"))),
        ("versions", _pairs(run.about.get("versions"))),
        ("notes", "; ".join([*run.left_out, *map(str, notes)])),
    ]


def _pairs(data: object) -> str:
    if not isinstance(data, dict):
        return ""
    return ", ".join(f"{k} {_text(v)}" for k, v in data.items() if v is not None)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
