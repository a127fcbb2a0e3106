"""What `howlinear reproduce` prints: our numbers and the paper's side by side, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from howlinear.cli.terminal import number, plain
from howlinear.records.paper import PREDICTED, Reproduction

Cell = Callable[[Any], str]


def _digits(count: int) -> Cell:
    return lambda value: number(value, count)


def _whole(value: Any) -> str:
    return "-" if value is None else f"{value:.0f}"


def _large(value: Any) -> str:
    """Swaps can cost anything: two digits, or as many as fit."""
    return number(value, 2) if value is None or abs(value) < 1e5 else f"{value:.1e}"


SHOWN: dict[str, tuple[str, Cell]] = {  # what a quantity is called, and how it is written
    "r2_scalar": ("R2 scalar", _digits(4)),
    "r2_feature_median": ("median", _digits(3)),
    "effective_rank": ("rank", _whole),
    "delta_ppl": ("dPPL", _large),
    "bilinear_gain": ("gain", _digits(4)),
}
MEANS = (
    "R2 scalar: around one mean of all elements, the paper's R2_lin; R2: around the mean of each "
    "feature, ours alone; body: that without first positions; median: of the features' R2; rank: "
    "of the map that keeps 90 % of R2"
)
MEANS_MORE = (
    "dPPL: rise of perplexity by plain least squares in the block's place; gain: of the bilinear "
    "probe, as a share of the variance around one mean"
)


def show_reproductions(
    console: Console, results: list[Reproduction], unreached: Mapping[str, str]
) -> None:
    for line in unreached_lines(unreached):
        console.print(plain(line))
    for i, found in enumerate(results):
        if i or unreached:
            console.print()
        show_reproduction(console, found)


def unreached_lines(unreached: Mapping[str, str]) -> list[str]:
    """Which models there are no numbers of, and why; one line where the reason is one."""
    if not unreached:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, reason in unreached.items():
        by_reason.setdefault(reason, []).append(name)
    told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return [f"not measured: {told}"]


def show_reproduction(console: Console, found: Reproduction) -> None:
    """One run: a table of what a profile knows, one of swaps and probes if there are any."""
    model, text, settings = (found.about[part] for part in ("model", "corpus", "settings"))
    console.print(plain(f"{model.get('id')}, {len(found.blocks)} blocks, the paper's protocol"))
    console.print(
        plain(
            f"{text.get('name')} {text.get('part')}: {settings.get('tokens')} tokens in windows "
            f"of {settings.get('window')}"
        )
    )
    for quantities in _tables(found):
        console.print(_table(found, quantities))
    if found.summary:
        console.print(_summary(found))
    console.print(MEANS)
    if len(_tables(found)) > 1:
        console.print(MEANS_MORE)
    for note in found.notes:
        console.print(plain(f"note: {note}"))
    if "delta_ppl" not in found.measured and found.name:
        console.print(
            f"to add what swaps cost: `howlinear swap RUN --tokens {PREDICTED} --units 0`, then "
            "`howlinear reproduce RUN`"
        )
    console.print(plain(f"results in {found.run}"), soft_wrap=True)


def _tables(found: Reproduction) -> list[list[str]]:
    """The quantities of each table."""
    profiled = ("r2_scalar", "r2_feature_median", "effective_rank")
    parts = [[q for q in found.measured if (q in profiled) is first] for first in (True, False)]
    return [quantities for quantities in parts if quantities]


def _table(found: Reproduction, quantities: list[str]) -> Table:
    sides = ("ours", "paper") if found.name else ("ours",)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    headers = ["#"]
    for quantity in quantities:
        word = SHOWN[quantity][0]
        headers += [f"{word}\nours", "paper"] if found.name else [word]
        if quantity == "r2_scalar":
            headers += (["diff."] if found.name else []) + ["R2", "body"]
    for header in headers:
        at_foot = header if "\n" in header or not found.name else f"\n{header}"
        table.add_column(at_foot, justify="right", no_wrap=True)
    for row in found.blocks:
        cells = [str(row["index"])]
        for quantity in quantities:
            cell, write = row[quantity], SHOWN[quantity][1]
            cells += [write(cell[side]) for side in sides]
            if quantity == "r2_scalar":
                away = cell["difference"]
                cells += [_signed(away, write)] if found.name else []
                cells += [number(row["r2"]), number(row["r2_body"])]
        table.add_row(*cells)
    return table


def _summary(found: Reproduction) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("ours and the paper's")
    for header in ("blocks", "correlation", "largest difference"):
        table.add_column(header, justify="right", no_wrap=True)
    for quantity, s in found.summary.items():
        word, write = SHOWN[quantity]
        most = "-" if s["at"] is None else f"{_signed(s['largest_difference'], write)} at {s['at']}"
        table.add_row(word, str(s["blocks"]), number(s["pearson"], 4), most)
    return table


def _signed(value: float | None, write: Cell) -> str:
    return "-" if value is None else ("+" if value >= 0 else "") + write(value)
