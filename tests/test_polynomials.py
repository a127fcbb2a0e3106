"""Quadratic, cubic and neither are told apart."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import planted
from howlinear.probing.bilinear import residual
from howlinear.probing.polynomials import Polynomial, _fit, degrees
from howlinear.probing.samples import outcome

BLOCKS = {
    "second order": lambda x: x + x * x.roll(1, 1),
    "third order": lambda x: x + x * x.roll(1, 1) * x.roll(2, 1),
    "no polynomial of degree 3 in the leading directions": lambda x: x + (9 * x).sin(),
}


@pytest.mark.parametrize("verdict", BLOCKS)
def test_planted_orders_are_told_apart(verdict):
    f = BLOCKS[verdict]
    fit, choose, report, affine = planted.samples(f, d=8, noise=0.1)
    found, layers = degrees(fit, choose, report, affine)
    assert found["verdict"] == verdict
    two, three = (step["recovered"] for step in found["steps"][:2])
    if verdict == "second order":
        assert two > 0.95
        assert abs(found["third_gain"]) < 0.01
    elif verdict == "third order":
        assert two < 0.1
        assert three > 0.95
        assert found["third_gain"] > 10 * found["third_gain_se"]
    for step, layer in zip(found["steps"], layers.values(), strict=False):
        assert outcome(layer, affine, report).gain == pytest.approx(step["gain"])


def test_a_linear_block_leaves_no_polynomial():
    fit, choose, report, affine = planted.samples(planted.linear(0, d=8), d=8)
    found, _ = degrees(fit, choose, report, affine)
    assert all(abs(step["gain"]) < 0.01 for step in found["steps"])


def test_the_fit_is_the_ridge_of_scikit_learn():
    fit, choose, report, affine = planted.samples(BLOCKS["third order"], d=5, sizes=(600, 200, 200))
    layer = Polynomial(affine, fit.x.mean(0), torch.eye(5), 3)
    ridge, _ = _fit(layer, fit, residual(fit, affine), choose)
    assert layer.weight.shape[1] == 5 + 15 + 35
    authority = Ridge(alpha=ridge * len(fit)).fit(
        layer.monomials(fit.x).double(), residual(fit, affine).double()
    )
    want = authority.predict(layer.monomials(report.x).double())
    got = (layer(report.x) - affine(report.x)).numpy()
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_few_rows_mean_few_directions():
    fit, choose, report, affine = planted.samples(planted.linear(0), d=24, sizes=(600, 200, 200))
    found, _ = degrees(fit, choose, report, affine)
    assert max(step["monomials"] for step in found["steps"]) <= 600 // 15
    two, three, wide = found["steps"]
    assert two["directions"] == three["directions"] < wide["directions"]


def test_a_polynomial_takes_any_leading_shape():
    fit, choose, report, affine = planted.samples(planted.linear(0, d=8), d=8)
    _, layers = degrees(fit, choose, report, affine)
    layer = next(iter(layers.values()))
    x = report.x[:12]
    torch.testing.assert_close(layer(x.view(3, 4, 8)).view(12, -1), layer(x))
