"""Is the residual a polynomial of low degree? Ridge regression on monomials, in closed form.

    record, layers = degrees(fit, choose, report, affine)
    record["steps"][1]["gain"], record["verdict"]

The leading principal directions of x, scaled to unit variance, are multiplied out to degree 2 and 3;
linear terms are included, so that higher degrees contain lower ones. A second polynomial of degree 2
has as many monomials as the one of degree 3, in more directions: it separates the gain of a higher
order from the gain of more directions. The ridge is chosen on the rows kept for choosing.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement as choices
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.linear.moments import Moments
from howlinear.linear.solving import fit as least_squares
from howlinear.probing.bilinear import residual
from howlinear.probing.samples import CHUNK, Layer, Sample, errors, outcome, ratio, size_of

DIRECTIONS = 20
ROWS_A_MONOMIAL = 15
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of a monomial's variance
SHARE = 0.1  # of the residual: the verdict is "no polynomial" below it


class Polynomial(nn.Module):
    """Wx + b + a polynomial in some directions of x."""

    def __init__(self, affine: Affine, mean: Tensor, directions: Tensor, degree: int) -> None:
        super().__init__()
        self.affine, self.mean, self.directions = affine, mean, directions  # (d_in, p)
        p = directions.shape[1]
        self.terms = [
            torch.tensor(list(choices(range(p), q))).t() for q in range(1, degree + 1)
        ]  # one column per monomial
        count = sum(t.shape[1] for t in self.terms)
        self.scale = torch.ones(count)
        self.weight = nn.Parameter(torch.zeros(affine.d_out, count), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(affine.d_out), requires_grad=False)
        self.d_in, self.d_out = affine.d_in, affine.d_out

    def monomials(self, x: Tensor) -> Tensor:
        t = (x.reshape(-1, x.shape[-1]) - self.mean) @ self.directions
        parts = []
        for which in self.terms:
            product = t[:, which[0]]
            for more in which[1:]:
                product = product * t[:, more]
            parts.append(product)
        return torch.cat(parts, 1) / self.scale

    def forward(self, x: Tensor) -> Tensor:
        rest = nn.functional.linear(self.monomials(x), self.weight, self.bias)
        return self.affine(x) + rest.reshape(*x.shape[:-1], -1)


def degrees(
    fit: Sample, choose: Sample, report: Sample, affine: Affine
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """Degree 2 and 3 in the same directions, degree 2 in as many monomials as degree 3 has."""
    mean = fit.x.mean(0)
    centred = fit.x - mean
    values, vectors = torch.linalg.eigh((centred.t() @ centred).double() / len(fit))
    usable = int((values > values[-1] * 1e-10).sum())
    most = max(_monomials(1, 3), len(fit) // ROWS_A_MONOMIAL)
    p = max(q for q in range(1, min(usable, DIRECTIONS) + 1) if _monomials(q, 3) <= most)
    wide = max(q for q in range(1, usable + 1) if _monomials(q, 2) <= _monomials(p, 3))
    rest = residual(fit, affine)
    steps: list[dict[str, Any]] = []
    layers: dict[str, Layer] = {}
    errors_by: dict[str, float] = {}
    for degree, count in dict.fromkeys(((2, p), (3, p), (2, wide))):
        directions = (vectors[:, -count:] / values[-count:].sqrt()).flip(1).float()
        layer = Polynomial(affine, mean, directions, degree)
        name = f"degree {degree} in {count}"
        layers[name] = layer
        ridge, errors_by[name] = _fit(layer, fit, rest, choose)
        scores = outcome(layer, affine, report)
        steps.append(
            {
                "degree": degree,
                "directions": count,
                "monomials": layer.weight.shape[1],
                "ridge": ridge,
                "parameters": affine.parameters + directions.numel() + size_of(layer),
                "recovered": _share(scores.gain, 1 - scores.r2 + scores.gain),
                **scores.to_dict(),
            }
        )
    second, third = (errors(layers[f"degree {q} in {p}"], report)[0] for q in (2, 3))
    more, more_se = ratio(second - third, report.spread, report.cluster)
    best = min(errors_by, key=errors_by.__getitem__)  # by the rows kept for choosing
    record = {"steps": steps, "best": best, "third_gain": more, "third_gain_se": more_se}
    return record | {"verdict": verdict(steps, more, more_se)}, layers


def verdict(steps: list[dict[str, Any]], third: float, third_se: float) -> str:
    """The verdict in words; SHARE is a convention, stated in docs/fields.md."""
    if max(step["recovered"] for step in steps) < SHARE:
        return "no polynomial of degree 3 in the leading directions"
    unsure = 0.0 if math.isnan(third_se) else 2 * third_se
    if third > unsure and third > SHARE * (1 - steps[0]["r2"]):
        return "third order"
    return "second order"


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _monomials(directions: int, degree: int) -> int:
    return math.comb(directions + degree, degree) - 1


@torch.no_grad()
def _fit(layer: Polynomial, fit: Sample, rest: Tensor, choose: Sample) -> tuple[float, float]:
    """Set the weights of the best ridge by `choose`; that ridge, and its squared error there."""
    squares = sum(layer.monomials(x).double().square().sum(0) for x in fit.x.split(CHUNK))
    assert isinstance(squares, Tensor)
    layer.scale = (squares / len(fit)).sqrt().float().clamp_min(1e-30)
    rows = Moments(len(layer.scale), layer.d_out)
    for x, y in zip(fit.x.split(CHUNK), rest.split(CHUNK), strict=True):
        rows.update(layer.monomials(x), y)
    inputs = [(layer.monomials(x), layer.affine(x)) for x in choose.x.split(CHUNK)]
    best, best_ridge = math.inf, 0.0
    for ridge in RIDGES:
        affine = least_squares(rows, ridge=ridge * len(fit))
        weight, bias = affine.weight.float(), affine.bias.float()
        error = sum(
            float((y - base - m @ weight.t() - bias).double().square().sum())
            for (m, base), y in zip(inputs, choose.y.split(CHUNK), strict=True)
        )
        if error < best:
            best, best_ridge = error, ridge
            layer.weight.data, layer.bias.data = weight, bias
    return best_ridge, best
