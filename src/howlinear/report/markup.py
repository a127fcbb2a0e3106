"""Markup from values. Everything is escaped unless it is markup already.

tag("td", "a < b", class_="n")  ->  <td class="n">a &lt; b</td>
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from howlinear.records.files import clean
from howlinear.records.words import compact, escaped

VOID = {"br", "input", "link", "meta"}


class Markup(str):
    """Text that is markup already."""


def marked(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(escaped(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is class, `aria_label` aria-label; None is left out, True stands alone."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        parts.append(label if value is True else f'{label}="{marked(value)}"')
    opening = f"<{' '.join(parts)}>"
    if name in VOID:
        return Markup(opening)
    return Markup(f"{opening}{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    return Markup("".join(marked(c) for c in children if c is not None))


def table(head: Markup, rows: Iterable[Markup], caption: str | None = None, **more: str) -> Markup:
    title = None if caption is None else tag("caption", caption)
    return tag("table", title, tag("thead", head), tag("tbody", *rows), **more)


def scrolled(content: Markup, label: str, class_: str = "wide") -> Markup:
    """A wide element that scrolls sideways, by keyboard too."""
    return tag("div", content, class_=class_, tabindex="0", role="region", aria_label=label)


def definitions(pairs: Iterable[tuple[str, str]]) -> Markup:
    """A list of terms; those without a text are left out."""
    return tag("dl", *(joined(tag("dt", term), tag("dd", text)) for term, text in pairs if text))


def cell_text(value: object) -> object:
    return "-" if value is None else compact(value) if isinstance(value, float) else value


def json_inside(data: Any) -> Markup:
    """JSON for a <script> element: nothing in it ends the element or opens another."""
    text = json.dumps(clean(data), allow_nan=False, separators=(",", ":"))  # ASCII only
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
