"""Where the residual is large: positions and tokens that a block's map predicts worst."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProbe
from howlinear.records.words import number
from howlinear.report.markup import Markup, joined, scrolled, table, tag
from howlinear.report.runs import Run, inside, listed

READING = (
    "The first position's share of the squared residual and of the rows, and the tokens with the "
    "largest residuals, as multiples of the mean squared residual."
)
TOKENS = 6


def where(runs: Sequence[Run]) -> Markup | None:
    rows = [
        tag("tr", tag("td", run.name, class_="words"), *cells, class_=f"r{i}")
        for i, run in enumerate(runs)
        for p in run.probes.values()
        if (cells := _cells(p))
    ]
    if not rows:
        return None
    names = ("run", "block", "first position, % of residual", "% of rows", "tokens")
    head = tag("tr", *(tag("th", n, scope="col", class_="words") for n in names))
    title = "Where the residual is large"
    wide = scrolled(table(head, rows), title)
    return tag("section", tag("h2", title), tag("p", READING, class_="reading"), wide)


def _shown(token: object) -> str:
    """A token with visible blanks."""
    return str(token).replace(" ", "␣")


def _cells(p: BlockProbe) -> list[Markup]:
    first = next((s for s in listed(p.where, "positions") if inside(s, "from") == 0), {})
    tokens = listed(p.where, "tokens")[:TOKENS]
    if not first and not tokens:
        return []
    shares = [inside(first, key) for key in ("share", "rows")]
    parts = [tag("td", "-" if v is None else number(100 * v, 1)) for v in shares]
    shown = [
        joined(tag("code", _shown(t.get("text"))), f" {number(inside(t, 'times_mean'), 1)}  ")
        for t in tokens
    ]
    return [tag("td", p.index), *parts, tag("td", *shown, class_="words")]
