"""`howlinear report`: one page from run folders, and figures as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import say

Runs = Annotated[
    list[Path],
    Argument(
        help="Run folders; several have a strip each and are drawn on the same axes.",
        metavar="RUN...",
    ),
]
Page = Annotated[
    Path | None,
    Option("--out", "-o", help="HTML file to write; report.html in the first run's folder."),
]
Figures = Annotated[
    Path | None,
    Option(
        help="Folder for the figures as SVG and CSV files; with the package typst also PNG and PDF."
    ),
]


def report(
    runs: Runs, out: Page = None, figures: Figures = None, as_json: flags.AsJson = False
) -> None:
    """Write one page: a verdict for every block, figures, and how it was measured."""
    from howlinear.records import files
    from howlinear.report import draw, page, read_runs
    from howlinear.report.files import check_folder, write_figures

    results = read_runs(runs)
    out = runs[0] / "report.html" if out is None else out
    files.check_file(out)
    if figures is not None:
        check_folder(figures)
    drawings = draw(results)
    with files.atomic(out) as temporary:
        temporary.write_text(page(results, drawings), encoding="utf-8")
    written = write_figures(drawings, figures) if figures is not None else []
    if as_json:
        print(json.dumps({"page": str(out), "figures": [str(path) for path in written]}, indent=1))
        return
    if figures is not None and not any(path.suffix == ".png" for path in written):
        say("SVG and CSV alone: `pip install typst` adds PNG and PDF")
    for place in ([figures] if figures is not None else []) + [out]:
        print(place)
