"""Results in a notebook: a line, drawings of profiles, and a table of blocks.

result            # the last line of a cell: Jupyter calls result._repr_html_()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from howlinear.records.fields import BlockProfile
from howlinear.report.figure import Figure
from howlinear.report.figures import alike, depth, training
from howlinear.report.markup import Markup, cell_text, joined, table, tag
from howlinear.report.runs import Run, listed, numbered
from howlinear.report.svg import standalone

SHOWN = {  # columns by kind of result; other kinds show their first fields with plain values
    "profile": "index path r2 r2_se r2_body r2_scalar effective_rank expected_kl kind",
    "swap": "index path verdict kl kl_se kl_plain delta_ppl delta_ppl_se tokens params_saved",
    "compress": "index path replaced rank parameters parameters_left",
}
COLUMNS, ROWS = 10, 200  # at most
WIDTH = 780  # pixels of a drawing


def html_of(
    line: str, data: dict[str, Any], profiles: Sequence[tuple[str, Sequence[BlockProfile]]] = ()
) -> str:
    """HTML of a result with the summary `line` and the fields `data`, with profiles to draw."""
    runs = numbered([Run(name, blocks=list(blocks)) for name, blocks in profiles])
    drawings = (_drawing(module.draw(runs, WIDTH)) for module in (depth, alike))
    return str(tag("div", tag("p", line), *drawings, _table(data)))


def training_html(line: str, rows: list[dict[str, Any]]) -> str:
    """HTML of a monitor's rows: a heat map once there is something to draw."""
    figure = training.draw([Run("training", training=rows)])
    return str(tag("div", tag("p", line), _drawing(figure)))


def _drawing(figure: Figure | None) -> Markup | None:
    return None if figure is None else Markup(standalone(figure.canvas, figure.title))


def _table(data: dict[str, Any]) -> Markup | None:
    blocks = listed(data, "blocks")
    if not blocks:
        return None
    names = SHOWN.get(str(data.get("kind")), "").split() or _plain(blocks[0])
    head = tag("tr", *(tag("th", name) for name in names))
    rows = (tag("tr", *(tag("td", cell_text(b.get(n))) for n in names)) for b in blocks[:ROWS])
    left = len(blocks) - ROWS
    more = tag("p", f"and {left} more") if left > 0 else None
    return joined(table(head, rows), more)


def _plain(block: dict[str, Any]) -> list[str]:
    return [k for k, v in block.items() if isinstance(v, str | int | float | None)][:COLUMNS]
