"""What `howlinear compare` and `howlinear control` print: profiles side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from howlinear.cli.tables import print_table, write
from howlinear.records.words import bar, between, known, number, signed, span, with_se

BAR = 6  # cells of a bar that stands beside others


def show_comparison(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The tables that `howlinear compare` prints."""
    names = [run["name"] for run in data["runs"]]
    for name, run in zip(names, data["runs"], strict=True):
        model, text = run["model"] or {}, run["corpus"] or {}
        said = (model.get("id", "?"), text.get("name", "?"))
        write(console, f"{name}: {said[0]}, {said[1]}", width=console.width)
    bars = len(names) * (BAR + 13) <= console.width - 3
    rows = [(str(b["index"]), *(_r2(run, bars) for run in b["runs"])) for b in blocks]
    print_table(console, ("#", *names), rows)
    for pair in data["pairs"]:
        _show_pair(console, pair)
    if data["crossed"]:
        write(console)
        crossed = [(c["fit"], c["scored"], between(c["mean"])) for c in data["crossed"]]
        columns = ("fitted on", "scored on", "mean R2")
        print_table(console, columns, crossed, words=columns[:2])
    for note in data["notes"]:
        write(console, f"note: {note}")


def _r2(run: dict[str, Any] | None, bars: bool) -> str:
    r2, se = (None, None) if run is None else (run["r2"], run["r2_se"])
    return f"{with_se(r2, se)} {bar(r2, BAR):{BAR}}" if bars else with_se(r2, se)


def _show_pair(console: Console, pair: dict[str, Any]) -> None:
    write(console)
    write(console, f"{pair['a']} to {pair['b']}, with 95 % intervals over folds:")
    depth, ranks = between(pair["pearson"]), between(pair["spearman"])
    write(console, f"  correlation over depth {depth}, of ranks {ranks}")
    mean, extent = between(pair["mean_shift"]), between(pair["mean_size_of_shift"])
    write(console, f"  mean shift of R2 {mean}, mean size {extent}")
    largest = between(pair["largest_shift"])
    write(console, f"  largest at block {pair['largest_shift_at']}: {largest}")


def show_random_init(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control random-init`."""
    s, found = data["settings"], data["summary"]
    write(console, f"{data['model']['id']}, {len(blocks)} blocks, {s['tokens']} tokens")
    said = "their own weights, permuted" if s["weights"] == "shuffled" else "fresh weights"
    columns = ("#", "R2 trained", "body", f"{s['seeds']} untrained", "body untrained", "")
    print_table(console, columns, [_random_init_row(b) for b in blocks], words=("",))
    write(
        console,
        f"untrained: {said}. Trained R2 is below their band in {found['below']} of {len(blocks)} "
        f"blocks and above it in {found['above']}; mean {number(found['mean_trained'])} trained, "
        f"{number(found['mean_untrained'])} untrained; range over depth "
        f"{number(found['range_trained'])} and {number(found['range_untrained'])}",
    )


def _random_init_row(b: dict[str, Any]) -> list[str]:
    where = "-"
    if len(known([b["r2"], b["low"], b["high"]])) == 3:
        where = "below" if b["r2"] < b["low"] else "above" if b["r2"] > b["high"] else "inside"
    body = known(u["r2_body"] for u in b["untrained"])
    return [
        str(b["index"]),
        with_se(b["r2"], b["r2_se"]),
        number(b["r2_body"]),
        span(b["low"], b["high"]),
        span(min(body, default=None), max(body, default=None)),
        where,
    ]


def show_cross_feed(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The two-way table of `howlinear control cross-feed`."""
    write(console, f"A: {data['model']['id']}", width=console.width)
    write(console, f"B: {data['model_b']['id']}", width=console.width)
    names = ("aa", "ab", "ba", "bb", "a_moved", "b_moved")
    rows = []
    for b in blocks:
        cells = [number(b["cells"][name]["value"]) for name in names]
        split = [
            signed(b["split"][name]["value"], 3) for name in ("difference", "weights", "inputs")
        ]
        rows.append([str(b["index"]), str(b["index_b"]), *cells, *split])
    columns = ("a", "b", "AA", "AB", "BA", "BB", "A→B", "B→A", "B-A", "weights", "inputs")
    print_table(console, columns, rows)
    found = data["summary"]
    write(
        console,
        "AB: R2 of A's weights on B's inputs; A→B: of A's weights on its own inputs, moved to the "
        "mean and covariance of B's",
    )
    write(
        console,
        f"mean of R2 of B less R2 of A: {signed(found['difference'], 3)}, of which weights make "
        f"{signed(found['weights'], 3)} and inputs {signed(found['inputs'], 3)}",
    )


def show_matched(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control matched`."""
    s = data["settings"]
    write(console, f"{data['model']['id']}, {len(blocks)} blocks, {s['tokens']} tokens")
    names = ["own", "gaussian", "whitened", *(f"x{scale:g}" for scale in s["scales"])]
    rows = []
    for b in blocks:
        cells = [number(b["r2"][name]["value"]) for name in names]
        told = b["predicted"]
        extra = ["-", "-"]
        if told is not None:
            extra = [number(told["r2"]["value"]), number(told["r2_gaussian"])]
        rows.append([str(b["index"]), *cells, *extra])
    print_table(console, ("#", *names, "predicted", "its Gaussian"), rows)
    write(
        console,
        "R2 on own inputs; on Gaussian ones of the same mean and covariance; on own inputs whitened "
        "and scaled. predicted: the map from weights, mean and covariance alone, on own and on "
        "Gaussian inputs",
    )
    for note in data["notes"]:
        write(console, f"note: {note}")


def show_training(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control checkpoints`: a row a checkpoint."""
    write(console, f"{data['asked']['model']}, {len(blocks)} blocks", width=console.width)
    room = max(1, (console.width - 28) // 6)
    step = -(-len(blocks) // room)  # as many as fit
    shown = blocks[::step] if blocks else []
    rows = []
    for i, c in enumerate(data["checkpoints"]):
        every = known(b["r2"][i] for b in blocks)
        mean = sum(every) / len(every) if every else None
        rows.append([c["name"], number(mean), *(number(b["r2"][i]) for b in shown)])
    columns = ("checkpoint", "mean", *(str(b["index"]) for b in shown))
    print_table(console, columns, rows, words=("checkpoint",))
