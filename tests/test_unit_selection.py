"""Matrix and units fitted together, beside numpy's least squares and trying every choice."""

from itertools import combinations

import numpy as np
import pytest
import torch

from howlinear import Moments
from howlinear.linear.affine import Factored, UnitMap
from howlinear.linear.unit_selection import eliminations, joint_map, unexplained_by_rank

D, M, OUT, N = 5, 6, 4, 400


class Units(torch.nn.Module):
    """Hidden units that anyone can compute: relu of fixed directions."""

    def __init__(self, chosen=tuple(range(M))):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.rows = torch.randn(M, D, generator=g, dtype=torch.float64)[list(chosen)]

    def forward(self, x):
        return torch.relu(x @ self.rows.t())


@pytest.fixture(scope="module")
def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    h = Units()(x)
    write = torch.randn(M, OUT, generator=g, dtype=torch.float64) * torch.tensor(
        [[4.0], [3.0], [2.0], [1.0], [0.5], [0.1]], dtype=torch.float64
    )
    noise = 0.3 * torch.randn(N, OUT, generator=g, dtype=torch.float64)
    y = h @ write + x[:, :1] + 2 + noise
    weight = torch.rand(N, generator=g, dtype=torch.float64) + 0.1
    rows = Moments(D + M, OUT)
    rows.update(torch.cat([x, h], 1), y, weight)
    return x, h, y, weight, rows


def squares(guess, y, weight):
    return float((weight[:, None] * (y - guess).square()).sum())


def least(columns, y, weight):
    """Weighted squares that numpy's least squares leaves, with an intercept."""
    root = weight.sqrt().numpy()[:, None]
    A = np.concatenate([columns.numpy(), np.ones((N, 1))], 1) * root
    B = y.numpy() * root
    solution = np.linalg.lstsq(A, B, rcond=None)[0]
    return float(np.square(B - A @ solution).sum())


@pytest.mark.parametrize("units", [(), (4,), (2, 0, 5)])
@pytest.mark.parametrize("rank", [None, 0])
def test_the_fit_is_that_of_least_squares(data, units, rank):
    x, h, y, weight, rows = data
    fitted = joint_map(rows, D, units, rank, Units(units) if units else None)
    columns = torch.cat([x] * (rank is None) + [h[:, list(units)]], 1)
    assert squares(fitted(x), y, weight) == pytest.approx(least(columns, y, weight), rel=1e-9)
    if units:
        assert isinstance(fitted, UnitMap)
        assert fitted.units == units


def test_a_fit_without_intercept_goes_through_the_origin(data):
    x, _, y, weight, rows = data
    fitted = joint_map(rows, D, (), None, None, intercept=False)
    assert not fitted.bias.any()
    root = weight.sqrt()[:, None]
    want = np.linalg.lstsq((x * root).numpy(), (y * root).numpy(), rcond=None)[0]
    np.testing.assert_allclose(fitted.weight.numpy(), want.T, rtol=1e-9)


def test_units_alone_are_fitted_without_intercept_too(data):
    _, h, y, weight, rows = data
    fitted = joint_map(rows, D, (3, 0), 0, Units((3, 0)), intercept=False)
    assert not fitted.affine.bias.any()
    root = weight.sqrt()[:, None]
    kept = h[:, [3, 0]]
    want = np.linalg.lstsq((kept * root).numpy(), (y * root).numpy(), rcond=None)[0]
    np.testing.assert_allclose(fitted.write.numpy(), want.T, rtol=1e-9)
    with_one = joint_map(rows, D, (3, 0), 0, Units((3, 0)))
    assert (with_one.write - fitted.write).abs().max() > 1e-3  # y has a mean


@pytest.mark.parametrize("units", [(), (1, 3)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_no_matrix_of_the_same_rank_does_better(data, units, rank):
    """Alternating least squares from many starts finds nothing below the closed form."""
    x, h, y, weight, rows = data
    fitted = joint_map(rows, D, units, rank, Units(units) if units else None)
    matrix = fitted.affine if units else fitted
    assert isinstance(matrix, Factored)
    assert matrix.rank == rank
    ours = squares(fitted(x), y, weight)
    root = weight.sqrt()[:, None].numpy()
    rest = np.concatenate([h[:, list(units)].numpy(), np.ones((N, 1))], 1) * root
    X, Y = x.numpy() * root, y.numpy() * root
    project = rest @ np.linalg.pinv(rest)
    X, Y = X - project @ X, Y - project @ Y  # freed of units and intercept
    rng = np.random.default_rng(0)
    best = np.inf
    for _ in range(5):
        A = rng.standard_normal((D, rank))
        for _ in range(300):
            B = np.linalg.lstsq(X @ A, Y, rcond=None)[0]
            A = np.linalg.lstsq(X, Y @ np.linalg.pinv(B), rcond=None)[0]
        best = min(best, np.square(Y - X @ A @ B).sum())
    assert ours == pytest.approx(best, rel=1e-6)


def test_what_a_lower_rank_leaves_is_told_beforehand(data):
    x, _, y, weight, rows = data
    full = squares(joint_map(rows, D, (1,), None, Units((1,)))(x), y, weight)
    beyond = unexplained_by_rank(rows, D, (1,))
    for rank in range(OUT):
        low = squares(joint_map(rows, D, (1,), rank, Units((1,)))(x), y, weight)
        told = full + float(beyond[rank]) * float(rows.S_yy.sum())
        assert low == pytest.approx(told, rel=1e-9)


@pytest.mark.parametrize("matrix", [True, False])
def test_unexplained_shares_are_what_the_fits_leave(data, matrix):
    x, _, y, weight, rows = data
    chosen = eliminations(rows, D)[matrix]
    assert sorted(chosen.order) == list(range(M))
    for k, rest in chosen.unexplained.items():
        units = tuple(chosen.order[:k])
        fitted = joint_map(rows, D, units, None if matrix else 0, Units(units) if k else None)
        left = squares(fitted(x), y, weight)
        assert rest * float(rows.S_yy.sum()) == pytest.approx(left, rel=1e-6)
    assert list(chosen.unexplained.values()) == sorted(chosen.unexplained.values())


def test_the_unit_that_goes_first_is_the_one_least_missed(data, monkeypatch):
    """One at a time, elimination takes the very unit that trying all would take."""
    monkeypatch.setattr("howlinear.linear.unit_selection.GROUP", 1)
    x, h, y, weight, rows = data
    order = eliminations(rows, D)[1].order
    for k in range(M - 1, 0, -1):
        tries = {
            c: least(torch.cat([x, h[:, list(c)]], 1), y, weight)
            for c in combinations(sorted(order[: k + 1]), k)
        }
        assert min(tries, key=tries.get) == tuple(sorted(order[:k]))


def test_units_that_repeat_one_another_do_no_harm(data):
    x, h, y, _, _ = data
    rows = Moments(D + M, OUT)
    h = h.clone()
    h[:, 5] = h[:, 0]
    h[:, 4] = 0
    rows.update(torch.cat([x, h], 1), y)
    chosen = eliminations(rows, D)[1]
    assert sorted(chosen.order) == list(range(M))
    assert chosen.order[-1] == 4 or chosen.order[-2] == 4  # says nothing, and goes among the first
    assert set(chosen.order[-2:]) & {0, 5}
