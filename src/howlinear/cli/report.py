"""`howlinear report`: run folders -> one page, and figures as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from howlinear.cli.parts import AsJson, say


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; several are laid over one another.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write; report.html in the first run if not given."
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="A folder for the figures: SVG and CSV, PNG and PDF too with the plot extra."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One page that shows it all: figures, a verdict for every block, and how it was measured."""
    from howlinear.records import files
    from howlinear.report import draw, page, read_runs
    from howlinear.report.files import write_figures

    found = read_runs(runs)
    drawn = draw(found)
    out = runs[0] / "report.html" if out is None else out
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name a file with -o, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}: make it, or name another place with -o")
    with files.atomic(out) as temporary:
        temporary.write_text(page(found, drawn), encoding="utf-8")
    written = write_figures(drawn, figures) if figures is not None else []
    if as_json:
        told = {"page": str(out), "figures": [str(path) for path in written]}
        print(json.dumps(told, indent=1))
        return
    if figures is not None and not any(path.suffix == ".png" for path in written):
        say("SVG and CSV alone: pip install 'howlinear[plot]' for PNG and PDF")
    for place in ([figures] if figures is not None else []) + [out]:
        print(place)
