"""The page's texts: what it means, where residuals are large, every word, how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.fields import BlockProbe
from howlinear.records.verdicts import COSTLY, SAFE
from howlinear.records.words import number, percent, plural
from howlinear.report.markup import Markup, definitions, joined, scrolled, table, tag
from howlinear.report.runs import Run, inside, listed

MEANING = (
    "Each block is compared with one matrix and a bias, the best by least squares, on text that they were "
    "not fitted on.",
    "R2 is the share of the variance of the block's output that they explain: at 1 the block is linear, at 0 "
    "a constant does as well.",
    "The cost tells how far the model's predictions move when the matrix takes the block's place; a high R2 "
    "does not make it small, so look at both.",
)
CITATION = """@misc{whipp2026linear,
  title         = {How Linear Is a Transformer Feed-Forward Block? Per-Block Linear Recoverability
                   Is Learned, Not Architectural},
  author        = {Whipp, Stuart},
  year          = {2026},
  eprint        = {2606.19379},
  archivePrefix = {arXiv},
  primaryClass  = {cs.LG}
}"""
WHERE = (
    "The first position's share of the squared residual and of the rows, and the tokens with the "
    "largest residuals, as multiples of the mean squared residual."
)
TOKENS = 6
WORDS = {
    "R2": "the share of the variance of a block's output, on held-out text, that the exact "
    "least-squares map of its input explains. 1: one matrix and a bias reproduce the block. 0: a constant "
    "does as well. The variance is taken around the mean of each output feature.",
    "± se": "a standard error: over folds for R2, over documents for costs.",
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
    "undecided: the interval holds a threshold, or there are fewer than 16 windows. likely: by the expected "
    "cost, not measured.",
}
CAVEATS = (
    "Blocks were replaced one at a time: the costs of several do not simply add up.",
    "Numbers hold for this text; other texts give other numbers.",
    "The standard error of R2 is over folds that share fit rows, so it is an approximation.",
    "Held-out R2 is low by about (1 - R2) d / (n - d) with n rows and d columns.",
)


def lead(runs: Sequence[Run]) -> Markup:
    """What was measured, in a line for each run."""
    lines = []
    for i, run in enumerate(runs):
        text = " ".join(_text(run.fact("corpus", k)) for k in ("name", "part")).strip()
        tokens = run.fact("settings", "tokens")
        facts = [
            run.name if len(runs) > 1 else "",
            plural(len(run.blocks), "block") if run.blocks else "the log of a training",
            f"{tokens:,} tokens" if isinstance(tokens, int) else "",
            text,
        ]
        lines.append(tag("p", " · ".join(filter(None, facts)), class_=f"lead r{i}"))
    return joined(*lines)


def meaning() -> Markup:
    sentences = (tag("li", sentence) for sentence in MEANING)
    return tag("section", tag("h2", "What it means"), tag("ol", *sentences), id="meaning")


def where(runs: Sequence[Run]) -> Markup | None:
    several = len(runs) > 1
    rows = [
        tag(
            "tr",
            *([tag("td", run.name, class_="words")] if several else []),
            *cells,
            class_=f"r{i}",
        )
        for i, run in enumerate(runs)
        for p in run.probes.values()
        if (cells := _cells(p))
    ]
    if not rows:
        return None
    names = ["run"] if several else []
    names += ["block", "first position, % of residual", "% of rows", "tokens"]
    head = tag("tr", *(tag("th", n, scope="col", class_="words") for n in names))
    title = "Where the residual is large"
    wide = scrolled(table(head, rows), title)
    return tag("section", tag("h2", title), tag("p", WHERE, class_="reading"), wide, id="where")


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
    caveats = tag("ul", *(tag("li", caveat) for caveat in CAVEATS))
    words = joined(tag("h2", "Every word and number"), definitions(WORDS.items()))
    return tag("section", words, tag("h2", "When not to trust it"), caveats, id="guide")


def methods(runs: Sequence[Run]) -> Markup:
    parts = []
    for i, run in enumerate(runs):
        commands = [_text(data["command"]) for data in _files(run) if data.get("command")]
        again = copied("\n".join(commands), f"commands-{i}") if commands else None
        parts += [definitions(_facts(run)), again]
    return tag("section", tag("h2", "How the numbers were made"), *parts, id="methods")


def citation() -> Markup:
    return tag("section", tag("h2", "Cite the paper"), copied(CITATION, "citation"), id="cite")


def copied(text: str, name: str) -> Markup:
    """Text with a button that copies it."""
    lines: list[object] = []
    for line in text.split("\n"):  # escaped line by line: a line break is no control character here
        lines += [line, Markup("\n")]
    button = tag("button", "Copy", type="button", class_="copy needs-script", data_of=name)
    return tag("div", tag("pre", *lines[:-1], id=name, tabindex="0"), button, class_="copied")


def _files(run: Run) -> list[dict[str, Any]]:
    return [run.about, *(data for data in (run.swap, run.probe, run.compress) if data)]


def _facts(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to reproduce the numbers."""
    lists = (data.get("notes") for data in _files(run))
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
