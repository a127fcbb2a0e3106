"""Results as drawings, tables and one self-contained page.

Reads records and the JSON files of run folders; holds the figures of the paper.
No torch, no models.
"""

from howlinear.report.figures import draw
from howlinear.report.page import page
from howlinear.report.runs import Run, read_run, read_runs

__all__ = ["Run", "draw", "page", "read_run", "read_runs"]
