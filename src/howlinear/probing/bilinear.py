"""Is the rest a sum of products? y ~ Wx + b + A[(Ux) * (Vx)], with W and b as the closed form has them.

    solved = solve_products(fit, choose, affine, rank=16, seed=0)
    outcome(solved.layer, affine, report).gain

Given U and V the best A is a small least-squares problem, so only U and V are searched for, by
L-BFGS on all fit rows (variable projection). Three things keep it honest on real activations, whose
few large rows can be learnt by heart: a ridge on each product's norm |a|^2 |u|^2 |v|^2, which does
not care how the three share their scale; stopping by rows that the fit does not see; and products of
x itself, not of centred x. The search runs in partly whitened coordinates, each principal direction
of x scaled by its root mean square to the power -1/4. Whitening in full is worse (`python
benchmarks/probe.py --whitening 0.25,1`): it leads the search into directions of little variance,
where large rows stand apart.

`train_products` is the paper's way: Adam on raw inputs through a gate exp(q) that starts at e^-2.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.probing.samples import CHUNK, Sample, errors

WHITENING = 0.25  # of 1
RIDGE = 0.3  # a row's, for x of unit mean square; lowered for as long as that helps
EVERY = 10  # iterations between looks at the rows kept for stopping
ITERATIONS = 200
STARTS = 4
START_LOOKS = 3
BEGIN = 4096  # rows at least that a search begins on; an eighth if that is more
DRIFT = 3.0  # times its first length, before a factor is put back to it
PATIENCE = 2  # looks without gain before the search at one ridge, and with it all, ends
TOLERANCE = 0.02  # of what is explained: less in EVERY iterations, and the search has converged
RANKS = (1, 2, 4, 8, 16, 32, 64)


class Bilinear(nn.Module):
    """Wx + b + A[(Ux) * (Vx)]. `mean` (r,) of the products over fit rows is taken out by way of b."""

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


@dataclass(frozen=True, eq=False)
class Solved:
    """A fitted layer, and how it was found."""

    layer: Bilinear
    rank: int
    seed: int
    solver: str
    steps: int
    seconds: float
    converged: bool
    chosen_at: int  # step with the highest gain on the rows kept for stopping
    curve: list[tuple[int, float]]  # step, gain on those rows
    gate: float | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("rank", "seed", "solver", "steps", "seconds", "converged", "chosen_at", "gate")
        return {name: getattr(self, name) for name in names} | {"curve": self.curve}


def recruitment(layer: Bilinear, affine: Affine, sample: Sample) -> float:
    """Root mean square of the product term over that of what the map leaves: 0 if not recruited."""
    rest = float(errors(affine, sample)[0].sum())
    with torch.no_grad():
        used = sum(
            float((layer(x) - affine(x)).double().square().sum()) for x in sample.x.split(CHUNK)
        )
    return math.sqrt(used / rest) if rest > 0 else math.nan


def solve_products(
    fit: Sample,
    choose: Sample,
    affine: Affine,
    *,
    rank: int = 16,
    seed: int = 0,
    start: Bilinear | None = None,
) -> Solved:
    """Variable projection: U and V by L-BFGS on all rows, A in closed form at every step.

    `start` is a layer of lower rank to begin from. O(6 n d rank) multiply-adds an iteration.
    """
    began = time.perf_counter()
    problem = _Problem(fit, affine)
    g = torch.Generator().manual_seed(seed)
    P = nn.Parameter(_begin(problem, rank, start, g))
    search = _Search(problem, P)
    judge = _Judge(choose, affine)
    best, best_gain, chosen_at = problem.layer(P), 0.0, 0
    best.write.data.zero_()  # nothing learnt yet
    best.bias.data.copy_(affine.bias)
    curve, before, level, converged, steps, idle = [(0, 0.0)], 0.0, 0.0, False, 0, 0
    while steps < ITERATIONS and idle < PATIENCE:
        search.advance()
        steps += EVERY
        layer = problem.layer(P)
        curve.append((steps, gain := judge.gain(layer)))
        idle = 0 if gain > best_gain * (1 + TOLERANCE) else idle + 1
        if gain > best_gain:
            best, best_gain, chosen_at = layer, gain, steps
        converged = before - problem.value <= TOLERANCE * -problem.value
        before = problem.value
        if converged and best_gain <= level * (1 + TOLERANCE):
            break  # the last ridge did as well
        if converged:
            level, problem.ridge, idle = best_gain, problem.ridge / 10, 0
            problem.layer(P)
            before = problem.value
            search = _Search(problem, P)  # the old one remembers another curvature
    seconds = time.perf_counter() - began
    converged = converged or steps < ITERATIONS
    return Solved(best, rank, seed, "ours", steps, seconds, converged, chosen_at, curve)


def _begin(problem: _Problem, rank: int, start: Bilinear | None, g: torch.Generator) -> Tensor:
    """(2, rank, d_in): of a few short searches on some of the rows, the one that got furthest.

    Now and then a search ends where two products share the work of one and another's is not
    done; that shows early.
    """
    d, best, furthest = problem.x.shape[1], torch.zeros(0), math.inf
    few = problem.narrow(torch.randperm(problem.n, generator=g)[: max(problem.n // 8, BEGIN)])
    for _ in range(STARTS):
        factors = torch.randn(2, rank, d, generator=g) * problem.weights.rsqrt()
        for i, known in enumerate((start.left, start.right) if start else ()):
            factors[i, : len(known)] = known.detach() @ problem.back
        P = nn.Parameter(factors)
        search = _Search(few, P)
        for _ in range(START_LOOKS):
            search.advance()
        few.best(P.detach())
        if few.value < furthest:
            best, furthest = P.detach(), few.value
    return best


class _Search:
    """L-BFGS on U and V, EVERY iterations at a time.

    Nothing depends on the lengths of u and v, so they drift; once they differ much the search is
    badly scaled. Then all are made of unit length, and the curvature so far is forgotten.
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
    """What the affine map leaves, as a function of U and V alone, in the coordinates x T."""

    def __init__(self, fit: Sample, affine: Affine) -> None:
        self.affine, self.n, self.ridge = affine, len(fit), RIDGE
        self.rest = left_over(fit, affine)
        self.rest -= self.rest.mean(0)  # products are centred too; zero where fitted on these rows
        self.total = float(self.rest.double().square().sum()) or 1.0
        values, Q = torch.linalg.eigh((fit.x.t() @ fit.x).double() / self.n)
        scale = values.mean().clamp_min(torch.finfo(torch.float64).tiny)
        values = (values / scale).clamp_min(1e-8)
        root = values ** (WHITENING / 2)
        self.T = (Q / root / scale.sqrt()).float()  # (d_in, d_in)
        self.back = (Q * root * scale.sqrt()).float()  # inverse of T, transposed
        self.weights = root.square().reciprocal().float()  # |u|^2 in x's own coordinates, scaled
        self.x = fit.x @ self.T
        self.write, self.mean, self.value = torch.zeros(0), torch.zeros(0), 0.0

    def lengths(self, P: Tensor) -> Tensor:
        """(2, r, 1), of each u and v in x's own coordinates."""
        return (P.square() * self.weights).sum(2, keepdim=True).sqrt().clamp_min(1e-20)

    def narrow(self, rows: Tensor) -> _Problem:
        """The same on some of the rows."""
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
        """The layer on x as it comes."""
        self.best(P)
        left, right = P[0] @ self.T.t(), P[1] @ self.T.t()
        return Bilinear(self.affine, left, right, self.write, self.mean)


