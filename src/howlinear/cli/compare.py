"""`howlinear compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from howlinear.cli.parts import (
    AsJson,
    show,
    versions,
)
from howlinear.cli.tables.compare import show_comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Profiles side by side: correlations and shifts with intervals; maps of one text on another."""
    from howlinear.profiling import comparing
    from howlinear.records import files

    result = comparing.compare_runs(runs)
    result.about.update(command=shlex.join(["howlinear", *sys.argv[1:]]), versions=versions())
    if out is not None:
        files.write_json(out, result.to_dict())
    show(result, show_comparison, out, as_json)
