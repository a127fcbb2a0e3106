"""`howlinear swap`."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from howlinear.cli.parts import (
    AllowPickle,
    AsJson,
    BatchSize,
    Device,
    RunFolder,
    TrustRemoteCode,
    asked_of,
    fitting,
    held_out,
    inputs_for,
    own_device,
    progress_bars,
    run_model,
    run_text,
    show,
    versions,
)
from howlinear.cli.tables.swap import show_expert_swaps, show_swaps


class Units(StrEnum):
    auto = "auto"
    none = "0"
    one = "1"
    two = "2"
    four = "4"


class Weighting(StrEnum):
    none = "none"
    body = "body"
    stream = "stream"
    output = "output"


def swap(
    run: RunFolder,
    tokens: Annotated[
        int, typer.Option(help="Tokens to predict; half as many to choose units by.", min=1)
    ] = 4096,
    units: Annotated[
        Units, typer.Option(help="Sink units that a map keeps; auto: chosen for each block.")
    ] = Units.auto,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to swap: 3,5,9-12 or a regular expression.")
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help="Replace single experts instead: all, or blocks and experts such as 3,5.17,7.shared."
        ),
    ] = None,
    weighting: Annotated[
        Weighting,
        typer.Option(
            help="Rows in the fit: none, without first positions (body), by 1/|h| (stream) or "
            "by 1/|y|^2 (output)."
        ),
    ] = Weighting.none,
    protocol: Annotated[
        str, typer.Option(help="windows-N, stride-LENGTH-STRIDE or gptq-2048.")
    ] = "windows-128",
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    asked, about = asked_of(run)
    text = run_text(run, asked, about)

    from howlinear.losses.protocols import EvalProtocol as Cut
    from howlinear.models import corpus
    from howlinear.run.ranks import Ranks
    from howlinear.swapping.swaps import measure_swaps

    cut, ranks = Cut.parse(protocol), Ranks.start()
    code = (trust_remote_code, allow_pickle)
    net, tokenizer = run_model(run, asked, about, own_device(device), *code)
    bos = about["settings"].get("bos", "auto")
    if cut.name.startswith("windows"):
        cut = Cut.parse(f"windows-{fitting(net, tokenizer, cut.length)}")
    report, n_bytes = held_out(text.report(), tokenizer, cut, tokens, bos)
    told = {
        "model": about["model"],
        "corpus": {"name": text.name, "choose": text.parts[1], "report": text.parts[2]},
        "command": shlex.join(["howlinear", *sys.argv[1:]]),
        "versions": versions(),
    }
    if experts is not None:
        from howlinear.swapping.expert_swaps import measure_expert_swaps

        how: dict[str, Any] = {"protocol": cut, "n_bytes": n_bytes, "batch_size": batch_size}
        with progress_bars() as begin:
            result: Any = measure_expert_swaps(
                net, run, experts, report=report, ranks=ranks, progress=begin, **how
            )
        _finish_swap(result, told, run, ranks, show_expert_swaps, "swap-experts.json", as_json)
        return
    choose, _ = held_out(text.choose(), tokenizer, cut, max(tokens // 2, 1), bos)
    fit = None
    if weighting in (Weighting.stream, Weighting.output):
        length, budget = about["settings"]["window"], about["settings"]["tokens"]
        fit = inputs_for(
            net, corpus.windows(text.fit, tokenizer, length, tokens=budget, bos=bos), 8
        )
    with progress_bars() as begin:
        result = measure_swaps(
            net,
            run,
            choose=inputs_for(net, choose, batch_size),
            report=inputs_for(net, report, batch_size),
            fit=fit,
            at=blocks,
            units=units.value if units is Units.auto else int(units.value),
            weighting=weighting.value,
            protocol=cut,
            n_bytes=n_bytes,
            batch_size=batch_size,
            ranks=ranks,
            progress=begin,
        )
    _finish_swap(result, told, run, ranks, show_swaps, "swap.json", as_json)


def _finish_swap(
    result: Any, about: dict[str, Any], run: Path, ranks: Any, table: Any, name: str, as_json: bool
) -> None:
    result.about.update(about)
    if ranks.rank == 0:
        result.save(run)
    show(result, table, run / name, as_json)
    ranks.stop()
