"""Results -> SVG -> one HTML page. Pure: no torch, nothing is computed but what is drawn.

from howlinear.report import draw, page, read_run

runs = [read_run("runs/demo")]
figures = draw(runs)
html = page(runs, figures)
"""

from howlinear.report.figures import draw
from howlinear.report.page import page
from howlinear.report.runs import Run, read_run, read_runs

__all__ = ["Run", "draw", "page", "read_run", "read_runs"]
