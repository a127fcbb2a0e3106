"""The learned share of a correction, beside trying every share, and where nothing can be learned."""

import numpy as np
import pytest
import torch

from howlinear import Moments
from howlinear.linear.accumulators import merged
from howlinear.linear.blending import Blend, learned_share
from howlinear.linear.unit_selection import joint_map

D, OUT = 30, 4


def rows(n, noise, seed):
    """x, y, and a correction c that x explains in part."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64) + 3
    fixed = torch.Generator().manual_seed(99)
    A, B = (torch.randn(OUT, D, generator=fixed, dtype=torch.float64) for _ in range(2))
    y = x @ A.t() + x[:, :OUT].square()
    c = x @ B.t() + noise * torch.randn(n, OUT, generator=g, dtype=torch.float64)
    return x, y, c


def moments(x, y, c):
    sums = Moments(D, 2 * OUT)
    sums.update(x, torch.cat([y, c], 1))
    return sums


@pytest.mark.parametrize("noise", [0.0, 3.0, 30.0, 300.0])
def test_the_share_is_the_best_of_all_on_held_out_rows(noise):
    fit, held = rows(120, noise, 1), rows(5000, noise, 2)
    share = learned_share(moments(*fit), moments(*held))
    x, y, c = (t.numpy() for t in fit)
    X = np.column_stack([x, np.ones(len(x))])
    W_y, W_c = (np.linalg.lstsq(X, t, rcond=None)[0][:-1] for t in (y, c))
    X, Y, C = (t.numpy() for t in held)
    left = Y + C - X @ W_y
    tried = np.linspace(0, 1, 2001)
    errors = [np.square((e := left - a * X @ W_c) - e.mean(0)).sum() for a in tried]
    assert share == pytest.approx(tried[int(np.argmin(errors))], abs=6e-4)


def test_all_is_learned_without_noise_and_nothing_from_noise_alone():
    assert learned_share(moments(*rows(400, 0.0, 1)), moments(*rows(400, 0.0, 2))) > 0.99
    x, y, c = rows(60, 1e4, 1)
    assert learned_share(moments(x, y, c), moments(*rows(4000, 1e4, 2))) < 0.02
    assert learned_share(moments(x, y, c), Moments(D, 2 * OUT)) == 0  # nothing held out


@pytest.mark.parametrize("intercept", [True, False])
def test_a_blend_is_the_fit_to_the_blended_target(intercept):
    x, y, c = rows(200, 3.0, 1)
    sums = merged([moments(x[:90], y[:90], c[:90]), moments(x[90:], y[90:], c[90:])])
    fitted = joint_map(Blend(sums, 0.3), D, (), None, None, intercept=intercept)
    X = np.column_stack([x.numpy(), *([np.ones(len(x))] if intercept else [])])
    want = np.linalg.lstsq(X, (y + 0.3 * c).numpy(), rcond=None)[0]
    np.testing.assert_allclose(fitted.weight.numpy(), want[:D].T, rtol=1e-9, atol=1e-9)
    if intercept:
        np.testing.assert_allclose(fitted.bias.numpy(), want[D], rtol=1e-9, atol=1e-9)
