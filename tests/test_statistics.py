"""How sure a number made of profiles is, against closed forms and simulation."""

import math
import random

import pytest
from scipy import stats

from howlinear.records.statistics import jackknife, pearson, r2s, student


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30])
def test_student_is_scipys(freedom):
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


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
