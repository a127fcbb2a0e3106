"""Results on a terminal: tables that fit 80 columns and say more on wider ones.

    show_profile(terminal_console(), result.to_dict(), result.blocks)

Each takes the console, what the result's file holds, and the result's blocks. Here are profiles and
swaps; `terminal_probe`, `terminal_compress` and `terminal_compare` have the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from howlinear.cli.tables import Cell, plain, print_table, terminal_console, write
from howlinear.cli.terminal_compare import (
    show_comparison,
    show_cross_feed,
    show_matched,
    show_random_init,
    show_training,
)
from howlinear.cli.terminal_compress import show_bench, show_compression
from howlinear.cli.terminal_probe import show_probes
from howlinear.records.fields import BlockProfile, BlockSwap, ExpertSwap
from howlinear.records.words import (
    bar,
    count,
    error,
    known,
    number,
    perplexity,
    power,
    ranges,
    signed,
    with_se,
)

__all__ = [
    "number",
    "plain",
    "ranges",
    "show_bench",
    "show_comparison",
    "show_compression",
    "show_cross_feed",
    "show_expert_swaps",
    "show_matched",
    "show_probes",
    "show_profile",
    "show_random_init",
    "show_shard",
    "show_swaps",
    "show_training",
    "signed",
    "terminal_console",
]

COLOURS = {
    "broadly linear": "green",
    "partly linear": "yellow",
    "outlier-concentrated": "yellow",
    "first-position only": "magenta",
    "nonlinear": "red",
}

SAFETY_MEANS = {  # in the order shown
    "likely safe": "likely safe",
    "costly": "costly",
    "sink": "costly unless sink units are kept",
}

AXIS = "0        1"  # heading of a bar


def show_shard(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """What `howlinear profile --shard` prints: there is nothing to score yet."""
    settings = data["settings"]
    part, parts = settings["shard"]
    rows = max(b["rows"] for b in blocks)
    write(console, f"{data['model']['id']}, {len(blocks)} blocks")
    write(
        console,
        f"shard {part} of {parts}: {settings['read']} of {settings['tokens']} tokens, {rows} rows "
        "a block; add the shards up with `howlinear merge`",
    )


def show_profile(console: Console, data: dict[str, Any], blocks: list[BlockProfile]) -> None:
    """The table that `howlinear profile` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    write(console, f"{model['id']}, {model['dtype']}, {len(blocks)} blocks")
    scheme = f"{settings['folds']} folds" if settings["folds"] else "one 80/20 split"
    write(
        console,
        f"{text['name']} {text['part']}: {settings['tokens']} tokens in windows of "
        f"{settings['window']}, protocol {settings['protocol']}, {scheme}",
    )
    for line in modules([(b.index, b.path) for b in blocks]):
        write(console, line)
    wide = console.width >= 132
    columns = ["#", "R2 ± se", AXIS, "body", "scalar", "feat.", "rank"]
    if wide:
        columns += ["first", "stream err.", "signal", "input rank", "condition", "rows/col."]
    rows = [_profile_row(b, wide) for b in blocks]
    print_table(console, [*columns, "kind"], rows, words=(AXIS, "kind"))
    _show_summary(console, data["summary"])
    _show_safety(console, blocks)
    if data.get("experts"):
        _show_experts(console, data["experts"], settings["experts"])
    for note in data["notes"]:
        write(console, f"note: {note}")


def modules(paths: Sequence[tuple[int, str]]) -> list[str]:
    """Where the blocks are, a line for all whose paths differ in numbers alone.

    [(0, "h.0.mlp"), (1, "h.1.mlp")] -> ["blocks 0-1: h.{0-1}.mlp"]
    """
    alike: dict[tuple[str | None, ...], list[tuple[int, list[str]]]] = {}
    for index, path in paths:
        parts = path.split(".")
        shape = tuple(None if _is_number(part) else part for part in parts)
        alike.setdefault(shape, []).append((index, parts))
    lines = []
    for group in alike.values():
        columns = [set(parts) for parts in zip(*(parts for _, parts in group), strict=True)]
        named = [c.pop() if len(c) == 1 else f"{{{ranges(map(int, c))}}}" for c in columns]
        several = "s" * (len(group) > 1)
        lines.append(f"block{several} {ranges(index for index, _ in group)}: {'.'.join(named)}")
    return lines


def _is_number(part: str) -> bool:
    return part.isdecimal() and part.isascii() and len(part) < 7


def _profile_row(b: BlockProfile, wide: bool) -> list[Cell]:
    colour = COLOURS.get(b.kind, "")
    cells: list[Cell] = [
        str(b.index),
        with_se(b.r2, b.r2_se),
        Text(bar(b.r2), style=colour),
        number(b.r2_body),
        number(b.r2_scalar),
        number(b.r2_feature["median"], 2),
        "-" if b.effective_rank is None else str(b.effective_rank),
    ]
    if wide:
        cells += [
            number(b.first_share),
            number(b.stream_error, 4),
            number(b.swap_signal),
            f"{b.input_rank}/{b.d_in}",
            power(b.input_condition),
            number(b.rows_per_column, 1),
        ]
    return [*cells, Text(b.kind, style=colour)]


