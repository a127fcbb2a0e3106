"""Products in float32, sums in float64: what that costs is known in advance and asserted here.

u = 2**-24. In the scaled inputs, of correlation matrix C with largest eigenvalue L, float32 products move C by up
to 4 u L, and directions below 8 u L are left out. Both change the explained variance w'Cw of a map w by at most a
multiple of u L |w|^2: an error of R2 of `BOUND * u L |w|^2 / var y`, at any condition number. Estimation noise in a
direction that one precision leaves out and the other keeps is (1 - R2) / n.
"""

import threading
from contextlib import nullcontext
from contextvars import ContextVar
from unittest.mock import patch

import pytest
import torch

from howlinear import TSQR, Moments, fit, score
from howlinear.linear import tiles
from howlinear.linear.accumulators import TILE
from howlinear.linear.moments import full_float32

U = 2.0**-24
BOUND = 16
D, N = 64, 20_000


without_float64 = ContextVar("without_float64", default=False)


@pytest.fixture(params=["cpu", "no float64"])
def device(request):
    """The CPU, and a CPU that pretends to have no float64 where mixed rows are, as mps has none."""
    token = without_float64.set(request.param == "no float64")
    yield
    without_float64.reset(token)


def filled(x, y, weight=None, precision="mixed"):
    m = Moments(x.shape[-1], y.shape[-1], precision=precision)
    add(m, x, y, weight)
    return m


def add(m, x, y, weight=None):
    lacks = without_float64.get() and m.precision == "mixed"
    with patch.object(tiles, "widest", lambda _: torch.float32) if lacks else nullcontext():
        m.update(x, y, weight)


def rows(*args, **kwargs):
    return planted(*args, **kwargs)[:2]


def planted(condition=1.0, offset=0.0, spread=1.0, n=N, d=D, weakest=False, dtype=torch.float32):
    """(x, y, w): rows of standard deviations 1 to `spread`, and y = w x / deviation + noise.

    The scaled inputs have about that condition number. `weakest` has y depend on their last direction alone.
    """
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    V = torch.linalg.qr(draw(d, d)).Q
    V[:, 0] = d**-0.5  # every feature takes part in the largest, so that scaling changes little
    V = torch.linalg.qr(V).Q
    x = (draw(n, d) * torch.logspace(0, -torch.tensor(condition).log10().item(), d)) @ V.t()
    deviation = x.std(0)
    x /= deviation
    w = V[:, -1:] * deviation[:, None] if weakest else draw(d, 4)
    w /= (x @ w).std()
    y = x @ w
    y += 0.3 * draw(*y.shape)
    x *= torch.logspace(-0.5, 0.5, d, dtype=torch.float64) ** torch.tensor(spread).log10().item()
    return (x + offset).to(dtype), (y + offset).to(dtype), w


