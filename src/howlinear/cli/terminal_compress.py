"""What `howlinear compress` and `howlinear bench` print: a smaller model, its cost and its speed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from howlinear.cli.tables import print_table, write
from howlinear.records.fields import BlockCompression
from howlinear.records.words import count, number, perplexity, signed, size

METHODS = {
    "ours": "refitted along the plan",
    "swap": "one matrix each, cheapest swaps first",
    "r2": "one matrix each, highest R2 first",
    "zero": "blocks removed, cheapest first",
}


def show_compression(
    console: Console, data: dict[str, Any], blocks: list[BlockCompression]
) -> None:
    """The tables that `howlinear compress` prints: what became of the blocks, and the methods."""
    gone = [b for b in blocks if b.replaced]
    write(console, f"{data['model']['id']}: {len(gone)} of {len(blocks)} blocks replaced")
    columns = ("#", "module", "matrix", "units", "parameters", "left")
    print_table(console, columns, [_block_row(b) for b in gone], words=("module",))
    write(
        console,
        f"{data['removed']:,} parameters removed: {_share(data['removed'], data['feed_forward'])} "
        f"of the feed-forward blocks', {_share(data['removed'], data['parameters'])} of the model's",
    )
    if data["change"] is not None:
        _show_change(console, data["change"])
    if data["exported"] is not None:
        _show_export(console, data["exported"])
    if len({p["method"] for p in data["curve"]}) > 1:
        _show_curve(console, data["curve"])
    for note in data["notes"]:
        write(console, f"note: {note}")


def _block_row(b: BlockCompression) -> tuple[str, ...]:
    matrix = "full" if b.rank is None else f"rank {b.rank}" if b.rank else "-"
    left = f"{b.parameters_left / b.parameters:.0%}"
    return str(b.index), b.path, matrix, str(len(b.units)), f"{b.parameters:,}", left


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


def _show_export(console: Console, made: dict[str, Any]) -> None:
    own = made["perplexity"]
    stored = "" if own is None else f", perplexity {perplexity(own)} so"
    write(
        console,
        f"written in {made['dtype']}: {made['parameters']:,} parameters, "
        f"{made['bytes'] / 1e6:.0f} MB{stored}; loaded again in a new process, it agrees",
    )
    for note in made["notes"]:
        write(console, f"note: {note}")


def _show_curve(console: Console, curve: list[dict[str, Any]]) -> None:
    rows = []
    for p in sorted(curve, key=lambda p: (p["removed"], p["method"])):
        cells = [
            f"{p['share']:.1%}",
            str(p["blocks"]),
            perplexity(p["perplexity"]),
            f"{signed(p['delta_ppl'])} ±{number(p['delta_ppl_se'], 2)}",
            METHODS[p["method"]],
        ]
        style = "bold" if p["method"] == "ours" else ""
        rows.append([Text(cell, style=style) for cell in cells])
    columns = ("removed", "blocks", "perplexity", "Δppl ± se", "method")
    print_table(console, columns, rows, words=("method",))


def show_bench(console: Console, data: dict[str, Any]) -> None:
    """The table that `howlinear bench` prints: a model, and the one beside it."""
    s, roles = data["settings"], ("model", "against")[: len(data["speeds"])]
    for role in roles:
        if role in data:
            write(console, f"{role}: {data[role]['id']}", width=console.width)
    threads = f"{s['threads']} thread{'s' * (s['threads'] > 1)}"
    write(
        console,
        f"{s['batch']} x {s['length']} tokens of prefill, {s['new_tokens']} decoded after "
        f"{s['prompt']}, {s['repeats']} times; {s['dtype']}, {s['device']}, {threads}",
    )
    rows = [(role, *_speed_cells(speed)) for role, speed in zip(roles, data["speeds"], strict=True)]
    columns = ("", "params", "memory", "on disk", "prefill tokens/s", "decode tokens/s")
    print_table(console, columns, rows, words=("",))
    compared = data["comparison"]
    if compared is not None:
        write(console, compared["verdict"])
    if compared is not None and compared["saved_share"] is not None:
        share = number(compared["saved_share"], 2)
        write(console, f"share of the promised saving of time: {share}")


def _speed_cells(speed: dict[str, Any]) -> list[str]:
    disk = speed["bytes_on_disk"]
    sizes = [count(speed["parameters"]), size(speed["bytes"]), "-" if disk is None else size(disk)]
    return [*sizes, _rate(speed["prefill"]), _rate(speed["decode"])]


def _rate(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 1 if spread["median"] < 100 else 0
    low, middle, high = (f"{spread[k]:.{digits}f}" for k in ("q25", "median", "q75"))
    return f"{middle} ({low}-{high})"
