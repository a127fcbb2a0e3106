"""The exact least-squares map of moments, and how well it does on other moments.

    affine = fit(moments)               # argmin of sum w |y - Wx - b|^2, solved, not trained
    affine(x)                           # W x + b
    score(affine, held_out).r2          # on rows that the fit never saw

Notation: W (d_out, d_in), b (d_out,), S_xx (d_in, d_in), S_xy (d_in, d_out), S_yy (d_out,) centred
sums over rows; F fit rows, T held-out rows.

The columns of x are first scaled to unit variance. A Cholesky factorisation solves where that
matrix is well conditioned; otherwise its eigenvectors do, directions below the rank threshold are
left out, and the solution is the one of least norm in the scaled columns. The threshold is
numpy's for `matrix_rank` with the width in place of the row count: singular values of the scaled,
centred inputs below `d_in * eps` times the largest count as zero, eps being that of the rows'
dtype (float32's for anything narrower). Moments square what they see, so they cannot tell singular
values apart below sqrt(d_in * 2.2e-16): that floor matters for float64 rows only.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from howlinear.linear.moments import Accumulator
from howlinear.records.statistics import ratio

log = logging.getLogger(__name__)

EPS = float(torch.finfo(torch.float64).eps)


@dataclass(frozen=True, eq=False, repr=False)
class Affine:
    """y ~ W x + b. `rank` is the numerical rank of the inputs that the fit found."""

    weight: Tensor  # (d_out, d_in)
    bias: Tensor  # (d_out,)
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))

    def __repr__(self) -> str:
        return f"<Affine map of {self.d_in} to {self.d_out}, inputs of rank {self.rank}>"

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    @property
    def parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()

    @property
    def multiply_adds(self) -> int:
        """A row's."""
        return self.weight.numel()

    def to(self, like: Tensor) -> Affine:
        """In the dtype and on the device of `like`, so that calls need not convert."""
        return Affine(self.weight.to(like), self.bias.to(like), self.rank)

    def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """The same map as a layer that can be put in a model."""
        linear = torch.nn.Linear(self.d_in, self.d_out, device=self.weight.device, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight)
            linear.bias.copy_(self.bias)
        return linear


@dataclass(frozen=True, eq=False, repr=False)
class Factored:
    """y ~ B (A x) + b: an affine map of rank r in two factors. r = 0 is a constant."""

    into: Tensor  # A (r, d_in)
    out: Tensor  # B (d_out, r)
    bias: Tensor  # (d_out,)

    def __call__(self, x: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(x, self.into.to(x)), self.out.to(x), self.bias.to(x))

    def __repr__(self) -> str:
        return f"<Factored map of {self.d_in} to {self.d_out}, rank {self.rank}>"

    @property
    def rank(self) -> int:
        return len(self.into)

    @property
    def d_in(self) -> int:
        return self.into.shape[1]

    @property
    def d_out(self) -> int:
        return len(self.out)

    @property
    def parameters(self) -> int:
        return self.multiply_adds + self.bias.numel()

    @property
    def multiply_adds(self) -> int:
        """A row's."""
        return self.into.numel() + self.out.numel()

    def to(self, like: Tensor) -> Factored:
        """In the dtype and on the device of `like`, so that calls need not convert."""
        return Factored(self.into.to(like), self.out.to(like), self.bias.to(like))


@dataclass(frozen=True, eq=False, repr=False)
class UnitMap:
    """y ~ W x + b + D h_S: an affine map beside a few hidden units of the block, kept as they are.

    One unit can write rows hundreds of times larger than the rest (the attention sink). Given to
    the regression as one more input, it leaves the matrix free to fit all other rows.
    """

    affine: Affine | Factored
    units: tuple[int, ...]  # S
    write: Tensor  # D (d_out, k)
    hidden: torch.nn.Module  # x (..., d_in) -> h_S (..., k)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.affine(x) + torch.nn.functional.linear(h, self.write.to(h))

    def __repr__(self) -> str:
        return f"<{self.affine!r} beside {len(self.units)} hidden units>"

    @classmethod
    def split(cls, joint: Affine, units: tuple[int, ...], hidden: torch.nn.Module) -> UnitMap:
        """Of a map fitted on [x, h_S]."""
        d = joint.d_in - len(units)
        affine = Affine(joint.weight[:, :d], joint.bias, min(joint.rank, d))
        return cls(affine, units, joint.weight[:, d:], hidden)

    @property
    def d_in(self) -> int:
        return self.affine.d_in

    @property
    def d_out(self) -> int:
        return self.affine.d_out

    @property
    def parameters(self) -> int:
        """Of W, b, D, and the weights that the kept units are computed with."""
        own = sum(p.numel() for p in self.hidden.parameters())
        return self.affine.parameters + self.write.numel() + own

    @property
    def multiply_adds(self) -> int:
        """A row's."""
        own = sum(p.numel() for p in self.hidden.parameters() if p.ndim == 2)
        return self.affine.multiply_adds + self.write.numel() + own

    def to(self, like: Tensor) -> UnitMap:
        """W, b and D in the dtype and on the device of `like`; the units are the block's own."""
        return UnitMap(self.affine.to(like), self.units, self.write.to(like), self.hidden)


