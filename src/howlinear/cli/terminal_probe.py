"""What `howlinear probe` prints: a table for each kind of probe.

A kind is a row of `PROBE_TABLES`: its title, its columns, and how a block becomes a row of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from howlinear.cli.tables import print_table, write
from howlinear.records.fields import BlockProbe
from howlinear.records.words import count, error, known, number, power, signed

Found = dict[str, Any]


def show_probes(console: Console, data: dict[str, Any], blocks: list[BlockProbe]) -> None:
    """The tables that `howlinear probe` prints, one a kind of probe."""
    rows, text = data["settings"]["rows"], data["corpus"]
    write(console, f"{data['model']['id']}, {len(blocks)} blocks probed")
    write(
        console,
        f"{text['name']}: fitted on {rows['fit']} rows of {text['fit']}, chosen on "
        f"{rows['choose']} of {text['choose']}, reported on {rows['report']} of {text['report']}",
    )
    for kind, table in PROBE_TABLES.items():
        own = [(b, getattr(b, kind)) for b in blocks if getattr(b, kind) is not None]
        if own:
            _show_kind(console, table, own)
    write(console)
    for name, found in data["summary"].items():
        write(
            console,
            f"{name.replace('_', ' ')} over {found['blocks']} blocks: median "
            f"{number(found['median'], 4)}, largest {number(found['max'], 4)}; correlation with "
            f"1 - R2: {signed(found['pearson_with_1_minus_r2'])} (Pearson), "
            f"{signed(found['spearman_with_1_minus_r2'])} (ranks)",
        )
    for note in data["notes"]:
        write(console, f"note: {note}")


def _show_kind(console: Console, table: ProbeTable, own: list[tuple[BlockProbe, Found]]) -> None:
    write(console)
    write(console, table.title, style="bold")
    done = [(b, found) for b, found in own if "skipped" not in found]
    rows = [(str(b.index), *table.cells(b, found)) for b, found in done]
    if done:
        print_table(console, ("#", *table.columns), rows, table.words)
    if table.columns == NETWORK and not all(found["converged"] for _, found in done):
        write(console, "*: not converged")
    for b, found in own:
        if "skipped" in found:
            write(console, f"block {b.index} left out: {found['skipped']}")


def _cost(found: Found, name: str) -> str:
    """What a fitted layer costs when swapped in, where that was measured."""
    return signed(found.get("swap", {}).get(name, {}).get("delta_ppl"))


def _gain(found: Found) -> str:
    return signed(found["gain"], 4) + error(found["gain_se"], 4)


def _bilinear(b: BlockProbe, found: Found) -> list[str]:
    ranks = {step["rank"]: step["gain"] for step in found["ranks"] or []}
    sweep = " ".join(number(ranks[r]) for r in (1, 4, 64) if r in ranks) or "-"
    gains = known(seed["gain"] for seed in found["seeds"])
    spread = number(max(gains) - min(gains), 4) if len(gains) > 1 else "-"
    costs = [_cost(b.linear, "linear"), _cost(found, "bilinear")]
    cells = [number(b.r2), _gain(found), spread, sweep, number(found["recruitment"], 2)]
    return [*cells, *costs, number(found["seconds"], 0)]


def _degree(b: BlockProbe, found: Found) -> list[str]:
    steps = found["steps"]
    shares = [number(step["recovered"]) for step in (steps[0], steps[1], steps[-1])]
    verdict = str(found["verdict"]).removesuffix(" in the leading directions")  # the title has it
    return [number(b.r2), *shares, _cost(found, found["best"]), verdict]


def _units(b: BlockProbe, found: Found) -> list[str]:
    steps = {step["k"]: step for step in found["steps"]}
    k = found["at_two_matrices"]
    cells = [number(steps[n]["r2"]) if n in steps else "-" for n in (0, 1, 16, 64, 256)]
    cells += [str(k), number(steps[k]["r2"]), count(steps[k]["parameters"])]
    return [*cells, _cost(b.linear, "linear"), _cost(found, f"{k} units")]


def _network(name: str) -> Callable[[BlockProbe, Found], list[str]]:
    def cells(b: BlockProbe, found: Found) -> list[str]:
        fitted = [number(b.r2), number(found["r2"]), _gain(found), count(found["parameters"])]
        done = f"{found['steps']}{'' if found['converged'] else '*'}"
        return [*fitted, _cost(b.linear, "linear"), _cost(found, name), done]

    return cells


def _trained(b: BlockProbe, found: Found) -> list[str]:
    by = {(run["optimiser"], run["inputs"]): run["r2"] for run in found["runs"]}
    cells = [
        f"{number(by[name, 'raw'])} {number(by[name, 'whitened'])}"
        for name in ("sgd", "adam", "adamw")
    ]
    return [number(found["r2_closed_form"]), *cells, power(found["input_condition"])]


def _where(b: BlockProbe, found: Found) -> list[str]:
    first = sum(known(p["share"] for p in found["positions"] if p["from"] == 0))
    tokens = ", ".join(
        f"{(t['text'] or str(t['token'])).strip() or '␣'} {number(t['times_mean'], 1)}x "
        f"({t['count']})"
        for t in found["tokens"][:3]
    )
    writes = (found["directions"] or [{}])[0].get("writes")
    read = "" if writes is None else " ".join(str(t).strip() for t in writes["up"][:3])
    return [number(first), tokens, read]


def _quantised(b: BlockProbe, found: Found) -> list[str]:
    errors = [power(found[name]["error"], digits=2) for name in ("int8", "int4")]
    costs = [_cost(b.linear, "linear"), *(_cost(found, name) for name in ("int8", "int4"))]
    return [number(1 - b.r2 if known([b.r2]) else None), *errors, *costs]


def _healing(b: BlockProbe, found: Found) -> list[str]:
    costs = [_cost(found, name) for name in ("swapped", "healed", "control")]
    return [str(len(found["units"])), *costs, str(found["healed"]["steps"])]


class ProbeTable(NamedTuple):
    title: str
    columns: tuple[str, ...]
    cells: Callable[[BlockProbe, Found], list[str]]
    words: tuple[str, ...] = ()


LINEAR = "Δppl lin."  # of the least-squares map, beside whose cost the others stand
NETWORK = ("linear R2", "R2", "gain ± se", "params", LINEAR, "Δppl", "steps")
TOKENS, WRITES = "tokens, times the mean (count)", "the map writes"
PROBE_TABLES = {
    "bilinear": ProbeTable(
        "bilinear: y ~ Wx + b + A[(Ux) * (Vx)]",
        ("R2", "gain ± se", "seeds", "at 1, 4, 64", "recr.", LINEAR, "Δppl", "s"),
        _bilinear,
    ),
    "degree": ProbeTable(
        "degree: share of the rest that polynomials of leading directions recover",
        ("R2", "2nd", "3rd", "2nd wide", "Δppl best", "verdict"),
        _degree,
        ("verdict",),
    ),
    "units": ProbeTable(
        "units: R2 of the matrix beside k hidden units",
        ("k = 0", "1", "16", "64", "256", "k at 2W", "R2", "params", LINEAR, "Δppl"),
        _units,
    ),
    "dense": ProbeTable("dense (2x): Linear-GELU-Linear", NETWORK, _network("dense")),
    "poly": ProbeTable("poly (2x): two bilinear layers", NETWORK, _network("poly")),
    "seeded": ProbeTable(
        "seeded poly: all trained from the closed form", NETWORK, _network("seeded")
    ),
    "trained": ProbeTable(
        "trained: R2 of a linear layer by gradient descent, on inputs raw and whitened",
        ("closed form", "SGD", "Adam", "AdamW", "condition"),
        _trained,
    ),
    "where": ProbeTable(
        "where: what carries the rest", ("first", TOKENS, WRITES), _where, (TOKENS, WRITES)
    ),
    "quantised": ProbeTable(
        "quantised: error over variance, beside 1 - R2 of one matrix",
        ("1 - R2", "int8", "int4", LINEAR, "Δppl int8", "Δppl int4"),
        _quantised,
    ),
    "healing": ProbeTable(
        "healing: rise of perplexity as swapped, fine-tuned, and of the block itself fine-tuned",
        ("units", "swapped", "healed", "control", "steps"),
        _healing,
    ),
}