def _show_summary(console: Console, s: dict[str, Any]) -> None:
    write(
        console,
        f"R2 from {number(s['r2_min'])} (block {s['r2_min_block']}) to {number(s['r2_max'])} "
        f"(block {s['r2_max_block']})",
    )
    if s["largest_jump"] is not None:
        pair = f"blocks {s['largest_jump_after']} and {s['largest_jump_before']}"
        write(console, f"largest jump {number(s['largest_jump'])}, between {pair}")
    write(console, f"rank correlation of R2 with depth {number(s['depth_spearman'], 2)}")


def _show_safety(console: Console, blocks: list[BlockProfile]) -> None:
    by_safety: dict[str, list[int]] = {}
    for b in blocks:
        by_safety.setdefault(b.safety, []).append(b.index)
    words = [
        f"{meaning} {ranges(by_safety[word])}"
        for word, meaning in SAFETY_MEANS.items()
        if word in by_safety
    ]
    if words:
        write(console, f"as one matrix, by estimate: {'; '.join(words)}")
        write(console, "`howlinear swap RUN` measures what a swap costs")


def _show_experts(console: Console, experts: list[dict[str, Any]], asked: str) -> None:
    """A line a layer: how linear its experts are, and which were given too little."""
    write(console)
    on = "every token" if asked == "all" else "the tokens routed to each"
    write(console, f"experts, on {on}: R2 of each, and of the layer's lowest and highest")
    for index in dict.fromkeys(e["index"] for e in experts):
        own = [e for e in experts if e["index"] == index]
        tokens = [e["tokens"] for e in own if e["expert"] != "shared"]
        text = f"{index:>3}  {len(own)} experts, {min(tokens)} to {max(tokens)} tokens"
        scored = [e for e in own if e["problem"] is None and known([e["r2"]])]
        if scored:
            scored.sort(key=lambda e: float(e["r2"]))
            low, middle, high = scored[0], scored[len(scored) // 2], scored[-1]
            text += f"; R2 {number(low['r2'])} ({low['expert']}), median {number(middle['r2'])}"
            text += f", {number(high['r2'])} ({high['expert']})"
        write(console, text)
        thin = [e for e in own if e["problem"] is not None]
        if thin:
            names = ", ".join(e["expert"] for e in thin[:6]) + (", ..." if len(thin) > 6 else "")
            write(console, f"     not scored, too few tokens: {names} ({len(thin)} of {len(own)})")


def show_expert_swaps(console: Console, data: dict[str, Any], blocks: list[ExpertSwap]) -> None:
    """The table that `howlinear swap --experts` prints."""
    base = data["base"]
    shown = perplexity(base["perplexity"])
    write(console, f"perplexity {shown}, {base['protocol']}, {base['tokens']} tokens")
    rows = [
        (
            f"{b.index}.{b.expert}",
            str(b.tokens),
            number(b.r2),
            signed(b.delta_nll, 4) + error(b.delta_nll_se, 4),
            signed(b.delta_ppl),
            number(b.kl, 4),
            number(b.top1),
        )
        for b in blocks
    ]
    columns = ("expert", "tokens", "R2", "nats ± se", "perplexity", "KL", "top-1")
    print_table(console, columns, rows)


def show_swaps(console: Console, data: dict[str, Any], blocks: list[BlockSwap]) -> None:
    """The table that `howlinear swap` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    write(console, f"{model['id']}, {len(blocks)} blocks, each replaced alone")
    base = data["base"]
    if base is not None:
        bits = base["bits_per_byte"]
        shown = f"perplexity {perplexity(base['perplexity'])} ± {number(base['perplexity_se'], 2)}"
        shown += "" if bits is None else f", {number(bits)} bits a byte"
        where = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        write(console, f"{shown} as it is ({where})")
    names = ["Δppl ± se", "units", "plain", "zero", "mean", "KL", "top-1"] if base else []
    near = console.width >= 120 or not base
    names += ["cosine", "rmse", "stream err."] if near else []
    rows = [_swap_row(b, base is not None, near) for b in blocks]
    print_table(console, ["#", *names, "params", "signal"], rows)
    if base is not None:
        write(
            console, "Δppl: with the map; plain: plain least squares; zero: removed; mean: constant"
        )
    listed = [f"{name} {signed(r)}" for name, r in data["signals"].items() if r is not None]
    if listed:
        told = ", ".join(listed)
        write(console, f"rank correlation with what plain least squares costs: {told}")
    for note in data["notes"]:
        write(console, f"note: {note}")


def _swap_row(b: BlockSwap, costs: bool, near: bool) -> list[str]:
    cells = [str(b.index)]
    if costs:
        cells += [
            f"{signed(b.delta_ppl)} ±{number(b.delta_ppl_se, 2)}",  # of one window there is none
            str(len(b.units)),
            signed(b.delta_ppl_plain),
            signed(b.delta_ppl_zero),
            signed(b.delta_ppl_mean),
            number(b.kl),
            number(b.top1),
        ]
    if near:
        cells += [number(b.cosine), number(b.rmse, 4), number(b.stream_error, 4)]
    signal = "-" if not known([b.swap_signal]) else _two_figures(b.swap_signal or 0.0)
    return [*cells, count(-b.params_saved, "+"), signal]


def _two_figures(value: float) -> str:
    shown = f"{value:.2g}"
    return power(value) if "e" in shown else shown
