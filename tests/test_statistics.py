"""How sure a number made of profiles is, against closed forms and simulation."""

import math
import random

import pytest
from scipy import stats

from howlinear.records.statistics import (
    MIN_BLOCKS,
    agreement,
    jackknife,
    over_blocks,
    pearson,
    r2s,
    spearman,
    student,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30])
def test_student_is_scipys(freedom):
    for level in (0.95, 1 - 0.05 / 30):
        want = stats.t.ppf((1 + level) / 2, freedom)
        assert student(freedom, level) == pytest.approx(want, rel=1e-9)


def test_of_a_mean_it_is_the_standard_error_of_the_mean():
    """With folds of one size, R2 is the mean over folds, whose jackknife is known in closed form."""
    values = [0.5, 0.7, 0.4, 0.65, 0.6]
    sums = [[[1 - v, 1.0] for v in values]]
    found = jackknife(lambda a: a[0], [sums], paired=True)
    mean = sum(values) / 5
    se = math.sqrt(sum((v - mean) ** 2 for v in values) / (5 * 4))
    assert found.value == pytest.approx(mean)
    assert found.se == pytest.approx(se)
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.975, 4) * se, rel=2e-3)


def noisy(rng, truth, hard, spread):
    """Sums of folds: some folds are harder for everybody, and each block has noise of its own."""
    return [[[1 - t + h + rng.gauss(0, spread), 1.0] for h in hard] for t in truth]


def test_a_fold_that_is_hard_for_both_runs_is_not_a_difference():
    rng = random.Random(0)
    hard = [0.2, -0.1, 0.1, -0.2, 0.0]
    a, b = (noisy(rng, [0.5, 0.6, 0.7], hard, 0.001) for _ in range(2))

    def shift(a, b):
        return sum(b) / 3 - sum(a) / 3

    assert jackknife(shift, [a, b], paired=True).se < 0.002
    assert jackknife(shift, [a, b], paired=False).se > 0.05


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = random.Random(1)
    hit, trials = 0, 400
    for _ in range(trials):
        hard = [[rng.gauss(0, 0.05) for _ in range(5)] for _ in range(2)]
        a, b = (noisy(rng, [t, t + 0.1], h, 0.05) for t, h in zip((0.4, 0.6), hard, strict=True))
        found = jackknife(lambda a, b: sum(b) / 2 - sum(a) / 2, [a, b], paired=False)
        hit += found.low <= 0.2 <= found.high
    # a binomial of 400 at 95 % has a standard error of 1.1 %; min(K) - 1 degrees are conservative
    assert hit / trials > 0.92


def test_correlations_stay_between_minus_one_and_one():
    rng = random.Random(2)
    truth = [0.1 * i for i in range(8)]
    a, b = (noisy(rng, truth, [0.0] * 5, 0.05) for _ in range(2))
    found = jackknife(pearson, [a, b], paired=False, correlation=True)
    assert -1 < found.low < found.value < found.high < 1


def test_the_same_run_twice_correlates_perfectly_without_an_interval():
    sums = noisy(random.Random(3), [0.1, 0.5, 0.9], [0.0] * 5, 0.05)
    found = jackknife(pearson, [sums, sums], paired=True, correlation=True)
    assert found.value == pytest.approx(1)
    assert found.low is None


def test_one_split_has_no_interval():
    found = jackknife(lambda a: a[0], [[[[0.4, 1.0]]]], paired=True)
    assert (found.value, found.se) == (0.6, None)
    assert math.isnan(r2s([[[0.0, 0.0]]])[0])


@pytest.mark.parametrize("paired", [True, False])
def test_runs_of_one_model_differ_in_five_of_a_hundred_comparisons(paired):
    """400 comparisons of two noisy measurements of the same 12 blocks."""
    rng, trials = random.Random(4), 400
    truth = [0.3 + 0.05 * i for i in range(12)]
    excluded, sizes, noise = {"mean_shift": 0, "largest_shift": 0}, 0.0, 0.0
    for _ in range(trials):
        hard = [rng.gauss(0, 0.02) for _ in range(5)]
        other = hard if paired else [rng.gauss(0, 0.02) for _ in range(5)]
        a, b = (noisy(rng, truth, folds, 0.03) for folds in (hard, other))
        pair = agreement(a, b, paired=paired)
        for name in excluded:
            excluded[name] += not pair[name]["low"] <= 0 <= pair[name]["high"]
        sizes, noise = sizes + pair["mean_size_of_shift"], noise + pair["mean_size_by_noise"]
    for name, times in excluded.items():  # 5 % +- three standard errors; fewer is conservative
        assert times / trials < 0.083, name
    assert noise / trials == pytest.approx(sizes / trials, rel=0.1)


def test_a_large_shift_is_found_among_many_blocks():
    rng = random.Random(5)
    a = noisy(rng, [0.5] * 30, [0.0] * 5, 0.01)
    b = noisy(rng, [0.5] * 17 + [0.7] + [0.5] * 12, [0.0] * 5, 0.01)
    pair = agreement(a, b, paired=True)
    assert pair["largest_shift_at"] == 17
    assert 0 < pair["largest_shift"]["low"] < 0.2 < pair["largest_shift"]["high"] < 0.3


@pytest.mark.parametrize("correlation", [pearson, spearman])
def test_intervals_over_blocks_hold_the_truth_as_often_as_they_say(correlation):
    """Normal pairs with correlation 0.7, whose rank correlation is 6 / pi asin(0.35)."""
    rng, trials, hit = random.Random(6), 400, 0
    truth = 0.7 if correlation is pearson else 6 / math.pi * math.asin(0.35)
    for _ in range(trials):
        x = [rng.gauss(0, 1) for _ in range(12)]
        y = [0.7 * u + math.sqrt(1 - 0.49) * rng.gauss(0, 1) for u in x]
        found = over_blocks(correlation, x, y)
        hit += found.low <= truth <= found.high
    assert 0.92 < hit / trials < 0.98


def test_few_blocks_and_blocks_without_a_number_are_not_correlated():
    x, y = [float(i) for i in range(MIN_BLOCKS)], [float(i * i % 5) for i in range(MIN_BLOCKS)]
    want = stats.spearmanr(x, y).statistic
    assert over_blocks(spearman, x, y).value == pytest.approx(want)
    assert over_blocks(spearman, x[1:], y[1:]).value is None
    assert over_blocks(spearman, [*x, None, 3.0], [*y, 1.0, math.nan]).value == pytest.approx(want)
    assert over_blocks(spearman, [math.nan, *x[1:]], y).value is None


def test_a_block_without_an_r2_is_left_out_of_comparisons():
    rng = random.Random(7)
    a, b = (noisy(rng, [0.5, 0.6, 0.8], [0.0] * 5, 0.01) for _ in range(2))
    want = agreement(a, b, paired=True)
    constant = [[[0.0, 0.0]] * 5]
    got = agreement(constant + a, constant + b, paired=True)
    assert got == want | {"largest_shift_at": want["largest_shift_at"] + 1}
    nothing = agreement(constant, constant, paired=True)
    assert (nothing["largest_shift_at"], nothing["mean_shift"]["value"]) == (None, None)
