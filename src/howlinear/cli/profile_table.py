"""What `howlinear profile` and `howlinear merge` print: how linear each block is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import student
from howlinear.records.verdicts import COSTLY, SAFE, beyond_reach, cost_level
from howlinear.records.words import (
    bar,
    correlation,
    finite,
    known,
    number,
    percent,
    percent_se,
    plural,
    power,
    ranges,
    title,
    with_se,
)

COLOURS = {
    "constant": "green",
    "broadly linear": "green",
    "partly linear": "yellow",
    "outlier-concentrated": "yellow",
    "first-position only": "magenta",
    "nonlinear": "red",
}


def _colour(block: BlockProfile) -> str:
    return COLOURS.get(block.kind, "")


SCORES = (
    Column("#", "index"),
    Column("R2 ± se", lambda b: with_se(b.r2, b.r2_se)),
    Column("0        1", "r2", bar, words=True, style=_colour),  # the heading is the bar's axis
    Column("body", "r2_body", number),
    Column("scalar", "r2_scalar", number),
    Column("feat.", lambda b: b.r2_feature["median"], digits(2)),
    Column("rank", "effective_rank"),
)
INPUTS = (  # on wide terminals
    Column("first", "first_share", number),
    Column("stream err.", "stream_error", digits(4)),
    Column("input rank", lambda b: f"{b.input_rank}/{b.d_in}"),
    Column("condition", "input_condition", power),
    Column("rows/col.", "rows_per_column", digits(1)),
)
EXPECTED = Column("expected cost", lambda b: expected_cost(b))  # of perplexity
KIND = Column("kind", "kind", words=True, style=_colour)


def show_shard(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """What `howlinear profile --shard` prints. Scores follow when shards are merged."""
    settings = data["settings"]
    part, parts = settings["shard"]
    rows = max(b["rows"] for b in blocks)
    write(console, f"{title(data['model']['id'])}, {plural(len(blocks), 'block')}")
    write(
        console,
        f"shard {part} of {parts}: {settings['read']} of {settings['tokens']} tokens, {rows} rows "
        "a block; add the shards up with `howlinear merge`",
    )


def show_profile(console: Console, data: dict[str, Any], blocks: list[BlockProfile]) -> None:
    """The table that `howlinear profile` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    write(console, f"{title(model['id'])}, {model['dtype']}, {plural(len(blocks), 'block')}")
    scheme = f"{settings['folds']} folds" if settings["folds"] else "one 80/20 split"
    write(
        console,
        f"{text['name']} {text['part']}: {settings['tokens']} tokens in windows of "
        f"{settings['window']}, protocol {settings['protocol']}, {scheme}",
    )
    for line in modules([(b.index, b.path) for b in blocks]):
        write(console, line)
    known_costs = any(finite(b.expected_kl) is not None for b in blocks)
    expected = (EXPECTED,) if known_costs and console.width >= 96 else ()
    inputs = INPUTS if console.width >= 140 else ()
    print_table(console, (*SCORES, *expected, *inputs, KIND), blocks)
    if settings["folds"]:
        reach = number(student(settings["folds"] - 1), 2)
        write(console, f"± standard error over folds; a 95 % interval of R2 is ± {reach} of it")
    _show_summary(console, data["summary"])
    _show_expected(console, blocks)
    if data.get("experts"):
        _show_experts(console, data["experts"], settings["experts"])
    write_notes(console, data["notes"])


def modules(paths: Sequence[tuple[int, str]]) -> list[str]:
    """Module paths of the blocks: one line for all paths that differ only in numbers.

    [(0, "h.0.mlp"), (1, "h.1.mlp")] -> ["blocks 0-1: h.{0-1}.mlp"]
    """
    by_shape: dict[tuple[str | None, ...], list[tuple[int, list[str]]]] = {}
    for index, path in paths:
        parts = path.split(".")
        shape = tuple(None if _is_number(part) else part for part in parts)
        by_shape.setdefault(shape, []).append((index, parts))
    lines = []
    for group in by_shape.values():
        columns = [set(parts) for parts in zip(*(parts for _, parts in group), strict=True)]
        named = [c.pop() if len(c) == 1 else f"{{{ranges(map(int, c))}}}" for c in columns]
        plural = "s" * (len(group) > 1)
        lines.append(f"block{plural} {ranges(index for index, _ in group)}: {'.'.join(named)}")
    return lines


