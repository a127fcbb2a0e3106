"""Markup from values: everything is escaped unless it is markup already.

tag("td", "a < b", class_="n")  ->  <td class="n">a &lt; b</td>
"""

from __future__ import annotations

import html
import json
from typing import Any

from howlinear.records.escaping import escaped
from howlinear.records.files import clean

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


def json_inside(data: Any) -> Markup:
    """JSON that may stand in a <script>: nothing in it ends the element or opens another."""
    text = json.dumps(clean(data), allow_nan=False, separators=(",", ":"))  # ASCII alone
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
