"""Errors measured by what they cost: what that changes in a fit, and what it must not."""

import numpy as np
import pytest
import torch

from howlinear import Moments
from howlinear.linear.metric import SHRINK, Metric
from howlinear.linear.unit_selection import joint_map

N, D, OUT, UNITS = 400, 6, 5, 3


@pytest.fixture
def data():
    """Rows x and hidden units, y that they do not explain, and gradients that prefer some directions."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    x, mixing = draw(N, D), draw(OUT, OUT)
    h = draw(N, UNITS).relu()
    y = x @ draw(D, OUT) + h @ draw(UNITS, OUT) + 0.5 * draw(N, OUT) @ mixing + 3
    return x, h, y, draw(N, OUT) @ (mixing * torch.tensor([9.0, 3.0, 1.0, 0.3, 0.1]))


class Hidden(torch.nn.Module):
    """Hidden units that are looked up by their rows."""

    def __init__(self, h, units):
        super().__init__()
        self.h, self.units = h, list(units)

    def forward(self, x):
        return self.h[:, self.units].to(x)


def fitted(x, h, y, rank, units):
    rows = Moments(D + UNITS, OUT)
    rows.update(torch.cat([x, h], 1), y)
    return joint_map(rows, D, units, rank, Hidden(h, units) if units else None)


def test_the_root_is_that_of_the_products_shrunk(data):
    *_, g = data
    products = g.t() @ g
    metric = Metric.of(products)
    M = products / products.diagonal().mean()
    want = (1 - SHRINK) * M + SHRINK * torch.eye(OUT, dtype=torch.float64)
    torch.testing.assert_close(metric.root @ metric.root, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metric.root @ metric.inverse, torch.eye(OUT).double())
    assert Metric.of(torch.zeros(OUT, OUT)) is None


@pytest.mark.parametrize(("rank", "units"), [(None, ()), (None, (2, 0)), (0, (1,)), (OUT, (1,))])
def test_with_given_inputs_the_map_is_that_of_plain_least_squares(data, rank, units):
    x, h, y, g = data
    metric = Metric.of(g.t() @ g)
    plain = fitted(x, h, y, rank, units)
    ours = metric.restored(fitted(x, h, metric.scaled(y), rank, units))
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-9, atol=1e-9)
    inputs = np.concatenate([*([x] if rank != 0 else []), h[:, list(units)], np.ones((N, 1))], 1)
    referee = inputs @ np.linalg.lstsq(inputs, y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(ours(x).numpy(), referee, atol=1e-9)


@pytest.mark.parametrize("units", [(), (1,)])
def test_a_lower_rank_costs_less_than_by_squares_and_leaves_more_squares(data, units):
    x, h, y, g = data
    metric = Metric.of(g.t() @ g)
    plain = fitted(x, h, y, 2, units)(x) - y
    ours = metric.restored(fitted(x, h, metric.scaled(y), 2, units))(x) - y
    cost = lambda e: float(metric.scaled(e).square().sum())  # noqa: E731
    assert cost(ours) < 0.95 * cost(plain)
    assert ours.square().sum() > plain.square().sum()
