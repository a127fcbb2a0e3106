"""Products beyond the linear map: planted ones are found from every seed, and no others."""

import math

import numpy as np
import pytest
import torch

import planted
from howlinear.probing import bilinear
from howlinear.probing.bilinear import (
    Bilinear,
    rank_sweep,
    recruitment,
    settled,
    solve_products,
    train_products,
)
from howlinear.probing.samples import outcome


@pytest.mark.parametrize("block", range(3))
def test_a_planted_block_of_rank_four_is_recovered_from_every_seed(block):
    f = planted.bilinear(block)
    fit, choose, report, affine = planted.samples(f, d=24, seed=block)
    truth = outcome(f, affine, report).gain
    assert truth > 0.3
    for seed in range(5):
        solved = solve_products(fit, choose, affine, rank=4, seed=seed)
        assert solved.converged
        assert outcome(solved.layer, affine, report).gain == pytest.approx(truth, abs=0.01)


def test_a_planted_linear_block_gains_nothing():
    fit, choose, report, affine = planted.samples(planted.linear(1), d=24)
    for seed in range(3):
        done = outcome(solve_products(fit, choose, affine, seed=seed).layer, affine, report)
        assert abs(done.gain) <= max(2 * done.gain_se, 1e-3)


def test_a_cubic_block_is_no_sum_of_products():
    f = lambda x: x[:, :4] * x[:, 4:8] * x[:, 8:12]  # noqa: E731
    fit, choose, report, affine = planted.samples(f, d=12, noise=0.1)
    assert outcome(f, affine, report).gain > 0.9
    assert outcome(solve_products(fit, choose, affine).layer, affine, report).gain < 0.05


@pytest.mark.parametrize("rows", [slice(None), slice(50)])  # all, and some with a mean of their own
def test_the_gradient_is_that_of_the_projected_sum_of_squares(rows):
    fit, _, _, affine = planted.samples(planted.bilinear(0, d=10), d=10, sizes=(400, 100, 100))
    problem = bilinear._Problem(fit, affine).narrow(torch.arange(400)[rows])
    for name in ("x", "rest", "weights"):
        setattr(problem, name, getattr(problem, name).double())
    P = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(P):
        """By another way: least squares on [z; sqrt(penalty)] with autograd through it."""
        z = (problem.x @ P[0].t()) * (problem.x @ P[1].t())
        z = z - z.mean(0)
        penalty = (problem.ridge * problem.n * (P.square() * problem.weights).sum(2).prod(0)).sqrt()
        tall = torch.cat([z, penalty.diag()])
        target = torch.cat([problem.rest, torch.zeros(3, problem.rest.shape[1]).double()])
        rest = target - tall @ torch.linalg.lstsq(tall, target).solution
        return (rest.square().sum() - problem.rest.square().sum()) / problem.total

    P.requires_grad_(True)
    value(P).backward()
    got, gradient = problem.value_and_gradient(P.detach())
    assert got == pytest.approx(float(value(P).detach()), rel=1e-9)
    largest = float(P.grad.abs().max())  # the other way goes through a factor of the tall matrix
    torch.testing.assert_close(gradient, P.grad, rtol=0, atol=1e-7 * largest)


def test_ranks_are_nested_and_end_where_the_planted_rank_ends():
    f = planted.bilinear(2)
    fit, choose, report, affine = planted.samples(f, d=24, seed=2)
    gains = {
        rank: outcome(fitted.layer, affine, report).gain
        for rank, fitted in rank_sweep(fit, choose, affine, (1, 2, 4, 8)).items()
    }
    truth = outcome(f, affine, report).gain
    assert gains[1] < gains[2] < gains[4]
    assert gains[1] < 0.6 * truth
    assert gains[4] == pytest.approx(truth, abs=0.01)
    assert gains[8] == pytest.approx(truth, abs=0.01)


def test_the_same_seed_gives_the_same_layer():
    fit, choose, _, affine = planted.samples(planted.bilinear(0, d=12), d=12, sizes=(500, 200, 10))
    one, two = (solve_products(fit, choose, affine, rank=2, seed=3).layer for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_stopping_keeps_what_the_rows_kept_for_it_gain_most_by():
    """Few rows and much noise: the fit gains by heart what nobody else does."""
    fit, choose, report, affine = planted.samples(
        planted.linear(0), d=24, noise=1, sizes=(120, 200, 2000)
    )
    solved = solve_products(fit, choose, affine, rank=16)
    best = max(gain for _, gain in solved.curve)
    assert dict(solved.curve)[solved.chosen_at] == best
    assert best >= 0
    assert outcome(solved.layer, affine, report).gain > -0.02


def test_the_papers_way_trains_a_gate_and_keeps_its_best():
    f = planted.bilinear(0)
    fit, choose, report, affine = planted.samples(f, d=24)
    solved = train_products(fit, choose, affine, steps=1500, every=100)
    gain = outcome(solved.layer, affine, report).gain
    assert 0.05 < gain <= outcome(f, affine, report).gain + 0.01
    assert solved.about["gate"] > math.exp(-2)
    assert dict(solved.curve)[solved.chosen_at] == max(g for _, g in solved.curve)
    ours = outcome(solve_products(fit, choose, affine).layer, affine, report).gain
    assert ours > gain
    assert recruitment(solved.layer, affine, report) > 0.3
    plain = Bilinear(affine, torch.ones(1, 24), torch.ones(1, 24), torch.zeros(16, 1))
    assert recruitment(plain, affine, report) == 0
    torch.testing.assert_close(plain(report.x), affine(report.x))


def test_settled_looks_at_the_last_gains():
    assert settled([0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3])
    assert not settled(list(np.linspace(0, 1, 20)))
    assert not settled([0.3, 0.3])
