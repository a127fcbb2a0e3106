"""Statistics over folds, windows and blocks: ratios of sums, correlations, the jackknife.

    ratio([(1.2, 4.0), (1.4, 5.0)])                 # sum a / sum b, and its standard error
    spearman(depths, r2s(sums))
    estimate = jackknife(pearson, [sums_a, sums_b], paired=True, correlation=True)
    estimate.value, estimate.low, estimate.high

`sums` are what a profile keeps of a run: for each block, [SS_res, SS_tot] of each held-out fold.
They give any statistic of R2s without one of the K folds, and K such values give its standard error:
sqrt((K - 1) / K sum (s_f - mean s)^2). Runs on the same windows lose the same fold together
(`paired`), so that a fold that is hard for both does not count as a difference; other runs lose
their folds one run at a time, and variances add. Intervals are 95 %, by Student's t with K - 1
degrees of freedom. Maps of different folds share fit rows, so all of this is an approximation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from howlinear.records.fields import BlockProfile

Sums = Sequence[Sequence[Sequence[float]]]  # (blocks, folds, 2)
Statistic = Callable[..., float | None]  # of one list of R2s for each run


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where folds give none."""

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
    statistic: Statistic, runs: Sequence[Sums], *, paired: bool, correlation: bool = False
) -> Estimate:
    """A statistic of the runs' R2s with its interval, made on Fisher's scale for a correlation."""
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
    reach = student(min(counts) - 1) * se
    slope = 1 - value**2 if correlation else 1.0
    return Estimate(value, se * slope, back(scale(value) - reach), back(scale(value) + reach))


def student(freedom: int, level: float = 0.95) -> float:
    """t such that `level` of Student's distribution lies within +-t; from 3 on by its expansion."""
    if freedom == 1:
        return math.tan(math.pi * level / 2)
    if freedom == 2:
        return level * math.sqrt(2 / (1 - level**2))
    z, n = NormalDist().inv_cdf((1 + level) / 2), freedom
    terms = (  # Abramowitz and Stegun 26.7.5
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (k + 1) for k, term in enumerate(terms))


# -- profiles -------------------------------------------------------------------------------------


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


def fold_sums(blocks: Sequence[BlockProfile]) -> Sums:
    """Sums of each block; without folds (one split, an older file) one pair with the same R2."""
    return [b.fold_sums or [[1 - b.r2, 1.0]] for b in blocks]


def agreement(a: Sums, b: Sums, *, paired: bool) -> dict[str, Any]:
    """Correlations over depth and shifts from a to b, each with an interval."""

    def shifts(a: list[float], b: list[float]) -> list[float]:
        return [v - u for u, v in zip(a, b, strict=True)]

    sizes = [abs(v) for v in shifts(r2s(a), r2s(b))]
    at = max(range(len(sizes)), key=sizes.__getitem__)
    means: dict[str, Statistic] = {
        "mean_shift": lambda a, b: sum(shifts(a, b)) / len(a),
        "mean_size_of_shift": lambda a, b: sum(map(abs, shifts(a, b))) / len(a),
        "largest_shift": lambda a, b: b[at] - a[at],
    }
    result: dict[str, Any] = {"paired": paired}
    for name, statistic in {"pearson": pearson, "spearman": spearman, **means}.items():
        estimate = jackknife(statistic, (a, b), paired=paired, correlation=name not in means)
        result[name] = estimate.to_dict()
    return result | {"largest_shift_at": at}  # in the order of the blocks


def same_windows(*files: Mapping[str, Any]) -> bool:
    """Do the folds of these profiles hold the same windows?"""
    keys = []
    for file in files:
        corpus, settings = (file.get(k) for k in ("corpus", "settings"))
        if not (isinstance(corpus, Mapping) and corpus.get("fingerprint")):
            return False
        cut = settings if isinstance(settings, Mapping) else {}
        keys.append([corpus["fingerprint"], *(cut.get(k) for k in ("window", "folds", "tokens"))])
    return all(key == keys[0] for key in keys)
