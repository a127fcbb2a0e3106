"""Budgets and what they buy: the path is the greedy knapsack, checked against trying everything."""

import math
import types
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from howlinear import blocks
from howlinear.compression import plan
from howlinear.compression.plan import (
    Option,
    after,
    descent,
    even_descent,
    expected,
    hull,
    saving,
    within,
)
from howlinear.compression.search import Search

costs = st.floats(0, 1, allow_nan=False)
tables = st.lists(
    st.lists(st.tuples(st.integers(1, 50), costs), max_size=4), min_size=1, max_size=4
)


def option(index, saved, cost):
    return Option(index, None, 0, saved, cost)


def totals(chosen):
    return sum(o.saved for o in chosen.values()), sum(o.cost for o in chosen.values())


def test_the_hull_leaves_out_what_another_option_beats():
    good = [option(0, 10, 1.0), option(0, 20, 3.0), option(0, 30, 9.0)]
    dearer = option(0, 15, 2.5)  # above the line from 10 to 20
    worse = option(0, 20, 4.0)
    assert hull([dearer, *good, worse]) == good


def test_steps_come_in_order_of_what_a_parameter_costs():
    path = descent([option(0, 10, 1.0), option(0, 20, 9.0), option(1, 10, 2.0)])
    assert [(s.options[0].index, s.options[0].saved) for s in path] == [(0, 10), (1, 10), (0, 20)]
    assert totals(after(path, 2)) == (20, 3.0)
    assert within(path, 3.0) == 2
    assert within(path, 2.9) == 1
    assert within(path, 0.5) == 0


def test_the_last_step_saves_no_more_than_is_worth_it():
    options = [option(0, 10, 1.0), option(0, 40, 5.0), option(1, 10, 2.0), option(1, 12, 2.5)]
    path = descent([*options, option(0, 15, 2.9)])
    assert [s.options[0].saved for s in path] == [10, 40, 10, 12]
    for others in ([], [option(0, 15, 2.9)]):  # above the hull: of use for the last step alone
        every = [*options, *others]
        assert totals(saving(path, every, 10)) == (10, 1.0)
        assert totals(saving(path, every, 15)) == ((15, 2.9) if others else (20, 3.0))
        assert totals(saving(path, every, 21)) == (22, 3.5)
        assert totals(saving(path, every, 23)) == (40, 5.0)
        assert totals(saving(path, every, 999)) == (52, 7.5)


@given(tables, st.integers(1, 100))
def test_what_saves_enough_costs_no_more_than_the_path(table, parameters):
    options = [option(i, s, c) for i, own in enumerate(table) for s, c in own]
    path = descent(options)
    saved, cost = totals(saving(path, options, parameters))
    reached = [totals(after(path, steps)) for steps in range(len(path) + 1)]
    enough = [(s, c) for s, c in reached if s >= parameters]
    assert cost <= min((c for _, c in enough), default=math.inf) + 1e-9
    assert saved >= parameters if enough else saved == reached[-1][0]


def test_costs_between_measured_ones_follow_power_laws():
    known = [(0.1, 0.02), (0.4, 0.32)]  # four times the rest, sixteen times the cost
    assert expected(known, 0.1) == pytest.approx(0.02)
    assert expected(known, 0.2) == pytest.approx(0.08)
    assert expected(known, 0.05) == pytest.approx(0.01)  # beyond them, in proportion
    assert expected(known, 0.8) == pytest.approx(0.64)
    assert expected(known, 0.0) == 0.0
    assert expected([], 0.3) == 0.0
    assert expected([(0.2, 0.1)], 0.4) == pytest.approx(0.2)
    assert expected([(0.2, -0.1), (0.3, 0.3)], 0.1) == pytest.approx(0.1)  # noise is left out


@given(tables)
def test_no_choice_saves_as_much_for_less(table):
    options = [option(i, s, c) for i, own in enumerate(table) for s, c in own]
    path = descent(options)
    ways = [[None, *(o for o in options if o.index == i)] for i in range(len(table))]
    every = [totals({o.index: o for o in way if o}) for way in product(*ways)]
    for steps in range(len(path) + 1):
        saved, cost = totals(after(path, steps))
        cheapest = min(c for s, c in every if s >= saved)
        assert cost <= cheapest + 1e-9


