"""Numbers and strings as a person reads them. No sibling is imported.

Strings from outside (model names, module paths, tokens) may hold anything; `visible` shows what
has no shape of its own, and what would turn the text around it, by its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


def visible(text: object) -> str:
    """The same text with control characters, bidi marks and lone surrogates spelled out."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def known(value: object) -> float | None:
    """A finite number, or None for whatever else a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def compact(value: float | None) -> str:
    """Three figures, whatever the size."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3g}"


def percent(nats: float | None) -> str:
    """A difference in nats a token as a change of perplexity: +3.3 %."""
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


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} is named twice: name different runs")


def ranges(indices: Sequence[int]) -> str:
    """3, 5, 9-12, as `--blocks` takes it."""
    parts: list[list[int]] = []
    for i in sorted(indices):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)
