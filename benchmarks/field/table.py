"""Rows of results as a Markdown table and as a figure of nats against size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from howlinear.report.canvas import Canvas, Panel, Scale
from howlinear.report.figure import Entry, key, looks
from howlinear.report.svg import standalone

Row = dict[str, Any]
MOST = 2.0  # nats: worse models stand at the upper edge


def markdown(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """By size asked for, the best first; `texts` are the names of the texts, that of the run first."""
    heads = ["method", "removed (feed-forward)"]
    heads += [f"nats, {name}" for name in texts]
    heads += ["KL", "bytes, M", "prefill", "CPU seconds", "variant"]
    lines = []
    for size in sorted({row["size"] for row in rows}):
        lines += [f"\nAt {size:.0%} of all parameters:\n", line(heads), line(["---"] * len(heads))]
        at = [row for row in rows if row["size"] == size]
        lines += [line(cells(row, texts)) for row in sorted(at, key=lambda r: nats(r, texts[0]))]
    return "\n".join(lines)


def summary(rows: Sequence[Row], text: str) -> str:
    """Nats of each method by size; the lowest of each size in bold."""
    sizes = sorted({row["size"] for row in rows})
    by_method: dict[str, dict[float, Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["size"]] = row
    least = {size: min(nats(r, text) for r in rows if r["size"] == size) for size in sizes}

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        told = f"{nats(row, text):+.3f} ± {row['texts'][text]['delta_nll_se']:.3f}"
        return f"**{told}**" if nats(row, text) == least[row["size"]] else told

    def rank(method: str) -> list[float]:
        return [nats(r, text) if (r := by_method[method].get(s)) else math.inf for s in sizes]

    lines = [line(["method", *(f"{size:.0%}" for size in sizes)]), line(["---"] * (1 + len(sizes)))]
    for method in sorted(by_method, key=rank):
        lines.append(line([method, *(cell(by_method[method].get(size)) for size in sizes)]))
    return f"\nNats, {text}:\n\n" + "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def nats(row: Row, text: str) -> float:
    return float(row["texts"][text]["delta_nll"])


def cells(row: Row, texts: Sequence[str]) -> list[str]:
    losses = [row["texts"][name] for name in texts]
    return [
        row["method"],
        f"{row['removed']:.2%} ({row['feed_forward_removed']:.1%})",
        *(f"{x['delta_nll']:+.4f} ± {x['delta_nll_se']:.4f}" for x in losses),
        f"{losses[0]['kl']:.4f}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['prefill']:.2f}",
        f"{row['seconds']:.0f}",
        row["note"],
    ]


def figure(rows: Sequence[Row], text: str) -> str:
    """An SVG file: nats per token more than the original, on a log scale, against parameters removed."""
    canvas = Canvas(860, 480)
    every = [min(max(nats(row, text), 1e-3), MOST) for row in rows]
    removed = max(row["removed"] for row in rows)
    y = Scale(min(every) * 0.8, MOST, 430, 64, log=True)
    panel = Panel(canvas, Scale(0.0, 105 * removed, 66, 846), y)
    panel.frame("all parameters removed, %", "nats per token more than the original")
    entries = []
    for i, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        colour, shape = looks(i)
        mode = "dash" if i >= 6 else ""  # colours repeat
        entries.append(Entry(method, colour, shape, mode))
        own = sorted((r for r in rows if r["method"] == method), key=lambda r: r["removed"])
        panel.line([(100 * r["removed"], nats(r, text)) for r in own], colour, mode)
        for r in own:
            loss = r["texts"][text]
            about = f"{method}: {r['removed']:.1%} removed, {loss['delta_nll']:+.4f} ± {loss['delta_nll_se']:.4f}"
            panel.dot(100 * r["removed"], loss["delta_nll"], colour, shape=shape, about=about)
    key(canvas, entries, 66, 20)
    return standalone(canvas, f"Loss against parameters removed, {text}")
