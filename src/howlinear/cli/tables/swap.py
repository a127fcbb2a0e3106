"""What `howlinear swap` prints: what replacing each block, or each expert, costs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.records.fields import BlockSwap, ExpertSwap
from howlinear.records.words import count, error, known, number, perplexity, power, signed

INDEX = Column("#", "index")
COSTS = (  # Δ: with the fitted map in the block's place
    Column("Δppl ± se", lambda b: f"{signed(b.delta_ppl)} ±{number(b.delta_ppl_se, 2)}"),
    Column("units", lambda b: len(b.units)),
    Column("plain", "delta_ppl_plain", signed),
    Column("zero", "delta_ppl_zero", signed),
    Column("mean", "delta_ppl_mean", signed),
    Column("KL", "kl", number),
    Column("top-1", "top1", number),
)
DISTANCES = (
    Column("cosine", "cosine", number),
    Column("rmse", "rmse", digits(4)),
    Column("stream err.", "stream_error", digits(4)),
)
SIZES = (
    Column("params", lambda b: count(-b.params_saved, "+")),
    Column("signal", "swap_signal", lambda signal: _two_figures(signal)),
)
EXPERTS = (
    Column("expert", lambda b: f"{b.index}.{b.expert}"),
    Column("tokens", "tokens"),
    Column("R2", "r2", number),
    Column("nats ± se", lambda b: signed(b.delta_nll, 4) + error(b.delta_nll_se, 4)),
    Column("perplexity", "delta_ppl", signed),
    Column("KL", "kl", digits(4)),
    Column("top-1", "top1", number),
)


def show_swaps(console: Console, data: dict[str, Any], blocks: list[BlockSwap]) -> None:
    """The table that `howlinear swap` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    write(console, f"{model['id']}, {len(blocks)} blocks, each replaced alone")
    base = data["base"]  # None for a model without a language-model head
    if base is not None:
        bits = base["bits_per_byte"]
        line = f"perplexity {perplexity(base['perplexity'])} ± {number(base['perplexity_se'], 2)}"
        line += "" if bits is None else f", {number(bits)} bits a byte"
        source = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        write(console, f"{line} as it is ({source})")
    columns = (INDEX, *(COSTS if base else ()))
    columns += DISTANCES if console.width >= 120 or not base else ()
    print_table(console, (*columns, *SIZES), blocks)
    if base is not None:
        write(
            console, "Δppl: with the map; plain: plain least squares; zero: removed; mean: constant"
        )
    correlations = [f"{name} {signed(r)}" for name, r in data["signals"].items() if r is not None]
    if correlations:
        line = ", ".join(correlations)
        write(console, f"rank correlation with what plain least squares costs: {line}")
    write_notes(console, data["notes"])


def show_expert_swaps(console: Console, data: dict[str, Any], experts: list[ExpertSwap]) -> None:
    """The table that `howlinear swap --experts` prints."""
    base = data["base"]
    original = perplexity(base["perplexity"])
    write(console, f"perplexity {original}, {base['protocol']}, {base['tokens']} tokens")
    print_table(console, EXPERTS, experts)


def _two_figures(value: float | None) -> str:
    if not known([value]):
        return "-"
    text = f"{value:.2g}"
    return power(value) if "e" in text else text
