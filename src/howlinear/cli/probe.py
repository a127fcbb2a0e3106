"""`howlinear probe`: what the residual of each block's map is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import progress_bars, say, show
from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.cli.sources import PARTS, Loader, RunSource
from howlinear.records.fields import BlockProbe
from howlinear.records.words import (
    correlation,
    count,
    error,
    known,
    number,
    plural,
    power,
    signed,
    size,
    title,
)
from howlinear.run import room

MAX_ROWS = 30_000  # by default

Result = dict[str, Any]  # what a kind of probe measured at a block; the block's map_r2 and map
Columns = tuple[Column, ...]


Kinds = Annotated[
    str,
    Option(
        help="Kinds of probes, separated by commas: bilinear, degree, units, where, quantised; "
        "slower: dense, poly, seeded, trained, healing; or all."
    ),
]
Rank = Annotated[int, Option(help="Number of products of the bilinear layer.", min=1)]
Solver = Annotated[
    Literal["ours", "paper"],
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
    model: flags.RunModel = None,
    text_file: flags.RunText = None,
    kind: Kinds = "bilinear,degree,units,where,quantised",
    rank: Rank = 16,
    solver: Solver = "ours",
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
    from howlinear.probing import probes

    source = RunSource(run, model, text_file)
    source.folder.check_addable("probe")
    kinds = probes.KINDS if kind == "all" else tuple(name.strip() for name in kind.split(","))
    settings = probes.ProbeSettings(kinds, rank=rank, solver=solver, seeds=seeds, seed=seed)
    source.check_blocks(blocks)
    net = source.load(Loader("cpu", trust_remote_code, allow_pickle))
    read, budget = source.fit_windows().ids, min(rows or MAX_ROWS, source.settings["tokens"])
    text = (read, source.text, source.tokenizer, budget, source.bos, seed)
    windows: dict[str, Any] = dict(zip(PARTS, probes.windows_of(*text), strict=True))
    memory = _check_rows(net, source.blocks(blocks), [*map(probes.count, windows.values())])
    cut = source.protocol()
    if tokens:
        windows["predict"] = source.held_out("report", cut, tokens)[0]
    if "healing" in kinds:
        windows["heal_on"] = source.short_windows(cut.length, max(budget, cut.length))
    settings = replace(
        settings,
        protocol=cut,
        memory=memory,
        keep_layers=False,
        decode=lambda token: source.tokenizer.decode([token]),
        about=source.about(*PARTS),
    )
    with progress_bars() as begin:
        result = probes.probe(net, run, **windows, settings=settings, at=blocks, progress=begin)
    where = source.folder.path("probe")
    show(result, show_probes, where, as_json, lambda: result.save(run))


def _check_rows(net: Any, blocks: list[Any], counts: list[int]) -> int | None:
    """Report the rows and the memory of a probe, and refuse too many; bytes that it may use."""
    from howlinear.probing.probes import needs

    free = room.available_memory()
    memory = None if free is None else free // 2
    together, needed = needs(net, blocks, sum(counts), memory)
    room.check_memory(needed, "rows need", "lower --rows")
    say(f"{counts[0]} rows to fit on, {counts[1]} to choose by, {counts[2]} to report on; ", end="")
    say(f"{plural(together, 'block')} at a time, {size(needed)} of memory")
    return memory


# -- tables


def show_probes(console: Console, data: dict[str, Any], blocks: list[BlockProbe]) -> None:
    """The tables that `howlinear probe` prints."""
    rows, text = data["settings"]["rows"], data["corpus"]
    write(console, f"{title(data['model']['id'])}, {plural(len(blocks), 'block')} probed")
    write(
        console,
        f"{text['name']}: fitted on {rows['fit']} rows of {text['fit']}, chosen on "
        f"{rows['choose']} of {text['choose']}, reported on {rows['report']} of {text['report']}",
    )
    for kind, (heading, columns) in TABLES.items():
        results = [
            {"index": b.index, "map_r2": b.r2, "map": b.linear, **result}
            for b in blocks
            if (result := getattr(b, kind)) is not None
        ]
        if results:
            _show_kind(console, heading, columns, results)
    write(console)
    for name, summary in data["summary"].items():
        write(
            console,
            f"{name.replace('_', ' ')} over {plural(summary['blocks'], 'block')}: median "
            f"{number(summary['median'], 4)}, largest {number(summary['max'], 4)}; correlation "
            f"with 1 - R2 {correlation(summary['pearson_with_1_minus_r2'])}, "
            f"of ranks {correlation(summary['spearman_with_1_minus_r2'])}",
        )
    write_notes(console, data["notes"])


def _show_kind(console: Console, title: str, columns: Columns, results: list[Result]) -> None:
    write(console)
    write(console, title, style="bold")
    measured = [r for r in results if "skipped" not in r]
    if measured:
        print_table(console, (Column("#", "index"), *columns), measured)
    if STEPS in columns and not all(r["converged"] for r in measured):
        write(console, "*: not converged")
    for r in results:
        if "skipped" in r:
            write(console, f"block {r['index']} left out: {r['skipped']}")


def _perplexity_change(result: Result, name: str) -> str:
    """Change of perplexity with a fitted layer swapped in, where that was measured."""
    return signed(result.get("swap", {}).get(name, {}).get("delta_ppl"))


def _cost(heading: str, name: str) -> Column:
    return Column(heading, lambda r: _perplexity_change(r, name))


def _seed_spread(r: Result) -> str:
    gains = known(seed["gain"] for seed in r["seeds"])
    return number(max(gains) - min(gains), 4) if len(gains) > 1 else "-"


def _gains_by_rank(r: Result) -> str:
    gains = {step["rank"]: step["gain"] for step in r["ranks"] or []}
    return " ".join(number(gains[rank]) for rank in (1, 4, 64) if rank in gains) or "-"


def _with_units(name: str, k: int | None = None) -> Callable[[Result], Any]:
    """A score with k hidden units; without k, with as many as make the size of two matrices."""

    def value(r: Result) -> Any:
        units = r["at_two_matrices"] if k is None else k
        return next((step[name] for step in r["steps"] if step["k"] == units), None)

    return value


def _verdict(r: Result) -> str:
    """The verdict without words that the title has."""
    return str(r["verdict"]).removesuffix(" in the leading directions")


def _trained(optimiser: str) -> Callable[[Result], str]:
    def cell(r: Result) -> str:
        scores = {(run["optimiser"], run["inputs"]): run["r2"] for run in r["runs"]}
        return " ".join(number(scores[optimiser, inputs]) for inputs in ("raw", "whitened"))

    return cell


def _first_share(r: Result) -> float:
    return sum(known(p["share"] for p in r["positions"] if p["from"] == 0))


def _tokens(r: Result) -> str:
    return ", ".join(
        f"{(t['text'] or str(t['token'])).strip() or '␣'} {number(t['times_mean'], 1)}x "
        f"({t['count']})"
        for t in r["tokens"][:3]
    )


def _written_tokens(r: Result) -> str:
    writes = (r["directions"] or [{}])[0].get("writes")
    return "" if writes is None else " ".join(str(token).strip() for token in writes["up"][:3])


R2 = Column("R2", "map_r2", number)  # of the least-squares map
LINEAR_COST = Column("Δppl lin.", lambda r: _perplexity_change(r["map"], "linear"))
GAIN = Column("gain ± se", lambda r: signed(r["gain"], 4) + error(r["gain_se"], 4))
STEPS = Column("steps", lambda r: f"{r['steps']}{'' if r['converged'] else '*'}")


def _network(name: str) -> Columns:
    """The columns of a trained network."""
    scores = (Column("linear R2", "map_r2", number), Column("R2", "r2", number), GAIN)
    return (*scores, Column("params", "parameters", count), LINEAR_COST, _cost("Δppl", name), STEPS)


TABLES: dict[str, tuple[str, Columns]] = {  # titles and columns, which show values of a Result
    "bilinear": (
        "bilinear: y ~ Wx + b + A[(Ux) * (Vx)]",
        (
            R2,
            GAIN,
            Column("seeds", _seed_spread),
            Column("at 1, 4, 64", _gains_by_rank),
            Column("recr.", "recruitment", digits(2)),
            LINEAR_COST,
            _cost("Δppl", "bilinear"),
            Column("s", "seconds", digits(0)),
        ),
    ),
    "degree": (
        "degree: share of the rest that polynomials of leading directions recover",
        (
            R2,
            Column("2nd", lambda r: r["steps"][0]["recovered"], number),
            Column("3rd", lambda r: r["steps"][1]["recovered"], number),
            Column("2nd wide", lambda r: r["steps"][-1]["recovered"], number),
            Column("Δppl best", lambda r: _perplexity_change(r, r["best"])),
            Column("verdict", _verdict, words=True),
        ),
    ),
    "units": (
        "units: R2 of the matrix beside k hidden units",
        (
            Column("k = 0", _with_units("r2", 0), number),
            *(Column(str(k), _with_units("r2", k), number) for k in (1, 16, 64, 256)),
            Column("k at 2W", "at_two_matrices"),
            Column("R2", _with_units("r2"), number),
            Column("params", _with_units("parameters"), count),
            LINEAR_COST,
            Column("Δppl", lambda r: _perplexity_change(r, f"{r['at_two_matrices']} units")),
        ),
    ),
    "dense": ("dense (2x): Linear-GELU-Linear", _network("dense")),
    "poly": ("poly (2x): two bilinear layers", _network("poly")),
    "seeded": ("seeded poly: all trained from the closed form", _network("seeded")),
    "trained": (
        "trained: R2 of a linear layer by gradient descent, on inputs raw and whitened",
        (
            Column("closed form", "r2_closed_form", number),
            *(Column(name, _trained(name.lower())) for name in ("SGD", "Adam", "AdamW")),
            Column("condition", "input_condition", power),
        ),
    ),
    "where": (
        "where: what carries the rest",
        (
            Column("first", _first_share, number),
            Column("tokens, times the mean (count)", _tokens, words=True),
            Column("the map writes", _written_tokens, words=True),
        ),
    ),
    "quantised": (
        "quantised: error over variance, beside 1 - R2 of one matrix",
        (
            Column("1 - R2", lambda r: 1 - r["map_r2"] if known([r["map_r2"]]) else None, number),
            Column("int8", lambda r: power(r["int8"]["error"], digits=2)),
            Column("int4", lambda r: power(r["int4"]["error"], digits=2)),
            LINEAR_COST,
            _cost("Δppl int8", "int8"),
            _cost("Δppl int4", "int4"),
        ),
    ),
    "healing": (
        "healing: rise of perplexity as swapped, fine-tuned, and of the block itself fine-tuned",
        (
            Column("units", lambda r: len(r["units"])),
            _cost("swapped", "swapped"),
            _cost("healed", "healed"),
            _cost("control", "control"),
            Column("steps", lambda r: r["healed"]["steps"]),
        ),
    ),
}
