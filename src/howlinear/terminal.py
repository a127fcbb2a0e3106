"""Results on a terminal: tables that fit 80 columns and say more on wider ones.

Strings from outside (model names, module paths) are shown as text: no markup, no control codes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from howlinear.records import BlockProfile, BlockSwap

COLOURS = {
    "broadly linear": "green",
    "partly linear": "yellow",
    "outlier-concentrated": "yellow",
    "first-position only": "magenta",
    "nonlinear": "red",
}


SAFETY_MEANS = {  # in the order shown
    "likely safe": "likely safe",
    "costly": "costly",
    "sink": "costly unless sink units are kept",
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
        "-" if b.swap_signal is None else f"{b.swap_signal:.3f}",
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
    wide = console.width >= 132
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("module", overflow="ellipsis", no_wrap=True)
    for name in ("R2 ± se", "body", "scalar", "feat.", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("first", "stream err.", "signal", "input rank", "condition", "rows/col."):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    room = max(12, console.width - (60 if not wide else 120))
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
    by_safety: dict[str, list[int]] = {}
    for b in blocks:
        by_safety.setdefault(b.safety, []).append(b.index)
    words = [
        f"{meaning} {ranges(by_safety[word])}"
        for word, meaning in SAFETY_MEANS.items()
        if word in by_safety
    ]
    if words:
        console.print(plain(f"as one matrix, by estimate: {'; '.join(words)}"))
        console.print("`howlinear swap RUN` measures what a swap costs")
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def ranges(indices: list[int]) -> str:
    """3, 5, 9-12, as `--blocks` takes it."""
    parts: list[list[int]] = []
    for i in sorted(indices):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def signed(value: float | None) -> str:
    """A difference in four figures or so, whatever its size."""
    if value is None or value != value:
        return "-"
    digits = 2 if abs(value) < 100 else 0
    return f"{value:+.{digits}f}" if abs(value) < 1e5 else f"{value:+.1e}"


def show_swaps(console: Console, data: dict[str, Any], blocks: list[BlockSwap]) -> None:
    """The table that `howlinear swap` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    console.print(plain(f"{model['id']}, {len(blocks)} blocks, each replaced alone"))
    base = data["base"]
    if base is not None:
        bits = base["bits_per_byte"]
        shown = f"perplexity {base['perplexity']:.2f} ± {base['perplexity_se']:.2f}"
        shown += "" if bits is None else f", {bits:.3f} bits a byte"
        where = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        console.print(plain(f"{shown} as it is ({where})"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    names = ["Δppl ± se", "units", "plain", "zero", "mean", "KL", "top-1"] if base else []
    wide = console.width >= 120
    extra = ["cosine", "rmse", "stream err."] if wide or not base else []
    for name in (*names, *extra, "params", "signal"):
        table.add_column(name, justify="right", no_wrap=True)
    for b in blocks:
        cells = []
        if base is not None:
            se = number(b.delta_ppl_se, 2)  # of one window there is none
            cells += [
                f"{signed(b.delta_ppl)} ±{se}",
                str(len(b.units)),
                signed(b.delta_ppl_plain),
                signed(b.delta_ppl_zero),
                signed(b.delta_ppl_mean),
                number(b.kl),
                number(b.top1),
            ]
        if extra:
            cells += [number(b.cosine), number(b.rmse, 4), number(b.stream_error, 4)]
        signal = "-" if b.swap_signal is None else f"{b.swap_signal:.2g}"
        table.add_row(str(b.index), *cells, f"{-b.params_saved / 1e6:+.2f}M", signal)
    console.print(table)
    if base is not None:
        console.print(
            "Δppl: with the map; plain: plain least squares; zero: removed; mean: constant"
        )
    known = {name: value for name, value in data["signals"].items() if value is not None}
    if known:
        listed = ", ".join(f"{name} {value:+.2f}" for name, value in known.items())
        console.print(plain(f"rank correlation with what plain least squares costs: {listed}"))
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))
