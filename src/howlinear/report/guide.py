"""How to read the page, and how its numbers were made."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.verdicts import COSTLY, SAFE
from howlinear.records.words import percent
from howlinear.report.markup import Markup, definitions, tag
from howlinear.report.runs import Run

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
    "signal": "the expected cost of a swap, in nats per token, from one backward pass.",
    "swap": "the growth of perplexity when the map replaces this block alone, on text that was used "
    "neither to fit nor to choose; both models read the same tokens.",
    "verdict": f"safe: the cost is below {SAFE:g} nats per token ({percent(SAFE)} perplexity) with two "
    f"standard errors added; safe so far: only without them. costly: {COSTLY:g} nats ({percent(COSTLY)}) or "
    "more. Blocks were replaced one at a time: costs of several do not simply add up.",
}
REMARK = (
    "R2 does not predict which blocks are safe to replace: the cost of a swap depends on how much the "
    "rest of the model depends on the residual. Look at the measured cost."
)


def guide() -> Markup:
    heading = tag("h2", "How to read this page")
    return tag("section", heading, tag("p", REMARK), definitions(WORDS.items()))


def methods(runs: Sequence[Run]) -> Markup:
    lists = (definitions(_facts(run)) for run in runs)
    return tag("section", tag("h2", "How the numbers were made"), *lists, id="methods")


def _facts(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to reproduce the numbers."""
    files = [run.about, *(data for data in (run.swap, run.probe, run.compress) if data)]
    notes = [data.get("notes") for data in files]
    notes = [note for some in notes if isinstance(some, list) for note in some]
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