def _is_number(part: str) -> bool:
    return part.isdecimal() and part.isascii() and len(part) < 7


def _show_summary(console: Console, s: dict[str, Any]) -> None:
    write(
        console,
        f"R2 from {number(s['r2_min'])} (block {s['r2_min_block']}) to {number(s['r2_max'])} "
        f"(block {s['r2_max_block']})",
    )
    if s["largest_jump"] is not None:
        pair = f"blocks {s['largest_jump_after']} and {s['largest_jump_before']}"
        write(console, f"largest jump {number(s['largest_jump'])}, between {pair}")
    write(console, f"rank correlation of R2 with depth {correlation(s['depth_spearman'])}")


def expected_cost(b: BlockProfile) -> str:
    """The expected growth of perplexity; in brackets where it is only a guide."""
    cost = f"{percent(b.expected_kl)}{percent_se(b.expected_kl, b.expected_kl_se)}"
    return f"({cost})" if beyond_reach(b) else cost


def _show_expected(console: Console, blocks: list[BlockProfile]) -> None:
    """Which blocks are expected to cost little or much as one matrix."""
    costs = {b.index: nats for b in blocks if (nats := finite(b.expected_kl)) is not None}
    low, high = ([i for i, nats in costs.items() if cost_level(nats) == level] for level in (0, 2))
    groups = [f"below {percent(SAFE)} {ranges(low)}"] if low else []
    groups += [f"above {percent(COSTLY)} {ranges(high)}"] if high else []
    if groups:
        write(console, f"expected cost in perplexity as one matrix: {'; '.join(groups)}")
    if guides := [b.index for b in blocks if beyond_reach(b)]:
        write(console, f"the expected cost is only a guide for {ranges(guides)}")


def next_step(folder: Path, blocks: Sequence[Any]) -> str | None:
    """The command that measures what the profile estimates; None where it has no estimate."""
    if not any(finite(getattr(b, "expected_kl", None)) is not None for b in blocks):
        return None
    return f"`{shlex.join(['howlinear', 'swap', str(folder)])}` measures what a swap costs"


def _show_experts(console: Console, experts: list[dict[str, Any]], rows: str) -> None:
    """A line for each layer: R2 of its experts, and the experts with too few tokens."""
    write(console)
    tokens = "every token" if rows == "all" else "the tokens routed to each"
    write(console, f"experts, on {tokens}: R2 of each, and of the layer's lowest and highest")
    by_layer: dict[int, list[dict[str, Any]]] = {}
    for expert in experts:
        by_layer.setdefault(expert["index"], []).append(expert)
    for index, layer in by_layer.items():
        _show_layer(console, index, layer)


def _show_layer(console: Console, index: int, experts: list[dict[str, Any]]) -> None:
    tokens = [e["tokens"] for e in experts if e["expert"] != "shared"]
    line = f"{index:>3}  {len(experts)} experts, {min(tokens)} to {max(tokens)} tokens"
    scored = [e for e in experts if e["problem"] is None and known([e["r2"]])]
    if scored:
        scored.sort(key=lambda e: float(e["r2"]))
        low, middle, high = scored[0], scored[len(scored) // 2], scored[-1]
        line += f"; R2 {number(low['r2'])} ({low['expert']}), median {number(middle['r2'])}"
        line += f", {number(high['r2'])} ({high['expert']})"
    write(console, line)
    thin = [e["expert"] for e in experts if e["problem"] is not None]
    if thin:
        names = ", ".join(thin[:6]) + (", ..." if len(thin) > 6 else "")
        write(console, f"     not scored, too few tokens: {names} ({len(thin)} of {len(experts)})")
