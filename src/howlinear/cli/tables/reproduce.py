"""What `howlinear reproduce` prints: our numbers and the paper's side by side, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from howlinear.cli.printer import (
    Column,
    digits,
    print_table,
    write,
    write_notes,
    write_whole,
)
from howlinear.records.paper import PREDICTED, Reproduction
from howlinear.records.words import number

Format = Callable[[Any], str]


def _whole(value: Any) -> str:
    return "-" if value is None else f"{value:.0f}"


def _large(value: Any) -> str:
    """Two digits, or a power of ten: a swap may cost anything."""
    return number(value, 2) if value is None or abs(value) < 1e5 else f"{value:.1e}"


QUANTITIES: dict[str, tuple[str, Format]] = {  # the name of each in tables, and its format
    "r2_scalar": ("R2 scalar", digits(4)),
    "r2_feature_median": ("median", digits(3)),
    "effective_rank": ("rank", _whole),
    "delta_ppl": ("dPPL", _large),
    "bilinear_gain": ("gain", digits(4)),
}
PROFILED = ("r2_scalar", "r2_feature_median", "effective_rank")  # the others: swaps and probes
MEANS = (
    "R2 scalar: around one mean of all elements, the paper's R2_lin; R2: around the mean of each "
    "feature, ours alone; body: that without first positions; median: of the features' R2; rank: "
    "of the map that keeps 90 % of R2"
)
MEANS_MORE = (
    "dPPL: rise of perplexity by plain least squares in the block's place; gain: of the bilinear "
    "probe, as a share of the variance around one mean"
)


def show_reproductions(
    console: Console, results: list[Reproduction], unreached: Mapping[str, str]
) -> None:
    """The tables of each run; before them the models that were not measured, with the reason."""
    if unreached:
        write(console, _unreached_line(unreached))
    for i, result in enumerate(results):
        if i or unreached:
            write(console)
        show_reproduction(console, result)


def _unreached_line(unreached: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in unreached.items():
        by_reason.setdefault(reason, []).append(name)
    groups = (f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"not measured: {'; '.join(groups)}"


def show_reproduction(console: Console, result: Reproduction) -> None:
    """One run: a table of the profile, and one of swaps and probes if they were measured."""
    model, text, settings = (result.about[part] for part in ("model", "corpus", "settings"))
    write(console, f"{model.get('id')}, {len(result.blocks)} blocks, the paper's protocol")
    write(
        console,
        f"{text.get('name')} {text.get('part')}: {settings.get('tokens')} tokens in windows "
        f"of {settings.get('window')}",
    )
    profiled = [q for q in result.measured if q in PROFILED]
    others = [q for q in result.measured if q not in PROFILED]
    tables = [quantities for quantities in (profiled, others) if quantities]
    for quantities in tables:
        columns = [c for q in quantities for c in _columns(q, bool(result.name))]
        print_table(console, (Column("#", "index"), *columns), result.blocks)
    if result.summary:
        print_table(console, SUMMARY, result.summary.items())
    write(console, MEANS)
    if len(tables) > 1:
        write(console, MEANS_MORE)
    write_notes(console, result.notes)
    if "delta_ppl" not in result.measured and result.name:
        write(
            console,
            f"to add what swaps cost: `howlinear swap RUN --tokens {PREDICTED} --units 0`, then "
            "`howlinear reproduce RUN`",
        )
    write_whole(console, f"results in {result.run}")


def _columns(quantity: str, paper: bool) -> list[Column]:
    """Our number and the paper's if there is one; R2 scalar has the difference and our R2 beside it."""
    name, form = QUANTITIES[quantity]

    def side(heading: str, key: str, above: str = "", form: Format = form) -> Column:
        return Column(heading, lambda block: block[quantity][key], form, above=above)

    columns = (
        [side("ours", "ours", name), side("paper", "paper")] if paper else [side(name, "ours")]
    )
    if quantity == "r2_scalar":
        columns += [side("diff.", "difference", form=_signed(form))] if paper else []
        columns += [Column("R2", "r2", number), Column("body", "r2_body", number)]
    return columns


def _signed(form: Format) -> Format:
    return lambda value: "-" if value is None else ("+" if value >= 0 else "") + form(value)


def _largest(row: tuple[str, dict[str, Any]]) -> str:
    quantity, summary = row
    if summary["at"] is None:
        return "-"
    difference = _signed(QUANTITIES[quantity][1])(summary["largest_difference"])
    return f"{difference} at {summary['at']}"


SUMMARY = (  # of (quantity, summary)
    Column("ours and the paper's", lambda row: QUANTITIES[row[0]][0], words=True),
    Column("blocks", lambda row: row[1]["blocks"]),
    Column("correlation", lambda row: row[1]["pearson"], digits(4)),
    Column("largest difference", _largest),
)
