"""`howlinear swap`: replace each block alone by its map and measure the cost."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import follows, progress_bars, show
from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.cli.sources import Loader, RunSource
from howlinear.records.fields import BlockSwap, ExpertSwap
from howlinear.records.verdicts import UNDECIDED, candidates, costly_from
from howlinear.records.words import (
    between,
    count,
    error,
    number,
    perplexity,
    plural,
    ranges,
    signed,
    title,
)

PredictedTokens = Annotated[
    int, Option(help="Tokens to predict at most; a block takes fewer if they decide.", min=1)
]
AllTokens = Annotated[
    bool, Option("--all-tokens", help="Take all --tokens for every block, also where fewer decide.")
]
Safe = Annotated[
    str,
    Option(
        help="Below this a swap is called safe: 3% of perplexity, or 0.03 nats of KL per token. "
        "Costly is 10/3 of it."
    ),
]
Positions = Annotated[
    str,
    Option(
        help="Positions to score in each window: auto (by the work of the head), all or a number."
    ),
]
Baselines = Annotated[
    bool,
    Option("--baselines", help="Also remove each block, and put its mean output in its place."),
]
TogetherBlocks = Annotated[
    str | None,
    Option("--together", help="Also replace these blocks at once, such as 3,5,9, and compare."),
]
Again = Annotated[
    bool, Option("--overwrite", help="Measure again what swap.json holds of these settings.")
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
    all_tokens: AllTokens = False,
    safe: Safe = "0.03",
    units: Units = "auto",
    blocks: flags.Blocks = None,
    together: TogetherBlocks = None,
    baselines: Baselines = False,
    experts: Experts = None,
    weighting: Weighting = "none",
    protocol: Eval = "windows-128",
    positions: Positions = "auto",
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    overwrite: Again = False,
    as_json: flags.AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    from howlinear.losses.protocols import EvalProtocol
    from howlinear.profiling.profiler import Profile
    from howlinear.run.work import Ranks, Work
    from howlinear.swapping.expert_swaps import chosen
    from howlinear.swapping.swaps import SwapOptions

    source = RunSource(run, model, text_file)
    EvalProtocol.parse(protocol)  # mistakes are refused before the model is loaded
    source.check_blocks(blocks)
    options = SwapOptions(
        units=units if units == "auto" else int(units),
        weighting=weighting,
        safe=nats_of(safe),
        baselines=baselines,
        together=source.indices(together, "together"),
        all_tokens=all_tokens,
        overwrite=overwrite,
    )
    wanted = flags.number_or(positions, "--positions", "auto", "all")
    if wanted == 0:
        raise ValueError("--positions 0 scores no token: write auto, all or a number from 1 on")
    if experts is not None:
        chosen(Profile.load(run).experts, experts)
    kind = "swap" if experts is None else "swap-experts"
    source.folder.check_addable(kind)
    ranks = Ranks.start()
    source.load(Loader(device, trust_remote_code, allow_pickle))
    options = replace(options, protocol=source.protocol(protocol))
    with progress_bars() as begin:
        work = Work(ranks, batch_size, begin)
        if experts is not None:
            result: Any = _experts(source, experts, tokens, options.protocol, work)
        else:
            result = _blocks(source, blocks, tokens, wanted, options, work)
    show_table = show_swaps if experts is None else show_expert_swaps
    show(result, show_table, source.folder.path(kind), as_json, lambda: result.save(run))
    ranks.stop()


def nats_of(text: str) -> float:
    """--safe in nats per token: 0.03, or a growth of perplexity such as 3%."""
    share = flags.share_of(text, "--safe", 1)
    return math.log1p(share) if text.strip().endswith("%") else share


def _experts(source: RunSource, experts: str, tokens: int, cut: Any, work: Any) -> Any:
    from howlinear.swapping.expert_swaps import measure_expert_swaps

    report, n_bytes = source.held_out("report", cut, tokens)
    folder = source.folder.folder
    result = measure_expert_swaps(
        source.net, folder, experts, report=report, protocol=cut, work=work
    )
    result = replace(result, base=replace(result.base, n_bytes=n_bytes))
    result.about.update(source.about("choose", "report"))
    return result


def _blocks(
    source: RunSource, at: str | None, tokens: int, positions: int | str, options: Any, work: Any
) -> Any:
    """The costs of swaps, written to the run after each round."""
    from howlinear.losses.positions import scored_positions
    from howlinear.swapping.rounds import FIRST_LOOK
    from howlinear.swapping.swaps import measure_swaps

    cut, folder = options.protocol, source.folder.folder
    if positions == "auto":
        positions = scored_positions(source.net, cut)
    few = positions if isinstance(positions, int) and positions < cut.counted else None
    options = replace(options, positions=few)
    sample: dict[str, Any] = {"positions": few, "nested": True}
    report, n_bytes = source.held_out("report", cut, tokens, **sample)
    choose, _ = source.held_out("choose", cut, FIRST_LOOK * (few or cut.counted), **sample)
    with_bytes = partial(_with_bytes, n_bytes / (len(report["input_ids"]) * cut.counted))
    weighted = options.weighting in ("stream", "output")
    result = measure_swaps(
        source.net,
        folder,
        choose=choose,
        report=report,
        fit=source.fit_windows() if weighted else None,
        at=at,
        options=options,
        work=work,
        about=source.about("choose", "report"),
        after_round=lambda so_far: _keep(with_bytes(so_far), folder),
    )
    return with_bytes(result)


def _keep(so_far: Any, folder: Path) -> None:
    """Write what the rounds so far gave, if that can be: at the end the result is printed if not."""
    if not follows():
        with suppress(OSError):
            so_far.save(folder)


def _with_bytes(a_token: float, result: Any) -> Any:
    """The result, with the utf-8 bytes that its tokens stand for."""
    base = result.base
    return replace(result, base=base and replace(base, n_bytes=round(a_token * base.tokens)))


# -- tables


COSTS = (  # with the fitted map in the block's place
    Column("verdict", "verdict"),
    Column("KL ± se", lambda b: number(b.kl, 4) + error(b.kl_se, 4)),
    Column("Δppl ± se", lambda b: f"{signed(b.delta_ppl)} ±{number(b.delta_ppl_se, 2)}"),
    Column("units", lambda b: len(b.units)),
    Column("plain", "kl_plain", number),
    Column("top-1", "top1", number),
    Column("tokens", "tokens"),
)
CONSTANTS = (Column("zero", "kl_zero", number), Column("mean", "kl_mean", number))
DISTANCES = (
    Column("cosine", "cosine", number),
    Column("rmse", "rmse", digits(4)),
    Column("stream err.", "stream_error", digits(4)),
)
SIZES = (Column("params", lambda b: count(-b.params_saved, "+")),)
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
    write(console, f"{title(model['id'])}, {plural(len(blocks), 'block')}, each replaced alone")
    base = data["base"]  # None for a model without a language-model head
    if base is not None:
        bits = base["bits_per_byte"]
        line = f"perplexity {perplexity(base['perplexity'])} ± {number(base['perplexity_se'], 2)}"
        line += "" if bits is None else f", {number(bits)} bits a byte"
        source = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        write(console, f"{line} as it is ({source})")
    wide = console.width >= 120
    columns = (Column("#", "index"), *(COSTS if base else ()))
    columns += CONSTANTS if any(b.kl_zero is not None for b in blocks) else ()
    columns += DISTANCES if wide or not base else ()
    print_table(console, (*columns, *(SIZES if wide or not base else ())), blocks)
    if base is not None:
        write(console, "KL in nats per token; plain: KL of plain least squares, no units kept")
        _show_verdicts(console, blocks, settings["safe"])
    for joint in data["together"]:
        _show_together(console, joint)
    signals = {n: between(r, 2) for n, r in data["signals"].items() if r["value"] is not None}
    if signals:
        write(console, "rank correlation with the KL of plain least squares (95 % interval):")
        write(console, "; ".join(f"{name} {shown}" for name, shown in signals.items()))
    elif data["signals"]:
        write(console, "rank correlations of signals with costs need 8 blocks or more")
    write_notes(console, data["notes"])


def _show_verdicts(console: Console, blocks: list[BlockSwap], safe: float) -> None:
    """The thresholds, and between which verdicts the undecided blocks are."""
    write(console, f"safe: KL below {safe:.3g} nats; costly: from {costly_from(safe):.3g} on")
    between_them: dict[tuple[str, str], list[int]] = {}
    for b in blocks:
        if b.verdict == UNDECIDED and b.kl is not None:
            ends = candidates(b.kl, b.kl_se or math.nan, b.clusters, safe)
            between_them.setdefault(ends, []).append(b.index)
    for (low, high), indices in between_them.items():
        which = f"may be {low} or {high}" if low != high else f"seem {low}, on too few windows"
        write(
            console, f"undecided: {ranges(indices)} {which}; more held-out text decides (--tokens)"
        )


def _show_together(console: Console, joint: dict[str, Any]) -> None:
    """How far the costs of several blocks are from adding up."""
    write(console, f"blocks {ranges(joint['blocks'])} together, {joint['tokens']} tokens, nats:")
    for name, label in (("kl", "KL"), ("delta_nll", "Δnll")):
        parts = [
            f"{what} {signed(joint[name + end], 4)}{error(joint[f'{name}{end}_se'], 4)}"
            for what, end in (("joint", ""), ("sum", "_sum"), ("joint - sum", "_gap"))
        ]
        write(console, f"  {label}: {', '.join(parts)}")


def show_expert_swaps(console: Console, data: dict[str, Any], experts: list[ExpertSwap]) -> None:
    """The table that `howlinear swap --experts` prints."""
    base = data["base"]
    original = perplexity(base["perplexity"])
    write(console, f"perplexity {original}, {base['protocol']}, {base['tokens']} tokens")
    print_table(console, EXPERTS, experts)
