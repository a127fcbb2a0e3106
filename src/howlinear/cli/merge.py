"""`howlinear merge`: runs or shards added up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, progress_bars, show
from howlinear.cli.profile_table import next_step, show_profile
from howlinear.run import room


def merge(
    runs: Annotated[
        list[Path], Argument(help="Run folders or shards, two or more.", metavar="RUN...")
    ],
    out: Annotated[Path, Option("--out", "-o", help="Run folder to write.")],
    overwrite: flags.Overwrite = False,
    as_json: flags.AsJson = False,
) -> None:
    """Add runs or shards from several machines, texts or days up to one run."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise ValueError(f"{out} is not empty: name another folder with -o, or pass --overwrite")
    from howlinear.profiling.merging import merge_runs
    from howlinear.records.files import check_writable

    check_writable(out / "profile.json", "name another folder with -o")
    needed = sum(path.stat().st_size for path in runs[0].rglob("*.safetensors"))
    room.check_disk(needed, "the sum needs", out, "name another place with -o")
    with progress_bars() as begin:
        result = merge_runs(runs, out, begin("solving", 0), overwrite=overwrite)
    result.about.update(made_by())
    then = next_step(out, result.blocks)
    show(result, show_profile, out, as_json, lambda: result.save(out), then)
