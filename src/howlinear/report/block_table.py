"""The table of blocks: a verdict, numbers, and what is behind them; and the page's numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.words import finite, number, percent, percent_se, plural
from howlinear.report.markup import Markup, joined, scrolled, tag
from howlinear.report.runs import Run
from howlinear.report.strip import block_id
from howlinear.report.verdicts import LOOKS, WORDS, verdict, words

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
    "expected ± se": "expected growth of perplexity by plain least squares, from the profile alone",
    "KL ± se": "divergence of the predictions when replaced, nats per token",
    "plain": "the same by plain least squares, where the map keeps hidden units",
    "perplexity ± se": "growth of perplexity when replaced",
}
Cell = tuple[object, object]  # the number by which a column is sorted, and its text


def _cells(b: BlockProfile, s: BlockSwap | None) -> dict[str, Cell]:
    """The cells of a block, by heading."""
    r2_se = "" if finite(b.r2_se) is None else f" ± {number(b.r2_se)}"
    kl, plain, growth = (s.kl, s.kl_plain if s.units else None, s.delta_nll) if s else (None,) * 3
    kl_se = "" if s is None or finite(s.kl_se) is None else f" ± {number(s.kl_se, 4)}"
    expected, body = finite(b.expected_kl), finite(b.r2_body)
    cells: tuple[Cell, ...] = (
        (b.r2, joined(tag("span", number(b.r2) + r2_se), _bar(b.r2))),
        (body, number(body)),
        (expected, percent(expected) + percent_se(expected, b.expected_kl_se)),
        (kl, number(finite(kl), 4) + kl_se),
        (plain, number(finite(plain), 4)),
        (growth, percent(growth) + percent_se(growth, s.delta_nll_se if s else None)),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def block_table(run: Run, i: int, several: bool) -> Markup:
    """One line a block; its sentence is in a second line, which a button opens."""
    rows = {b.index: _cells(b, run.swaps.get(b.index)) for b in run.blocks}
    # columns without any number are left out
    shown = [n for n in COLUMNS if any(finite(cells[n][0]) is not None for cells in rows.values())]
    headings = [("block", "opens what is behind the verdict", ""), ("verdict", "", "words")]
    headings += [(name, COLUMNS[name], "") for name in shown]
    headings += [("kind", "what kind of linear", "words")]
    head = tag("tr", *(_heading(*h) for h in headings), role="row")
    bodies = (_body(run, i, b, {n: rows[b.index][n] for n in shown}) for b in run.blocks)
    caption = tag("caption", f"{run.name}: {plural(len(run.blocks), 'block')}") if several else None
    thead = tag("thead", head, role="rowgroup")
    # roles: as cards the elements are no table to a browser
    made = tag("table", caption, thead, *bodies, class_="sortable", role="table")
    return scrolled(made, f"Blocks of {run.name}", f"wide r{i}")


def _heading(name: str, about: str, words: str) -> Markup:
    button = tag("button", name, type="button", title=about or None)
    return tag("th", button, scope="col", class_=words or None, role="columnheader")


def _body(run: Run, i: int, b: BlockProfile, cells: dict[str, Cell]) -> Markup:
    s, place, opened = run.swaps.get(b.index), block_id(i, b.index), f"more-{i}-{b.index}"
    word, why = verdict(b, s, run.limit)
    opener = tag(
        "button",
        b.index,
        type="button",
        class_="opener",
        aria_expanded="true",
        aria_controls=opened,
    )
    look = LOOKS[word]
    chip = tag("span", look.sign, class_=_chip(word), aria_hidden="true")
    row = [
        tag("th", opener, scope="row", data_v=b.index, role="rowheader"),
        tag("td", chip, " ", word, class_="words", data_v=WORDS.index(word), role="cell"),
    ]
    for name, (value, text) in cells.items():
        key = "" if finite(value) is None else repr(finite(value))
        row.append(tag("td", text, data_v=key, data_label=name, role="cell"))
    row.append(tag("td", b.kind, class_="words", data_label="kind", role="cell"))
    more = tag("td", _more(b, s, why), colspan=len(row), role="cell")
    return tag(
        "tbody",
        tag("tr", *row, role="row"),
        tag("tr", more, class_="more", id=opened, role="row"),
        id=place,
        data_word=word,
        role="rowgroup",
    )


def _chip(word: str) -> str:
    look = LOOKS[word]
    return f"chip {look.colour}" + ("" if look.measured else " open")


def _more(b: BlockProfile, s: BlockSwap | None, why: str) -> Markup:
    """What is behind the verdict, and the numbers that the line of the block does not have."""
    rank = None if b.effective_rank is None else f"{b.effective_rank} of {b.d_out}"
    facts = {
        "scalar R2": number(finite(b.r2_scalar)),
        "median feature's R2": number(finite(b.r2_feature.get("median"))),
        "effective rank": rank,
        "measured on": None if s is None else f"{s.tokens} tokens",
    }
    told = [f"{name} {value}" for name, value in facts.items() if value not in (None, "-")]
    sentence = tag("p", why) if why else None
    return joined(sentence, tag("p", tag("code", b.path), *(f" · {fact}" for fact in told)))


def _bar(share: float) -> Markup:
    width = f"{72 * min(1.0, max(0.0, share)):.1f}"
    parts = [tag("rect", class_="b grid", width="72", height="5")]
    parts.append(tag("rect", class_="b axis", width=width, height="5"))
    return tag("svg", *parts, class_="hl bar", viewBox="0 0 72 5", aria_hidden="true")


def filters(runs: Sequence[Run]) -> Markup:
    """Controls that need scripting and are hidden without it."""
    present = {word for run in runs for word in words(run).values()}
    options = (tag("option", word, value=word) for word in WORDS if word in present)
    chosen = tag("select", tag("option", "any", value=""), *options, id="word", autocomplete="off")
    find = tag("input", type="search", id="find", autocomplete="off", placeholder="sink, layers.7")
    sort = tag("select", id="sort", autocomplete="off")
    return tag(
        "div",
        tag("label", "Find ", find),
        tag("label", "Verdict ", chosen),
        tag("label", "Sort by ", sort, class_="as-cards"),
        tag("button", "Open all", type="button", id="open-all", aria_pressed="false"),
        tag("button", "Save the numbers (JSON)", type="button", id="save"),
        tag("output", id="count", for_="find word"),
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
                "blocks": [_numbers(run, b) for b in run.blocks],
            }
            for run in runs
        ],
    }


def _numbers(run: Run, b: BlockProfile) -> dict[str, Any]:
    s = run.swaps.get(b.index)
    return {
        **{name: _short(getattr(b, name)) for name in PROFILED},
        "r2_feature_median": _short(b.r2_feature.get("median")),
        "swap": {name: _short(getattr(s, name)) for name in SWAPPED} if s else None,
        "verdict": verdict(b, s, run.limit)[0],
    }


def _short(value: object) -> object:
    """Five digits: more than the page shows, a third of the bytes."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
