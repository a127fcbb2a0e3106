"""The fit against independent authorities, and scores against their definitions."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import statsmodels.api as sm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score

import howlinear as hl
from howlinear.linear.accumulators import merged
from howlinear.linear.moments import TSQR, Moments
from howlinear.linear.scoring import (
    Score,
    cross_validate,
    effective_rank,
    input_stats,
    r2_se,
    score,
    score_both,
    spectrum,
)
from howlinear.linear.solving import fit, solve, solve_both

BOTH = pytest.mark.parametrize("kind", [Moments, TSQR])
NIST = Path(__file__).parents[2] / "shared" / "data" / "nist_strd_linear.json"


def rows(n, d_in=8, d_out=5, seed=0, noise=1.0):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    x = torch.randn(n, d_in, generator=g, dtype=torch.float64) + 2
    y = x @ W.t() + 1 + noise * torch.randn(n, d_out, generator=g, dtype=torch.float64)
    return x, y


def moments_of(kind, x, y, weight=None):
    m = kind(x.shape[1], y.shape[1])
    m.update(x, y, weight)
    return m


@BOTH
def test_fit_is_scikit_learns(kind):
    x, y = rows(200)
    mine, theirs = fit(moments_of(kind, x, y)), LinearRegression().fit(x, y)
    np.testing.assert_allclose(mine.weight, theirs.coef_, rtol=1e-10)
    np.testing.assert_allclose(mine.bias, theirs.intercept_, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mine(x), theirs.predict(x), rtol=1e-10)
    np.testing.assert_allclose(mine.to_linear(torch.float64)(x).detach(), mine(x), rtol=1e-12)


@BOTH
def test_weighted_fit_is_statsmodels(kind):
    x, y = rows(200)
    w = torch.rand(200, dtype=torch.float64)
    mine = fit(moments_of(kind, x, y, w))
    theirs = sm.WLS(y[:, 0].numpy(), sm.add_constant(x.numpy()), weights=w.numpy()).fit().params
    np.testing.assert_allclose(mine.weight[0], theirs[1:], rtol=1e-9)
    np.testing.assert_allclose(mine.bias[0], theirs[0], rtol=1e-9)
    plain = fit(moments_of(kind, x, y))
    assert not np.allclose(plain.weight, mine.weight, rtol=1e-3)  # weights do something


@BOTH
@pytest.mark.parametrize("alpha", [0.1, 30.0])
def test_ridge_is_scikit_learns(kind, alpha):
    x, y = rows(60)
    theirs = Ridge(alpha=alpha, solver="cholesky").fit(x, y)
    mine = fit(moments_of(kind, x, y), ridge=alpha)
    np.testing.assert_allclose(mine.weight, theirs.coef_, rtol=1e-9)
    np.testing.assert_allclose(mine.bias, theirs.intercept_, rtol=1e-9)


@BOTH
def test_without_intercept(kind):
    x, y = rows(60)
    mine = fit(moments_of(kind, x, y), intercept=False)
    np.testing.assert_allclose(mine.weight.t(), np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-9)
    assert not mine.bias.any()


@BOTH
def test_scores_are_their_definitions(kind):
    affine = fit(moments_of(kind, *rows(100)))
    x, y = rows(80, seed=1)
    s = score(affine, moments_of(kind, x, y))
    r = (y - affine(x)).numpy()
    y = y.numpy()
    by_feature = r2_score(y, y - r, multioutput="raw_values")
    np.testing.assert_allclose(
        s.r2, r2_score(y, y - r, multioutput="variance_weighted"), rtol=1e-12
    )
    np.testing.assert_allclose(s.r2_scalar, r2_score(y.ravel(), (y - r).ravel()), rtol=1e-12)
    np.testing.assert_allclose(s.r2_by_feature, by_feature, rtol=1e-11)
    np.testing.assert_allclose(
        list(s.r2_feature.values()), np.quantile(by_feature, [0.5, 0.25, 0.75]), rtol=1e-11
    )
    np.testing.assert_allclose(s.rmse, np.sqrt(np.mean(r**2)), rtol=1e-12)
    np.testing.assert_allclose(s.residual_norm, np.sqrt(np.mean((r**2).sum(1))), rtol=1e-12)
    np.testing.assert_allclose(s.output_norm, np.sqrt(np.mean((y**2).sum(1))), rtol=1e-12)
    assert s.n == 80
    assert not np.isclose(s.r2, s.r2_scalar, rtol=1e-3)  # the two conventions differ here


@BOTH
def test_scores_add_over_folds(kind):
    affine = fit(moments_of(kind, *rows(100)))
    parts = [rows(50, seed=s) for s in (1, 2)]
    total = score(affine, moments_of(kind, *parts[0])) + score(affine, moments_of(kind, *parts[1]))
    res = sum(float((y - affine(x)).square().sum()) for x, y in parts)
    tot = sum(float((y - y.mean(0)).square().sum()) for _, y in parts)
    assert total.r2 == pytest.approx(1 - res / tot, rel=1e-12)


@BOTH
def test_linear_block_scores_one_and_noise_scores_nothing(kind):
    x, y = rows(400, noise=0.0)
    assert (
        score(fit(moments_of(kind, x, y)), moments_of(kind, *rows(99, seed=1, noise=0.0))).r2
        > 1 - 1e-12
    )
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(4000, 5, generator=g, dtype=torch.float64) for _ in range(2))
    held = score(fit(moments_of(kind, x[:2000], y[:2000])), moments_of(kind, x[2000:], y[2000:]))
    # held-out R2 of noise is about -d / n with sd sqrt(2 d / (n d_out)): 5 sd = 0.02
    assert abs(held.r2) < 0.02


@BOTH
def test_relu_of_normals_has_its_closed_form(kind):
    n = 400_000
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    m = moments_of(kind, x, x.relu())
    exact = (1 / 4 - 1 / (2 * math.pi)) / (1 / 2 - 1 / (2 * math.pi))
    assert exact == pytest.approx(0.2665, abs=5e-5)
    # 5 standard errors of a variance ratio over n rows, kurtosis of relu(x) below 10
    assert 1 - score(fit(m), m).r2 == pytest.approx(exact, abs=5 * math.sqrt(10 / n) * exact)


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_r2_does_not_depend_on_units(scale, shift, seed):
    (x, y), (u, v) = rows(60, seed=seed), rows(40, seed=seed + 9)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(8, generator=g)
    plain = score(fit(moments_of(Moments, x, y)), moments_of(Moments, u, v)).r2

    def change(t):
        return t[:, order] * scale + shift

    moved = score(
        fit(moments_of(Moments, change(x), y * scale - shift)),
        moments_of(Moments, change(u), v * scale - shift),
    ).r2
    # offset / spread is at most 1e6: float64 keeps 1 - r2 to about 1e-9
    assert moved == pytest.approx(plain, abs=1e-8)


def reduced_rank(x, y, u, v, k, around_fit=False):
    """R2 of reduced-rank regression by an SVD of the fitted values, in numpy."""
    mx, my = x.mean(0), y.mean(0)
    coef = np.linalg.lstsq(x - mx, y - my, rcond=None)[0]
    _, _, Vt = np.linalg.svd((x - mx) @ coef, full_matrices=False)
    guess = my + (u - mx) @ coef @ Vt[:k].T @ Vt[:k]
    centre = my if around_fit else v.mean(0)
    return 1 - ((v - guess) ** 2).sum() / ((v - centre) ** 2).sum()


@BOTH
@pytest.mark.parametrize("noise", [0.1, 1.0, 4.0])
def test_effective_rank_is_reduced_rank_regression(kind, noise):
    decay = torch.logspace(0, -2, 8, dtype=torch.float64)
    (x, y), (u, v) = rows(300, noise=noise), rows(200, seed=1, noise=noise)
    x, u = x * decay, u * decay
    y, v = (
        y + 3 * x @ torch.ones(8, 5, dtype=torch.float64),
        v + 3 * u @ torch.ones(8, 5, dtype=torch.float64),
    )
    m = moments_of(kind, x, y)
    affine = solve(m)[0]
    curve = [reduced_rank(x.numpy(), y.numpy(), u.numpy(), v.numpy(), k) for k in range(1, 6)]
    expected = next(k for k, r2 in enumerate(curve, 1) if r2 >= 0.9 * curve[-1])
    assert effective_rank(affine, m, moments_of(kind, u, v)) == expected


def test_effective_rank_around_the_means_of_the_fit_rows():
    """As the paper has it: an offset of the held-out rows counts as variance to be explained."""
    (x, y), (u, v) = rows(400, 20, 20), rows(200, 20, 20, seed=1)
    v = v + 2
    m = moments_of(Moments, x, y)
    affine, held = solve(m)[0], moments_of(Moments, u, v)
    arrays, found = [t.numpy() for t in (x, y, u, v)], []
    for around_fit in (False, True):
        curve = [reduced_rank(*arrays, k, around_fit) for k in range(1, 21)]
        found.append(next(k for k, r2 in enumerate(curve, 1) if r2 >= 0.9 * curve[-1]))
        assert effective_rank(affine, m, held, around_fit=around_fit) == found[-1]
    assert found[1] < found[0]


@pytest.mark.parametrize("kind", [Moments, TSQR])
@pytest.mark.parametrize("more", [0, 1, 3, 200])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_maps_without_and_with_a_few_more_rows(kind, more, size):
    """Few rows update the map; many, and other accumulators, are solved for again. `size` makes them sinks."""
    (x, y), (u, v) = rows(300), rows(more, seed=1)
    u, v = u * size, v * size
    without, both, change = solve_both(moments_of(kind, x, y), moments_of(kind, u, v))
    assert (change is not None) == (kind is Moments and 0 < more < 4)
    for affine, own in ((without, (x, y)), (both, (torch.cat([x, u]), torch.cat([y, v])))):
        a = np.column_stack([own[0].numpy(), np.ones(len(own[0]))])
        want = np.linalg.lstsq(a, own[1].numpy(), rcond=None)[0]
        off = a @ want - affine(own[0]).numpy()
        assert np.abs(off).max() < 1e-10 * np.abs(own[1].numpy()).max()
        assert affine.rank == x.shape[1]
    if more and size > 1:
        assert float((both.weight - without.weight).abs().max()) > 1e-3


@BOTH
@pytest.mark.parametrize("more", [1, 3, 200])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_maps_without_and_with_a_few_more_rows_are_scored_at_once(kind, more, size):
    (x, y), (u, v) = rows(300), rows(more, seed=1)
    body, (s, t) = rows(200, seed=2), rows(more, seed=3)
    held, first = moments_of(kind, *body), moments_of(kind, s * size, t * size)
    maps = solve_both(moments_of(kind, x, y), moments_of(kind, u * size, v * size))
    scores = score_both(maps, held, first, merged([held, first]))
    every = (torch.cat([body[0], s * size]), torch.cat([body[1], t * size]))
    for found, affine, (own, want) in zip(scores, maps, (body, every), strict=False):
        squares = (want - affine(own)).square().sum(0)
        np.testing.assert_allclose(found.ss_res, squares, rtol=1e-9)
        assert found.r2 == pytest.approx(
            r2_score(want, affine(own), multioutput="variance_weighted")
        )
        assert found.n == len(own)


def test_few_more_rows_of_inputs_that_lack_rank():
    x, y = rows(300)
    x = torch.cat([x, x[:, :1]], 1)
    some, more, all_rows = (
        moments_of(Moments, x[at], y[at]) for at in (slice(297), slice(297, None), slice(None))
    )
    both = solve_both(some, more)[1]
    assert both.rank == x.shape[1] - 1
    torch.testing.assert_close(both.weight, solve(all_rows)[0].weight, rtol=0, atol=1e-10)


def test_effective_rank_of_nothing_is_none():
    g = torch.Generator().manual_seed(0)
    x, y, u, v = (torch.randn(30, 4, generator=g, dtype=torch.float64) for _ in range(4))
    m = moments_of(Moments, x, y)
    held = moments_of(Moments, u, v)
    assert score(fit(m), held).r2 < 0
    assert effective_rank(solve(m)[0], m, held) is None


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lack_of_rank_is_reported_and_solved_with_least_norm(kind, dtype, caplog):
    x, y = rows(300, 6, 3)
    x = torch.cat(
        [x, x[:, :2] @ x.new_tensor([[1.0], [2.0]]), torch.ones(300, 1, dtype=x.dtype)], 1
    )
    x = x.to(dtype)
    with caplog.at_level("WARNING"):
        affine = fit(moments_of(kind, x, y.to(dtype)))
    assert affine.rank == 6
    assert "rank 6 of 8" in caplog.text
    sd = (x - x.mean(0)).double().square().sum(0).sqrt().numpy()
    sd[-1] = np.inf
    scaled = (x - x.mean(0)).double().numpy() / sd
    least = scipy.linalg.pinv(scaled, rtol=1e-4) @ (y - y.mean(0)).numpy() / sd[:, None]
    np.testing.assert_allclose(affine.weight.t(), least, rtol=1e-3, atol=1e-4)
    assert affine.weight[:, -1].abs().max() == 0  # a constant column explains nothing


@BOTH
def test_rank_does_not_depend_on_the_row_count(kind):
    ranks = set()
    for n in (200, 20_000):
        x, y = rows(n, 6, 3)
        x = torch.cat([x, x[:, :1] + 3e-6 * torch.randn(n, 1, dtype=x.dtype)], 1)
        ranks.add(fit(moments_of(kind, x.float(), y.float())).rank)
    assert ranks == {7}


def test_solvers_agree_on_the_rank_of_float32_rows():
    # singular values from 1 down to 1e-9 of the largest: both cut at d * eps(float32)
    g = torch.Generator().manual_seed(0)
    for smallest in (1e-2, 1e-4, 1e-5, 3e-6, 1e-7):
        U, _ = torch.linalg.qr(torch.randn(500, 10, generator=g, dtype=torch.float64))
        V, _ = torch.linalg.qr(torch.randn(10, 10, generator=g, dtype=torch.float64))
        x = (U * torch.logspace(0, math.log10(smallest), 10, dtype=torch.float64)) @ V.t()
        y = torch.randn(500, 2, generator=g)
        ranks = [fit(moments_of(kind, x.float(), y)).rank for kind in (Moments, TSQR)]
        assert ranks[0] == ranks[1]


@BOTH
def test_too_few_rows_are_refused_with_the_number_that_would_do(kind):
    x, y = rows(8)
    with pytest.raises(
        ValueError, match=r"8 rows cannot determine 9 columns: at least 9 are needed"
    ):
        fit(moments_of(kind, x, y))
    assert fit(moments_of(kind, x, y), ridge=1.0).weight.isfinite().all()
    with pytest.raises(ValueError, match="ridge"):
        fit(moments_of(kind, x, y), ridge=-1.0)


def test_input_stats_are_those_of_the_inputs():
    x, y = rows(300)
    x = x * torch.logspace(0, 3, 8, dtype=torch.float64)
    stats = input_stats(moments_of(Moments, x, y), 8)
    centred = (x - x.mean(0)).numpy()
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    assert stats["input_condition"] == pytest.approx(np.linalg.cond(centred), rel=1e-6)
    assert stats["input_participation"] == pytest.approx(values.sum() ** 2 / (values**2).sum())
    sd = np.sort(centred.std(0))
    assert stats["input_range"] == pytest.approx(sd[-1] / sd[3])  # torch's median is the lower one


# -- digits ---------------------------------------------------------------------------------------


def conditioned(condition, offset, n=400, d=6):
    """Inputs of a given condition number (centred), far from zero, with noisy outputs."""
    g = np.random.default_rng(0)
    u = g.standard_normal((n, d))
    u -= u.mean(0)
    U, _ = np.linalg.qr(u)
    V, _ = np.linalg.qr(g.standard_normal((d, d)))
    x = U * np.logspace(0, -math.log10(condition), d) @ V.T * math.sqrt(n) + offset
    y = x @ g.standard_normal((d, 2)) + 0.05 * g.standard_normal((n, 2)) + offset
    return x, y


def exact_unexplained(x, y, digits=50):
    """1 - R2 of the least-squares fit in 50-digit arithmetic."""
    res = tot = mpf(0)
    with mp.workdps(digits):
        X = mp.matrix([[mpf(1), *map(mpf, map(float, row))] for row in x])
        for column in y.T:
            Y = mp.matrix(list(map(mpf, map(float, column))))
            E = Y - X * mp.lu_solve(X.T * X, X.T * Y)
            mean = sum(Y) / len(Y)
            res += sum(e**2 for e in E)
            tot += sum((v - mean) ** 2 for v in Y)
        return float(res / tot)


@BOTH
def test_unexplained_share_at_condition_1e6_and_offset_999(kind):
    x, y = conditioned(1e6, 999.0)
    m = moments_of(kind, torch.tensor(x), torch.tensor(y))
    exact = exact_unexplained(x, y)
    assert 1e-4 < exact < 0.5
    assert 1 - score(fit(m), m).r2 == pytest.approx(exact, rel=1e-6)


def test_float32_sums_would_fail_that():
    x, y = conditioned(1e6, 999.0)
    z = np.column_stack([np.ones(len(x)), x]).astype(np.float32)
    B = np.linalg.solve(z.T @ z, z.T @ y.astype(np.float32))
    r = y - z @ B
    bad = (r**2).sum() / ((y - y.mean(0)) ** 2).sum()
    assert abs(bad / exact_unexplained(x, y) - 1) > 1e-2


LEAST = {  # correct digits of the worst coefficient: (Moments, TSQR)
    "Norris": (10.5, 9),
    "Pontius": (10.5, 9),
    "Longley": (10.5, 9),
    "Wampler1": (5.5, 9),
    "Wampler2": (5.5, 9),
    "Wampler3": (5.5, 9),
    "Wampler4": (5.5, 7),
    "Wampler5": (5.5, 5.5),
    "Filip": (None, 6),
    "NoInt1": (10.5, 9),
    "NoInt2": (10.5, 9),
}


@pytest.mark.skipif(
    not NIST.exists(), reason="the NIST reference sets are not beside this checkout"
)
@BOTH
@pytest.mark.parametrize("name", LEAST)
def test_nist_digits(kind, name):
    data = json.loads(NIST.read_text())[name]
    x = torch.tensor([[float(v) for v in row] for row in data["x"]], dtype=torch.float64)
    y = torch.tensor([[float(v)] for v in data["y"]], dtype=torch.float64)
    if data["model"].startswith("poly"):
        x = torch.cat([x**k for k in range(1, int(data["model"][4:]) + 1)], 1)
    intercept = "no intercept" not in data["model"]
    affine = fit(moments_of(kind, x, y), intercept=intercept)
    least = LEAST[name][kind is TSQR]
    if least is None:
        assert affine.rank < x.shape[1]
        return
    assert affine.rank == x.shape[1]
    got = [float(affine.bias[0])] * intercept + affine.weight[0].tolist()
    certified = [float(v) for v in data["certified"]["beta"]]
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, certified, strict=True))
    digits = -math.log10(max(worst, 1e-15))
    print(f"{name} {kind.__name__}: {digits:.1f} correct digits")
    assert digits >= least


def test_spectra_are_those_of_the_covariance_and_of_every_length():
    x, y = rows(300, d_in=100)
    x[:, 7] = x[:, 3]  # one direction that does not vary: left out
    moments = moments_of(Moments, x, y)
    found = input_stats(moments, 99)["input_spectrum"]
    theirs = np.linalg.eigvalsh(np.cov(x.t().numpy()))[::-1]
    places = [int(k) for k, _ in found]
    assert places[0] == 1
    assert places[-1] == 99
    assert len(places) == len(set(places)) <= 48
    np.testing.assert_allclose(
        [v for _, v in found], theirs[[k - 1 for k in places]] / theirs.sum()
    )
    for n in (0, 1, 2, 3, 50):
        falling = torch.arange(n, 0, -1.0)
        assert [int(k) for k, _ in spectrum(falling)][-1:] == ([n] if n else [])
        assert all(v == n + 1 - k for k, v in spectrum(falling))


@BOTH
def test_cross_validation_is_scikit_learns(kind):
    parts = [rows(40 + 10 * i, seed=i) for i in range(4)]
    groups = [moments_of(kind, *part) for part in parts]
    scores = cross_validate([*groups, kind(8, 5)])  # a group without rows is left out
    left = total = 0.0
    for i, (u, v) in enumerate(parts):
        x, y = (torch.cat([part[k] for j, part in enumerate(parts) if j != i]) for k in (0, 1))
        left += float(((v.numpy() - LinearRegression().fit(x, y).predict(u)) ** 2).sum())
        total += float((v - v.mean(0)).square().sum())
    assert Score.pooled(scores).r2 == pytest.approx(1 - left / total, rel=1e-10)
    assert 0 < r2_se(scores) < 0.1
    assert [g.n for g in groups] == [40, 50, 60, 70]  # the groups stay as they were
    with pytest.raises(ValueError, match="one fold"):
        cross_validate([groups[0], kind(8, 5)])


@BOTH
def test_accumulators_add_up_without_their_last_columns(kind):
    (x, y), (u, v) = rows(60), rows(50, seed=1)
    both = merged([moments_of(kind, x, y), moments_of(kind, u, v)], 6)
    whole = moments_of(kind, torch.cat([x, u])[:, :6], torch.cat([y, v]))
    assert (both.n, both.d_in) == (110, 6)
    np.testing.assert_allclose(fit(both).weight, fit(whole).weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["numpy", "lists", "a data frame", "tensors", "whole numbers"])
def test_rows_in_memory_are_fitted_as_by_scikit_learn(kind):
    x = np.random.default_rng(0).standard_normal((200, 5))
    x = np.round(10 * x).astype(int) if kind == "whole numbers" else x
    y = np.tanh(x @ np.arange(10.0).reshape(5, 2))
    convert = {
        "lists": np.ndarray.tolist,
        "a data frame": pd.DataFrame,
        "tensors": torch.from_numpy,
    }
    given = [convert.get(kind, lambda rows: rows)(rows) for rows in (x, y)]
    affine, theirs = hl.fit(*given), LinearRegression().fit(x, y)
    assert np.allclose(affine.predict(given[0]), theirs.predict(x), atol=1e-10)
    moments = hl.Moments(5, 2)
    moments.update(*given)
    assert torch.equal(hl.fit(moments).weight, affine.weight)


def test_one_output_and_weights_in_memory():
    rng = np.random.default_rng(1)
    x, y, weight = rng.standard_normal((99, 3)), rng.standard_normal(99), rng.uniform(size=99)
    x.flags.writeable = False
    affine = hl.fit(hl.Moments.from_arrays(x, y, weight))
    assert np.allclose(affine.weight[0], LinearRegression().fit(x, y, weight).coef_, atol=1e-12)
    with pytest.raises(ValueError, match="expected \\(rows, columns\\)"):
        hl.fit(y, y)
