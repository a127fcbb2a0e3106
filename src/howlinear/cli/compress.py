"""`howlinear compress`."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from howlinear.cli.parts import (
    PARTS,
    AllowPickle,
    AsJson,
    Device,
    RunFolder,
    TrustRemoteCode,
    asked_of,
    budget_of,
    fitting,
    held_out,
    number_or,
    progress_bars,
    room_for_batch,
    run_model,
    run_text,
    say,
    share_of,
    show,
    versions,
)
from howlinear.cli.tables.compress import show_compression


class Export(StrEnum):
    hf = "hf"
    narrow = "narrow"
    nemotron_nas = "nemotron-nas"


def compress(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the smaller model.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="How much perplexity may rise; 5% by default.")
    ] = None,
    remove_params: Annotated[
        str | None, typer.Option(help="How many of the feed-forward parameters go: 20%.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to replace, without planning: 3,5,9-12 or a regex.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan.json to follow, perhaps edited by hand.")
    ] = None,
    rank: Annotated[
        str, typer.Option(help="Rank of the matrices: auto, full, 0 for none, or a number.")
    ] = "auto",
    keep_units: Annotated[
        str, typer.Option(help="Hidden units kept in each replaced block: auto or a number.")
    ] = "auto",
    export: Annotated[
        Export, typer.Option(help="narrow and nemotron-nas: for engines without remote code.")
    ] = Export.hf,
    add_biases: Annotated[
        bool, typer.Option("--add-biases", help="narrow: switch on a family's biases for it.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(help="Tokens to choose by, and as many others to report on.", min=256)
    ] = 4096,
    curve: Annotated[
        str | None, typer.Option(help="Measure these sizes too, ours and baselines: 5%,10%,20%.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure simpler ways to remove as much.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write plan.json and compress.json, no model.")
    ] = False,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Replace blocks under a budget and write a smaller model that loads."""
    asked, about = asked_of(run)
    budget = budget_of(max_ppl_increase, remove_params, blocks, plan)
    if out is None and not dry_run:
        raise ValueError("where to? Name a folder with -o, or pass --dry-run")

    from howlinear.compression import plan as plans
    from howlinear.compression.compress import CompressSettings, compress_model
    from howlinear.export.write import check_exportable, check_free, write_export
    from howlinear.losses.protocols import EvalProtocol as Cut
    from howlinear.models import corpus
    from howlinear.records.files import read_json, write_json

    chosen = None if plan is None else plans.from_dict(read_json(plan, "plan"))
    if out is not None:
        check_free(out)
    text = run_text(run, asked, about)
    net, tokenizer = run_model(run, asked, about, device, trust_remote_code, allow_pickle)
    if not dry_run:
        check_exportable(net, export.value, add_biases)
    settings = about["settings"]
    bos, window, budgeted = settings.get("bos", "auto"), settings["window"], settings["tokens"]
    fit = corpus.windows(text.fit, tokenizer, window, tokens=budgeted, bos=bos)
    cut = Cut.parse(f"windows-{fitting(net, tokenizer, 128)}")
    choose, report = (
        held_out(part, tokenizer, cut, tokens, bos)[0] for part in (text.choose(), text.report())
    )
    room_for_batch(net, run, fit.numel())
    plain = export is Export.nemotron_nas  # which has no place for biases, factors and units
    with progress_bars() as begin:
        result = compress_model(
            net,
            run,
            budget,
            fit=fit,
            choose=choose,
            report=report,
            plan=chosen,
            at=blocks,
            settings=CompressSettings(
                rank="full" if plain else number_or(rank, "--rank", "auto", "full"),
                units=0 if plain else number_or(keep_units, "--keep-units", "auto"),
                intercept=not plain,
                protocol=cut,
                curve=[share_of(part, "--curve") for part in curve.split(",")] if curve else (),
                baselines=baselines,
            ),
            progress=begin,
        )
    result.about.update(
        model=about["model"],
        corpus={"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=versions(),
    )
    if out is not None and not dry_run:
        say(f"writing {out}")
        write_export(net, tokenizer, result, out, export.value, asked["model"], report, add_biases)
    write_json(run / "plan.json", result.plan_dict())
    write_json(run / "compress.json", result.to_dict())
    where = run / "compress.json" if out is None or dry_run else out
    show(result, show_compression, where, as_json)
