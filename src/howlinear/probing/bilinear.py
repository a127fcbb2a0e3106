"""Is the residual a sum of products? y ~ Wx + b + A[(Ux) * (Vx)], with W and b of the least-squares map.

    fitted = solve_products(fit, choose, affine, rank=16, seed=0)
    outcome(fitted.layer, affine, report).gain

Given U and V the best A is a small least-squares problem, so the search is over U and V alone, by
L-BFGS on all fit rows (variable projection). Real activations have a few large rows that can be
overfitted. Against this there are: a ridge on each product's norm |a|^2 |u|^2 |v|^2, which does not
depend on how the three share their scale; stopping by rows that are not fitted; and products of
x itself, not of centred x. The search runs in partly whitened coordinates, each principal direction
of x scaled by its root mean square to the power -1/4. Full whitening is worse (`python
benchmarks/probe.py --whitening 0.25,1`): it leads the search into directions of little variance,
in which large rows are outliers.

`train_products` is the paper's method: Adam on raw inputs through a gate exp(q) that starts at e^-2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.probing.fitting import Fitted, best_of, descend
from howlinear.probing.samples import CHUNK, Layer, Sample, errors, outcome, size_of

WHITENING = 0.25  # of 1
RIDGE = 0.3  # per row, for x of unit mean square; lowered while that raises the gain
EVERY = 10  # iterations between checks on the rows kept for stopping
ITERATIONS = 200
STARTS = 4
START_CHECKS = 3
START_ROWS = 4096  # of a short search, at least; an eighth of all rows if that is more
DRIFT = 3.0  # times its first length: then all factors are rescaled
PATIENCE = 2  # checks without gain before the search ends
TOLERANCE = 0.02  # relative improvement in EVERY iterations below which the search has converged
RANKS = (1, 2, 4, 8, 16, 32, 64)
SOLVERS = ("ours", "paper")


class Bilinear(nn.Module):
    """Wx + b + A[(Ux) * (Vx)]. `mean` (r,) of the products over fit rows is subtracted through b."""

    def __init__(
        self,
        affine: Affine,
        left: Tensor,
        right: Tensor,
        write: Tensor,
        mean: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.d_in, self.d_out = affine.d_in, affine.d_out
        like = left.detach()
        self.weight = nn.Parameter(affine.weight.to(like, copy=True))
        bias = affine.bias.to(like, copy=True)
        self.bias = nn.Parameter(bias if mean is None else bias - write.detach() @ mean)
        self.left, self.right = nn.Parameter(left.detach()), nn.Parameter(right.detach())  # (r, d)
        self.write = nn.Parameter(write.detach())  # (d_out, r)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + self.products(x)

    def products(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(linear(x, self.left) * linear(x, self.right), self.write)


@torch.no_grad()
def recruitment(layer: Bilinear, affine: Affine, sample: Sample) -> float:
    """Root mean square of the product term over that of the map's residual: 0 if it is not used."""
    rest = float(errors(affine, sample)[0].sum())
    parts = sample.x.split(CHUNK)
    used = sum(float((layer(x) - affine(x)).double().square().sum()) for x in parts)
    return math.sqrt(used / rest) if rest > 0 else math.nan


