"""Statistics of results: ratios of sums with standard errors, correlations, a profile's summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from howlinear.records.fields import BlockProfile


def summarise(blocks: list[BlockProfile]) -> dict[str, Any]:
    """Heterogeneity over depth: range, largest jump between neighbours, rank correlation."""
    values = [b.r2 for b in blocks]
    jumps = [abs(b - a) for a, b in pairwise(values)]
    jump = max(range(len(jumps)), key=jumps.__getitem__) if jumps else None
    low, high = min(blocks, key=lambda b: b.r2), max(blocks, key=lambda b: b.r2)
    return {
        "r2_min": low.r2,
        "r2_min_block": low.index,
        "r2_max": high.r2,
        "r2_max_block": high.index,
        "largest_jump": None if jump is None else jumps[jump],
        "largest_jump_after": None if jump is None else blocks[jump].index,
        "largest_jump_before": None if jump is None else blocks[jump + 1].index,
        "depth_spearman": spearman([float(b.index) for b in blocks], values),
    }


def ratio(sums: Iterable[Sequence[float]]) -> tuple[float, float]:
    """(r, standard error) of r = sum a / sum b over K independent groups, each with sums (a, b).

    NaN where sum b is not positive; the standard error is NaN for fewer than two groups too.
    """
    pairs = list(sums)
    total = sum(b for _, b in pairs)
    if not total > 0:
        return math.nan, math.nan
    value = sum(a for a, _ in pairs) / total
    return value, ratio_se([a - value * b for a, b in pairs], total)


def ratio_se(deviations: Sequence[float], total: float) -> float:
    """sqrt(K / (K - 1) sum d^2) / total: the standard error of a ratio r of sums over K groups.

    `deviations` are a - r b of each group with sums (a, b), `total` is the sum of b. The linearised
    standard error; NaN for fewer than two groups.
    """
    K = len(deviations)
    if K < 2 or not total > 0:
        return math.nan
    return math.sqrt(K / (K - 1) * sum(d * d for d in deviations)) / total


def spearman(a: list[float], b: list[float]) -> float | None:
    """Rank correlation with ties sharing their mean rank; None where one side does not vary."""
    return pearson(_ranks(a), _ranks(b))


def pearson(x: list[float], y: list[float]) -> float | None:
    """Correlation; None where one side does not vary."""
    if not x:
        return None
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xx = sum((u - mx) ** 2 for u in x)
    yy = sum((v - my) ** 2 for v in y)
    if xx <= 0 or yy <= 0:
        return None
    return sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / math.sqrt(xx * yy)


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            ranks[k] = (i + j) / 2
        i = j + 1
    return ranks
