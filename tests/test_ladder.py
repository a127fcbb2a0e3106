"""From one matrix to the whole block, a hidden unit at a time, in closed form."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import tiny
from howlinear import Moments, blocks, fit
from howlinear.models.hooks import as_module
from howlinear.models.units import hidden_units
from howlinear.probing.ladder import forward_selection, regressions, unit_counts
from howlinear.probing.samples import gather


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def climbed(request):
    torch.manual_seed(0)
    model = tiny.model(request.param)
    block = blocks(model)[1]
    for p in as_module(model, block).parameters():  # far from linear
        p.data *= 8
    g = torch.Generator().manual_seed(0)
    rows, report = (
        gather(model, [block], torch.randint(3, 49, (n, 8), generator=g))[1] for n in (400, 120)
    )
    moments = Moments(block.d_in, block.d_out)
    moments.update(rows.x, rows.y)
    affine = fit(moments).to(rows.x)
    return model, block, rows, report, affine, regressions(model, block, rows, report, affine)


def columns(model, block, sample, units):
    with torch.no_grad():
        return np.hstack([sample.x, hidden_units(model, block)(sample.x)[:, units]]).astype(float)


def test_no_unit_is_the_map_and_all_units_are_the_block(climbed):
    _, block, _, _, affine, (steps, maps) = climbed
    assert steps[0]["k"] == 0
    assert steps[0]["gain"] == 0
    assert maps[0] is affine
    assert steps[-1]["r2"] == pytest.approx(1, abs=1e-9)
    assert steps[0]["r2"] < 0.9
    r2 = [step["r2"] for step in steps]
    assert r2 == sorted(r2)
    assert steps[0]["parameters"] == block.d_out * (block.d_in + 1)


def test_every_rung_is_the_least_squares_of_scikit_learn(climbed):
    model, block, rows, report, _, (steps, maps) = climbed
    for step in steps[1:-1]:
        units = list(maps[step["k"]].units)
        assert len(set(units)) == step["k"]
        authority = LinearRegression().fit(columns(model, block, rows, units), rows.y.double())
        guess = authority.predict(columns(model, block, report, units))
        r2 = r2_score(report.y, guess, multioutput="variance_weighted")
        assert step["r2"] == pytest.approx(r2, abs=1e-5)


def test_each_unit_is_the_one_that_lowers_the_error_most(climbed):
    model, block, rows, _, _, (_, maps) = climbed
    k = 4
    y = rows.y.double().numpy()

    def left(units):
        a = np.hstack([columns(model, block, rows, units), np.ones((len(y), 1))])
        return float(np.square(y - a @ np.linalg.lstsq(a, y, rcond=None)[0]).sum())

    m = hidden_units(model, block)(rows.x[:1]).shape[1]
    chosen = []
    for _ in range(k):
        chosen.append(
            min((u for u in range(m) if u not in chosen), key=lambda u: left([*chosen, u]))
        )
    assert list(maps[k].units) == chosen


def test_units_that_repeat_what_is_known_come_last():
    g = torch.Generator().manual_seed(0)
    x, own = torch.randn(500, 3, generator=g), torch.randn(500, 2, generator=g)
    hidden = torch.cat([x[:, :1] + x[:, 1:2], own[:, :1], own[:, :1], own[:, 1:]], 1)
    moments = Moments(7, 2)
    moments.update(torch.cat([x, hidden], 1), own * torch.tensor([1.0, 5.0]))
    order = forward_selection(moments, 3, 4)
    assert order[0] == 3
    assert order[1] in (1, 2)
    assert sorted(order) == [0, 1, 2, 3]


def test_regressions_without_rows_are_left_out(climbed):
    model, block, rows, report, affine, _ = climbed
    few = type(rows)(rows.x[:200], rows.y[:200], rows.cluster[:200], rows.position[:200])
    steps, _ = regressions(model, block, few, report, affine)
    m = steps[-1]["k"]
    assert m > 24  # all of them need no fit
    assert max(step["k"] for step in steps[:-1]) <= 200 // 8 - block.d_in


def test_one_rung_has_the_parameters_of_two_matrices(climbed):
    *_, affine, (steps, maps) = climbed
    one = maps[1].parameters - affine.parameters
    spare = [2 * affine.parameters - step["parameters"] for step in steps]
    assert min(v for v in spare if v >= 0) < one


def test_unit_counts_double():
    assert unit_counts(40, [7, 99]) == [0, 1, 2, 4, 7, 8, 16, 32, 40]
    assert unit_counts(1) == [0, 1]
