"""The profile over depth: R2 with and without first positions; below it the cost of each swap.

The marks of one run have the colours of its verdicts; several runs have a colour each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.verdicts import HIGH_R2, LOW_R2, UNDECIDED, costly_from
from howlinear.records.words import compact, finite, number
from howlinear.report.canvas import Canvas, Panel, Point, Scale, r2_floor, reach
from howlinear.report.figure import NARROW, WIDE, Choice, Entry, Figure, key, looks, run_dot
from howlinear.report.runs import Run
from howlinear.report.verdicts import LOOKS, words

LEFT = 42
TITLE = "How linear each block is"
READING = (
    "A long line from a filled to an open mark of R2: only the attention sink at the first position is "
    "linear."
)
COSTS = (
    " A long line between two costs: plain least squares fits the sink alone, and a few hidden units kept "
    "beside the matrix repair it."
)
EXPECTED = " Costs are estimates from the profile alone."
UNTRAINED = " Grey bands: the range of the same architecture untrained."
EDGE = " Triangles at an edge lie beyond it."
COLUMNS = (
    *("run", "block", "R2", "se", "body", "scalar"),
    *("KL, nats", "se", "plain, nats", "expected, nats"),
)
APART = 0.02  # differences of R2 below are not drawn


def draw(runs: Sequence[Run], width: float = WIDE) -> Figure | None:
    measured = [run for run in runs if run.blocks]
    if not measured:
        return None
    swapped = any(s.kl is not None for run in runs for s in run.swaps.values())
    costs = swapped or any(finite(b.expected_kl) is not None for run in runs for b in run.blocks)
    canvas = Canvas(width, 30)
    sheet = Sheet(canvas, _depths(measured, width), width == NARROW, len(runs) > 1)
    _r2_panel(sheet, runs, last=not costs)
    if costs:
        _cost_panel(sheet, runs, swapped)
    untrained = any(run.untrained for run in runs)
    told = [READING, (COSTS if swapped else EXPECTED) if costs else "", UNTRAINED * untrained, EDGE]
    return Figure(
        "profile",
        f"{TITLE}, and what replacing it costs" if costs else TITLE,
        "".join(told),
        canvas,
        COLUMNS,
        [_row(run, b) for run in runs for b in run.blocks],
        by_run=len(runs) > 1,
        choices=(Choice("scalar", "R2 around one scalar mean (dotted)", on=False),),
    )


@dataclass(frozen=True)
class Sheet:
    """The drawing with its axis of depth."""

    canvas: Canvas
    x: Scale
    narrow: bool
    several: bool  # runs

    def panel(self, title: str, entries: Sequence[Entry], height: float, ends: Scale) -> Panel:
        """A panel beneath what is drawn, with a title and a legend."""
        top = self.canvas.height
        self.canvas.text((LEFT - 34, top), title, mode="bold", anchor="start")
        top = key(self.canvas, entries, LEFT - 34, top + 20) + 16
        self.canvas.height = top + height + 58
        low, high = ends.low, ends.high
        return Panel(self.canvas, self.x, Scale(low, high, top + height, top, log=ends.log))

    def colour(self, run: Run, verdicts: dict[int, str], index: int) -> str:
        if self.several:
            return looks(run.number)[0]
        return LOOKS[verdicts[index]].colour if index in verdicts else "muted"

    @property
    def size(self) -> float:
        """Radius of a mark."""
        return 3.4 if self.narrow or self.several else 5.0


def _depths(runs: Sequence[Run], width: float) -> Scale:
    right = width - (78 if width == NARROW else 92)
    if _relative(runs):
        return Scale(-0.02, 1.02, LEFT, right)
    indices = [b.index for run in runs for b in run.blocks]
    return Scale(min(indices) - 0.6, max(indices) + 0.6, LEFT, right)


def _relative(runs: Sequence[Run]) -> bool:
    measured = [run for run in runs if run.blocks]
    models, depths = {run.model for run in measured}, {run.blocks[-1].index for run in measured}
    return len(models) > 1 and len(depths) > 1


def _axis(runs: Sequence[Run]) -> str:
    return "depth (first block 0, last block 1)" if _relative(runs) else "block"


# -- R2


def _r2_panel(sheet: Sheet, runs: Sequence[Run], last: bool) -> None:
    low = r2_floor(finite(v) for run in runs for b in run.blocks for v in (b.r2, b.r2_body))
    entries = [
        Entry("R2 ± standard error", "muted", part="main"),
        Entry("without first positions", "muted", line=None, open=True, part="body"),
        Entry("around one scalar mean", "muted", "", line="dots", part="scalar"),
    ]
    height = 170 if sheet.narrow else 220
    panel = sheet.panel("R2: how linear", entries, height, Scale(low, 1.0, 0, 1))
    panel.frame(_axis(runs) if last else "")
    zones = [("nonlinear", "muted"), ("partly", "muted"), ("linear", "muted")]
    panel.zones((LOW_R2, HIGH_R2), zones)
    for run in runs:
        _r2(sheet, panel, run, _relative(runs))
    if not sheet.several:  # labels of several runs would overlap
        _name_r2(panel, runs[0], sinks=not sheet.narrow)


def _r2(sheet: Sheet, panel: Panel, run: Run, relative: bool) -> None:
    line = looks(run.number)[0] if sheet.several else "axis"
    verdicts = words(run)
    at = [(run.depth(b.index, relative), b) for b in run.blocks]
    scalar = [(x, finite(b.r2_scalar)) for x, b in at]
    panel.line(scalar, line, "dots thin", part=f"{run.part} scalar")
    panel.line([(x, b.r2) for x, b in at], line, "thin", part=f"{run.part} main")
    _untrained(panel, run, relative)
    for x, b in at:
        colour = sheet.colour(run, verdicts, b.index)
        if b.r2_se is not None:
            panel.whisker(x, b.r2 - b.r2_se, b.r2 + b.r2_se, colour, f"{run.part} main")
        body = finite(b.r2_body)
        if body is not None and abs(body - b.r2) >= APART:
            part = f"{run.part} body"
            panel.whisker(x, min(body, b.r2), max(body, b.r2), colour, part)
            about = f"block {b.index}: R2 {_with_se(body, b.r2_body_se)} without first positions"
            look = {"colour": colour, "mode": "open", "size": 0.8 * sheet.size, "part": part}
            run_dot(panel, run, (x, body), about, **look)
        about = f"block {b.index}: R2 {_with_se(b.r2, b.r2_se)}, body {number(b.r2_body)}, "
        about += f"scalar {number(b.r2_scalar)}; {b.kind}"
        look = {"colour": colour, "size": sheet.size, "part": f"{run.part} main"}
        run_dot(panel, run, (x, b.r2), about, **look)


def _name_r2(panel: Panel, run: Run, sinks: bool) -> None:
    """Names the blocks with the highest and the lowest R2; with `sinks`, those that only a sink makes linear."""
    low, high = (pick(run.blocks, key=lambda b: b.r2) for pick in (min, max))
    named = [(high, high.r2, -10), (low, low.r2, 19)]
    for b in run.blocks:
        body = finite(b.r2_body)
        if sinks and b.kind == "first-position only" and body is not None:
            named.append((b, body, 19))
    places = []
    for b, r2, away in named:
        x, y = panel.at(b.index, r2)
        places.append(((x, y + away), f"block {b.index}: {number(r2, 2)}"))
    _label(panel, run, places)


def _untrained(panel: Panel, run: Run, relative: bool) -> None:
    part = f"{run.part} untrained"
    for index, (low, high) in run.untrained.items():
        x = run.depth(index, relative)
        about = f"{run.name}, block {index} untrained: R2 {number(low)} to {number(high)}"
        if panel.y.holds(high):
            ends = [panel.at(x, low - 0.004), panel.at(x, high + 0.004)]  # visible if they agree
            panel.canvas.line(ends, "muted", "wide soft", part=part, about=about)
        else:
            panel.dot(x, high, "muted", mode="soft", part=part, about=about)


def _with_se(value: float, se: float | None) -> str:
    return number(value) + ("" if finite(se) is None else f" ± {number(se)}")


# -- costs


def cost_ends(costs: Sequence[float | None]) -> tuple[float, float]:
    """Ends of a log scale of costs in nats: from 0.0001 on, a decade or more."""
    low, high = reach([c for cost in costs if (c := finite(cost)) is not None], log=True)
    low = max(low, 1e-4)
    return low, max(high, 10 * low)


def _cost_panel(sheet: Sheet, runs: Sequence[Run], swapped: bool) -> None:
    safe = runs[0].limit
    limits = (safe, costly_from(safe))
    swaps = [s for run in runs for s in run.swaps.values()]
    known = [c for s in swaps for c in (s.kl, s.kl_plain if s.units else None)]
    if not swapped:
        known = [b.expected_kl for run in runs for b in run.blocks]
    low, high = cost_ends([*known, safe / 1.6, 1.6 * limits[1]])
    entries = [Entry("expected from the profile, not measured", "muted", line=None, open=True)]
    if swapped:
        entries = [
            Entry("measured ± standard error", "muted", line=None),
            Entry("plain least squares, no hidden units kept", "muted", line=None, open=True),
        ]
        if not sheet.several and UNDECIDED in words(runs[0]).values():
            entries.append(Entry(UNDECIDED, UNDECIDED, line=None))
    title, height = "Cost of replacing it: KL, nats per token", 150 if sheet.narrow else 200
    panel = sheet.panel(title, entries, height, Scale(low, high, 0, 1, log=True))
    panel.frame(_axis(runs))
    panel.zones(limits, [("safe", "safe"), ("some cost", "some"), ("costly", "costly")])
    for run in runs:
        verdicts = words(run)
        named: dict[int, float] = {}
        for b in run.blocks:
            s, colour = run.swaps.get(b.index), sheet.colour(run, verdicts, b.index)
            x = run.depth(b.index, _relative(runs))
            shown = _cost(sheet, panel, run, s, x, colour) if s else None
            if s is None and not swapped:
                shown = _expected(sheet, panel, run, b, x, colour)
            if shown is not None:
                named[b.index] = shown
        if not sheet.several:
            _name_costs(panel, run, named)


def _cost(
    sheet: Sheet, panel: Panel, run: Run, s: BlockSwap, x: float, colour: str
) -> float | None:
    """Marks of a swap; its cost."""
    plain, cost, se = (finite(v) for v in (s.kl_plain, s.kl, s.kl_se))
    if cost is None:
        return None
    if plain is not None and s.units:
        panel.whisker(x, min(cost, plain), max(cost, plain), colour, run.part)
        about = f"block {s.index}: plain least squares {compact(plain)} nats"
        look = {"colour": colour, "mode": "open", "size": 0.8 * sheet.size}
        run_dot(panel, run, (x, plain), about, **look)
    if se is not None:
        panel.whisker(x, cost - se, cost + se, colour, run.part)
    error = "" if se is None else f" ± {compact(se)}"
    about = f"block {s.index}: KL {compact(cost)}{error} nats"
    about += f", {len(s.units)} hidden units kept" if s.units else ", one matrix"
    run_dot(panel, run, (x, cost), about, colour=colour, size=sheet.size)
    return cost


def _expected(
    sheet: Sheet, panel: Panel, run: Run, b: BlockProfile, x: float, colour: str
) -> float | None:
    """The mark of an estimate; its cost."""
    cost = finite(b.expected_kl)
    if cost is not None:
        about = f"block {b.index}: KL {compact(cost)} nats expected, not measured"
        run_dot(panel, run, (x, cost), about, colour=colour, mode="open", size=sheet.size)
    return cost


def _name_costs(panel: Panel, run: Run, costs: dict[int, float]) -> None:
    """Names the cheapest and the costliest block."""
    if not costs:
        return
    places = []
    for pick, away in ((max, -10.0), (min, 19.0)):
        index = pick(costs, key=lambda i: costs[i])
        x, y = panel.at(index, costs[index])
        places.append(((x, y + away), f"block {index}: {compact(costs[index])}"))
    _label(panel, run, places)


def _label(panel: Panel, run: Run, places: Sequence[tuple[Point, str]]) -> None:
    """Labels in the middle of their places, but inside the panel."""
    left, right = panel.x.start, panel.x.end
    inside = []
    for (x, y), text in places:
        half = 3.1 * len(text) + 4
        inside.append(((min(max(x, left + half), right - half), y), text))
    panel.canvas.labels(inside, run.part, anchor="middle")


def _row(run: Run, b: BlockProfile) -> tuple[object, ...]:
    s = run.swaps.get(b.index)
    costs = (s.kl, s.kl_se, s.kl_plain) if s else (None, None, None)
    return (run.name, b.index, b.r2, b.r2_se, b.r2_body, b.r2_scalar, *costs, b.expected_kl)
