"""Moments are sums: batching, merging, shifting and saving change nothing."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from howlinear import fit
from howlinear.linear import tiles
from howlinear.linear.accumulators import TILE, merged
from howlinear.linear.moments import PANEL, TSQR, Moments
from howlinear.linear.stores import OutNorm

BOTH = pytest.mark.parametrize("kind", [Moments, TSQR])


def rows(n, d_in=5, d_out=3, seed=0, offset=0.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d_in, generator=g, dtype=torch.float64) + offset
    y = x @ torch.randn(d_in, d_out, generator=g, dtype=torch.float64)
    y += torch.randn(n, d_out, generator=g, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def filled(kind, x, y, weight=None, **kwargs):
    moments = kind(x.shape[-1], y.shape[-1], **kwargs)
    moments.update(x, y, weight)
    return moments


def reference(x, y, w=None):
    """numpy's own weighted covariance, as sums."""
    z = torch.cat([x, y], 1).double().numpy()
    w = np.ones(len(z)) if w is None else w.numpy()
    S = np.cov(z, rowvar=False, aweights=w, ddof=0) * w.sum()
    d = x.shape[1]
    return np.average(z, axis=0, weights=w), S[:d, :d], S[:d, d:], np.diag(S)[d:]


def assert_same(moments, expected, rtol=1e-12):
    """Means to `rtol` standard deviations, products to `rtol` of the product of norms."""
    mean, S_xx, S_xy, S_yy = expected
    norm_x, norm_y = np.sqrt(np.diag(S_xx)), np.sqrt(S_yy)
    root_n = np.sqrt(moments.n)
    offset = 1 + np.abs(mean).max()  # a mean is no better than its own rounding
    d = moments.d_in
    np.testing.assert_array_less(
        np.abs(moments.mean_x.numpy() - mean[:d]), rtol * (norm_x / root_n + offset)
    )
    np.testing.assert_array_less(
        np.abs(moments.mean_y.numpy() - mean[d:]), rtol * (norm_y / root_n + offset)
    )
    np.testing.assert_array_less(
        np.abs(moments.S_xx.numpy() - S_xx), rtol * np.outer(norm_x, norm_x)
    )
    np.testing.assert_array_less(
        np.abs(moments.S_xy.numpy() - S_xy), rtol * np.outer(norm_x, norm_y)
    )
    np.testing.assert_allclose(moments.S_yy, S_yy, rtol=rtol)


