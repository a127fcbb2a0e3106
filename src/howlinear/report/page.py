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
from howlinear.report.figure import WIDE, Figure, looks
from howlinear.report.markup import Markup, cell_text, joined, json_inside, scrolled, table, tag
from howlinear.report.runs import Run
from howlinear.report.sections import citation, guide, lead, meaning, methods, where
from howlinear.report.strip import strips
from howlinear.report.styles import DARK, LIGHT, shades, stylesheet, variables
from howlinear.report.svg import svg


def page(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    script = _resource("page.js")
    style = _style(runs, figures)
    title = " and ".join(dict.fromkeys(run.title for run in runs))
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
        tag("header", tag("h1", f"How linear is {title}?"), lead(runs), _run_switches(runs)),
        tag(
            "main",
            strips(runs),
            meaning(),
            *(_section(f, several) for f in first),
            _tables(runs),
            tag("div", *(_section(f, several) for f in others), class_="figures"),
            where(runs),
            guide(),
            methods(runs),
            citation(),
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
        shades(),
    ]
    for i in range(len(runs)):
        rules.append(f"body:has(#on-r{i}:not(:checked)) .r{i}{{display:none}}")
    for f in figures:
        for c in f.choices:
            rules.append(
                f"#{f.name}:not(:has(#{f.name}-{c.part}:checked)) .hl .{c.part}{{display:none}}"
            )
    return "\n".join(rules)


def _run_switches(runs: Sequence[Run]) -> Markup | None:
    boxes = [_input(f"on-r{i}", run.name, True, _sample(i)) for i, run in enumerate(runs)]
    return tag("fieldset", tag("legend", "Runs"), *boxes, class_="controls") if boxes[1:] else None


def _choices(f: Figure) -> Markup | None:
    """Switches of the parts of a drawing: one at a time, or any number of them."""
    if not f.choices:
        return None
    group = f"{f.name}-one" if f.one_at_a_time else None
    inputs = [_input(f"{f.name}-{c.part}", c.label, c.on, group=group) for c in f.choices]
    legend, class_ = ("Block", "controls one") if group else ("Show", "controls")
    return tag("fieldset", tag("legend", legend), *inputs, class_=class_)


def _input(
    id_: str, label: str, on: bool, sample: Markup | None = None, group: str | None = None
) -> Markup:
    kind = "radio" if group else "checkbox"
    box = tag("input", type=kind, id=id_, name=group, checked=on, autocomplete="off")
    return tag("label", box, sample, label)


def _sample(i: int) -> Markup:
    """The colour and shape of a run, beside its name."""
    colour, shape = looks(i)
    canvas = Canvas(24, 14)
    canvas.line([(1, 7), (23, 7)], colour)
    canvas.marks.append(Mark("dot", ((12.0, 7.0),), colour, shape=shape))
    return tag("span", svg(canvas, None), class_="swatch")


def _section(f: Figure, several: bool) -> Markup:
    label = f"{f.name}-title"
    drawings = [svg(f.canvas, f.title, label=label, name="broad")]
    if f.narrow is not None:
        drawings.append(svg(f.narrow, f.title, label=f"{label}-narrow", name="narrow"))
    plot = tag(
        "div",
        *drawings,
        class_="plot",
        tabindex="0",
        role="group",
        aria_label=f"{f.title}: arrow keys move from value to value",
    )
    return tag(
        "section",
        tag("h2", f.title),
        tag("p", f.reading, class_="reading"),
        _choices(f),
        tag("figure", plot),
        tag("details", tag("summary", "Numbers"), _numbers(f, several), class_="numbers"),
        id=f.name,
        class_="full" if f.canvas.width >= WIDE else None,
    )


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
        tag("h2", "Block by block"),
        filters(runs),
        *(block_table(run, i, several=len(runs) > 1) for i, run in enumerate(runs) if run.blocks),
        id="blocks",
    )
