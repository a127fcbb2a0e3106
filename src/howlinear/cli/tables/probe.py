"""What `howlinear probe` prints: a table for each kind of probe, a row of `TABLES`.

A column of a probe's table shows a value of (block, result): the block's record, and what this kind
of probe measured there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from howlinear.cli.tables.printer import Column, digits, print_table, write, write_notes
from howlinear.records.fields import BlockProbe
from howlinear.records.words import count, error, known, number, power, signed

Result = dict[str, Any]
Row = tuple[BlockProbe, Result]


class Table(NamedTuple):
    title: str
    columns: tuple[Column, ...]


def show_probes(console: Console, data: dict[str, Any], blocks: list[BlockProbe]) -> None:
    """The tables that `howlinear probe` prints."""
    rows, text = data["settings"]["rows"], data["corpus"]
    write(console, f"{data['model']['id']}, {len(blocks)} blocks probed")
    write(
        console,
        f"{text['name']}: fitted on {rows['fit']} rows of {text['fit']}, chosen on "
        f"{rows['choose']} of {text['choose']}, reported on {rows['report']} of {text['report']}",
    )
    for kind, table in TABLES.items():
        probed = [(b, getattr(b, kind)) for b in blocks if getattr(b, kind) is not None]
        if probed:
            _show_kind(console, table, probed)
    write(console)
    for name, summary in data["summary"].items():
        write(
            console,
            f"{name.replace('_', ' ')} over {summary['blocks']} blocks: median "
            f"{number(summary['median'], 4)}, largest {number(summary['max'], 4)}; correlation "
            f"with 1 - R2: {signed(summary['pearson_with_1_minus_r2'])} (Pearson), "
            f"{signed(summary['spearman_with_1_minus_r2'])} (ranks)",
        )
    write_notes(console, data["notes"])


def _show_kind(console: Console, table: Table, probed: list[Row]) -> None:
    write(console)
    write(console, table.title, style="bold")
    measured = [row for row in probed if "skipped" not in row[1]]
    if measured:
        print_table(console, (Column("#", lambda row: row[0].index), *table.columns), measured)
    if STEPS in table.columns and not all(result["converged"] for _, result in measured):
        write(console, "*: not converged")
    for block, result in probed:
        if "skipped" in result:
            write(console, f"block {block.index} left out: {result['skipped']}")


# -- values of a row, which is (block, result)


def _field(name: str) -> Callable[[Row], Any]:
    return lambda row: row[1][name]


def _perplexity_change(result: Result, name: str) -> str:
    """Change of perplexity with a fitted layer swapped in, where that was measured."""
    return signed(result.get("swap", {}).get(name, {}).get("delta_ppl"))


def _cost(heading: str, name: str) -> Column:
    return Column(heading, lambda row: _perplexity_change(row[1], name))


def _seed_spread(row: Row) -> str:
    gains = known(seed["gain"] for seed in row[1]["seeds"])
    return number(max(gains) - min(gains), 4) if len(gains) > 1 else "-"


def _gains_by_rank(row: Row) -> str:
    gains = {step["rank"]: step["gain"] for step in row[1]["ranks"] or []}
    return " ".join(number(gains[rank]) for rank in (1, 4, 64) if rank in gains) or "-"


def _recovered(step: int) -> Callable[[Row], Any]:
    return lambda row: row[1]["steps"][step]["recovered"]


def _verdict(row: Row) -> str:
    """The verdict without words that the title has."""
    return str(row[1]["verdict"]).removesuffix(" in the leading directions")


def _unit_step(row: Row, k: int) -> Result:
    """The scores with k hidden units kept; none if that was not measured."""
    return next((step for step in row[1]["steps"] if step["k"] == k), {"r2": None})


def _r2_with_units(k: int) -> Callable[[Row], Any]:
    return lambda row: _unit_step(row, k)["r2"]


def _two_matrices(name: str) -> Callable[[Row], Any]:
    """The scores with as many hidden units as make the layer as large as two matrices."""
    return lambda row: _unit_step(row, row[1]["at_two_matrices"])[name]


def _trained(optimiser: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        scores = {(run["optimiser"], run["inputs"]): run["r2"] for run in row[1]["runs"]}
        return " ".join(number(scores[optimiser, inputs]) for inputs in ("raw", "whitened"))

    return cell


def _first_share(row: Row) -> float:
    return sum(known(p["share"] for p in row[1]["positions"] if p["from"] == 0))


def _tokens(row: Row) -> str:
    return ", ".join(
        f"{(t['text'] or str(t['token'])).strip() or '␣'} {number(t['times_mean'], 1)}x "
        f"({t['count']})"
        for t in row[1]["tokens"][:3]
    )


def _written_tokens(row: Row) -> str:
    writes = (row[1]["directions"] or [{}])[0].get("writes")
    return "" if writes is None else " ".join(str(token).strip() for token in writes["up"][:3])


def _one_minus_r2(row: Row) -> float | None:
    return 1 - row[0].r2 if known([row[0].r2]) else None


def _steps(row: Row) -> str:
    return f"{row[1]['steps']}{'' if row[1]['converged'] else '*'}"


# -- tables


def _r2(heading: str) -> Column:
    """R2 of the least-squares map."""
    return Column(heading, lambda row: row[0].r2, number)


LINEAR_COST = Column("Δppl lin.", lambda row: _perplexity_change(row[0].linear, "linear"))
GAIN = Column("gain ± se", lambda row: signed(row[1]["gain"], 4) + error(row[1]["gain_se"], 4))
STEPS = Column("steps", _steps)


def _network(title: str, name: str) -> Table:
    """A trained network's table."""
    scores = (_r2("linear R2"), Column("R2", _field("r2"), number), GAIN)
    parameters = Column("params", _field("parameters"), count)
    return Table(title, (*scores, parameters, LINEAR_COST, _cost("Δppl", name), STEPS))