@BOTH
@pytest.mark.parametrize("d_in", [1, 5, PANEL, PANEL + 1, 2 * PANEL + 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_numpy(kind, d_in, weighted):
    x, y = rows(2 * d_in + 50, d_in)
    w = torch.rand(len(x), dtype=torch.float64) if weighted else None
    assert_same(filled(kind, x, y, w), reference(x, y, w))


@BOTH
def test_one_changed_number_changes_the_moments(kind):
    x, y = rows(50)
    changed = x.clone()
    changed[7, 2] += 1e-3
    with pytest.raises(AssertionError):
        assert_same(filled(kind, changed, y), reference(x, y))


@BOTH
@given(cuts=st.lists(st.integers(0, 60), max_size=4), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_batching_and_merging_change_nothing(kind, cuts, seed):
    x, y = rows(60, seed=seed, offset=3.0)
    bounds = sorted({0, 60, *cuts})
    streamed, merged = kind(5, 3), kind(5, 3)
    for a, b in pairwise(bounds):
        streamed.update(x[a:b], y[a:b])
        merged.merge(filled(kind, x[a:b], y[a:b]))
    for moments in (streamed, merged):
        assert moments.n == 60
        assert_same(moments, reference(x, y))


@BOTH
def test_merging_streams_with_different_shifts(kind):
    a, b = rows(400, offset=999.0), rows(300, seed=1, offset=-50.0)
    both = filled(kind, *a).merge(filled(kind, *b))
    assert_same(both, reference(*(torch.cat(t) for t in zip(a, b, strict=True))), rtol=1e-11)


@BOTH
def test_merging_with_itself_counts_every_row_twice(kind):
    x, y = rows(40)
    moments = filled(kind, x, y)
    moments.merge(moments)
    assert_same(moments, reference(torch.cat([x, x]), torch.cat([y, y])))


@BOTH
def test_offset_costs_no_digits(kind):
    x, y = rows(500)
    far = filled(kind, x + 999, y + 999)
    near = filled(kind, x, y)
    # x + 999 itself is rounded: eps * 999 in an entry of size 1
    torch.testing.assert_close(far.S_xx, near.S_xx, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(far.S_yy, near.S_yy, rtol=1e-11, atol=0)


@BOTH
def test_leading_shape_and_strides_do_not_matter(kind):
    x, y = rows(24 * 50, 6, 4)
    x3, y3 = x.view(24, 50, 6), y.view(24, 50, 4)
    assert_same(
        filled(kind, x3[:, 1:], y3[:, 1:]),
        reference(x3[:, 1:].reshape(-1, 6), y3[:, 1:].reshape(-1, 4)),
    )


@BOTH
def test_more_rows_than_a_tile(kind):
    x, y = rows(2 * TILE + 11, 3, 2)
    assert_same(filled(kind, x, y), reference(x, y))
    assert_same(filled(kind, x[None], y[None]), reference(x, y))


@BOTH
def test_few_rows_are_kept_as_they_came(kind):
    x, y = rows(20, 64, 8, dtype=torch.float32)
    moments = filled(kind, x, y)
    assert moments._kept.n == 20
    bigger = moments.copy()
    bigger.update(*rows(20, 64, 8, seed=1, dtype=torch.float32))
    assert bigger._kept.n == 0
    assert moments._kept.n == 20
    assert_same(moments, reference(x, y), rtol=1e-10)


@BOTH
@pytest.mark.parametrize("n", [3, 30, 300])
@pytest.mark.parametrize("weighted", [False, True])
def test_state_goes_on_to_the_bit(kind, n, weighted):
    x, y = rows(n, 16, 4, dtype=torch.float32)
    w = torch.rand(n, dtype=torch.float64) if weighted else None
    one = filled(kind, x, y, w)
    two = kind(16, 4)
    two.load_state_dict({k: v.clone() for k, v in one.state_dict().items()})
    for moments in (one, two):
        moments.update(*rows(50, 16, 4, seed=1, dtype=torch.float32))
    assert (one.n, one.weight, one.eps) == (two.n, two.weight, two.eps)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@BOTH
def test_not_finite_rows_are_refused_and_leave_no_trace(kind):
    for n in (2, 40, TILE + 5):
        x, y = rows(n)
        moments = filled(kind, *rows(60, seed=2))
        before = {k: v.clone() for k, v in moments.state_dict().items()}
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoiled = y.clone()
            spoiled[-1, 1] = bad
            with pytest.raises(ValueError, match=r"not finite.*output y, feature 1"):
                moments.update(x, spoiled)
        after = moments.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:, :2], y, None), "widths"),
        (lambda x, y: (x[:4], y, None), "but y has"),
        (lambda x, y: (x.long(), y, None), "floating point"),
        (lambda x, y: (x, y, torch.ones(3)), "weight has shape"),
        (lambda x, y: (x, y, -torch.ones(len(x))), "not negative"),
        (lambda x, y: (x, y, torch.full((len(x),), torch.nan)), "finite"),
    ],
)
def test_malformed_rows_are_refused(kind, change, message):
    moments = kind(5, 3)
    with pytest.raises(ValueError, match=message):
        moments.update(*change(*rows(10)))
    assert moments.n == 0


