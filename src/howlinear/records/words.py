"""Numbers as text, about four digits whatever their size, and text that is safe to print.

number(0.8871)            0.887
signed(1234567.0)         +1.2e6
with_se(0.8871, 0.0031)   0.887 ±.003
count(2_320_000)          2.32M
bar(0.53)                 █████▎
strip([0.1, 0.5, None])   ▂▅·
escaped("a\\x1b[31m b")    a\\x1b[31m b   (characters that are not printable become codes)
spelled("Δ ±", "ascii")   d +-

A missing number is `-`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

HEIGHTS = "▁▂▃▄▅▆▇█"
EIGHTHS = ("", *"▏▎▍▌▋▊▉")
SPELLING = {"±": "+-", "Δ": "d", "…": "...", "→": "->", "␣": "_", "·": "."}
SPELLING |= dict(zip("▁▂▃▄▅▆▇", "..--==#", strict=True))  # heights
SPELLING |= dict.fromkeys("▌▋▊▉█", "#") | dict.fromkeys("▏▎▍", " ")  # cells of a bar, rounded


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Fewer digits from 100 on, powers of ten from 100,000 on: nine characters at most."""
    if value is None or value != value:
        return "-"
    if abs(value) >= 1e5:
        return power(value, sign)
    return f"{value:{sign}.{digits if abs(value) < 100 else max(digits - 2, 0)}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """A difference, with its sign."""
    return number(value, digits, "+")


def perplexity(value: float | None) -> str:
    """With two decimals below 100,000: two perplexities are often close."""
    return f"{value:.2f}" if value is not None and value < 1e5 else number(value)


def power(value: float | None, sign: str = "", digits: int = 1) -> str:
    """4.0e3, without leading zeros in the exponent."""
    if value is None or value != value:
        return "-"
    mantissa, e, exponent = f"{value:{sign}.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa  # infinity has no exponent


def with_se(value: float | None, se: float | None, digits: int = 3) -> str:
    """A number and its standard error, where there is one."""
    return number(value, digits) + error(se, digits)


def error(se: float | None, digits: int) -> str:
    return "" if se is None or se != se else f" ±{number(se, digits).removeprefix('0')}"


def span(low: float | None, high: float | None, digits: int = 3) -> str:
    ends = (number(low, digits), number(high, digits))
    return "-" if low is None or high is None else " to ".join(ends)


def between(estimate: dict[str, float | None], digits: int = 3) -> str:
    """A number with its 95 % interval, where there is one."""
    value, low, high = (estimate[k] for k in ("value", "low", "high"))
    shown = number(value, digits)
    return shown if low is None or high is None else f"{shown} ({span(low, high, digits)})"


def correlation(estimate: dict[str, float | None]) -> str:
    """The same for a correlation over blocks, which has no value where they are too few."""
    return "- (8 blocks or more are needed)" if estimate["value"] is None else between(estimate, 2)


def count(value: float, sign: str = "") -> str:
    """2.32M, 1.00B"""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:{sign}.2f}{name}"
    return f"{value:{sign}.0f}"


def plural(number: int, noun: str) -> str:
    """1 block, 2 blocks"""
    return f"{number} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    """1.2 GB"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """About 40 s, about 4 min, about 2.5 h."""
    if seconds < 90:
        return f"about {max(round(seconds, -1 if seconds >= 10 else 0), 1):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def bar(share: float | None, cells: int = 10) -> str:
    """A bar for a share from 0 to 1; empty below 0 and for a missing number."""
    if share is None or not share > 0:
        return ""
    whole, part = divmod(round(min(share, 1.0) * cells * 8), 8)
    return "█" * whole + EIGHTHS[part]


def strip(shares: Iterable[float | None]) -> str:
    """A character for each share from 0 to 1, as high as the share; a point for a missing number."""
    return "".join(
        "·" if share is None or share != share else HEIGHTS[round(7 * min(1.0, max(0.0, share)))]
        for share in shares
    )


def ranges(indices: Iterable[int]) -> str:
    """3,5,9-12, as `--blocks` takes it."""
    parts: list[list[int]] = []
    for i in sorted(indices):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def known(values: Iterable[Any]) -> list[Any]:
    """The values that are numbers."""
    return [v for v in values if v is not None and v == v]


def compact(value: float | None) -> str:
    """Three digits, whatever the size."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3g}"


def percent(nats: float | None) -> str:
    """A difference in nats per token as a change of perplexity: +3.3 %."""
    if nats is None or not math.isfinite(nats):
        return "-"
    change = 100 * math.expm1(min(nats, 700.0))
    if abs(change) >= 1e4:
        return f"{change:+.1e} %"
    return f"{change:+.{1 if abs(change) < 100 else 0}f} %"


def percent_se(nats: float | None, se: float | None) -> str:
    """The standard error of that change, in the same unit."""
    if nats is None or se is None or not (math.isfinite(nats) and math.isfinite(se)):
        return ""
    size = 100 * math.exp(min(nats, 700.0)) * se
    return f" ± {size:.1e}" if size >= 1e4 else f" ± {size:.{1 if size < 100 else 0}f}"


def finite(value: object) -> float | None:
    """A finite number; None for any other value that a file may have in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    parts = [path.absolute().parts for path in paths]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} is named twice: name different runs")


def title(model: str) -> str:
    """A model's name for a title: of an absolute path its last part."""
    path = PureWindowsPath(model)  # knows both kinds of slashes, and drives
    return path.name if path.root and path.name else model


def escaped(text: object) -> str:
    """Text from outside (model names, module paths, tokens) on one line, safe to print.

    A code stands in place of each character that is not printable: control characters, line breaks
    and characters that change the direction of writing.
    """
    return "".join(c if c.isprintable() else _code(c) for c in str(text))


def spelled(text: str, encoding: str) -> str:
    """The text in characters that the encoding of a terminal or a file has."""
    if _holds(text, encoding):
        return text
    return "".join(c if _holds(c, encoding) else SPELLING.get(c, _code(c)) for c in text)


def _holds(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
