"""Whether products of rows may be made in float32: each block decides by what it would change."""

import math

import pytest
import torch

from howlinear import Moments, fit, score
from howlinear.linear.folds import Folds
from howlinear.linear.precision import HARMLESS, float32_shift
from howlinear.linear.rows import Rows
from howlinear.linear.stores import BlockStore
from howlinear.models.families import Block
from howlinear.profiling.passes import Course
from test_mixed import CASES, planted

D, N = 256, 8192
SAFE = ["plain", "offset", "spreads", "condition 1e2", "condition 1e2, offset"]


def r2(x, y, precision):
    parts = (slice(N // 2), slice(N // 2, None))
    a, b = (Moments(D, y.shape[1], precision=precision) for _ in parts)
    for moments, part in zip((a, b), parts, strict=True):
        moments.update(x[part], y[part])
    return score(fit(a), b).r2


@pytest.mark.parametrize("case", SAFE)
def test_what_is_called_harmless_moves_r2_by_less_than_a_millionth(case):
    x, y, _ = planted(**CASES[case], n=N, d=D)
    shift = float32_shift([], x[:2048], y[:2048])
    assert 0 < shift < HARMLESS
    assert abs(r2(x, y, "mixed") - r2(x, y, "float64")) < 1e-6


@pytest.mark.parametrize("case", ["condition 1e2, weakest", "condition 1e4", "condition 1e6"])
def test_what_is_not_stays_in_float64(case):
    x, y, _ = planted(**CASES[case], n=N, d=D)
    assert float32_shift([], x[:2048], y[:2048]) > HARMLESS


def test_inputs_that_lack_rank_stay_in_float64():
    x, y, _ = planted(n=N, d=D)
    x = torch.nn.functional.layer_norm(x, (D,))
    assert float32_shift([], x, y) == math.inf


def test_earlier_rows_count():
    """Few rows alone do not determine a map: with sums of others they do."""
    x, y, _ = planted(n=N, d=D)
    before = Moments(D, 4)
    before.update(x[:2048], y[:2048])
    assert float32_shift([], x[2048:2248], y[2048:2248]) == math.inf
    assert 0 < float32_shift([before], x[2048:2248], y[2048:2248]) < HARMLESS


def store_of(x, y, precision="auto", batches=4):
    """Windows of 64 rows, in batches."""
    block = Block(0, "mlp", ("mlp",), None, None, None, "", D, 4, "test")
    store = BlockStore(block, 2, "moments", 0, torch.device("cpu"), precision=precision)
    for i, (a, b) in enumerate(zip(x.chunk(batches), y.chunk(batches), strict=True)):
        shape = (len(a) // 64, 64)
        offsets = [i * len(a) + 64 * j for j in range(shape[0])]
        store.update(Rows(a, b, None, shape, shape, None, a), offsets, Folds(2))
    return store


def test_a_store_decides_after_its_first_rows_and_says_so():
    x, y, _ = planted(n=N, d=D)
    store, exact = store_of(x, y), store_of(x, y, "float64")
    assert store.float32_shift < HARMLESS
    assert [a.precision for a in store.body] == ["mixed"] * 2
    assert [a.precision for a in store.first] == ["float64"] * 2
    assert exact.float32_shift is None
    for a, b in zip(store.body, exact.body, strict=True):
        assert 0 < float((a.S_xx - b.S_xx).abs().max()) < 1e-5 * float(b.S_xx.max())
    assert torch.equal(store.first[0].S_yy, exact.first[0].S_yy)


def test_a_store_that_keeps_float64_has_its_sums_to_the_bit():
    x, y, _ = planted(**CASES["condition 1e4"], n=N, d=D)
    store, exact = store_of(x, y), store_of(x, y, "float64")
    assert store.float32_shift > HARMLESS
    assert all(torch.equal(a.S_xx, b.S_xx) for a, b in zip(store.body, exact.body, strict=True))


def test_the_decision_is_saved_and_merged():
    x, y, _ = planted(n=N, d=D)
    store = store_of(x, y)
    again = BlockStore.from_state(store.block, store.state_dict())
    assert again.float32_shift == store.float32_shift
    assert not again.undecided
    assert again.merge(store_of(x, y, "float64")).float32_shift == store.float32_shift
    with pytest.raises(ValueError, match="float32_shift is not as expected"):
        BlockStore.from_state(
            store.block, store.state_dict() | {"float32_shift": torch.tensor(math.nan)}
        )


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="unknown precision 'half', expected one of auto"):
        Course(precision="half")
