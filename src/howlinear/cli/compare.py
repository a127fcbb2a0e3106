"""`howlinear compare`: profiles side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, show
from howlinear.cli.tables.compare import show_comparison


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders, two or more.", metavar="RUN...")],
    out: Annotated[Path | None, Option("--out", "-o", help="JSON file to write.")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Compare profiles: correlations and shifts with intervals; maps of one text on another."""
    from howlinear.profiling import comparing
    from howlinear.records import files

    result = comparing.compare_runs(runs)
    result.about.update(made_by())
    if out is not None:
        files.write_json(out, result.to_dict())
    show(result, show_comparison, out, as_json)