def solve_products(
    fit: Sample,
    choose: Sample,
    affine: Affine,
    *,
    rank: int = 16,
    seed: int = 0,
    start: Bilinear | None = None,
    prepared: Prepared | None = None,
) -> Fitted:
    """Variable projection: U and V by L-BFGS on all rows, A in closed form at every step.

    `start` is a layer of lower rank to begin from; `prepared` is what several searches on these rows
    share. O(6 n d rank) multiply-adds an iteration.
    """
    fitted = Fitted(seed, rank=rank, solver="ours", gate=None)
    problem, gain_of = (prepared or Prepared(fit, choose, affine)).parts()
    P = nn.Parameter(_start(problem, rank, start, torch.Generator().manual_seed(seed)))
    unused = problem.layer(P)
    unused.write.data.zero_()  # the affine map itself
    unused.bias.data.copy_(affine.bias)
    fitted.check(0, 0.0, unused)
    search, before, level, idle = _Search(problem, P), 0.0, 0.0, 0
    while fitted.steps < ITERATIONS and idle < PATIENCE:
        search.advance()
        layer = problem.layer(P)
        gain = gain_of(layer)
        idle = 0 if gain > fitted.best * (1 + TOLERANCE) else idle + 1
        fitted.check(fitted.steps + EVERY, gain, layer)
        fitted.converged = before - problem.value <= TOLERANCE * -problem.value
        before = problem.value
        if fitted.converged:
            if fitted.best <= level * (1 + TOLERANCE):
                break  # the larger ridge did as well
            level, problem.ridge, idle = fitted.best, problem.ridge / 10, 0
            problem.best(P.detach())
            before = problem.value
            search = _Search(problem, P)  # the curvature has changed
    fitted.converged = fitted.converged or fitted.steps < ITERATIONS
    return fitted


