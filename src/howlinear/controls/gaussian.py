"""What a block's map would be if its inputs were Gaussian, from weights and two moments: no rows.

    expected_map(model, block, mean, covariance)        # Affine, W = E[Jacobian]
    transport(mean_a, cov_a, mean_b, cov_b)             # Affine, Gaussian a to Gaussian b
    draw(mean, symmetric_root(covariance), rows, generator)     # (rows, d)

Stein's lemma: for x ~ N(m, S), Cov(f(x), x) = E[f'(x)] S, so the least-squares map of any block on
Gaussian inputs is its mean Jacobian. Hidden unit j sees x through one number, g_j = G_j x + b_j, or
two, the gate g_j and u_j = U_j x + c_j, which it multiplies by. Under a Gaussian these are Gaussian
too, and what is left are integrals over one variable, t = (g_j - E g_j) / s_j:

    plain  h = a(g):    E[dh/dg] = E[a t] / s
    gated  h = a(g) u:  E[dh/du] = E[a],   E[dh/dg] = (E[h t] - (c / s) E[a]) / s,   c = Cov(g, u)

They are summed on a fine grid, on which kinks (ReLU) cost little accuracy. The activation is what the
block's own modules compute between their projections; that it is a(g) or a(g) u is tested.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.models.families import Block, projection_shape
from howlinear.models.hooks import Chain, as_module
from howlinear.models.twins import rebuilt
from howlinear.models.units import hidden_units, weight_of, writes

STEP = 0.01  # of the grid, in standard deviations: a kink leaves an error of STEP^2 / 12
REACH = 9.0  # of the grid to either side, in standard deviations
NODES = 64  # grid points at a time
NOISE = (16 * torch.finfo(torch.float32).eps) ** 2  # variance that rounding leaves of none


def symmetric_root(covariance: Tensor, power: float = 0.5) -> Tensor:
    """S^power for a covariance, on its range: directions without variance stay without."""
    values, V = torch.linalg.eigh(covariance)
    floor = float(values[-1].clamp_min(0)) * NOISE
    kept = values > floor
    return (V[:, kept] * values[kept] ** power) @ V[:, kept].t()


def transport(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> Affine:
    """The optimal-transport map between Gaussians: A = Ra^-1 (Ra Sb Ra)^(1/2) Ra^-1, Ra = Sa^(1/2).

    Of all maps that give rows with moments a the moments b, the one that moves them least.
    """
    root, inverse = symmetric_root(cov_a), symmetric_root(cov_a, -0.5)
    A = inverse @ symmetric_root(root @ cov_b @ root) @ inverse
    return Affine(A, mean_b - A @ mean_a, int(torch.linalg.matrix_rank(A, hermitian=True)))


def whitening(mean: Tensor, covariance: Tensor) -> Affine:
    """Rows of the same mean and the same total variance, spread evenly over all directions."""
    A = symmetric_root(covariance, -0.5) * math.sqrt(float(covariance.diagonal().mean()))
    return Affine(A, mean - A @ mean, int(torch.linalg.matrix_rank(A, hermitian=True)))


def draw(mean: Tensor, root: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Rows (rows, d) of N(mean, root root'), float64; `symmetric_root` has the root."""
    z = torch.randn(rows, len(mean), generator=generator, dtype=torch.float64)
    return mean + z @ root.t()


def expected_map(model: nn.Module, block: Block, mean: Tensor, covariance: Tensor) -> Affine:
    """The least-squares map of the block on N(mean, covariance), by integrals over one variable.

    ValueError for blocks whose hidden units are not a(g) or a(g) u: experts, mixing, two activations.
    """
    units = _HiddenUnits(model, block)
    (G, b), *second = units.projections
    mu, s2 = G @ mean + b, ((G @ covariance) * G).sum(1)
    s = s2.clamp_min(0).sqrt()
    # zero for a unit whose input does not vary
    inverse = torch.where(s > 0, 1 / s.clamp_min(1e-300), 0.0)
    e0, e1, e2 = units.moments(mu, s)
    if not second:
        expected, by_g = e0, e1 * inverse
        W = by_g[:, None] * G
    else:
        U, c = second[0]
        mean_u = U @ mean + c
        slope = ((G @ covariance) * U).sum(1) * inverse  # Cov(g, u) / s
        expected = mean_u * e0 + slope * e1
        by_g = (mean_u * e1 + slope * e2 - slope * e0) * inverse
        W = by_g[:, None] * G + e0[:, None] * U
    W = units.down @ W
    return Affine(W, units.down @ expected + units.bias - W @ mean, block.d_in)


