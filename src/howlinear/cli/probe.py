"""`howlinear probe`."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from typing import Annotated

import typer

from howlinear.cli.parts import (
    PARTS,
    AllowPickle,
    AsJson,
    RunFolder,
    TrustRemoteCode,
    asked_of,
    fitting,
    held_out,
    inputs_for,
    progress_bars,
    room_for_rows,
    run_model,
    run_text,
    show,
    versions,
)
from howlinear.cli.tables.probe import show_probes


class Search(StrEnum):
    ours = "ours"
    paper = "paper"


def probe(
    run: RunFolder,
    kind: Annotated[
        str,
        typer.Option(
            help="Probes, with commas: bilinear, degree, units, where, quantised; slower: dense, "
            "poly, seeded, trained, healing; or all."
        ),
    ] = "bilinear,degree,units,where,quantised",
    rank: Annotated[int, typer.Option(help="Products of the bilinear layer.", min=1)] = 16,
    solver: Annotated[
        Search, typer.Option(help="Of the bilinear layer; paper: Adam on raw inputs, gated.")
    ] = Search.ours,
    seeds: Annotated[int, typer.Option(help="Starts of whatever is searched for.", min=1)] = 3,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to probe: 3,5,9-12 or a regular expression.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Rows to fit on, of the run's text; a quarter as many to choose by, a third to "
            "report on. All that the run read, 30000 at most, by default.",
            min=1,
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens to predict with each fitted layer swapped in; 0: none.", min=0),
    ] = 4096,
    seed: Annotated[int, typer.Option(help="Of row samples and the first start.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Find out what the map of each block leaves is made of."""
    asked, about = asked_of(run)
    text = run_text(run, asked, about)

    from howlinear.losses.protocols import EvalProtocol as Cut
    from howlinear.probing import probes
    from howlinear.profiling.profiler import Profile
    from howlinear.swapping.swaps import match

    names = probes.KINDS if kind == "all" else tuple(k.strip() for k in kind.split(","))
    how = probes.Settings(names, rank=rank, solver=solver.value, seeds=seeds, seed=seed)
    net, tokenizer = run_model(run, asked, about, "cpu", trust_remote_code, allow_pickle)
    at = [b for b, _ in match(net, Profile.load(run), blocks)]
    bos, length = about["settings"].get("bos", "auto"), about["settings"]["window"]
    budget = min(rows or 30_000, about["settings"]["tokens"])
    fit, choose, report = (
        inputs_for(net, ids, 8)
        for ids in probes.windows_of(text, tokenizer, length, budget, about["settings"], seed)
    )
    memory = room_for_rows(net, at, [probes.count(w) for w in (fit, choose, report)])
    cut = Cut.parse(f"windows-{fitting(net, tokenizer, 128)}")
    predict = held_out(text.report(), tokenizer, cut, tokens, bos)[0] if tokens else None
    healed = None
    if "healing" in names:
        from howlinear.models import corpus

        most = max(budget, cut.length)
        healed = corpus.windows(text.fit, tokenizer, cut.length, tokens=most, bos=bos)
    with progress_bars() as begin:
        result = probes.probe(
            net,
            run,
            fit=fit,
            choose=choose,
            report=report,
            settings=how,
            at=blocks,
            predict=None if predict is None else inputs_for(net, predict, 8),
            protocol=cut,
            heal_on=healed,
            decode=lambda token: tokenizer.decode([token]),
            memory=memory,
            keep_layers=False,
            about={
                "model": about["model"],
                "corpus": {"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
                "command": shlex.join(["howlinear", *sys.argv[1:]]),
                "versions": versions(),
            },
            progress=begin,
        )
    show(result, show_probes, run / "probe.json", as_json)