class _Judge:
    """The gain on rows that a search does not see, without running the map on them again."""

    def __init__(self, choose: Sample, affine: Affine) -> None:
        self.x, self.affine, self.rest = choose.x, affine, left_over(choose, affine)
        self.squares, self.total = self.rest.double().square().sum(), choose.spread.sum()

    @torch.no_grad()
    def gain(self, layer: Bilinear) -> float:
        change = layer.products(self.x) + (layer.bias - self.affine.bias)
        left = (self.rest - change).square().sum(1).double().sum()
        return float((self.squares - left) / self.total)


def left_over(sample: Sample, affine: Affine) -> Tensor:
    """(n, d_out), y - Wx - b, subtracted in float64."""
    exact = Affine(affine.weight.double(), affine.bias.double(), affine.rank)
    pairs = zip(sample.x.split(CHUNK), sample.y.split(CHUNK), strict=True)
    return torch.cat([(y.double() - exact(x.double())).float() for x, y in pairs])


def train_products(
    fit: Sample,
    choose: Sample,
    affine: Affine,
    *,
    rank: int = 16,
    seed: int = 0,
    steps: int = 4000,
    every: int = 200,
) -> Solved:
    """The paper's: Adam 1e-3 on batches of 256 raw rows, a gate exp(q) from q = -2, the best kept.

    The paper keeps the best by the rows it reports; here `choose` decides, and others report.
    """
    began = time.perf_counter()
    g = torch.Generator().manual_seed(seed)
    d, d_out = fit.x.shape[1], fit.y.shape[1]
    U, V, A = (nn.Parameter(as_linear(*s, g)) for s in ((rank, d), (rank, d), (d_out, rank)))
    q = nn.Parameter(torch.tensor(-2.0))
    adam = torch.optim.Adam([U, V, A, q], lr=1e-3)
    rest = left_over(fit, affine)
    linear = nn.functional.linear
    judge = _Judge(choose, affine)
    best, best_gain, chosen_at, gate = None, -math.inf, 0, math.exp(-2)
    curve: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(fit), (256,), generator=g)
        x = fit.x[rows]
        guess = q.exp() * linear(linear(x, U) * linear(x, V), A)
        loss = (rest[rows] - guess).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % every == 0 or step == steps:
            layer = Bilinear(affine, U.clone(), V.clone(), q.exp() * A)
            curve.append((step, gain := judge.gain(layer)))
            if gain > best_gain:
                best, best_gain, chosen_at, gate = layer, gain, step, float(q.detach().exp())
    assert best is not None
    converged = settled([gain for _, gain in curve])
    seconds = time.perf_counter() - began
    return Solved(best, rank, seed, "paper", steps, seconds, converged, chosen_at, curve, gate)


def as_linear(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Weights drawn as nn.Linear draws its own."""
    return (torch.rand(rows, columns, generator=g) * 2 - 1) / math.sqrt(columns)


def settled(gains: Sequence[float], last: int = 5) -> bool:
    """Has the best of the last few looks added less than 1 % to the best before them?"""
    if len(gains) <= last:
        return False
    return max(gains[-last:]) - max(gains[:-last]) <= 0.01 * abs(max(gains[:-last]))


def rank_sweep(
    fit: Sample, choose: Sample, affine: Affine, ranks: Sequence[int] = RANKS, seed: int = 0
) -> list[Solved]:
    """One search a rank, each begun where the one before ended."""
    found: list[Solved] = []
    for rank in ranks:
        start = found[-1].layer if found else None
        found.append(solve_products(fit, choose, affine, rank=rank, seed=seed, start=start))
    return found
