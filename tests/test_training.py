"""Trained layers: networks that converge or say so, and the pitfall of training a linear layer."""

import math

import pytest
import torch
from torch import nn

import planted
from howlinear.probing.fitting import Fitted
from howlinear.probing.samples import outcome, size_of
from howlinear.probing.training import baselines, dense, poly, seeded, train


def ill_conditioned(decades, d=32):
    """A linear block whose features' scales fall by so many decades, and all matter alike.

    They fall along the axes: float32 rows keep seven decades apart there, and nowhere else.
    """
    g = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -decades, d)
    W = torch.randn(16, d, generator=g) / scales / d**0.5
    draw = lambda n, d, generator: torch.randn(n, d, generator=generator) * scales  # noqa: E731
    return planted.samples(lambda x: x @ W.t(), d=d, noise=0.1, draw=draw, sizes=(4000, 10, 2000))


def test_the_pitfall_and_its_cause():
    fit, _, report, affine = ill_conditioned(7)
    found, layers = baselines(fit, report, train_steps=1500)
    by = {(run["optimiser"], run["inputs"]): run["r2"] for run in found["runs"]}
    assert found["r2_closed_form"] > 0.98
    assert found["input_condition"] == pytest.approx(1e7, rel=0.2)
    for name in ("sgd", "adam", "adamw"):
        assert by[name, "raw"] < 0.6
        assert by[name, "whitened"] == pytest.approx(found["r2_closed_form"], abs=0.01)
        layer = layers[f"{name} whitened"]  # folded back: it reads x as it comes
        assert outcome(layer, affine, report).r2 == pytest.approx(by[name, "whitened"])
    losses = [loss for _, loss in found["runs"][0]["loss"]]
    assert losses[0] > losses[-1]


def test_without_the_cause_there_is_no_pitfall():
    fit, _, report, _ = ill_conditioned(0)
    found, _ = baselines(fit, report, train_steps=1500)
    assert found["input_condition"] < 2
    for run in found["runs"]:
        assert run["r2"] == pytest.approx(found["r2_closed_form"], abs=0.01), run["optimiser"]


@pytest.fixture(scope="module")
def network():
    """A block that is a network of gelus, which neither a matrix nor products are."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).requires_grad_(False)
    block[0].weight.mul_(6)
    return planted.samples(block, d=16, noise=0.2, sizes=(8000, 1000, 2000))


def test_dense_learns_what_a_matrix_cannot_and_says_that_it_converged(network):
    fit, choose, report, affine = network
    trained = train(dense(fit, 42), fit, choose, seed=42, lr=1e-2)
    linear, done = outcome(affine, affine, report).r2, outcome(trained.layer, affine, report).r2
    assert linear < 0.9 < done
    assert trained.converged
    assert trained.steps < 8000
    assert size_of(trained.layer) == 2 * (16 * 16 + 16)
    assert dict(trained.curve)[trained.chosen_at] == max(r2 for _, r2 in trained.curve)


def test_a_short_budget_is_not_convergence(network):
    fit, choose, _, _ = network
    trained = train(dense(fit, 0), fit, choose, steps=300)
    assert not trained.converged
    assert trained.steps == 300


def test_poly_and_seeded_poly_learn_products(network):
    f = planted.bilinear(0, d=16)
    fit, choose, report, affine = planted.samples(f, d=16, sizes=(8000, 1000, 2000))
    linear, truth = outcome(affine, affine, report).r2, outcome(f, affine, report).r2
    before = affine.weight.clone()
    whole = train(seeded(affine, 0, rank=8), fit, choose, steps=1500, lr=1e-3)
    assert whole.curve[0][1] == pytest.approx(linear, abs=0.1)  # begins at the closed form
    assert torch.equal(affine.weight, before)  # of which a copy was trained
    assert outcome(whole.layer, affine, report).r2 > linear + 0.8 * (truth - linear)
    deep = train(poly(fit, 0, rank=8), fit, choose, steps=1500)
    assert outcome(deep.layer, affine, report).r2 > linear + 0.5 * (truth - linear)
    assert size_of(deep.layer) == 2 * (16 * 16 + 16 + 3 * 8 * 16)


def test_scores_that_are_not_numbers_leave_the_first_layer():
    fitted = Fitted(seed=0)
    first, second = nn.Identity(), nn.Identity()
    assert fitted.check(0, math.nan, first)
    assert not fitted.check(10, math.nan, second)
    assert fitted.layer is first


def test_global_random_state_is_left_alone(network):
    fit, choose, _, _ = network
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    train(dense(fit, 0), fit, choose, steps=2)
    assert torch.equal(torch.rand(3), want)
