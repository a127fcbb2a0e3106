"""The table of blocks: numbers and a verdict in words; and the page's numbers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import compact, finite, number, percent, percent_se
from howlinear.report.markup import Markup, joined, scrolled, table, tag
from howlinear.report.runs import Run
from howlinear.report.verdicts import WORDS, verdict

PROFILED = (
    *("index", "path", "kind", "r2", "r2_se", "r2_body", "r2_body_se", "r2_scalar", "first_share"),
    *("effective_rank", "stream_error", "swap_signal", "residual_norm", "output_norm"),
)
SWAPPED = (
    *("units", "delta_nll", "delta_nll_se", "delta_nll_plain", "delta_nll_zero", "delta_nll_mean"),
    *("delta_ppl", "delta_ppl_se", "kl", "top1", "cosine", "params_saved"),
)


Getter = Callable[[BlockProfile, BlockSwap | None], object]


def _r2(b: BlockProfile, s: BlockSwap | None) -> Markup:
    se = "" if finite(b.r2_se) is None else f" ± {number(b.r2_se)}"
    return joined(number(b.r2) + se, _bar(b.r2))


def _cost(b: BlockProfile, s: BlockSwap | None) -> str:
    return percent(s.delta_nll) + percent_se(s.delta_nll, s.delta_nll_se) if s else "-"


# heading: (tooltip, value that the column is sorted by, text where it is not just that number)
COLUMNS: dict[str, tuple[str, Getter, Getter | None]] = {
    "R2 ± se": ("share of held-out variance that the map explains", lambda b, s: b.r2, _r2),
    "body": ("R2 without first positions", lambda b, s: b.r2_body, None),
    "scalar": ("R2 around one scalar mean", lambda b, s: b.r2_scalar, None),
    "feature": ("median R2 of an output feature", lambda b, s: b.r2_feature.get("median"), None),
    "rank": (
        "effective rank",
        lambda b, s: b.effective_rank,
        lambda b, s: "-" if b.effective_rank is None else b.effective_rank,
    ),
    "signal": (
        "estimated cost of a swap, nats per token",
        lambda b, s: b.swap_signal,
        lambda b, s: compact(finite(b.swap_signal)),
    ),
    "swap ± se": ("growth of perplexity when replaced", lambda b, s: s and s.delta_nll, _cost),
    "plain": (
        "the same by plain least squares, no hidden units kept",
        lambda b, s: s and s.delta_nll_plain,
        lambda b, s: percent(s.delta_nll_plain) if s else "-",
    ),
}


def block_table(run: Run, i: int, several: bool) -> Markup:
    headings = [("block", "index and module", ""), ("verdict", "can it be replaced?", "words")]
    headings += [(name, about, "") for name, (about, *_) in COLUMNS.items()]
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
    for _, value_of, text_of in COLUMNS.values():
        value = finite(value_of(b, s))
        text = text_of(b, s) if text_of else number(value)
        cells.append(tag("td", text, data_v="" if value is None else repr(value)))
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