@given(tables)
def test_a_blocks_own_steps_come_in_order(table):
    path = descent(option(i, s, c) for i, own in enumerate(table) for s, c in own)
    for i in range(len(table)):
        own = [s.options[0].saved for s in path if s.options[0].index == i]
        assert own == sorted(own)
    assert all(s.saved > 0 for s in path)


def test_an_even_path_keeps_as_many_units_in_all_blocks():
    costs = {96: (1.0, 3.0), 64: (2.0, 9.0), 32: (4.0,)}  # by hidden units, of block 0 and 1
    options = [
        Option(i, 0, units, 128 - units, cost)
        for units, each in costs.items()
        for i, cost in enumerate(each)
    ]
    path = even_descent(options)
    assert [(s.saved, s.cost) for s in path] == [(64, 4.0), (64, 7.0)]
    assert {o.units for o in after(path, 1).values()} == {96}
    assert totals(after(path, 2)) == (128, 11.0)
    assert even_descent([]) == []


def test_a_plan_survives_its_file():
    chosen = [plan.BlockPlan(5, "layers.5.mlp", None, 3), plan.BlockPlan(2, "layers.2.mlp", 0, 9)]
    data = plan.to_dict(chosen, {"model": {"id": "x"}})
    assert data["kind"] == "plan"
    assert plan.from_dict(data) == sorted(chosen, key=lambda b: b.index)


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ([], "no blocks"),
        ("5", "no blocks"),
        ([5], "one object a block"),
        ([{"index": 5, "path": "a", "rank": None}], "lacks units"),
        ([{"index": 5, "path": "a", "rank": -1, "units": 0}], "negative"),
        ([{"index": 5, "path": "a", "rank": "all", "units": 0}], "rank"),
        ([{"index": 5, "path": "a", "rank": None, "units": 0}] * 2, "block 5 twice"),
    ],
)
def test_plans_that_make_no_sense_are_refused_in_one_line(blocks, told):
    with pytest.raises(ValueError, match=told) as error:
        plan.from_dict({"blocks": blocks})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prices", "real", "wanted"),
    [
        ([0.001, 0.02, 0.5], [0.0, 0.01, 0.06, 0.4], 1),
        ([0.0, 0.0, 0.0, 0.1], [0.0, 0.01, 0.06, 0.4, 0.5], 1),  # constant blocks cost nothing
        ([0.01] * 20, [0.005 * k for k in range(21)], 8),  # 80 % of the budget
        ([0.01] * 20, [-0.001 * k for k in range(21)], 20),  # noise
        ([0.01] * 3, [0.0, 0.2, 0.3, 0.4], None),
        ([0.01] * 3, [math.nan] * 4, None),
    ],
)
def test_a_search_ends_with_the_last_plan_that_the_budget_allows(prices, real, wanted):
    """Costs that do not add up; a plan that fits is found if one step fits."""
    path = descent(option(i, 10, cost) for i, cost in enumerate(prices))
    windows = torch.zeros(10, 8)
    fitter = types.SimpleNamespace(at=[], windows=windows, some_windows=lambda n: windows[::2])
    search, tried = Search(fitter, None, None), []

    def trial(shapes, windows=None):
        tried.append(len(shapes))
        return types.SimpleNamespace(nats=real[len(shapes)], steps=len(shapes))

    search.path, search.trial, search.shapes_after = path, trial, range
    if wanted is None:
        found = search.within(plan.Budget(perplexity=math.expm1(0.05)))
        assert "no plan costs less than 5.1%" in search.unmet
        assert found.steps == 1  # the cheapest that was tried
    else:
        found = search.within(plan.Budget(perplexity=math.expm1(0.05)))
        assert found.steps >= wanted
        assert found.nats <= 0.05
        assert not search.unmet
    assert len(tried) <= 5


def test_a_size_ends_with_the_option_that_suffices():
    """Not with the next step of the path."""
    model = tiny.model("llama")
    block, *_ = at = blocks(model)
    sizes = types.SimpleNamespace(total=100, added=0)
    search = Search(types.SimpleNamespace(at=at), sizes, None)
    search.options = [Option(0, 0, u, s, c) for u, s, c in [(12, 10, 1.0), (4, 40, 5.0)]]
    search.path = descent(search.options)
    assert search.shapes_saving(0.11) == {block: (0, 4)}
    search.options.append(Option(0, 0, 7, 15, 2.9))  # above the hull
    assert search.shapes_saving(0.11) == {block: (0, 7)}
    assert search.shapes_saving(0.16) == {block: (0, 4)}