Map = Affine | Factored | UnitMap


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """How a map did on rows. Scores of disjoint rows add: each fold around its own mean."""

    n: int
    weight: float
    ss_res: Tensor  # (d_out,) sum of squared residuals
    ss_tot: Tensor  # (d_out,) around the mean of each feature
    ss_tot_scalar: float  # around one mean of all elements
    ss_raw: float  # around zero

    def __add__(self, other: Score) -> Score:
        return Score(
            self.n + other.n,
            self.weight + other.weight,
            self.ss_res + other.ss_res,
            self.ss_tot + other.ss_tot,
            self.ss_tot_scalar + other.ss_tot_scalar,
            self.ss_raw + other.ss_raw,
        )

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
        """[SS_res, SS_tot] over all features, or some of them: what folds add up."""
        return [float(self.ss_res[part].sum()), float(self.ss_tot[part].sum())]

    def to_dict(self) -> dict[str, Any]:
        names = ("r2", "r2_scalar", "r2_feature", "rmse", "residual_norm", "output_norm")
        return {name: getattr(self, name) for name in names} | {"n_heldout": self.n}


def fit(moments: Accumulator, *, intercept: bool = True, ridge: float = 0.0) -> Affine:
    """The exact least-squares map. `ridge` adds ridge * |W|^2 to the sum of squares; never by itself.

    O(d_in^2 (d_in / 3 + d_out)). Fewer rows than columns is refused unless there is a ridge; inputs
    that lack rank give the least-norm map, a warning and `rank < d_in`.
    """
    if not (ridge >= 0 and math.isfinite(ridge)):
        raise ValueError(f"ridge must be finite and not negative, got {ridge}")
    columns = moments.d_in + intercept
    if ridge == 0 and moments.n < columns:
        raise ValueError(
            f"{moments.n} rows cannot determine {columns} columns: at least {columns} tokens are "
            f"needed to fit, about {40 * moments.d_in} to trust the result (--tokens)"
        )
    affine, _ = solve(moments, intercept=intercept, ridge=ridge)
    if affine.rank < moments.d_in:
        log.warning(
            "inputs have rank %d of %d: the map of least norm is given", affine.rank, moments.d_in
        )
    return affine


def solve(
    moments: Accumulator, *, intercept: bool = True, ridge: float = 0.0
) -> tuple[Affine, Tensor]:
    """(map, Z) without the checks and warnings of `fit`.

    Z (d_out, rank) has Z Z' = W S_xx W', the sums of squares that the map explains; with a ridge
    they count the penalty too. `effective_rank` reads it.
    """
    root = moments.root(intercept)
    noise = input_noise(moments, intercept)
    if root is None:
        S_xx, S_xy = moments.gram(intercept)
        if ridge:
            S_xx.diagonal().add_(ridge)
        W, rank, Z = solve_gram(S_xx, S_xy, noise, moments.eps)
    else:
        W, rank, Z = _solve_root(*root, noise, moments.eps, ridge)
    bias = moments.mean_y - W @ moments.mean_x if intercept else W.new_zeros(len(W))
    return Affine(W, bias, rank), Z


def input_noise(moments: Accumulator, intercept: bool = True) -> Tensor:
    """(d_in,) root of the sum of squares that rounding alone gives each centred column of x."""
    if not intercept:
        return torch.zeros_like(moments.mean_x)
    return moments.eps * moments.mean_x.abs() * math.sqrt(moments.weight)


def _scale(squares: Tensor, noise: Tensor) -> Tensor:
    """Root of each column's sum of squares; infinite for columns that only rounding makes vary.

    Dividing by infinity makes such a column zero and its coefficient too.
    """
    scale = squares.clamp_min(0).sqrt()
    return torch.where(scale > noise, scale, torch.inf)


def _floor(d: int) -> float:
    """Singular values that float64 sums of squares can tell from zero."""
    return math.sqrt(d * EPS)


def solve_gram(S_xx: Tensor, S_xy: Tensor, noise: Tensor, eps: float) -> tuple[Tensor, int, Tensor]:
    """(W, rank, Z) from sums of squares; `eps` is the resolution of the rows."""
    d = len(S_xx)
    tol = max(d * eps, _floor(d))
    scale = _scale(S_xx.diagonal(), noise)
    C = S_xx / scale / scale[:, None]  # unit diagonal
    B = S_xy.t().contiguous() / scale  # (d_out, d_in): solving from the right is a quarter faster
    L, info = torch.linalg.cholesky_ex(C)
    factored = not int(info)
    keep = V = None
    if not factored or _smallest(L) <= 100 * tol**2 * float(C.abs().sum(1).max()):
        values, V = torch.linalg.eigh(C)
        keep = values > tol**2 * values[-1]
    if factored and (keep is None or bool(keep.all())):  # of full rank: the factor has more digits
        Z = torch.linalg.solve_triangular(L.t(), B, upper=True, left=False)
        return torch.linalg.solve_triangular(L, Z, upper=False, left=False) / scale, d, Z
    assert keep is not None
    assert V is not None
    V, root = V[:, keep], values[keep].sqrt()
    Z = B @ V / root
    return (Z / root) @ V.t() / scale, int(keep.sum()), Z


