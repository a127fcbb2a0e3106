"""How sure is a number that was made from profiles? Leave out one fold at a time and see.

    together = jackknife(lambda a, b: pearson(a, b), [sums_a, sums_b], paired=True)
    together.value, together.low, together.high

`sums` are what a profile keeps of a run: for each block, [SS_res, SS_tot] of each held-out fold.
What any statistic of R2s would have been without a fold follows from them, and from K such values
its standard error: sqrt((K - 1) / K sum (s_f - mean s)^2). Runs that read the same windows lose the
same fold together, so that a fold that is hard for both does not count as a difference; of others,
each loses its folds on its own and variances add. Intervals are 95 %, by Student's t with K - 1
degrees of freedom. Maps of different folds share fit rows, so all of this is an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import pearson, spearman

Sums = Sequence[Sequence[Sequence[float]]]  # (blocks, folds, 2)
Statistic = Callable[..., float | None]  # of one list of R2s a run


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where folds cannot tell."""

    value: float | None
    se: float | None = None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def r2s(sums: Sums, without: int | None = None) -> list[float]:
    """R2 of each block, by all folds or all but one."""
    found = []
    for folds in sums:
        kept = [f for i, f in enumerate(folds) if i != without]
        res, tot = (sum(f[k] for f in kept) for k in (0, 1))
        found.append(1 - res / tot if tot > 0 else math.nan)
    return found


def jackknife(
    statistic: Statistic, runs: Sequence[Sums], *, paired: bool, correlation: bool = False
) -> Estimate:
    """A statistic of the runs' R2s with its interval; of a correlation on Fisher's scale."""
    whole = [r2s(sums) for sums in runs]
    value = statistic(*whole)
    counts = [min((len(folds) for folds in sums), default=0) for sums in runs]
    bounded = not correlation or (value is not None and abs(value) < 1 - 1e-12)
    if value is None or min(counts) < 2 or (paired and len(set(counts)) > 1) or not bounded:
        return Estimate(value)
    onto, back = (math.atanh, math.tanh) if correlation else (float, float)
    variance = 0.0
    for alone in (None,) if paired else range(len(runs)):
        K = counts[alone or 0]
        found = [
            statistic(*(r2s(s, f if alone in (None, i) else None) for i, s in enumerate(runs)))
            for f in range(K)
        ]
        if any(v is None or not (abs(v) < 1 or not correlation) for v in found):
            return Estimate(value)
        scaled = [onto(float(v)) for v in found if v is not None]
        mean = sum(scaled) / K
        variance += (K - 1) / K * sum((v - mean) ** 2 for v in scaled)
    se = math.sqrt(variance)
    reach = student(min(counts) - 1) * se
    slope = 1 - value**2 if correlation else 1.0
    return Estimate(value, se * slope, back(onto(value) - reach), back(onto(value) + reach))


def sums_of(blocks: Sequence[BlockProfile]) -> Sums:
    """Of each block; without folds (one split, an older file) what leads to the same R2."""
    return [b.fold_sums or [[1 - b.r2, 1.0]] for b in blocks]


def alike(a: Sums, b: Sums, *, paired: bool) -> dict[str, Any]:
    """Correlations over depth and shifts from a to b, each with an interval."""

    def shift(a: list[float], b: list[float]) -> list[float]:
        return [v - u for u, v in zip(a, b, strict=True)]

    away = shift(r2s(a), r2s(b))
    at = max(range(len(away)), key=lambda i: abs(away[i]))
    runs = (a, b)
    return {
        "paired": paired,
        "pearson": jackknife(pearson, runs, paired=paired, correlation=True).to_dict(),
        "spearman": jackknife(spearman, runs, paired=paired, correlation=True).to_dict(),
        "mean_shift": jackknife(
            lambda a, b: sum(shift(a, b)) / len(a), runs, paired=paired
        ).to_dict(),
        "mean_size_of_shift": jackknife(
            lambda a, b: sum(map(abs, shift(a, b))) / len(a), runs, paired=paired
        ).to_dict(),
        "largest_shift": jackknife(lambda a, b: b[at] - a[at], runs, paired=paired).to_dict(),
        "largest_shift_at": at,  # in the order of the blocks
    }


def same_windows(*files: Mapping[str, Any]) -> bool:
    """Do folds of these profiles hold the same windows, so that they lose a fold together?"""
    cuts = []
    for file in files:
        corpus, settings = (file.get(k) for k in ("corpus", "settings"))
        if not (isinstance(corpus, Mapping) and corpus.get("fingerprint")):
            return False
        how = settings if isinstance(settings, Mapping) else {}
        cuts.append([corpus["fingerprint"], *(how.get(k) for k in ("window", "folds", "tokens"))])
    return all(cut == cuts[0] for cut in cuts)


def student(freedom: int, level: float = 0.95) -> float:
    """The quantile of Student's t that `level` of it lies within; from 3 on by its expansion."""
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