TABLES = {
    "bilinear": Table(
        "bilinear: y ~ Wx + b + A[(Ux) * (Vx)]",
        (
            _r2("R2"),
            GAIN,
            Column("seeds", _seed_spread),
            Column("at 1, 4, 64", _gains_by_rank),
            Column("recr.", _field("recruitment"), digits(2)),
            LINEAR_COST,
            _cost("Δppl", "bilinear"),
            Column("s", _field("seconds"), digits(0)),
        ),
    ),
    "degree": Table(
        "degree: share of the rest that polynomials of leading directions recover",
        (
            _r2("R2"),
            Column("2nd", _recovered(0), number),
            Column("3rd", _recovered(1), number),
            Column("2nd wide", _recovered(-1), number),
            Column("Δppl best", lambda row: _perplexity_change(row[1], row[1]["best"])),
            Column("verdict", _verdict, words=True),
        ),
    ),
    "units": Table(
        "units: R2 of the matrix beside k hidden units",
        (
            Column("k = 0", _r2_with_units(0), number),
            *(Column(str(k), _r2_with_units(k), number) for k in (1, 16, 64, 256)),
            Column("k at 2W", _field("at_two_matrices")),
            Column("R2", _two_matrices("r2"), number),
            Column("params", _two_matrices("parameters"), count),
            LINEAR_COST,
            Column(
                "Δppl", lambda row: _perplexity_change(row[1], f"{row[1]['at_two_matrices']} units")
            ),
        ),
    ),
    "dense": _network("dense (2x): Linear-GELU-Linear", "dense"),
    "poly": _network("poly (2x): two bilinear layers", "poly"),
    "seeded": _network("seeded poly: all trained from the closed form", "seeded"),
    "trained": Table(
        "trained: R2 of a linear layer by gradient descent, on inputs raw and whitened",
        (
            Column("closed form", _field("r2_closed_form"), number),
            *(Column(name, _trained(name.lower())) for name in ("SGD", "Adam", "AdamW")),
            Column("condition", _field("input_condition"), power),
        ),
    ),
    "where": Table(
        "where: what carries the rest",
        (
            Column("first", _first_share, number),
            Column("tokens, times the mean (count)", _tokens, words=True),
            Column("the map writes", _written_tokens, words=True),
        ),
    ),
    "quantised": Table(
        "quantised: error over variance, beside 1 - R2 of one matrix",
        (
            Column("1 - R2", _one_minus_r2, number),
            Column("int8", lambda row: power(row[1]["int8"]["error"], digits=2)),
            Column("int4", lambda row: power(row[1]["int4"]["error"], digits=2)),
            LINEAR_COST,
            _cost("Δppl int8", "int8"),
            _cost("Δppl int4", "int4"),
        ),
    ),
    "healing": Table(
        "healing: rise of perplexity as swapped, fine-tuned, and of the block itself fine-tuned",
        (
            Column("units", lambda row: len(row[1]["units"])),
            _cost("swapped", "swapped"),
            _cost("healed", "healed"),
            _cost("control", "control"),
            Column("steps", lambda row: row[1]["healed"]["steps"]),
        ),
    ),
}
