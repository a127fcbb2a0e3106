"""Expected costs of swaps: against measured swaps, closed forms, and least squares by numpy."""

import math

import numpy as np
import pytest
import torch

import tiny
from howlinear import profile, swap_costs
from howlinear.linear.gradients import GradientSample
from howlinear.models.forward import run_rows
from howlinear.models.hooks import as_module
from howlinear.profiling.expected import LIMIT, TOGETHER, expected_by_units, expected_kl, held_out


def tokens(*shape, seed=0):
    return torch.randint(3, 49, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_for_small_errors_it_is_the_measured_divergence(name):
    """Random errors of a size that second order suffices for, on the sampled windows themselves."""
    model, windows = tiny.model(name), tokens(8, 24)
    result = profile(model, windows)
    g = torch.Generator().manual_seed(0)

    def noisy(block, size):
        module = as_module(model, block)
        return lambda x: (y := module(x)) + size * torch.randn(y.shape, generator=g)

    for store in result.stores:
        size = 0.01 * float(store.gradients.y.std())
        guess = store.gradients.y + size * torch.randn(store.gradients.y.shape, generator=g)
        expected = expected_kl(store.gradients, guess, store.known.norm)
        cost = swap_costs(model, {store.block.index: noisy(store.block, size)}, windows)[0].change
        # both are means of about 184 squares of normal numbers: errors of sqrt(2 / 184) each
        assert expected.nats / TOGETHER == pytest.approx(cost.kl, rel=4 * math.sqrt(4 / 184))
        assert expected.share_beyond == 0


def planted(q, clusters=None):
    """A sample of one feature whose q are given, for the guess 0."""
    q = torch.as_tensor(q, dtype=torch.float64)
    sample = GradientSample(1, 1)
    n = len(q)
    sample.key = sample.cluster = torch.arange(n) if clusters is None else torch.tensor(clusters)
    sample.group = torch.zeros(n, dtype=torch.int64)
    sample.x, sample.y = torch.zeros(n, 1), torch.ones(n, 1)
    sample.gradient = (2 * q).sqrt().float()[:, None]
    return sample, torch.zeros(n, 1)


def test_a_token_costs_what_second_order_says_up_to_a_limit():
    small, huge = expected_kl(*planted([1e-3] * 8)), expected_kl(*planted([1e6] * 8))
    assert small.nats == pytest.approx(TOGETHER * 1e-3, rel=1e-3)  # q less q^2 / 16
    assert huge.nats == pytest.approx(TOGETHER * LIMIT)
    mixed = expected_kl(*planted([1e-3] * 99 + [1e6]))
    assert mixed.nats == pytest.approx(TOGETHER * (0.01 * LIMIT + 0.99e-3), rel=1e-3)
    assert mixed.share_beyond == 0.01


def test_the_standard_error_is_over_clusters():
    """Rows that repeat within a document add nothing to what is known."""
    q = np.random.default_rng(0).uniform(0, 0.01, 12)
    one, again = (
        expected_kl(*planted(q)),
        expected_kl(*planted(np.repeat(q, 7), [i // 7 for i in range(84)])),
    )
    assert again.nats == pytest.approx(one.nats, rel=1e-6)
    assert again.se == pytest.approx(one.se, rel=1e-6)
    assert one.se == pytest.approx(
        TOGETHER * q.std(ddof=1) / math.sqrt(12), rel=0.02
    )  # costs are about q
    apart = expected_kl(*planted(np.repeat(q, 7)))
    assert apart.se < 0.5 * one.se  # as independent rows they would


def test_without_rows_nothing_is_expected():
    nothing = expected_kl(GradientSample(3, 2), torch.zeros(0, 2))
    assert math.isnan(nothing.nats)
    assert math.isnan(nothing.se)
    assert math.isnan(nothing.share_beyond)


def test_errors_are_those_of_maps_that_did_not_see_the_row():
    """numpy's least squares on the rows of the other folds, with k sink units."""
    model, windows = tiny.model("llama"), tokens(60, 24)
    result = profile(model, windows)
    store = result.stores[0]
    kept = torch.tensor(store.known.units)
    rows = []

    def receive(batch, block, each):
        x = torch.cat([each.x, each.hidden], 1).double().numpy()
        rows.append((x.copy(), each.y.double().numpy().copy()))

    run_rows(model, windows, receive, at=[store.block], units={0: kept})
    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    groups = np.repeat([next(windows_group(windows, i)) for i in range(60)], 24)
    sample = store.gradients
    costs = expected_by_units(store)
    assert list(costs) == [k for k in (0, 1, 2, 4) if k <= len(kept)]
    for k, (nats, _) in costs.items():
        columns = np.concatenate([x[:, : store.block.d_in + k], np.ones((len(x), 1))], 1)
        guess = np.zeros(sample.y.shape)
        for group in range(5):
            fit, at = groups != group, (sample.group == group).numpy()
            W = np.linalg.lstsq(columns[fit], y[fit], rcond=None)[0]
            own = sample.x[at][:, : store.block.d_in + k].numpy()
            guess[at] = np.concatenate([own, np.ones((at.sum(), 1))], 1) @ W
        want = expected_kl(sample, torch.from_numpy(guess)).nats
        assert nats == pytest.approx(want, rel=1e-4)  # sampled rows are float32
    assert result.blocks[0].expected_kl == pytest.approx(costs[0][0], rel=1e-9)
    seen = dict.fromkeys(range(5), result.maps[0])  # fitted on all rows: too good
    assert expected_kl(*held_out(sample, seen)).nats < 0.99 * costs[0][0]


def windows_group(windows, i):
    """The fold of window i."""
    from howlinear.models.forward import as_windows

    split = as_windows(windows).folds(5)
    yield from (group for group, *_ in split.pieces([i * windows.shape[1]], windows.shape[1]))
