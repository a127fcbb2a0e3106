"""How well a map predicts rows that it was not fitted on, from their moments.

    score(affine, held_out).r2                      # one accumulator
    scores = cross_validate(groups)                 # one accumulator for each fold
    Score.pooled(scores).r2, r2_se(scores)

SS_res and SS_tot are sums of squares over the scored rows. O(d^3) each, no rows are read.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine
from howlinear.linear.solving import Both, solve
from howlinear.records.statistics import ratio

ROUNDING = 1e-24  # variance over squared mean: below, float64 sums of a constant


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """Sums of squares of one map on some rows. Scores of disjoint rows add, each around its own mean."""

    n: int
    weight: float
    ss_res: Tensor  # (d_out,) sum of squared residuals
    ss_tot: Tensor  # (d_out,) around the mean of each feature
    ss_tot_scalar: float  # around one mean of all elements
    ss_raw: float  # around zero

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Score)))

    @classmethod
    def pooled(cls, scores: Sequence[Score]) -> Score:
        """The sum of scores of disjoint rows."""
        return functools.reduce(operator.add, scores)

    def __repr__(self) -> str:
        return f"<Score on {self.n} rows: R2 {self.r2:.4f}>"

    @cached_property
    def r2(self) -> float:
        """1 - SS_res / SS_tot, SS_tot around the mean of each feature. NaN where y is constant."""
        return _one_minus(float(self.ss_res.sum()), float(self.ss_tot.sum()))

    @property
    def r2_scalar(self) -> float:
        """The same around one scalar mean: counts the offsets between features as explained."""
        return _one_minus(float(self.ss_res.sum()), self.ss_tot_scalar)

    @property
    def r2_by_feature(self) -> Tensor:
        """(d_out,) R2 of each output feature; NaN for a feature that does not vary."""
        nan = self.ss_tot.new_tensor(float("nan"))
        return torch.where(self.ss_tot > 0, 1 - self.ss_res / self.ss_tot, nan)

    @property
    def r2_feature(self) -> dict[str, float]:
        """Median and quartiles over the output features."""
        q = torch.nanquantile(self.r2_by_feature, self.ss_tot.new_tensor([0.25, 0.5, 0.75]))
        return {"median": float(q[1]), "q25": float(q[0]), "q75": float(q[2])}

    @property
    def rmse(self) -> float:
        """Root mean squared residual of one element."""
        return self.residual_norm / math.sqrt(len(self.ss_res))

    @property
    def residual_norm(self) -> float:
        """Root mean squared norm of a row's residual."""
        return math.sqrt(float(self.ss_res.sum()) / self.weight)

    @property
    def output_norm(self) -> float:
        """Root mean squared norm of a row of y."""
        return math.sqrt(self.ss_raw / self.weight)

    def sums(self, part: slice = slice(None)) -> list[float]:
        """[SS_res, SS_tot] summed over all features, or some of them."""
        return [float(self.ss_res[part].sum()), float(self.ss_tot[part].sum())]


def score(affine: Affine, moments: Accumulator, ss_res: Tensor | None = None) -> Score:
    """Scores of a map on the rows of an accumulator. O(d_in^2 d_out) unless `ss_res` is known."""
    if ss_res is None:
        ss_res = moments.residual_squares(affine.weight, affine.bias)
    mean_y, w = moments.mean_y, moments.weight
    rounding = ROUNDING * w * mean_y.square()  # what is left of a constant feature
    S_yy = torch.where(moments.S_yy > rounding, moments.S_yy, 0.0)
    within = float(S_yy.sum())
    return Score(
        n=moments.n,
        weight=w,
        ss_res=ss_res,
        ss_tot=S_yy,
        ss_tot_scalar=within + w * float((mean_y - mean_y.mean()).square().sum()),
        ss_raw=within + w * float(mean_y.square().sum()),
    )


