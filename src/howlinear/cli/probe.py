"""`howlinear probe`: what the residual of each block's map is made of."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import show
from howlinear.cli.progress import progress_bars, say
from howlinear.cli.sources import PARTS, Loader, RunSource, model_inputs, window_length
from howlinear.cli.tables.probe import show_probes
from howlinear.run import room

MAX_ROWS = 30_000  # by default


class Search(StrEnum):
    ours = "ours"
    paper = "paper"


Kinds = Annotated[
    str,
    Option(
        help="Kinds of probes, separated by commas: bilinear, degree, units, where, quantised; "
        "slower: dense, poly, seeded, trained, healing; or all."
    ),
]
Rank = Annotated[int, Option(help="Number of products of the bilinear layer.", min=1)]
Solver = Annotated[
    Search,
    Option(help="Solver of the bilinear layer; paper: Adam on raw inputs, with a gate."),
]
Seeds = Annotated[int, Option(help="Number of random starts of each search.", min=1)]
RowCount = Annotated[
    int | None,
    Option(
        help="Rows to fit on, from the run's text; a quarter as many to choose by, a third to "
        "report on. By default all rows of the run, at most 30000.",
        min=1,
    ),
]
PredictedTokens = Annotated[
    int,
    Option(help="Tokens to predict with each fitted layer swapped in; 0: measure no costs.", min=0),
]


def probe(
    run: flags.RunPath,
    kind: Kinds = "bilinear,degree,units,where,quantised",
    rank: Rank = 16,
    solver: Solver = Search.ours,
    seeds: Seeds = 3,
    blocks: flags.Blocks = None,
    rows: RowCount = None,
    tokens: PredictedTokens = 4096,
    seed: flags.Seed = 0,
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Measure what the residual of each block's map is made of."""
    source = RunSource(run)

    from howlinear.probing import probes

    kinds = probes.KINDS if kind == "all" else tuple(name.strip() for name in kind.split(","))
    settings = probes.ProbeSettings(kinds, rank=rank, solver=solver.value, seeds=seeds, seed=seed)
    net, tokenizer = source.load(Loader("cpu", trust_remote_code, allow_pickle))
    budget = min(rows or MAX_ROWS, source.settings["tokens"])
    parts = _row_windows(source, net, tokenizer, budget, seed)
    memory = _check_rows(net, source, blocks, [probes.count(part) for part in parts])
    protocol, windows = _predicted(
        source, net, tokenizer, tokens, budget if "healing" in kinds else 0
    )
    settings = replace(
        settings,
        protocol=protocol,
        memory=memory,
        keep_layers=False,
        decode=lambda token: tokenizer.decode([token]),
        about=source.about(*PARTS),
    )
    with progress_bars() as begin:
        result = probes.probe(
            net,
            run,
            **dict(zip(PARTS, parts, strict=True)),
            **windows,
            settings=settings,
            at=blocks,
            progress=begin,
        )
    show(result, show_probes, run / "probe.json", as_json)


def _row_windows(source: RunSource, net: Any, tokenizer: Any, rows: int, seed: int) -> list[Any]:
    """Windows whose rows are fitted on, chosen by and reported on."""
    from howlinear.probing.probes import windows_of

    length = source.settings["window"]
    windows = windows_of(source.text, tokenizer, length, rows, source.settings, seed)
    return [model_inputs(net, ids) for ids in windows]


def _predicted(
    source: RunSource, net: Any, tokenizer: Any, tokens: int, heal: int
) -> tuple[Any, dict[str, Any]]:
    """The protocol; windows to predict with layers swapped in, and `heal` tokens to fine-tune on."""
    from howlinear.losses.protocols import EvalProtocol, held_out_tokens
    from howlinear.models import corpus

    cut = EvalProtocol.parse(f"windows-{window_length(net, tokenizer, 128)}")
    predict = heal_on = None
    if tokens:
        ids, _ = held_out_tokens(source.text.report(), tokenizer, cut, tokens, source.bos)
        predict = model_inputs(net, ids)
    if heal:
        most = max(heal, cut.length)
        heal_on = corpus.windows(
            source.text.fit, tokenizer, cut.length, tokens=most, bos=source.bos
        )
    return cut, {"predict": predict, "heal_on": heal_on}


def _check_rows(net: Any, source: RunSource, at: str | None, counts: list[int]) -> int | None:
    """Report the rows and the memory of a probe, and refuse too many; bytes that it may use."""
    from howlinear.probing import probes
    from howlinear.profiling.profiler import Profile
    from howlinear.swapping.maps import match

    blocks = [b for b, _ in match(net, Profile.load(source.folder.folder), at)]
    free = room.available_memory()
    memory = None if free is None else free // 2
    together, needed = probes.needs(net, blocks, sum(counts), memory)
    room.check_memory(needed, "rows need", "lower --rows")
    say(f"{counts[0]} rows to fit on, {counts[1]} to choose by, {counts[2]} to report on; ", end="")
    say(f"{together} block{'s' * (together > 1)} at a time, {needed / 1e9:.1f} GB of memory")
    return memory
