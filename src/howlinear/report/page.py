"""Runs and figures -> one self-contained HTML page.

The page works without scripting: drawings, tables and switches are markup and CSS; the script adds
sorting, filtering and faster tooltips. Its content-security policy allows one style and one script,
by their hashes, so nothing else runs and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from howlinear.report.block_table import block_table, filters, numbers
from howlinear.report.canvas import Canvas, Mark
from howlinear.report.figure import Choice, Figure, looks
from howlinear.report.glance import summaries, tiles
from howlinear.report.guide import guide, methods
from howlinear.report.markup import Markup, cell_text, joined, json_inside, scrolled, table, tag
from howlinear.report.runs import Run
from howlinear.report.styles import DARK, LIGHT, stylesheet, variables
from howlinear.report.svg import svg
from howlinear.report.where import where


def page(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    script = _resource("page.js")
    style = _style(runs, figures)
    title = " and ".join(dict.fromkeys(run.model for run in runs))
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"How linear is {title}?"),
        tag("style", Markup(style)),
    )
    first, others, several = list(figures[:1]), list(figures[1:]), len(runs) > 1
    body = joined(
        tag("header", tag("h1", f"How linear is {title}?"), *summaries(runs), _run_switches(runs)),
        tag(
            "main",
            tiles(runs[0]) if len(runs) == 1 and runs[0].blocks else None,
            *(_section(f, several) for f in first),
            _tables(runs),
            *(_section(f, several) for f in others),
            where(runs),
            guide(),
            methods(runs),
        ),
        tag("footer", "Made by ", tag("code", "howlinear report"), ". This page fetches nothing."),
        tag("div", id="tip", class_="tip", aria_hidden="true"),
        tag("div", id="said", class_="offscreen", aria_live="polite"),
        tag("script", json_inside(numbers(runs)), type="application/json", id="numbers"),
        tag("script", Markup(script)),
    )
    html = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!doctype html>\n{html}\n"


def _resource(name: str) -> str:
    return files("howlinear.report").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    def sha(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{sha(style)}'; script-src 'sha256-{sha(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _style(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    rules = [
        f":root{{color-scheme:light dark;{variables(LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{@media screen{{:root{{{variables(DARK)}}}}}}}",
        _resource("page.css"),
        stylesheet(),
    ]
    for i in range(len(runs)):
        rules.append(f"body:has(#on-r{i}:not(:checked)) .r{i}{{display:none}}")
    for f in figures:
        off = [(c, f":has(#{f.name}-{c.part}:not(:checked))") for c in f.switches]
        off += [(c, f":not(:has(#{f.name}-{c.part}:checked))") for c in f.one_of]
        rules += [f"#{f.name}{state} .hl .{c.part}{{display:none}}" for c, state in off]
    return "\n".join(rules)


def _run_switches(runs: Sequence[Run]) -> Markup | None:
    if len(runs) < 2:
        return None
    return tag(
        "fieldset",
        tag("legend", "Runs"),
        *(_switch(f"on-r{i}", run.name, True, run=i) for i, run in enumerate(runs)),
        class_="controls",
    )


def _switch(id_: str, label: str, on: bool, run: int | None = None) -> Markup:
    box = tag("input", type="checkbox", id=id_, checked=on, autocomplete="off")
    return tag("label", box, None if run is None else _sample(run), label)


def _sample(i: int) -> Markup:
    """The colour and shape of a run, beside its name."""
    colour, shape = looks(i)
    canvas = Canvas(24, 14)
    canvas.line([(1, 7), (23, 7)], colour)
    canvas.marks.append(Mark("dot", ((12.0, 7.0),), colour, shape=shape))
    return tag("span", svg(canvas, None), class_="swatch")


def _section(f: Figure, several: bool) -> Markup:
    plot = tag(
        "div",
        svg(f.canvas, f.title, label=f"{f.name}-title"),
        class_="plot",
        tabindex="0",
        role="group",
        aria_label=f"{f.title}: arrow keys move from value to value",
    )
    return tag(
        "section",
        tag("h2", f.title),
        tag("p", f.reading, class_="reading"),
        _switches(f),
        _one_of(f),
        tag("figure", plot),
        tag("details", tag("summary", "Numbers"), _numbers(f, several), class_="numbers"),
        id=f.name,
    )


def _switches(f: Figure) -> Markup | None:
    if not f.switches:
        return None
    switches = (_switch(f"{f.name}-{c.part}", c.label, c.on) for c in f.switches)
    return tag("fieldset", tag("legend", "Show"), *switches, class_="controls")


def _one_of(f: Figure) -> Markup | None:
    if not f.one_of:
        return None

    def radio(c: Choice) -> Markup:
        state = {"name": f"{f.name}-one", "checked": c.on, "autocomplete": "off"}
        return tag("label", tag("input", type="radio", id=f"{f.name}-{c.part}", **state), c.label)

    return tag("fieldset", tag("legend", "Block"), *map(radio, f.one_of), class_="controls one")


def _numbers(f: Figure, several: bool) -> Markup:
    """All numbers of a figure; the column of run names only where there are several runs."""
    start = 0 if several else 1
    head = tag("tr", *(tag("th", c, scope="col") for c in f.columns[start:]))
    rows = (tag("tr", *map(_cell, row[start:])) for row in f.rows)
    return scrolled(table(head, rows), f"{f.title}: numbers")


def _cell(value: object) -> Markup:
    return tag("td", cell_text(value), class_="words" if isinstance(value, str) else None)


def _tables(runs: Sequence[Run]) -> Markup | None:
    if not any(run.blocks for run in runs):
        return None
    return tag(
        "section",
        tag("h2", "Block by block: which blocks can be replaced, and why"),
        filters(),
        *(block_table(run, i, several=len(runs) > 1) for i, run in enumerate(runs) if run.blocks),
        id="blocks",
    )
