"""The map that weights and two moments predict, against closed forms and against rows."""

import math

import pytest
import torch
from torch import nn

import tiny
from howlinear import Moments, blocks, fit, score
from howlinear.controls.gaussian import draw, expected_map, symmetric_root, transport, whitening
from howlinear.models.hooks import as_module

D = torch.float64


class Plain(nn.Module):
    """One list of layers with an `mlp` each: what the structural search finds."""

    def __init__(self, d, act):
        super().__init__()
        layer = nn.Module()
        layer.mlp = nn.Sequential(nn.Linear(d, d), act, nn.Linear(d, d))
        self.layers = nn.ModuleList([layer])

    def forward(self, x):
        return self.layers[0].mlp(x)


def relu_block(d=4):
    model = Plain(d, nn.ReLU()).requires_grad_(False)
    for linear in (model.layers[0].mlp[0], model.layers[0].mlp[2]):
        linear.weight.copy_(torch.eye(d))
        linear.bias.zero_()
    return model, blocks(model)[0]


def test_elementwise_relu_on_standard_normal_inputs():
    """E[relu'] = 1/2; of Var[relu] = 1/2 - 1/(2 pi), 1/4 is explained: R2 = 1 - 0.2665."""
    model, block = relu_block()
    found = expected_map(model, block, torch.zeros(4, dtype=D), torch.eye(4, dtype=D))
    # the kink leaves STEP^2 / 12 of its density
    torch.testing.assert_close(found.weight, 0.5 * torch.eye(4, dtype=D), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found.bias, torch.full((4,), 1 / math.sqrt(2 * math.pi), dtype=D), rtol=0, atol=1e-5
    )
    n = 400_000
    x = draw(torch.zeros(4, dtype=D), torch.eye(4, dtype=D), n, torch.Generator().manual_seed(0))
    moments = Moments(4, 4)
    moments.update(x, x.relu())
    r2 = 0.25 / (0.5 - 1 / (2 * math.pi))
    assert r2 == pytest.approx(1 - 0.2665, abs=5e-5)
    # R2 of n rows of 4 features: relative error about sqrt(5 / (4 n)) of 1 - R2, five of them
    assert score(found, moments).r2 == pytest.approx(r2, abs=5 * 0.2665 * math.sqrt(5 / (4 * n)))


def test_a_linear_block_is_its_own_map():
    model = Plain(5, nn.Identity()).requires_grad_(False).double()
    block = blocks(model)[0]
    cov = torch.diag(torch.tensor([1.0, 2, 3, 4, 5], dtype=D))
    found = expected_map(model, block, torch.ones(5, dtype=D), cov)
    x = torch.randn(7, 5, dtype=D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "llama", "phi3", "gemma", "bert", "t5-gated"]
)
def test_the_mean_jacobian_is_what_rows_give(family):
    """Against autograd on Gaussian rows: every entry within six standard errors of their mean."""
    torch.manual_seed(0)
    model = tiny.model(family).requires_grad_(False)
    block = blocks(model)[0]
    d, g = block.d_in, torch.Generator().manual_seed(0)
    R = torch.randn(d, d, generator=g, dtype=D)
    mean, cov = torch.randn(d, generator=g, dtype=D), 9 * R @ R.t() / d
    found = expected_map(model, block, mean, cov)
    module = as_module(model, block)
    x = draw(mean, symmetric_root(cov), 20_000, g).float()
    J = torch.func.vmap(torch.func.jacrev(lambda row: _first(module(row[None]))[0]))(x).double()
    se = J.std(0) / math.sqrt(len(x))
    floor = 1e-5 * J.abs().mean()  # float32 rounding, and the grid at kinks
    assert float(((found.weight - J.mean(0)).abs() / (se + floor)).max()) < 6
    # negative control: the Jacobian at the mean is not it
    there = torch.func.jacrev(lambda row: _first(module(row[None]))[0])(mean.float()).double()
    assert float(((there - J.mean(0)).abs() / (se + floor)).max()) > 20
    y = _first(module(x)).detach().double()
    away = (found(x.double()) - y).mean(0).abs() / (
        (found(x.double()) - y).std(0) / math.sqrt(len(x))
    )
    assert float(away.max()) < 6


def _first(y):
    return y[0] if isinstance(y, tuple) else y


def test_it_is_the_least_squares_map_of_gaussian_rows_and_no_other():
    model = tiny.model("llama")
    block = blocks(model)[0]
    d = block.d_in
    mean, cov = torch.full((d,), 0.3, dtype=D), 4 * torch.eye(d, dtype=D)
    found = expected_map(model, block, mean, cov)
    moments = Moments(d, d)
    x = draw(mean, symmetric_root(cov), 100_000, torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        moments.update(x, as_module(model, block)(x))
    best = score(fit(moments), moments).r2
    # d columns fitted to n rows gain about (1 - R2) d / n over the truth
    assert 0 <= best - score(found, moments).r2 < 5 * (1 - best) * d / 100_000
    elsewhere = expected_map(model, block, -mean, cov)
    assert best - score(elsewhere, moments).r2 > 0.01


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_experts_have_no_gaussian_map(family):
    model = tiny.model(family)
    with pytest.raises(ValueError, match="no Gaussian map"):
        expected_map(model, blocks(model)[0], torch.zeros(16, dtype=D), torch.eye(16, dtype=D))


def covariance(d, seed):
    R = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=D)
    return R @ R.t() / d


def test_transport_moves_moments_where_they_belong_and_no_further_than_it_must():
    (ma, Sa), (mb, Sb) = ((torch.randn(6, dtype=D), covariance(6, s)) for s in (0, 1))
    T = transport(ma, Sa, mb, Sb)
    torch.testing.assert_close(T(ma), mb)
    torch.testing.assert_close(T.weight @ Sa @ T.weight.t(), Sb)
    torch.testing.assert_close(T.weight, T.weight.t())  # the gradient of a convex function
    assert float(torch.linalg.eigvalsh(T.weight)[0]) > 0
    # the Bures distance, and a map that does the same and moves rows further
    Ra = symmetric_root(Sa)
    bures = Sa.trace() + Sb.trace() - 2 * symmetric_root(Ra @ Sb @ Ra).trace()

    def moved(A):
        E = A - torch.eye(6, dtype=D)
        return (E @ Sa @ E.t()).trace()

    torch.testing.assert_close(moved(T.weight), bures)
    other = symmetric_root(Sb) @ symmetric_root(Sa, -0.5)
    torch.testing.assert_close(other @ Sa @ other.t(), Sb)
    assert moved(other) > bures * 1.01


def test_whitened_rows_keep_mean_and_total_variance():
    mean, S = torch.randn(6, dtype=D), covariance(6, 2)
    T = whitening(mean, S)
    torch.testing.assert_close(T(mean), mean)
    torch.testing.assert_close(T.weight @ S @ T.weight.t(), torch.eye(6, dtype=D) * S.trace() / 6)


def test_directions_without_variance_stay_without():
    S = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=D))
    root = symmetric_root(S, -0.5)
    assert bool(root.isfinite().all())
    assert float(root[2, 2]) == 0
    x = draw(torch.zeros(3, dtype=D), symmetric_root(S), 10, torch.Generator().manual_seed(0))
    assert float(x[:, 2].abs().max()) == 0
