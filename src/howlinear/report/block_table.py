"""The table of blocks: numbers and a verdict in words; and the page's numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import finite, number, percent, percent_se
from howlinear.report.markup import Markup, cell_text, joined, scrolled, table, tag
from howlinear.report.runs import Run
from howlinear.report.verdicts import WORDS, verdict

PROFILED = (
    *("index", "path", "kind", "r2", "r2_se", "r2_body", "r2_body_se", "r2_scalar", "first_share"),
    *("effective_rank", "stream_error", "expected_kl", "expected_kl_se"),
    *("residual_norm", "output_norm"),
)
SWAPPED = (
    *("units", "kl", "kl_se", "kl_plain", "kl_zero", "kl_mean", "delta_nll", "delta_nll_se"),
    *("delta_ppl", "delta_ppl_se", "top1", "tokens", "cosine", "params_saved"),
)


# heading: tooltip
COLUMNS = {
    "R2 ± se": "share of held-out variance that the map explains",
    "body": "R2 without first positions",
    "scalar": "R2 around one scalar mean",
    "feature": "median R2 of an output feature",
    "rank": "effective rank",
    "expected ± se": "expected growth of perplexity by plain least squares, from the profile alone",
    "KL ± se": "divergence of the predictions when replaced, nats per token",
    "plain": "the same by plain least squares, no hidden units kept",
    "perplexity": "growth of perplexity when replaced",
    "tokens": "tokens that the swap was measured on",
}


def _columns(b: BlockProfile, s: BlockSwap | None) -> list[tuple[object, object]]:
    """The number by which each column is sorted, and its text."""
    r2_se = "" if finite(b.r2_se) is None else f" ± {number(b.r2_se)}"
    median, rank = finite(b.r2_feature.get("median")), b.effective_rank
    kl, plain, growth = (s.kl, s.kl_plain, s.delta_nll) if s else (None, None, None)
    kl_se = "" if s is None or finite(s.kl_se) is None else f" ± {number(s.kl_se, 4)}"
    expected = finite(b.expected_kl)
    return [
        (b.r2, joined(number(b.r2) + r2_se, _bar(b.r2))),
        (b.r2_body, number(finite(b.r2_body))),
        (b.r2_scalar, number(finite(b.r2_scalar))),
        (median, number(median)),
        (rank, cell_text(rank)),
        (expected, percent(expected) + percent_se(expected, b.expected_kl_se)),
        (kl, number(finite(kl), 4) + kl_se),
        (plain, number(finite(plain), 4)),
        (growth, percent(growth) + percent_se(growth, s.delta_nll_se if s else None)),
        (s.tokens if s else None, cell_text(s.tokens if s else None)),
    ]


def block_table(run: Run, i: int, several: bool) -> Markup:
    headings = [("block", "index and module", ""), ("verdict", "can it be replaced?", "words")]
    headings += [(name, about, "") for name, about in COLUMNS.items()]
    headings += [("kind", "what kind of linear", "words")]
    head = tag("tr", *(_heading(*h) for h in headings))
    rows = (_row(run, b) for b in run.blocks)
    caption = f"{run.name}: {len(run.blocks)} blocks" if several else f"{len(run.blocks)} blocks"
    made = table(head, rows, caption, class_="sortable")
    return scrolled(made, f"Blocks of {run.name}", f"wide r{i}")


def _heading(name: str, about: str, words: str) -> Markup:
    button = tag("button", name, type="button", title=about)
    return tag("th", button, scope="col", class_=words or None)


def _row(run: Run, b: BlockProfile) -> Markup:
    s = run.swaps.get(b.index)
    word, why = verdict(b, s)
    named = tag("td", b.index, tag("br"), tag("code", b.path), data_v=b.index)
    reason = joined(tag("b", word), tag("br"), why)
    cells = [named, tag("td", reason, class_="words why", data_v=WORDS.index(word))]
    for value, text in _columns(b, s):
        cells.append(tag("td", text, data_v="" if finite(value) is None else repr(finite(value))))
    cells.append(tag("td", b.kind, class_="words"))
    return tag("tr", *cells, data_word=word)


def _bar(share: float) -> Markup:
    width = f"{72 * min(1.0, max(0.0, share)):.1f}"
    parts = [tag("rect", class_="b grid", width="72", height="5")]
    parts.append(tag("rect", class_="b c0", width=width, height="5"))
    return tag("svg", *parts, class_="hl bar", viewBox="0 0 72 5", aria_hidden="true")


def filters() -> Markup:
    """Controls that need scripting and are hidden without it."""
    words = (tag("option", word, value=word) for word in WORDS)
    return tag(
        "div",
        tag("label", "Find ", tag("input", type="search", id="find", autocomplete="off")),
        tag(
            "label",
            "Verdict ",
            tag("select", tag("option", "any", value=""), *words, id="word", autocomplete="off"),
        ),
        tag("output", id="count", for_="find word"),
        tag("button", "Save the numbers (JSON)", type="button", id="save"),
        class_="controls needs-script",
    )


def numbers(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of the page as JSON; the run folder has more."""
    about = ("model", "corpus", "settings", "command", "versions")
    return {
        "kind": "report",
        "runs": [
            {
                "name": run.name,
                **{name: run.about.get(name) for name in about},
                "blocks": [_numbers(b, run.swaps.get(b.index)) for b in run.blocks],
            }
            for run in runs
        ],
    }


def _numbers(b: BlockProfile, s: BlockSwap | None) -> dict[str, Any]:
    return {
        **{name: _short(getattr(b, name)) for name in PROFILED},
        "r2_feature_median": _short(b.r2_feature.get("median")),
        "swap": {name: _short(getattr(s, name)) for name in SWAPPED} if s else None,
        "verdict": verdict(b, s)[0],
    }


def _short(value: object) -> object:
    """Five digits: more than the page shows, a third of the bytes."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
