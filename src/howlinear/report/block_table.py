"""The table of blocks: numbers, and a verdict in plain words. The page's numbers as JSON too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import compact, finite, number, percent, percent_se
from howlinear.report.markup import Markup, joined, tag
from howlinear.report.runs import Run
from howlinear.report.verdicts import WORDS, verdict

Cell = tuple[object, float | None]  # what is shown, and what it is sorted by
PROFILED = (
    *("index", "path", "kind", "r2", "r2_se", "r2_body", "r2_body_se", "r2_scalar", "first_share"),
    *("effective_rank", "stream_error", "swap_signal", "residual_norm", "output_norm"),
)
SWAPPED = (
    *("units", "delta_nll", "delta_nll_se", "delta_nll_plain", "delta_nll_zero", "delta_nll_mean"),
    *("delta_ppl", "delta_ppl_se", "kl", "top1", "cosine", "params_saved"),
)


def _r2(b: BlockProfile, s: BlockSwap | None) -> Cell:
    se = "" if finite(b.r2_se) is None else f" ± {number(b.r2_se)}"
    return joined(number(b.r2) + se, _bar(b.r2)), finite(b.r2)


def _cost(b: BlockProfile, s: BlockSwap | None) -> Cell:
    if s is None or finite(s.delta_nll) is None:
        return "-", None
    return percent(s.delta_nll) + percent_se(s.delta_nll, s.delta_nll_se), s.delta_nll


def _plain(b: BlockProfile, s: BlockSwap | None) -> Cell:
    return (percent(s.delta_nll_plain), finite(s.delta_nll_plain)) if s else ("-", None)


def _of(name: str, digits: int = 3) -> Callable[[BlockProfile, BlockSwap | None], Cell]:
    def cell(b: BlockProfile, s: BlockSwap | None) -> Cell:
        value = finite(getattr(b, name))
        return number(value, digits), value

    return cell


def _median(b: BlockProfile, s: BlockSwap | None) -> Cell:
    value = finite(b.r2_feature.get("median"))
    return number(value), value


def _rank(b: BlockProfile, s: BlockSwap | None) -> Cell:
    return "-" if b.effective_rank is None else b.effective_rank, finite(b.effective_rank)


def _signal(b: BlockProfile, s: BlockSwap | None) -> Cell:
    return compact(finite(b.swap_signal)), finite(b.swap_signal)


COLUMNS: dict[str, tuple[str, Callable[[BlockProfile, BlockSwap | None], Cell]]] = {
    "R2 ± se": ("share of held-out variance that the map explains", _r2),
    "body": ("R2 without first positions", _of("r2_body")),
    "scalar": ("R2 around one scalar mean", _of("r2_scalar")),
    "feature": ("median R2 of an output feature", _median),
    "rank": ("effective rank", _rank),
    "signal": ("estimated cost of a swap, nats a token", _signal),
    "swap ± se": ("growth of perplexity when replaced", _cost),
    "plain": ("the same by plain least squares, no units kept", _plain),
}


def block_table(run: Run, i: int, several: bool) -> Markup:
    headings = [("block", "index and module", ""), ("verdict", "may it be replaced?", "words")]
    headings += [(name, about, "") for name, (about, _) in COLUMNS.items()]
    headings += [("kind", "what kind of linear", "words")]
    head = tag("tr", *(_heading(*h) for h in headings))
    body = tag("tbody", *(_row(run, b) for b in run.blocks))
    name = f"{run.name}: {len(run.blocks)} blocks" if several else f"{len(run.blocks)} blocks"
    table = tag("table", tag("caption", name), tag("thead", head), body, class_="sortable")
    label = f"Blocks of {run.name}"
    return tag("div", table, class_=f"wide r{i}", tabindex="0", role="region", aria_label=label)


def _heading(name: str, about: str, words: str) -> Markup:
    button = tag("button", name, type="button", title=about)
    return tag("th", button, scope="col", class_=words or None)


def _row(run: Run, b: BlockProfile) -> Markup:
    s = run.swaps.get(b.index)
    word, why = verdict(b, s)
    named = tag("td", b.index, tag("br"), tag("code", b.path), data_v=b.index)
    told = joined(tag("b", word), tag("br"), why)
    cells = [named, tag("td", told, class_="words why", data_v=WORDS.index(word))]
    for _, make in COLUMNS.values():
        shown, value = make(b, s)
        cells.append(tag("td", shown, data_v="" if value is None else repr(value)))
    cells.append(tag("td", b.kind, class_="words"))
    return tag("tr", *cells, data_word=word)


def _bar(share: float) -> Markup:
    wide = f"{72 * min(1.0, max(0.0, share)):.1f}"
    parts = [tag("rect", class_="b grid", width="72", height="5")]
    parts.append(tag("rect", class_="b c0", width=wide, height="5"))
    return tag("svg", *parts, class_="hl bar", viewBox="0 0 72 5", aria_hidden="true")


def filters() -> Markup:
    """Controls that work with scripting alone, and show with it alone."""
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
    """What the page shows, for machines; the run folder has more."""
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
    found = {name: _short(getattr(b, name)) for name in PROFILED}
    found["r2_feature_median"] = _short(b.r2_feature.get("median"))
    found["swap"] = {name: _short(getattr(s, name)) for name in SWAPPED} if s else None
    return found | {"verdict": verdict(b, s)[0]}


def _short(value: object) -> object:
    """Five figures are more than the page shows, and a third of the bytes."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
