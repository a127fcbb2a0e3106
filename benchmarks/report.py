"""The page of a run: how large it is, how long it takes to write and to draw in a browser.

    python benchmarks/report.py [runs/demo]

Without a run, one of 30 planted blocks with everything that a report draws. Drawing is timed by the
browser itself, from the start of navigation to the first frame after the page is complete, with a
cold context each time. Needs chromium and playwright (extra dev).
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its signal.py would hide the standard library's

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from howlinear.report import draw, page, read_runs
from reports import planted_run

DRAWN = """new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"""


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else planted_run(Path(place) / "run")
        out = Path(place) / "page.html"
        began = time.perf_counter()
        runs = read_runs([run])
        text = page(runs, draw(runs))
        written = time.perf_counter() - began
        out.write_text(text, encoding="utf-8")
        print(
            f"{len(runs[0].blocks)} blocks: {len(text.encode()) / 1e3:.0f} KB, written in {written:.2f} s"
        )
        with sync_playwright() as play:
            browser = play.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            took = []
            for _ in range(7):
                context = browser.new_context()
                tab = context.new_page()
                tab.goto(out.as_uri())
                took.append(tab.evaluate(DRAWN))
                context.close()
            browser.close()
        shown = ", ".join(f"{t:.0f}" for t in took)
        print(
            f"drawn after {statistics.median(took):.0f} ms ({shown}; the first starts the browser's parts)"
        )


if __name__ == "__main__":
    main()