class _HiddenUnits:
    """A block's projections, gate first, and its hidden units as a function of their outputs."""

    def __init__(self, model: nn.Module, block: Block) -> None:
        if writes(model, block) is None:
            raise ValueError(f"{block} has no hidden units that stand alone, so no Gaussian map")
        down = attrgetter(str(block.down))(model)
        self.down, self.bias = _double(down)
        self._check_end(model, block, down)
        steps = [attrgetter(path)(model) for path in block.steps]
        before = [
            module
            for step in steps
            for module in (step.modules() if isinstance(step, nn.Module) else ())
            if module is not down and projection_shape(module) is not None
        ]
        self.fixed = [_FixedOutput() for _ in before]
        replaced: dict[nn.Module, nn.Module] = dict(zip(before, self.fixed, strict=True))
        replaced[down] = nn.Identity()
        replaced[down].register_buffer("weight", self.down.new_empty(0), persistent=False)
        self.chain = Chain([rebuilt(step, replaced) for step in steps])
        m = self.down.shape[1]
        self.projections = [
            (W[i : i + m], b[i : i + m])
            for W, b in map(_double, before)
            for i in range(0, len(W), m)
        ]
        self._order(m, block)

    def _check_end(self, model: nn.Module, block: Block, down: nn.Module) -> None:
        """ValueError if the block does anything after its last projection."""
        weight = weight_of(down)
        x = torch.randn(4, block.d_in, generator=torch.Generator().manual_seed(0)).to(weight)
        with torch.no_grad():
            got, want = down(hidden_units(model, block)(x)), as_module(model, block)(x)
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
            raise ValueError(f"{block} does more after its last projection, so no Gaussian map")

    def _order(self, m: int, block: Block) -> None:
        """Order the projections: the gate first, the one that multiplies it second."""
        if len(self.projections) == 1:
            return
        g, u = torch.randn(2, 4, m, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for swap in (False, True) if len(self.projections) == 2 else ():
            self.swap = swap
            once, twice = self._hidden(g, u), self._hidden(g, -2 * u)
            if torch.allclose(twice, -2 * once, rtol=1e-4, atol=1e-6):
                self.projections = self.projections[:: -1 if swap else 1]
                return
        raise ValueError(f"{block} does not multiply by one of its projections: no Gaussian map")

    swap = False  # does the block apply the gate's projection second?

    def _hidden(self, *values: Tensor) -> Tensor:
        """Hidden units where these are the outputs of the projections, gate first."""
        outputs = list(values[::-1] if self.swap else values)
        if len(self.fixed) == 1:
            outputs = [torch.cat(outputs, -1)]  # gate and up in one projection
        for fixed, value in zip(self.fixed, outputs, strict=True):
            fixed.value = value
        with torch.no_grad():
            return self.chain(values[0]).double()

    def moments(self, mu: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[a], E[a t] and E[a t^2] of each unit, t standard normal, a the activation at mu + s t."""
        t = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64)
        w = torch.exp(-t.square() / 2)
        w /= w.sum()
        sums = torch.zeros(3, len(mu), dtype=torch.float64)
        for nodes, weights in zip(t.split(NODES), w.split(NODES), strict=True):
            g = mu + s * nodes[:, None]
            ones = [torch.ones_like(g)] * (len(self.projections) - 1)
            a = self._hidden(g, *ones)
            for k in range(3):
                sums[k] += (weights * nodes**k) @ a
        return sums[0], sums[1], sums[2]


class _FixedOutput(nn.Module):
    """In place of a projection: returns a fixed value."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def _double(projection: nn.Module) -> tuple[Tensor, Tensor]:
    """(weight, bias) in float64 on the CPU; no bias is one of zeros."""
    W = weight_of(projection).detach().cpu().double()
    bias = getattr(projection, "bias", None)
    return W, W.new_zeros(len(W)) if bias is None else bias.detach().cpu().double()