def _solve_root(
    R: Tensor, Y: Tensor, noise: Tensor, eps: float, ridge: float
) -> tuple[Tensor, int, Tensor]:
    """(W, rank, Z) from factors, R'R = S_xx and R'Y = S_xy."""
    if ridge:
        R = torch.cat([R, math.sqrt(ridge) * torch.eye(len(R), dtype=R.dtype)])
        Y = torch.cat([Y, Y.new_zeros(len(R) - len(Y), Y.shape[1])])
        Q, R = torch.linalg.qr(R)
        Y = Q.t() @ Y
    tol = len(R) * eps
    scale = _scale(R.square().sum(0), noise)
    R = R / scale
    U, s, Vh = torch.linalg.svd(R, full_matrices=False)
    keep = s > tol * s[0]
    rank = int(keep.sum())
    if rank == len(s):
        return torch.linalg.solve_triangular(R, Y, upper=True).t() / scale, rank, Y.t()
    Z = Y.t() @ U[:, keep]
    return (Z / s[keep]) @ Vh[keep] / scale, rank, Z


def _smallest(L: Tensor, steps: int = 4) -> float:
    """About the smallest eigenvalue of L L', by inverse iteration; never below it. O(d^2)."""
    v = torch.ones(len(L), 1, dtype=L.dtype, device=L.device)
    v[1::2] = -1  # not orthogonal to anything in particular
    v += torch.linspace(0, 0.5, len(L), dtype=L.dtype, device=L.device)[:, None]
    growth = 1.0
    for _ in range(steps):
        v = v / torch.linalg.vector_norm(v)
        v = torch.linalg.solve_triangular(L, v, upper=False)
        v = torch.linalg.solve_triangular(L.t(), v, upper=True)
        growth = float(torch.linalg.vector_norm(v))
    return 1 / growth


def score(affine: Affine, moments: Accumulator) -> Score:
    """Every score that needs no rows. O(d_in^2 d_out)."""
    S_yy, mean_y, w = moments.S_yy, moments.mean_y, moments.weight
    within = float(S_yy.sum())
    return Score(
        n=moments.n,
        weight=w,
        ss_res=moments.residual_squares(affine.weight, affine.bias),
        ss_tot=S_yy,
        ss_tot_scalar=within + w * float((mean_y - mean_y.mean()).square().sum()),
        ss_raw=within + w * float(mean_y.square().sum()),
    )


def r2_se(scores: Sequence[Score]) -> float:
    """Standard error of the pooled R2 over folds. Folds share fit rows: it is an approximation."""
    return ratio([s.sums() for s in scores])[1]


def effective_rank(
    affine: Affine, Z: Tensor, mean_x: Tensor, held_out: Accumulator, *, around_fit: bool = False
) -> int | None:
    """Reduced-rank regression: the smallest k whose held-out R2 reaches 90 % of the full map's.

    The rank-k map is U_k U_k' W with U the leading eigenvectors of W S_xx W' = Z Z' over the fit
    rows, whose means (`mean_x`, and W mean_x + b for y) it keeps. None where R2 is not positive.
    SS_tot is around the held-out means, or around those of the fit rows, as in the paper.
    """
    W = affine.weight
    _, U = torch.linalg.eigh(Z @ Z.t())
    U = U.flip(1)
    mean_y = W @ mean_x + affine.bias
    S_xx, S_xy = held_out.gram()
    dx, dy, w = held_out.mean_x - mean_x, held_out.mean_y - mean_y, held_out.weight
    S_xx.addr_(dx, dx, alpha=w)  # about the fit rows' means
    S_xy.addr_(dx, dy, alpha=w)
    P = U.t() @ W  # (d_out, d_in)
    gain = 2 * ((P @ S_xy) * U.t()).sum(1) - ((P @ S_xx) * P).sum(1)  # by each direction
    base = float((held_out.S_yy + w * dy.square()).sum())
    total = base if around_fit else float(held_out.S_yy.sum())
    r2 = 1 - (base - gain.cumsum(0)) / total  # (d_out,), of rank 1, 2, ...
    if not float(r2[-1]) > 0:
        return None
    return int((r2 >= 0.9 * r2[-1]).nonzero()[0]) + 1


def input_stats(moments: Accumulator, rank: int) -> dict[str, Any]:
    """What the inputs look like: their condition within `rank`, participation ratio and range."""
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
    """[k, value] of falling positive values at about `points` places evenly spread over log k."""
    n = int((values > 0).sum())
    steps = range(points if n > 1 else n)
    places = sorted({round(n ** (i / (points - 1))) for i in steps})
    return [[k, float(values[k - 1])] for k in places]


def _one_minus(part: float, whole: float) -> float:
    return 1 - part / whole if whole > 0 else math.nan
