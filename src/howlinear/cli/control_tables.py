"""The tables that `howlinear control` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from howlinear.cli.printer import Column, digits, print_table, write, write_notes
from howlinear.records.words import known, number, plural, signed, span, title, with_se

Row = dict[str, Any]


def show_random_init(console: Console, data: dict[str, Any], blocks: list[Row]) -> None:
    """The table of `howlinear control random-init`."""
    settings, summary = data["settings"], data["summary"]
    write(
        console,
        f"{title(data['model']['id'])}, {plural(len(blocks), 'block')}, {settings['tokens']} tokens",
    )
    columns = (
        Column("#", "index"),
        Column("R2 trained", lambda b: with_se(b["r2"], b["r2_se"])),
        Column("body", "r2_body", number),
        Column(f"{settings['seeds']} untrained", lambda b: span(b["low"], b["high"])),
        Column("body untrained", _body_span),
        Column("", _place, words=True),
    )
    print_table(console, columns, blocks)
    shuffled = settings["weights"] == "shuffled"
    write(
        console,
        f"untrained: {'their own weights, permuted' if shuffled else 'fresh weights'}. "
        f"Trained R2 is below their range in {summary['below']} of {len(blocks)} "
        f"blocks and above it in {summary['above']}; mean {number(summary['mean_trained'])} "
        f"trained, {number(summary['mean_untrained'])} untrained; spread over depth "
        f"{number(summary['range_trained'])} and {number(summary['range_untrained'])}",
    )
    write_notes(console, data["notes"])


def _body_span(block: Row) -> str:
    scores = known(untrained["r2_body"] for untrained in block["untrained"])
    return span(min(scores, default=None), max(scores, default=None))


def _place(block: Row) -> str:
    r2, low, high = block["r2"], block["low"], block["high"]
    if len(known([r2, low, high])) < 3:
        return "-"
    return "below" if r2 < low else "above" if r2 > high else "inside"


def _value(group: str, name: str) -> Any:
    return lambda block: block[group][name]["value"]


CROSS_FEED = (
    Column("a", "index"),
    Column("b", "index_b"),
    Column("AA", _value("cells", "aa"), number),
    Column("AB", _value("cells", "ab"), number),
    Column("BA", _value("cells", "ba"), number),
    Column("BB", _value("cells", "bb"), number),
    Column("A→B", _value("cells", "a_moved"), number),
    Column("B→A", _value("cells", "b_moved"), number),
    Column("B-A", _value("split", "difference"), digits(3, signed)),
    Column("weights", _value("split", "weights"), digits(3, signed)),
    Column("inputs", _value("split", "inputs"), digits(3, signed)),
)


def show_cross_feed(console: Console, data: dict[str, Any], blocks: list[Row]) -> None:
    """The two-way table of `howlinear control cross-feed`."""
    write(console, f"A: {title(data['model']['id'])}", width=console.width)
    write(console, f"B: {title(data['model_b']['id'])}", width=console.width)
    print_table(console, CROSS_FEED, blocks)
    summary = data["summary"]
    write(
        console,
        "AB: R2 of A's weights on B's inputs; A→B: of A's weights on its own inputs, moved to the "
        "mean and covariance of B's",
    )
    write(
        console,
        f"mean of R2 of B less R2 of A: {signed(summary['difference'], 3)}, of which weights make "
        f"{signed(summary['weights'], 3)} and inputs {signed(summary['inputs'], 3)}",
    )


def show_matched(console: Console, data: dict[str, Any], blocks: list[Row]) -> None:
    """The table of `howlinear control matched`."""
    settings = data["settings"]
    write(
        console,
        f"{title(data['model']['id'])}, {plural(len(blocks), 'block')}, {settings['tokens']} tokens",
    )
    inputs = ["own", "gaussian", "whitened", *(f"x{scale:g}" for scale in settings["scales"])]
    columns = (
        Column("#", "index"),
        *(Column(name, _value("r2", name), number) for name in inputs),
        Column("predicted", lambda b: b["predicted"] and b["predicted"]["r2"]["value"], number),
        Column("its Gaussian", lambda b: b["predicted"] and b["predicted"]["r2_gaussian"], number),
    )
    print_table(console, columns, blocks)
    write(
        console,
        "R2 on own inputs; on Gaussian ones of the same mean and covariance; on own inputs whitened "
        "and scaled. predicted: the map from weights, mean and covariance alone, on own and on "
        "Gaussian inputs",
    )
    write_notes(console, data["notes"])


def show_training(console: Console, data: dict[str, Any], blocks: list[Row]) -> None:
    """The table of `howlinear control checkpoints`: a row for each checkpoint."""
    write(console, f"{data['asked']['model']}, {plural(len(blocks), 'block')}", width=console.width)
    room = max(1, (console.width - 28) // 6)
    step = max(1, -(-len(blocks) // room))  # every step-th block, as many as fit
    shown = [Column(str(b["index"]), str(b["index"]), number) for b in blocks[::step]]
    columns = (Column("checkpoint", "name", words=True), Column("mean", "mean", number), *shown)
    rows = []
    for i, checkpoint in enumerate(data["checkpoints"]):
        scores = {str(b["index"]): b["r2"][i] for b in blocks}
        rows.append({"name": checkpoint["name"], "mean": _mean(scores.values()), **scores})
    print_table(console, columns, rows)


def _mean(scores: Iterable[float | None]) -> float | None:
    numbers = known(scores)
    return sum(numbers) / len(numbers) if numbers else None
