"""What `howlinear bench` prints: sizes and speeds of a model, and of the model beside it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from howlinear.cli.printer import Column, print_table, write
from howlinear.records.words import count, number, size


def _rate(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 1 if spread["median"] < 100 else 0
    low, middle, high = (f"{spread[k]:.{digits}f}" for k in ("q25", "median", "q75"))
    return f"{middle} ({low}-{high})"


COLUMNS = (
    Column("", "role", words=True),
    Column("params", "parameters", count),
    Column("memory", "bytes", size),
    Column("on disk", "bytes_on_disk", lambda value: "-" if value is None else size(value)),
    Column("prefill tokens/s", "prefill", _rate),
    Column("decode tokens/s", "decode", _rate),
)


def show_bench(console: Console, data: dict[str, Any]) -> None:
    """The table that `howlinear bench` prints."""
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
    rows = [speed | {"role": role} for role, speed in zip(roles, data["speeds"], strict=True)]
    print_table(console, COLUMNS, rows)
    comparison = data["comparison"]
    if comparison is not None:
        write(console, comparison["verdict"])
    if comparison is not None and comparison["saved_share"] is not None:
        share = number(comparison["saved_share"], 2)
        write(console, f"share of the promised saving of time: {share}")
