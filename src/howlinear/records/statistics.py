"""Statistics over folds, windows and blocks: ratios of sums, correlations, the jackknife.

    ratio([(1.2, 4.0), (1.4, 5.0)])                 # sum a / sum b, and its standard error
    over_blocks(spearman, depths, r2s(sums)).low    # 95 % interval; no number below 8 blocks
    estimate = jackknife(pearson, [sums_a, sums_b], paired=True, correlation=True)
    estimate.value, estimate.low, estimate.high

`sums` are what a profile keeps of a run: for each block, [SS_res, SS_tot] of each held-out fold.
They give any statistic of R2s without one of the K folds, and K such values give its standard error:
sqrt((K - 1) / K sum (s_f - mean s)^2). Runs on the same windows lose the same fold together
(`paired`), so that a fold that is hard for both does not count as a difference; other runs lose
their folds one run at a time, and variances add. Intervals are 95 %, by Student's t with K - 1
degrees of freedom. Maps of different folds share fit rows, so all of this is an approximation.

An interval of a correlation over blocks takes the blocks for a sample: Fisher's z with variance
1 / (n - 3), for ranks (1 + r^2 / 2) / (n - 3) (Bonett and Wright 2000).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from howlinear.records.fields import BlockProfile
from howlinear.records.words import finite, known

Sums = Sequence[Sequence[Sequence[float]]]  # (blocks, folds, 2)
Statistic = Callable[..., float | None]  # of one list of R2s for each run

MIN_BLOCKS = 8  # of a correlation over blocks: over 7, chance alone reaches 0.75 in one of 20


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where there is none."""

    value: float | None
    se: float | None = None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


# -- ratios and correlations ----------------------------------------------------------------------


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
    """sqrt(K / (K - 1) sum d^2) / total: the linearised standard error of a ratio r over K groups.

    `deviations` are a - r b of each group with sums (a, b), `total` is the sum of b. NaN for fewer
    than two groups.
    """
    K = len(deviations)
    if K < 2 or not total > 0:
        return math.nan
    return math.sqrt(K / (K - 1) * sum(d * d for d in deviations)) / total


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation; None where one side does not vary."""
    if not x:
        return None
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xx = sum((u - mx) ** 2 for u in x)
    yy = sum((v - my) ** 2 for v in y)
    if xx <= 0 or yy <= 0:
        return None
    return sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / math.sqrt(xx * yy)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation with ties sharing their mean rank; None where one side does not vary."""
    return pearson(_ranks(x), _ranks(y))


def over_blocks(
    correlation: Callable[[Sequence[float], Sequence[float]], float | None],
    x: Iterable[float | None],
    y: Iterable[float | None],
) -> Estimate:
    """`pearson` or `spearman` over the blocks that have both numbers; none below MIN_BLOCKS."""
    pairs = [(u, v) for u, v in zip(x, y, strict=True) if finite(u) is not None is not finite(v)]
    n, r = len(pairs), None
    if n >= MIN_BLOCKS:
        r = correlation([float(u or 0) for u, _ in pairs], [float(v or 0) for _, v in pairs])
    if r is None or not abs(r) < 1 - 1e-12:
        return Estimate(r)
    se = math.sqrt((1 + r * r / 2 if correlation is spearman else 1) / (n - 3))  # of atanh r
    low, high = (
        math.tanh(math.atanh(r) + sign * NormalDist().inv_cdf(0.975) * se) for sign in (-1, 1)
    )
    return Estimate(r, se * (1 - r * r), low, high)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]


# -- the jackknife over folds ---------------------------------------------------------------------


def r2s(sums: Sums, without: int | None = None) -> list[float]:
    """R2 of each block, by all folds or all but one."""
    values = []
    for folds in sums:
        kept = [f for i, f in enumerate(folds) if i != without]
        res, tot = (sum(f[k] for f in kept) for k in (0, 1))
        values.append(1 - res / tot if tot > 0 else math.nan)
    return values


def jackknife(
    statistic: Statistic,
    runs: Sequence[Sums],
    *,
    paired: bool,
    correlation: bool = False,
    chances: int = 1,
) -> Estimate:
    """A statistic of the runs' R2s with its interval, made on Fisher's scale for a correlation.

    `chances`: of how many statistics it was picked; the interval is as much wider (Bonferroni).
    """
    value = statistic(*map(r2s, runs))
    counts = [min((len(folds) for folds in sums), default=0) for sums in runs]
    bounded = not correlation or (value is not None and abs(value) < 1 - 1e-12)
    if value is None or min(counts) < 2 or (paired and len(set(counts)) > 1) or not bounded:
        return Estimate(value)
    scale, back = (math.atanh, math.tanh) if correlation else (float, float)
    variance = 0.0
    for alone in (None,) if paired else range(len(runs)):  # the run that loses a fold; None: all
        K = counts[alone or 0]
        replicates = [
            statistic(*(r2s(s, f if alone in (None, i) else None) for i, s in enumerate(runs)))
            for f in range(K)
        ]
        if any(v is None or (correlation and not abs(v) < 1) for v in replicates):
            return Estimate(value)
        scaled = [scale(float(v)) for v in replicates if v is not None]
        mean = sum(scaled) / K
        variance += (K - 1) / K * sum((v - mean) ** 2 for v in scaled)
    se = math.sqrt(variance)
    reach = student(min(counts) - 1, 1 - 0.05 / chances) * se
    slope = 1 - value**2 if correlation else 1.0
    return Estimate(value, se * slope, back(scale(value) - reach), back(scale(value) + reach))


