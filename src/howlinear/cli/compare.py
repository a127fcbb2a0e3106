"""`howlinear compare`: profiles side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, show
from howlinear.cli.printer import Column, cut, or_dash, print_table, write, write_notes
from howlinear.records.words import bar, between, correlation, number, strip, title, with_se


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders, two or more.", metavar="RUN...")],
    out: Annotated[Path | None, Option("--out", "-o", help="JSON file to write.")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Compare profiles: correlations and shifts with intervals; maps of one text on another."""
    from howlinear.profiling import comparing
    from howlinear.records import files

    if out is not None:
        files.check_file(out)
    result = comparing.compare_runs(runs)
    result.about.update(made_by())
    write = (lambda: files.write_json(out, result.to_dict())) if out else (lambda: None)
    show(result, show_comparison, out, as_json, write)


# -- tables


BAR = 6  # cells of a bar
CROSSED = (
    Column("fitted on", "fit", words=True),
    Column("scored on", "scored", words=True),
    Column("mean R2", "mean", between),
)


def show_comparison(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The tables that `howlinear compare` prints."""
    names = [run["name"] for run in data["runs"]]
    for name, run in zip(names, data["runs"], strict=True):
        model, text = run["model"] or {}, run["corpus"] or {}
        line = f"{name}: {title(model.get('id', '?'))}, {text.get('name', '?')}"
        write(console, line, width=console.width)
    _show_strips(console, names, blocks)
    bars = len(names) * (BAR + 13) <= console.width - 3
    columns = [_run_column(name, i, bars) for i, name in enumerate(names)]
    print_table(console, (Column("#", "index"), *columns), blocks)
    for pair in data["pairs"]:
        _show_pair(console, pair)
    if data["crossed"]:
        write(console)
        print_table(console, CROSSED, data["crossed"])
    write_notes(console, data["notes"])


def _show_strips(console: Console, names: list[str], blocks: list[dict[str, Any]]) -> None:
    """A line for each run, with a character for each block as high as its R2; long ones are wrapped."""
    label = min(max(map(len, names)), console.width // 3)
    wide = max(console.width - label - 1, 10)
    for start in range(0, len(blocks), wide):
        part = blocks[start : start + wide]
        for i, name in enumerate(names):
            r2 = [None if b["runs"][i] is None else b["runs"][i]["r2"] for b in part]
            write(console, f"{cut(name, label):{label}} {strip(r2)}", width=console.width)
    write(console, "R2 over depth: one character a block, the highest is 1", width=console.width)


def _run_column(name: str, i: int, bars: bool) -> Column:
    """R2 of the i-th run, with a bar where there is room."""

    def cell(run: dict[str, Any] | None) -> str:
        r2, se = (None, None) if run is None else (run["r2"], run["r2_se"])
        return f"{with_se(r2, se)} {bar(r2, BAR):{BAR}}" if bars else with_se(r2, se)

    return Column(name, lambda block: block["runs"][i], cell)


def _show_pair(console: Console, pair: dict[str, Any]) -> None:
    write(console)
    write(console, f"{pair['a']} to {pair['b']}, with 95 % intervals over folds:")
    write(console, f"  correlation over depth {between(pair['pearson'])}")
    write(console, f"  of ranks {correlation(pair['spearman'])}, interval over blocks")
    write(console, f"  mean shift of R2 {between(pair['mean_shift'])}")
    size, noise = (number(pair[f"mean_size_{of}"]) for of in ("of_shift", "by_noise"))
    write(console, f"  mean size of the shifts {size}; of noise alone about {noise}")
    at, largest = or_dash(pair["largest_shift_at"]), between(pair["largest_shift"])
    write(console, f"  largest at block {at}: {largest}, for the largest of all blocks")