def _start(problem: _Problem, rank: int, start: Bilinear | None, g: torch.Generator) -> Tensor:
    """(2, rank, d_in): the best of a few short searches on some of the rows.

    Some searches end where two products do the work of one and another is missing. A short search
    shows it.
    """
    d, best, lowest = problem.x.shape[1], torch.zeros(0), math.inf
    few = problem.narrow(torch.randperm(problem.n, generator=g)[: max(problem.n // 8, START_ROWS)])
    for _ in range(STARTS):
        factors = torch.randn(2, rank, d, generator=g) * problem.weights.rsqrt()
        for i, known in enumerate((start.left, start.right) if start else ()):
            factors[i, : len(known)] = known.detach() @ problem.back
        P = nn.Parameter(factors)
        search = _Search(few, P)
        for _ in range(START_CHECKS):
            search.advance()
        few.best(P.detach())
        if few.value < lowest:
            best, lowest = P.detach(), few.value
    return best


class _Search:
    """L-BFGS on U and V, EVERY iterations at a time.

    The objective does not depend on the lengths of u and v, so they drift. Once they differ much, the
    search is badly scaled: then all are rescaled to unit length and L-BFGS starts again.
    """

    def __init__(self, problem: _Problem, P: nn.Parameter) -> None:
        self.problem, self.P = problem, P
        self.restart()

    def restart(self) -> None:
        self.P.data /= self.problem.lengths(self.P.data)
        self.lbfgs = torch.optim.LBFGS(
            [self.P],
            max_iter=EVERY,
            history_size=20,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )

    def advance(self) -> None:
        def closure() -> Tensor:
            with torch.no_grad():
                value, self.P.grad = self.problem.value_and_gradient(self.P)
            return torch.tensor(value)

        lengths = self.problem.lengths(self.P.data)
        if float(lengths.max()) > DRIFT or float(lengths.min()) < 1 / DRIFT:
            self.restart()
        self.lbfgs.step(closure)


class _Problem:
    """The residual of the affine map as a function of U and V alone, in the coordinates x T."""

    def __init__(self, fit: Sample, affine: Affine) -> None:
        self.affine, self.n, self.ridge = affine, len(fit), RIDGE
        self.rest = residual(fit, affine)
        self.rest -= self.rest.mean(0)  # products are centred too; zero where fitted on these rows
        self.total = float(self.rest.double().square().sum()) or 1.0
        values, Q = torch.linalg.eigh((fit.x.t() @ fit.x).double() / self.n)
        scale = values.mean().clamp_min(torch.finfo(torch.float64).tiny)
        values = (values / scale).clamp_min(1e-8)
        root = values ** (WHITENING / 2)
        self.T = (Q / root / scale.sqrt()).float()  # (d_in, d_in)
        self.back = (Q * root * scale.sqrt()).float()  # inverse of T, transposed
        self.weights = root.square().reciprocal().float()  # |u|^2 in the coordinates of x, scaled
        self.x = fit.x @ self.T
        self.write, self.mean, self.value = torch.zeros(0), torch.zeros(0), 0.0

    def lengths(self, P: Tensor) -> Tensor:
        """(2, r, 1) lengths of each u and v in the coordinates of x."""
        return (P.square() * self.weights).sum(2, keepdim=True).sqrt().clamp_min(1e-20)

    def narrow(self, rows: Tensor) -> _Problem:
        """The same problem on some of the rows."""
        few = copy.copy(self)
        few.x, few.rest, few.n = self.x[rows], self.rest[rows], len(rows)
        few.rest -= few.rest.mean(0)
        few.total = float(few.rest.double().square().sum()) or 1.0
        return few

    def value_and_gradient(self, P: Tensor) -> tuple[float, Tensor]:
        """The penalised sum of squares at the best A, relative to no products, and its gradient.

        A is at its best, so the gradient is that of the sum of squares with A held fixed.
        """
        u, v, z, norms = self.best(P)
        dz = z @ (self.write.t() @ self.write) - self.rest @ self.write
        gradient = (torch.cat([dz * v, dz * u], 1).t() @ self.x).reshape(P.shape)
        squares = self.write.double().square().sum(0)
        shares = (self.ridge * self.n * squares * norms.flip(0)).to(P)
        gradient += shares[:, :, None] * P * self.weights
        return self.value, gradient * (2 / self.total)

    def best(self, P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A and the value at it; (u, v, their centred products, squared lengths)."""
        r = P.shape[1]
        both = self.x @ P.reshape(2 * r, -1).t()
        u, v = both[:, :r], both[:, r:]
        z = u * v  # (n, r)
        self.mean = z.mean(0)
        z -= self.mean
        norms = (P.square() * self.weights).sum(2).double()  # (2, r)
        penalty = self.ridge * self.n * norms.prod(0)
        G, B = (z.t() @ z).double(), (z.t() @ self.rest).double()
        H = G + penalty.diag()
        s = H.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        A = torch.linalg.solve(H / s / s[:, None], B / s[:, None]) / s[:, None]  # (r, d_out)
        cost = ((G @ A) * A).sum() + (penalty * A.square().sum(1)).sum()
        value = float(cost - 2 * (A * B).sum())
        self.write, self.value = A.to(z).t(), value / self.total
        return u, v, z, norms

    @torch.no_grad()
    def layer(self, P: Tensor) -> Bilinear:
        """The layer in the coordinates of x."""
        self.best(P)
        left, right = P[0] @ self.T.t(), P[1] @ self.T.t()
        return Bilinear(self.affine, left, right, self.write, self.mean)


class Prepared:
    """The rows to fit in the coordinates of the search, and the gain on the rows kept for stopping."""

    def __init__(self, fit: Sample, choose: Sample, affine: Affine) -> None:
        self.problem, self.gain_of = _Problem(fit, affine), _gain_on(choose, affine)

    def parts(self) -> tuple[_Problem, Callable[[Bilinear], float]]:
        """For one search, which may change its ridge."""
        return copy.copy(self.problem), self.gain_of


def _gain_on(choose: Sample, affine: Affine) -> Callable[[Bilinear], float]:
    """A layer's gain on rows that are not fitted; the map runs on them once."""
    rest = residual(choose, affine)
    squares, total = rest.double().square().sum(), choose.spread.sum()

    @torch.no_grad()
    def gain(layer: Bilinear) -> float:
        change = layer.products(choose.x) + (layer.bias - affine.bias)
        left = (rest - change).square().sum(1).double().sum()
        return float((squares - left) / total)

    return gain


def residual(sample: Sample, affine: Affine) -> Tensor:
    """(n, d_out), y - Wx - b, subtracted in float64."""
    exact = Affine(affine.weight.double(), affine.bias.double(), affine.rank)
    return torch.cat([(y.double() - exact(x.double())).float() for x, y in sample.chunks()])


def train_products(
    fit: Sample,
    choose: Sample,
    affine: Affine,
    *,
    rank: int = 16,
    seed: int = 0,
    steps: int = 4000,
    every: int = 200,
) -> Fitted:
    """The paper's method: Adam 1e-3 on batches of 256 raw rows, a gate exp(q) from q = -2.

    The best state by `choose` is kept. The paper chooses by the rows that it reports.
    """
    fitted = Fitted(seed, rank=rank, solver="paper", gate=None)
    g = torch.Generator().manual_seed(seed)
    d, d_out = fit.x.shape[1], fit.y.shape[1]
    U, V, A = (nn.Parameter(as_linear(*s, g)) for s in ((rank, d), (rank, d), (d_out, rank)))
    q = nn.Parameter(torch.tensor(-2.0))
    adam = torch.optim.Adam([U, V, A, q], lr=1e-3)
    rest, gain_of = residual(fit, affine), _gain_on(choose, affine)
    linear = nn.functional.linear
    for step in range(1, steps + 1):
        rows = torch.randint(len(fit), (256,), generator=g)
        x = fit.x[rows]
        guess = q.exp() * linear(linear(x, U) * linear(x, V), A)
        descend(adam, (rest[rows] - guess).square().mean())
        if step % every == 0 or step == steps:
            layer = Bilinear(affine, U.clone(), V.clone(), q.exp() * A)
            if fitted.check(step, gain_of(layer), layer):
                fitted.about["gate"] = float(q.detach().exp())
    fitted.converged = settled([gain for _, gain in fitted.curve])
    return fitted


def as_linear(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Weights drawn as nn.Linear draws them."""
    return (torch.rand(rows, columns, generator=g) * 2 - 1) / math.sqrt(columns)


def settled(gains: Sequence[float], last: int = 5) -> bool:
    """Has the best of the last few checks added less than 1 % to the best before them?"""
    if len(gains) <= last:
        return False
    return max(gains[-last:]) - max(gains[:-last]) <= 0.01 * abs(max(gains[:-last]))


def rank_sweep(
    fit: Sample,
    choose: Sample,
    affine: Affine,
    ranks: Sequence[int] = RANKS,
    seed: int = 0,
    prepared: Prepared | None = None,
) -> dict[int, Fitted]:
    """One search for each rank, which starts at the layer of the rank before."""
    by_rank: dict[int, Fitted] = {}
    layer: Any = None
    options: dict[str, Any] = {"seed": seed, "prepared": prepared or Prepared(fit, choose, affine)}
    for rank in ranks:
        by_rank[rank] = solve_products(fit, choose, affine, rank=rank, start=layer, **options)
        layer = by_rank[rank].layer
    return by_rank


def probe_products(
    fit: Sample,
    choose: Sample,
    report: Sample,
    affine: Affine,
    *,
    rank: int,
    solver: str,
    seeds: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The record and layer of the seed with the highest gain on `choose`; every seed is listed."""

    def scores(layer: Any) -> dict[str, Any]:
        used = recruitment(layer, affine, report)
        return outcome(layer, affine, report).to_dict() | {"recruitment": used}

    prepared = Prepared(fit, choose, affine) if solver == "ours" else None
    search = partial(solve_products, prepared=prepared) if prepared else train_products
    tried = [search(fit, choose, affine, rank=rank, seed=seed + i) for i in range(seeds)]
    record, layer = best_of(tried, scores)
    parameters = size_of(layer)
    record |= {"parameters": parameters, "beyond_map": parameters - affine.parameters}
    record["ranks"] = None
    if prepared:
        by_rank = rank_sweep(fit, choose, affine, RANKS, seed, prepared)
        record["ranks"] = [
            {"rank": r, "converged": fitted.converged, "seconds": fitted.seconds}
            | scores(fitted.layer)
            for r, fitted in by_rank.items()
        ]
    return record, {"bilinear": layer}
