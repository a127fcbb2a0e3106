"""Where the rest sits: the positions and tokens that a block's map does worst on."""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records import BlockProbe
from howlinear.report.markup import Markup, joined, tag
from howlinear.report.runs import Run, inside, listed
from howlinear.words import number

READING = (
    "How much of what the map leaves lies at the first position of a window (of 512 tokens it is one), "
    "and the tokens whose rows leave most, with how many times the mean they leave."
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
    names = ("run", "block", "first position, %", "tokens")
    head = tag("tr", *(tag("th", n, scope="col", class_="words") for n in names))
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag(
        "section", tag("h2", "Where the rest sits"), tag("p", READING, class_="reading"), table
    )


def _shown(token: object) -> str:
    """A token with its blanks in sight."""
    return str(token).replace(" ", "␣")


def _cells(p: BlockProbe) -> list[Markup]:
    first = [inside(s, "share") for s in listed(p.where, "positions") if inside(s, "from") == 0]
    tokens = listed(p.where, "tokens")[:TOKENS]
    if not first and not tokens:
        return []
    share = 100 * first[0] if first and first[0] is not None else None
    shown = [
        joined(tag("code", _shown(t.get("text"))), f" {number(inside(t, 'times_mean'), 1)}  ")
        for t in tokens
    ]
    return [tag("td", p.index), tag("td", number(share, 1)), tag("td", *shown, class_="words")]