def score_both(
    maps: Both, body: Accumulator, first: Accumulator, every: Accumulator
) -> tuple[Score, Score]:
    """Scores of `maps.some` on `body`, and of `maps.all` on `every`, the rows of `body` and `first`.

    Where the maps differ by P Q of few rows, and `first` keeps its rows, both share the product W S_xx.
    """
    rows = first.kept()
    if maps.change is None or rows is None:
        return score(maps.some, body), score(maps.all, every)
    (P, Q), W, V = maps.change, maps.some.weight, maps.all.weight
    S_xx, S_xy = body.gram()
    squares = body.residual_squares(W, body.mean_y - W @ body.mean_x)  # by the best intercept
    change = torch.linalg.vecdot(P @ (Q @ S_xx), W + V) - 2 * torch.linalg.vecdot(V - W, S_xy.t())
    by_some, by_all = (
        ss.clamp_min(0) + body.weight * (body.mean_y - affine(body.mean_x)).square()
        for affine, ss in ((maps.some, squares), (maps.all, squares + change))
    )
    x, y = (part.double() for part in rows)
    by_all += (y - maps.all(x)).square().sum(0)
    return score(maps.some, body, by_some), score(maps.all, every, by_all)


def cross_validate(groups: Sequence[Accumulator]) -> list[Score]:
    """The score of each group by the least-squares map of the others; groups without rows are left out."""
    filled = [group for group in groups if group.n]
    if len(filled) < 2:
        raise ValueError("all rows fall into one fold: give more text")
    return [
        score(solve(merged([*filled[:i], *filled[i + 1 :]]))[0], held)
        for i, held in enumerate(filled)
    ]


def r2_se(scores: Sequence[Score]) -> float:
    """Standard error of the pooled R2 over folds. Folds share fit rows: it is an approximation."""
    return ratio([s.sums() for s in scores])[1]


def effective_rank(
    affine: Affine, fitted: Accumulator, held_out: Accumulator, *, around_fit: bool = False
) -> int | None:
    """Reduced-rank regression: the smallest k whose held-out R2 reaches 90 % of the full map's.

    The rank-k map is U_k U_k' W with U the leading eigenvectors of W S_xx W' = W S_xy over the fit
    rows, whose means it keeps. None where R2 is not positive. Eigenvectors are float32: they move R2 by
    about 1e-7, and the answer is a whole number.
    SS_tot is around the held-out means, or around those of the fit rows, as in the paper.
    """
    W, mean_x = affine.weight, fitted.mean_x
    explained = W @ fitted.gram()[1]
    size = float(explained.trace())
    if not size > 0:
        return None
    U = torch.linalg.eigh(((explained + explained.t()) / (2 * size)).float())[1].flip(1)
    mean_y = W @ mean_x + affine.bias
    S_xx, S_xy = held_out.gram()
    dx, dy, w = held_out.mean_x - mean_x, held_out.mean_y - mean_y, held_out.weight
    S_xx.addr_(dx, dx, alpha=w)  # about the fit rows' means
    S_xy.addr_(dx, dy, alpha=w)
    gains = W @ S_xy.mul_(2).sub_(S_xx @ W.t())  # (d_out, d_out): u' gains u by each direction u
    gain = ((gains / size).float() @ U * U).sum(0).double() * size
    base = float((held_out.S_yy + w * dy.square()).sum())
    total = base if around_fit else float(held_out.S_yy.sum())
    r2 = 1 - (base - gain.cumsum(0)) / total  # (d_out,), of rank 1, 2, ...
    if not float(r2[-1]) > 0:
        return None
    return int((r2 >= 0.9 * r2[-1]).nonzero()[0]) + 1


def input_stats(moments: Accumulator, rank: int) -> dict[str, Any]:
    """Statistics of the inputs: condition within `rank`, participation ratio, range, spectrum."""
    S_xx, _ = moments.gram()
    values = torch.linalg.eigvalsh(S_xx).clamp_min(0)
    sd = S_xx.diagonal().clamp_min(0).sqrt()
    smallest, median = float(values[-rank]) if rank else 0.0, float(sd.median())
    squares = float(values.square().sum())
    return {
        "input_rank": rank,
        "input_condition": math.sqrt(float(values[-1]) / smallest) if smallest > 0 else math.inf,
        "input_participation": float(values.sum()) ** 2 / squares if squares > 0 else 0.0,
        "input_range": float(sd.max()) / median if median > 0 else math.inf,
        "input_spectrum": spectrum(values.flip(0)[:rank] / values.sum()),
    }


def spectrum(values: Tensor, points: int = 48) -> list[list[float]]:
    """[k, k-th value] of positive values in falling order, at about `points` ranks k even in log k."""
    n = int((values > 0).sum())
    steps = range(points if n > 1 else n)
    places = sorted({round(n ** (i / (points - 1))) for i in steps})
    return [[k, float(values[k - 1])] for k in places]


def _one_minus(part: float, whole: float) -> float:
    return 1 - part / whole if whole > 0 else math.nan
