"""`howlinear merge`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from howlinear.cli.parts import (
    AsJson,
    Overwrite,
    progress_bars,
    show,
    versions,
)
from howlinear.cli.tables.profile import show_profile


def merge(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or shards, two or more.", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder to write.")],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Add runs of different machines, texts or days up to one run."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise ValueError(f"{out} is not empty: name another folder with -o, or pass --overwrite")
    from howlinear.profiling.merging import merge_runs

    with progress_bars() as begin:
        result = merge_runs(runs, out, begin("solving", 0))
    result.about.update(command=shlex.join(["howlinear", *sys.argv[1:]]), versions=versions())
    result.save(out)
    show(result, show_profile, out, as_json)
