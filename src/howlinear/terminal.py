"""Results on a terminal: tables that fit 80 columns and say more on wider ones.

Strings from outside (model names, module paths) are shown as text: no markup, no control codes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from howlinear.records import BlockProfile

COLOURS = {
    "broadly linear": "green",
    "partly linear": "yellow",
    "outlier-concentrated": "yellow",
    "first-position only": "magenta",
    "nonlinear": "red",
}


def plain(text: object, width: int | None = None) -> Text:
    """Text from outside, without control characters, cut in the middle to `width`."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    if width is not None and len(shown) > width:
        head = (width - 1) // 2
        shown = shown[:head] + "…" + shown[len(shown) - (width - 1 - head) :]
    return Text(shown)


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _wide(b: BlockProfile) -> list[str]:
    condition = "-" if b.input_condition is None else f"{b.input_condition:.1e}"
    return [
        number(b.first_share),
        number(b.stream_error, 4),
        f"{b.input_rank}/{b.d_in}",
        condition,
        number(b.rows_per_column, 1),
    ]


def show_profile(console: Console, data: dict[str, Any], blocks: list[BlockProfile]) -> None:
    """The table that `howlinear profile` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    console.print(plain(f"{model['id']}, {model['dtype']}, {len(blocks)} blocks"))
    scheme = f"{settings['folds']} folds" if settings["folds"] else "one 80/20 split"
    console.print(
        plain(
            f"{text['name']} {text['part']}: {settings['tokens']} tokens in windows of "
            f"{settings['window']}, protocol {settings['protocol']}, {scheme}"
        )
    )
    wide = console.width >= 120
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("module", overflow="ellipsis", no_wrap=True)
    for name in ("R2 ± se", "body", "scalar", "feat.", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("first", "stream err.", "input rank", "condition", "rows/col."):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    room = max(12, console.width - (60 if not wide else 113))
    for b in blocks:
        se = "" if b.r2_se is None else f" ±{b.r2_se:.3f}".replace("±0.", "±.")
        cells = [
            number(b.r2) + se,
            number(b.r2_body),
            number(b.r2_scalar),
            number(b.r2_feature["median"], 2),
            "-" if b.effective_rank is None else str(b.effective_rank),
        ]
        kind = Text(b.kind, style=COLOURS.get(b.kind, ""))
        extra = _wide(b) if wide else []
        table.add_row(str(b.index), plain(b.path, room), *cells, *extra, kind)
    console.print(table)
    s = data["summary"]
    console.print(
        f"R2 from {number(s['r2_min'])} (block {s['r2_min_block']}) to {number(s['r2_max'])} "
        f"(block {s['r2_max_block']})"
    )
    if s["largest_jump"] is not None:
        pair = f"blocks {s['largest_jump_after']} and {s['largest_jump_before']}"
        console.print(f"largest jump {number(s['largest_jump'])}, between {pair}")
    console.print(f"rank correlation of R2 with depth {number(s['depth_spearman'], 2)}")
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))