@BOTH
@pytest.mark.parametrize("n", [2, 300])
def test_spoiled_states_are_refused(kind, n):
    good = filled(kind, *rows(n, 16, 4)).state_dict()
    for name in good:
        for spoil in (
            lambda t: t[..., :-1],
            lambda t: t.to(torch.int8),
            lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t + 1,
            None,
        ):
            state = dict(good)
            if spoil is None:
                del state[name]
            else:
                state[name] = spoil(state[name])
            fresh = kind(16, 4)
            if n == 2 and name == "shift" and spoil is None:
                continue  # kept rows need none
            with pytest.raises(ValueError, match=r"\w"):
                fresh.load_state_dict(state)
            assert fresh.n == 0
    with pytest.raises(ValueError, match="unknown entries"):
        kind(16, 4).load_state_dict(good | {"pickle": torch.zeros(1)})


def test_kinds_do_not_mix():
    x, y = rows(30)
    with pytest.raises(ValueError, match="cannot merge TSQR"):
        filled(Moments, x, y).merge(filled(TSQR, x, y))
    with pytest.raises(ValueError, match="not that of TSQR"):
        TSQR(5, 3).load_state_dict(filled(Moments, x, y).state_dict())


def test_no_rows_is_an_error_not_a_nan():
    with pytest.raises(ValueError, match="no rows"):
        _ = Moments(2, 2).mean_x


@BOTH
@pytest.mark.parametrize("n", [2, 40, 500])  # kept as rows, and as sums
@pytest.mark.parametrize("cut", [1, 7, PANEL, PANEL + 3, 2 * PANEL])
def test_narrowing_gives_the_moments_of_the_first_columns(kind, n, cut):
    x, y = rows(n, d_in=2 * PANEL, offset=3.0)
    weight = torch.linspace(0.5, 2, n, dtype=torch.float64)
    wide = filled(kind, x, y, weight)
    narrow = wide.narrow(cut)
    assert (narrow.n, narrow.weight, narrow.d_in) == (n, wide.weight, cut)
    assert_same(narrow, reference(x[:, :cut], y, weight), rtol=1e-11)
    narrow.update(x[:, :cut], y)  # on its own from here
    assert (wide.n, narrow.n) == (n, 2 * n)
    with pytest.raises(ValueError, match="cannot narrow"):
        wide.narrow(2 * PANEL + 1)


class NoFloat64(torch.Tensor):
    """A tensor on a device without float64, such as mps: to be moved away before it is widened."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        moved = func is torch.Tensor.cpu or (
            func is torch.Tensor.to and args[1:] == (torch.device("cpu"),)
        )
        if moved:
            return out.as_subclass(torch.Tensor)
        if isinstance(out, cls) and out.dtype == torch.float64:
            raise TypeError(f"{func.__name__}: this device has no float64")
        return out


@pytest.mark.parametrize("size", [1.0, 2.0**50])
def test_rows_of_a_device_without_float64(monkeypatch, size):
    monkeypatch.setattr(tiles, "widest", lambda device: torch.float32)
    x, y = rows(300, dtype=torch.float32)
    weight = torch.linspace(0.5, 2, 300)
    want = filled(Moments, x * size, y * size, weight, precision="mixed")
    far = [t.as_subclass(NoFloat64) for t in (x * size, y * size, weight)]
    got = filled(Moments, *far, precision="mixed")
    assert torch.equal(got.S_xx, want.S_xx)
    norm = torch.nn.RMSNorm(5, eps=1e-6)
    norm.weight.data = torch.linspace(1, 2, 5).as_subclass(NoFloat64)
    assert OutNorm.of(norm, 5) is not None
    with pytest.raises(TypeError, match="no float64"):
        far[0].double()


@BOTH
def test_nothing_is_made_on_the_default_device(kind):
    """With another default device, everything stays where the rows are."""
    x, y = rows(300)
    want = fit(filled(kind, x, y), ridge=0.5)
    with torch.device("meta"):
        got = fit(filled(kind, x, y), ridge=0.5)
        fit(merged([filled(kind, x, y), filled(kind, x, y)]), intercept=False)
    assert torch.equal(got.weight, want.weight)
