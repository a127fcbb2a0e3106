"""Verdicts from KL: which side of the thresholds an interval lies on, and how rarely it is the wrong one."""

import math

import numpy as np
import pytest
import scipy.stats

from howlinear.records.verdicts import (
    COSTLY,
    LEVEL,
    SAFE,
    candidates,
    costly_from,
    interval,
    verdict_of,
)

LOOKS = (8, 16, 32, 64, 128, 256, 512)


def test_the_interval_is_students_on_the_log_scale():
    kl, se, clusters = 0.02, 0.003, 17
    t = scipy.stats.t.ppf((1 + LEVEL) / 2, clusters - 1)
    want = [kl * math.exp(sign * t * se / kl) for sign in (-1, 1)]
    assert interval(kl, se, clusters) == pytest.approx(want, rel=1e-9)
    assert interval(0.0, 0.0, 9) == (0, 0)  # a block that is linear
    assert all(map(math.isnan, interval(kl, math.nan, 1)))


@pytest.mark.parametrize(
    ("kl", "se", "windows", "word"),
    [
        (0.01, 0.001, 64, "safe"),
        (0.01, 0.001, 15, "undecided"),  # too few windows to be called safe
        (0.0, 0.0, 64, "safe"),
        (0.028, 0.001, 64, "undecided"),
        (0.06, 0.004, 64, "some cost"),
        (0.06, 0.02, 64, "undecided"),
        (0.3, 0.01, 8, "costly"),
        (0.105, 0.01, 64, "undecided"),
        (0.3, math.nan, 64, "undecided"),
    ],
)
def test_a_verdict_needs_an_interval_within_one_range(kl, se, windows, word):
    assert verdict_of(kl, se, 40, windows) == word
    assert verdict_of(10 * kl, 10 * se, 40, windows, safe=10 * SAFE) == word  # costly scales along
    assert costly_from(10 * SAFE) == pytest.approx(10 * COSTLY)


def test_undecided_blocks_say_between_what():
    assert candidates(0.028, 0.001, 40) == ("safe", "some cost")
    assert candidates(0.105, 0.01, 40) == ("some cost", "costly")
    assert candidates(0.05, math.nan, 1) == ("safe", "costly")


def drawn(cv, n, seed):
    """(n, last look) KLs of clusters: log-normal with mean SAFE and this ratio of deviation to mean."""
    sigma = math.sqrt(math.log1p(cv**2))
    normal = np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, (n, LOOKS[-1]))
    return SAFE * np.exp(normal)


def _ends(part):
    n = len(part)
    return float(part.mean()), float(part.std(ddof=1)) / math.sqrt(n), n, n


def ever_called_safe(kls):
    """The share of sweeps that call a block safe at some look."""
    wrong = 0
    for row in kls:
        parts = (row[:n] for n in LOOKS)
        ends = (_ends(part) for part in parts)
        wrong += any(verdict_of(*end) == "safe" for end in ends)
    return wrong / len(kls)


@pytest.mark.parametrize("cv", [0.3, 0.8])
def test_a_block_that_costs_as_much_as_the_limit_is_rarely_called_safe(cv):
    """The sweep stops at the first verdict, so every look is a chance to be wrong."""
    kls = drawn(cv, 1000, 0)
    assert ever_called_safe(kls) < 0.05
    assert ever_called_safe(kls / 2) > 0.95  # and one at half of it nearly always
    naive = 0
    for n in LOOKS[1:]:
        part = kls[:, :n]
        naive = naive | (part.mean(1) + 2 * part.std(1, ddof=1) / math.sqrt(n) < SAFE)
    assert naive.mean() > 0.1  # two standard errors at every look are not enough
