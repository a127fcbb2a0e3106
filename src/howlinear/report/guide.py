"""How to read the page, and how its numbers were made."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.verdicts import COSTLY, SAFE
from howlinear.records.words import percent
from howlinear.report.markup import Markup, tag
from howlinear.report.runs import Run

WORDS = {
    "R2": "the share of the variance of a block's output, on text that was not fitted, that the "
    "exact least-squares map of its input explains. 1: one matrix and a bias do all of it. 0: a constant "
    "does as well. Around the mean of each output feature.",
    "± se": "a standard error over folds. Folds share rows to fit, so it is an approximation.",
    "body": "R2 without the first position of each window. Where it is far below R2, what is linear "
    "is the attention sink alone.",
    "scalar": "R2 around one mean of all features: constant offsets between features count as "
    "explained, so it is never below R2. It is the paper's convention (arXiv 2606.19379).",
    "feature": "the median of R2 over output features: far below R2, a few large features carry it.",
    "rank": "the smallest rank of a matrix that reaches 90 % of R2.",
    "signal": "what a swap is expected to cost, in nats a token, from one backward pass.",
    "swap": "how much perplexity grows when this block alone becomes its map, on text that neither "
    "the fit nor any choice has seen; the same tokens through both models.",
    "verdict": f"safe: less than {SAFE:g} nats a token ({percent(SAFE)} perplexity), two standard errors "
    f"included; safe so far: not with them. costly: {COSTLY:g} nats ({percent(COSTLY)}) or more. "
    "Blocks were replaced one at a time: costs of several do not simply add up.",
}


def guide() -> Markup:
    listed = [
        tag(name, text) for word, why in WORDS.items() for name, text in (("dt", word), ("dd", why))
    ]
    remark = (
        "R2 does not tell which blocks are safe to replace: what a swap costs depends on how much the "
        "rest of the model cares about the error. Look at the measured cost."
    )
    return tag("section", tag("h2", "How to read this page"), tag("p", remark), tag("dl", *listed))


def methods(runs: Sequence[Run]) -> Markup:
    return tag("section", tag("h2", "How the numbers were made"), *map(_made, runs), id="methods")


def _made(run: Run) -> Markup:
    listed = [
        tag(name, text)
        for word, value in facts(run)
        if value
        for name, text in (("dt", word), ("dd", value))
    ]
    return tag("dl", *listed)


def facts(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to make the same numbers."""
    base, corpus = run.swap.get("base"), run.fact("corpus")
    name, part = (corpus.get(k) if isinstance(corpus, dict) else None for k in ("name", "part"))
    settings = run.fact("settings")
    shown = "" if not isinstance(settings, dict) else _listed(settings)
    tokens = run.fact("settings", "tokens")
    commands = [run.about.get("command"), *(d.get("command") for d in _others(run))]
    return [
        ("run", run.name),
        ("model", run.model),
        ("revision", _text(run.fact("model", "revision"))),
        ("dtype", _text(run.fact("model", "dtype"))),
        ("parameters", _text(run.fact("model", "parameters"))),
        ("weights", _text(run.fact("model", "weights"))),
        ("text", " ".join(filter(None, (_text(name), _text(part))))),
        ("tokens", _text(tokens)),
        ("settings", shown),
        ("swapped on", _listed(base) if isinstance(base, dict) else ""),
        ("commands", "; ".join(_text(c) for c in commands if c)),
        ("versions", _listed(run.about.get("versions"))),
        ("notes", "; ".join(_notes(run))),
    ]


def _notes(run: Run) -> list[str]:
    """What the files say besides, and what was left out of them."""
    told = [d.get("notes") for d in (run.about, *_others(run))]
    return [
        *run.left_out,
        *(str(note) for notes in told if isinstance(notes, list) for note in notes),
    ]


def _others(run: Run) -> list[dict[str, object]]:
    return [d for d in (run.swap, run.probe, run.compress) if d]


def _listed(data: object) -> str:
    if not isinstance(data, dict):
        return ""
    return ", ".join(f"{k} {_text(v)}" for k, v in data.items() if v is not None)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