def r2(x, y, precision, cut=N // 2):
    a, b = (filled(x[i], y[i], precision=precision) for i in (slice(cut), slice(cut, None)))
    affine = fit(a)
    return score(affine, b).r2, affine


def expected(x, y, w, r2, ranks):
    """The bound above. `w` maps the scaled inputs."""
    exact = filled(x, y, precision="float64")
    scale = exact.S_xx.diagonal().sqrt()
    largest = torch.linalg.eigvalsh(exact.S_xx / scale / scale[:, None])[-1]
    size = float(largest * w.square().sum() / (exact.S_yy.sum() / exact.weight))
    return BOUND * U * size + 8 * (1 - r2) * abs(ranks[0] - ranks[1]) / N


CASES = {
    "plain": {},
    "offset": {"offset": 999.0},
    "spreads": {"spread": 1e8},  # 1e-4 to 1e4
    "condition 1e2": {"condition": 1e2},
    "condition 1e4": {"condition": 1e4},
    "condition 1e6": {"condition": 1e6},
    "condition 1e2, offset": {"condition": 1e2, "offset": 999.0},
    "condition 1e2, weakest": {"condition": 1e2, "weakest": True},
}


@pytest.mark.parametrize("case", CASES)
def test_r2_is_off_by_no_more_than_derived(device, case):
    x, y, w = planted(**CASES[case])
    (exact, a), (mixed, b) = r2(x, y, "float64"), r2(x, y, "mixed")
    bound = expected(x, y, w, exact, (a.rank, b.rank))
    print(f"{case}: off by {abs(mixed - exact):.1e}, bound {bound:.1e}, ranks {a.rank} {b.rank}")
    assert exact > 0.8
    assert bound < 1e-2
    assert abs(mixed - exact) < bound


@pytest.mark.parametrize("case", ["offset", "condition 1e2, offset"])
def test_float32_sums_would_fail_that(case):
    x, y, w = planted(**CASES[case])
    exact, a = r2(x, y, "float64")
    bound = expected(x, y, w, exact, (a.rank, a.rank))
    z, fitted, held = torch.cat([torch.ones(N, 1), x], 1), slice(N // 2), slice(N // 2, None)
    B = torch.linalg.solve(z[fitted].t() @ z[fitted], z[fitted].t() @ y[fitted])
    res, tot = (y[held] - z[held] @ B).double(), y[held].double() - y[held].double().mean(0)
    bad = 1 - float(res.square().sum() / tot.square().sum())
    print(f"{case}: off by {abs(bad - exact):.1e}, bound {bound:.1e}")
    assert abs(bad - exact) > 100 * bound


def test_a_direction_too_weak_for_it_is_left_out_and_reported(caplog):
    x, y = rows(condition=1e4, weakest=True)
    (exact, a), (mixed, b) = r2(x, y, "float64"), r2(x, y, "mixed")
    assert a.rank == D > b.rank
    assert "inputs have rank" in caplog.text
    assert exact > 0.8
    assert mixed < 0.1  # the limit of mixed precision: y hangs on what it cannot see


def test_inputs_that_sum_to_zero_lack_a_rank_as_in_float64():
    x, y = rows()
    x = torch.nn.functional.layer_norm(x, (D,))
    (exact, a), (mixed, b) = r2(x, y, "float64"), r2(x, y, "mixed")
    assert a.rank == b.rank == D - 1
    assert mixed == pytest.approx(exact, abs=1e-6)


def test_a_sink_row_in_every_window(device):
    x, y, w = planted(condition=10.0)
    x[::100] *= 500
    y[::100] *= 500
    w = w * x.double().std(0)[:, None]  # it was 1
    windows = [t.view(-1, 100, t.shape[-1]) for t in (x, y)]
    (exact, a), (mixed, b) = (r2(*windows, precision, 100) for precision in ("float64", "mixed"))
    assert abs(mixed - exact) < expected(x, y, w, exact, (a.rank, b.rank))


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_are_exact_and_sums_agree_to_a_few_roundings(weighted):
    x, y = rows(offset=999.0)
    w = torch.rand(N, dtype=torch.float64) if weighted else None
    mixed, exact = filled(x, y, w), filled(x, y, w, "float64")
    assert (mixed.n, mixed.weight) == (exact.n, exact.weight)
    assert torch.equal(mixed.shift, exact.shift)
    for mean, deviation in (("mean_x", x.double().std(0)), ("mean_y", y.double().std(0))):
        off = (getattr(mixed, mean) - getattr(exact, mean)).abs() / deviation
        assert float(off.max()) < 2 * U
    torch.testing.assert_close(mixed.S_yy, exact.S_yy, rtol=4 * U, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_products_agree_to_a_few_roundings(device, dtype, weighted):
    x, y = rows(n=5000, spread=1e2, offset=3.0, dtype=dtype)
    w = torch.rand(5000, dtype=torch.float64) * 1e-200 if weighted else None
    mixed, exact = filled(x, y, w), filled(x, y, w, "float64")
    norm_x, norm_y = exact.S_xx.diagonal().sqrt(), exact.S_yy.sqrt()
    assert (mixed.S_xx - exact.S_xx).div(norm_x).div(norm_x[:, None]).abs().max() < 16 * U
    assert (mixed.S_xy - exact.S_xy).div(norm_y).div(norm_x[:, None]).abs().max() < 16 * U
    assert mixed.eps >= 2 * U


@pytest.mark.parametrize("unit", [2.0**-100, 2.0**-50, 2.0**60, 2.0**100])
def test_units_do_not_matter(device, unit):
    x, y = rows(n=3000)
    one, other = filled(x, y), filled(x * unit, y / unit)
    norm_x, norm_y = one.S_xx.diagonal().sqrt(), one.S_yy.sqrt()
    off = (other.S_xx / unit**2 - one.S_xx).div(norm_x).div(norm_x[:, None])
    assert float(off.abs().max()) < 16 * U
    off = (other.S_xy - one.S_xy).div(norm_y).div(norm_x[:, None])
    assert float(off.abs().max()) < 16 * U
    torch.testing.assert_close(other.S_yy, one.S_yy / unit**2, rtol=4 * U, atol=0)


def test_merging_with_float64_gives_mixed_sums():
    x, y = rows(offset=5.0)
    half = N // 2
    first, second = (x[:half], y[:half]), (x[half:] + 1, y[half:] - 1)
    exact = filled(*first, precision="float64").merge(filled(*second, precision="float64"))
    for a, b in (("mixed", "float64"), ("float64", "mixed"), ("mixed", "mixed")):
        both = filled(*first, precision=a).merge(filled(*second, precision=b))
        assert (both.n, both.weight, both.precision) == (exact.n, exact.weight, "mixed")
        assert both.eps == filled(*first).eps
        torch.testing.assert_close(both.S_xx, exact.S_xx, rtol=1e-6, atol=1e-6 * N)
        torch.testing.assert_close(both.mean_y, exact.mean_y, rtol=4 * U, atol=0)


@pytest.mark.parametrize("n", [0, 3, 3000])
def test_state_goes_on_to_the_bit(n):
    x, y = rows(n=6000, offset=2.0)
    one, two = Moments(D, 4, precision="mixed"), Moments(D, 4)
    one.update(x[:n], y[:n])
    two.load_state_dict({k: v.clone() for k, v in one.state_dict().items()})
    for m in (one, two, three := one.copy()):
        m.update(x[n:], y[n:])
    for other in (two, three):
        assert other.precision == "mixed"
        assert other.state_dict().keys() == one.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_states_without_a_precision_are_float64():
    exact = filled(*rows(n=500), precision="float64")
    assert "precision" not in exact.state_dict()
    fresh = Moments(D, 4, precision="mixed")
    fresh.load_state_dict(exact.state_dict())
    assert fresh.precision == "float64"


@pytest.mark.parametrize(
    "spoilt",
    [
        torch.zeros(5, dtype=torch.uint8),
        torch.tensor(list(b"mixed")),
        torch.tensor([list(b"mixed")], dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor(float("nan")),
    ],
)
def test_spoiled_precisions_are_refused(spoilt):
    state = filled(*rows(n=500)).state_dict()
    with pytest.raises(ValueError, match="precision"):
        Moments(D, 4).load_state_dict(state | {"precision": spoilt})


def test_narrowing_keeps_the_rank_threshold():
    x, y = rows(n=3000)
    wide = filled(x, y)
    narrow = wide.narrow(D // 4)
    assert narrow.precision == "mixed"
    assert narrow.eps * narrow.d_in == pytest.approx(wide.eps * wide.d_in)
    torch.testing.assert_close(narrow.S_xx, filled(x[:, : D // 4], y).S_xx, rtol=1e-6, atol=1e-3)


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="TSQR has no precision 'mixed', only float64"):
        TSQR(3, 2, precision="mixed")
    with pytest.raises(ValueError, match="no precision 'half', only float64, mixed"):
        Moments(3, 2, precision="half")


def test_not_finite_rows_leave_no_trace(device):
    for n in (2, 200, TILE + 5):
        x, y = rows(n=n)
        m = filled(*rows(n=100))
        before = {k: v.clone() for k, v in m.state_dict().items()}
        y[-1, 1] = float("nan")
        with pytest.raises(ValueError, match=r"not finite.*output y, feature 1"):
            add(m, x, y)
        assert all(torch.equal(before[k], v) for k, v in m.state_dict().items())


# -- full float32 ---------------------------------------------------------------------------------

BACKENDS = torch.backends
LOOSE = {
    "default": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
}
if hasattr(BACKENDS.cuda.matmul, "fp32_precision"):  # torch 2.9
    LOOSE["cuda alone"] = lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32")
    LOOSE["mkldnn alone"] = lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16")


def settings():
    found = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: BACKENDS.cuda.matmul.allow_tf32,
        lambda: getattr(BACKENDS.cuda.matmul, "fp32_precision", None),
        lambda: getattr(BACKENDS.mkldnn.matmul, "fp32_precision", None),
    ):
        try:
            found.append(read())
        except RuntimeError:  # torch has no one word for backends that differ
            found.append("differ")
    return found


@pytest.fixture
def clean():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("how", LOOSE)
@pytest.mark.parametrize("raises", [False, True])
def test_products_are_full_float32_and_the_setting_comes_back(how, raises, clean):
    LOOSE[how]()
    before, within = settings(), []
    try:
        with full_float32(torch.device("cpu")):
            within = settings()
            assert not raises
    except AssertionError:
        pass
    assert within[:2] == ["highest", False]
    assert {"tf32", "bf16"}.isdisjoint(within)
    assert settings() == before


def test_one_thread_does_not_loosen_anothers_products(clean):
    torch.set_float32_matmul_precision("medium")
    cpu, entered, leave = torch.device("cpu"), threading.Event(), threading.Event()

    def first():
        with full_float32(cpu):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with full_float32(cpu):
        leave.set()
        thread.join()
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"


def test_autocast_does_not_reach_the_products():
    x, y = rows(n=2000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = filled(x, y)
        assert (x.t() @ x).dtype == torch.bfloat16  # it is on
    assert torch.equal(inside.S_xx, filled(x, y).S_xx)
