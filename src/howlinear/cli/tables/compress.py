"""What `howlinear compress` prints: the replaced blocks, what the smaller model costs, methods."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from howlinear.cli.printer import Column, print_table, write, write_notes
from howlinear.records.fields import BlockCompression
from howlinear.records.words import number, perplexity, signed

METHODS = {
    "ours": "refitted along the plan",
    "swap": "one matrix each, cheapest swaps first",
    "r2": "one matrix each, highest R2 first",
    "zero": "blocks removed, cheapest first",
}


def _matrix(rank: int | None) -> str:
    return "full" if rank is None else f"rank {rank}" if rank else "-"


def _bold(point: dict[str, Any]) -> str:
    return "bold" if point["method"] == "ours" else ""


def _change(point: dict[str, Any]) -> str:
    return f"{signed(point['delta_ppl'])} ±{number(point['delta_ppl_se'], 2)}"


BLOCKS = (
    Column("#", "index"),
    Column("module", "path", words=True),
    Column("matrix", "rank", _matrix),
    Column("units", lambda b: len(b.units)),
    Column("parameters", "parameters", "{:,}".format),
    Column("left", lambda b: f"{b.parameters_left / b.parameters:.0%}"),
)
CURVE = (
    Column("removed", "share", "{:.1%}".format, style=_bold),
    Column("blocks", "blocks", style=_bold),
    Column("perplexity", "perplexity", perplexity, style=_bold),
    Column("Δppl ± se", _change, style=_bold),
    Column("method", "method", METHODS.__getitem__, words=True, style=_bold),
)


def show_compression(
    console: Console, data: dict[str, Any], blocks: list[BlockCompression]
) -> None:
    """The tables that `howlinear compress` prints: replaced blocks, and methods."""
    replaced = [b for b in blocks if b.replaced]
    write(console, f"{data['model']['id']}: {len(replaced)} of {len(blocks)} blocks replaced")
    print_table(console, BLOCKS, replaced)
    removed = data["removed"]
    write(
        console,
        f"{removed:,} parameters removed: {_share(removed, data['feed_forward'])} "
        f"of the feed-forward blocks', {_share(removed, data['parameters'])} of the model's",
    )
    if data["change"] is not None:
        _show_change(console, data["change"])
    if data["exported"] is not None:
        _show_export(console, data["exported"])
    if len({point["method"] for point in data["curve"]}) > 1:
        points = sorted(data["curve"], key=lambda point: (point["removed"], point["method"]))
        print_table(console, CURVE, points)
    write_notes(console, data["notes"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _show_change(console: Console, change: dict[str, Any]) -> None:
    before, after = (change[k]["perplexity"] for k in ("original", "changed"))
    rise = "-" if before is None or after is None else f"{signed(100 * (after / before - 1), 1)}%"
    write(
        console,
        f"perplexity {perplexity(before)} to {perplexity(after)} ({rise}; "
        f"{signed(change['delta_ppl'])} ± {number(change['delta_ppl_se'], 2)}), "
        f"{change['protocol']}, {change['tokens']} tokens that nothing was fitted to or chosen by",
    )


def _show_export(console: Console, exported: dict[str, Any]) -> None:
    value = exported["perplexity"]
    stored = "" if value is None else f", perplexity {perplexity(value)} so"
    write(
        console,
        f"written in {exported['dtype']}: {exported['parameters']:,} parameters, "
        f"{exported['bytes'] / 1e6:.0f} MB{stored}; loaded again in a new process, it agrees",
    )
    write_notes(console, exported["notes"])