@cache
def student(freedom: int, level: float = 0.95) -> float:
    """t such that `level` of Student's distribution lies within +-t, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < level else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Student's probability within +-sqrt(freedom) tan(angle); Abramowitz and Stegun 26.7.3-4."""
    odd, c = freedom % 2, math.cos(angle)
    term, total = (c if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= c * c * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


# -- profiles -------------------------------------------------------------------------------------


def summarise(blocks: list[BlockProfile]) -> dict[str, Any]:
    """Heterogeneity over depth: range, largest jump between neighbours, rank correlation.

    A block without an R2, whose output does not vary, is left out.
    """
    scored = [b for b in blocks if finite(b.r2) is not None]
    jumps = [(abs(b.r2 - a.r2), a.index, b.index) for a, b in pairwise(scored)]
    low, high = (pick(scored, key=lambda b: b.r2, default=None) for pick in (min, max))
    jump = max(jumps, key=lambda j: j[0], default=(None, None, None))
    depth = over_blocks(spearman, [float(b.index) for b in scored], [b.r2 for b in scored])
    return {
        "r2_min": low and low.r2,
        "r2_min_block": low and low.index,
        "r2_max": high and high.r2,
        "r2_max_block": high and high.index,
        "largest_jump": jump[0],
        "largest_jump_after": jump[1],
        "largest_jump_before": jump[2],
        "depth_spearman": depth.to_dict(),
    }


def fold_sums(blocks: Sequence[BlockProfile]) -> Sums:
    """Sums of each block; without folds (one split, an older file) one pair with the same R2."""
    return [b.fold_sums or [[1 - b.r2, 1.0]] for b in blocks]


def agreement(a: Sums, b: Sums, *, paired: bool) -> dict[str, Any]:
    """Correlations over depth and shifts from a to b, over the blocks that have an R2 in both.

    The mean of sizes is positive even between two measurements of one model, so it has no interval
    but the size to expect of noise alone. The largest shift was picked among all blocks, and its
    interval allows for that.
    """
    whole = [i for i, pair in enumerate(zip(r2s(a), r2s(b), strict=True)) if len(known(pair)) == 2]
    a, b = ([sums[i] for i in whole] for sums in (a, b))
    shifts = [jackknife(partial(_shift, i), (a, b), paired=paired) for i in range(len(whole))]
    sizes, noise = [abs(s.value or 0.0) for s in shifts], known(s.se for s in shifts)
    result: dict[str, Any] = {"paired": paired, "largest_shift_at": None}
    result["pearson"] = jackknife(pearson, (a, b), paired=paired, correlation=True).to_dict()
    result["spearman"] = over_blocks(spearman, r2s(a), r2s(b)).to_dict()
    mean = largest = Estimate(None)
    if whole:
        at = max(range(len(whole)), key=sizes.__getitem__)
        mean = jackknife(lambda a, b: (sum(b) - sum(a)) / len(a), (a, b), paired=paired)
        largest = jackknife(partial(_shift, at), (a, b), paired=paired, chances=len(whole))
        result["largest_shift_at"] = whole[at]  # in the order of the blocks
    result |= {"mean_shift": mean.to_dict(), "largest_shift": largest.to_dict()}
    result["mean_size_of_shift"] = sum(sizes) / len(sizes) if sizes else None
    # a normal difference with standard error s has the mean size s sqrt(2 / pi)
    result["mean_size_by_noise"] = (
        sum(noise) / len(noise) * math.sqrt(2 / math.pi) if noise else None
    )
    return result


def _shift(i: int, a: list[float], b: list[float]) -> float:
    return b[i] - a[i]


def same_windows(*files: Mapping[str, Any]) -> bool:
    """Do the folds of these profiles hold the same windows?"""
    keys = []
    for file in files:
        corpus, settings = (file.get(k) for k in ("corpus", "settings"))
        if not (isinstance(corpus, Mapping) and corpus.get("fingerprint")):
            return False
        cut = settings if isinstance(settings, Mapping) else {}
        same = ("window", "folds", "cells", "spread", "documents", "tokens", "shards", "bos")
        keys.append([corpus["fingerprint"], *(cut.get(k) for k in same)])
    return all(key == keys[0] for key in keys)
