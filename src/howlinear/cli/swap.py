"""`howlinear swap`: replace each block alone by its map and measure the cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import progress_bars, show
from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.cli.sources import Loader, RunSource
from howlinear.records.fields import BlockSwap, ExpertSwap
from howlinear.records.words import (
    between,
    count,
    error,
    known,
    number,
    perplexity,
    plural,
    power,
    signed,
)

PredictedTokens = Annotated[
    int, Option(help="Tokens to predict; half as many to choose units by.", min=1)
]
Units = Annotated[
    Literal["auto", "0", "1", "2", "4"],
    Option(help="Sink units that each map keeps; auto: chosen for each block."),
]
Experts = Annotated[
    str | None,
    Option(
        help="Replace single experts instead: all, or layers and experts such as 3,5.17,7.shared."
    ),
]
Weighting = Annotated[
    Literal["none", "body", "stream", "output"],
    Option(
        help="Weights of rows in the fit: equal (none), equal without first positions (body), "
        "1/|h| (stream) or 1/|y|^2 (output)."
    ),
]
Eval = Annotated[
    str,
    Option(
        "--eval",
        help="How the held-out text is cut: windows-N, stride-LENGTH-STRIDE or gptq-2048.",
    ),
]


def swap(
    run: flags.RunPath,
    model: flags.RunModel = None,
    text_file: flags.RunText = None,
    tokens: PredictedTokens = 4096,
    units: Units = "auto",
    blocks: flags.Blocks = None,
    experts: Experts = None,
    weighting: Weighting = "none",
    protocol: Eval = "windows-128",
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    from howlinear.losses.protocols import EvalProtocol
    from howlinear.run.work import Ranks, Work
    from howlinear.swapping.expert_swaps import measure_expert_swaps
    from howlinear.swapping.swaps import measure_swaps

    source = RunSource(run, model, text_file)
    EvalProtocol.parse(protocol)  # refused before the model is loaded
    source.check_blocks(blocks)
    kind = "swap" if experts is None else "swap-experts"
    source.folder.check_addable(kind)
    ranks = Ranks.start()
    net = source.load(Loader(device, trust_remote_code, allow_pickle))
    cut = source.protocol(protocol)
    report, n_bytes = source.held_out("report", cut, tokens)
    result: Any
    with progress_bars() as begin:
        work = Work(ranks, batch_size, begin)
        common: dict[str, Any] = {"report": report, "protocol": cut, "work": work}
        if experts is not None:
            result = measure_expert_swaps(net, run, experts, **common)
        else:
            common |= {"units": units if units == "auto" else int(units), "weighting": weighting}
            fit = source.fit_windows() if weighting in ("stream", "output") else None
            choose, _ = source.held_out("choose", cut, max(tokens // 2, 1))
            result = measure_swaps(net, run, choose=choose, fit=fit, at=blocks, **common)
    result = replace(result, base=result.base and replace(result.base, n_bytes=n_bytes))
    result.about.update(source.about("choose", "report"))
    show_table = show_swaps if experts is None else show_expert_swaps
    show(result, show_table, source.folder.path(kind), as_json, lambda: result.save(run))
    ranks.stop()


# -- tables


def _two_figures(value: float | None) -> str:
    if not known([value]):
        return "-"
    text = f"{value:.2g}"
    return power(value) if "e" in text else text


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
    Column("expected", "expected_kl", _two_figures),
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
    write(console, f"{model['id']}, {plural(len(blocks), 'block')}, each replaced alone")
    base = data["base"]  # None for a model without a language-model head
    if base is not None:
        bits = base["bits_per_byte"]
        line = f"perplexity {perplexity(base['perplexity'])} ± {number(base['perplexity_se'], 2)}"
        line += "" if bits is None else f", {number(bits)} bits a byte"
        source = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        write(console, f"{line} as it is ({source})")
    columns = (Column("#", "index"), *(COSTS if base else ()))
    columns += DISTANCES if console.width >= 120 or not base else ()
    print_table(console, (*columns, *SIZES), blocks)
    if base is not None:
        write(
            console, "Δppl: with the map; plain: plain least squares; zero: removed; mean: constant"
        )
    signals = {n: between(r, 2) for n, r in data["signals"].items() if r["value"] is not None}
    if signals:
        write(console, "rank correlation with what plain least squares costs (95 % interval):")
        write(console, "; ".join(f"{name} {shown}" for name, shown in signals.items()))
    elif data["signals"]:
        write(console, "rank correlations of signals with costs need 8 blocks or more")
    write_notes(console, data["notes"])


def show_expert_swaps(console: Console, data: dict[str, Any], experts: list[ExpertSwap]) -> None:
    """The table that `howlinear swap --experts` prints."""
    base = data["base"]
    original = perplexity(base["perplexity"])
    write(console, f"perplexity {original}, {base['protocol']}, {base['tokens']} tokens")
    print_table(console, EXPERTS, experts)
