"""Weights rounded to nearest, by hand and in every family."""

import pytest
import torch

import tiny
from howlinear import blocks
from howlinear.models.hooks import as_module
from howlinear.probing.rounding import nearest, rounded, rounding_errors
from howlinear.probing.samples import gather


def test_rounding_by_hand():
    weight = torch.tensor([[7.0, -3.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]])
    want = torch.tensor([[7.0, -3.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(nearest(weight, 4), want)
    two = nearest(torch.tensor([[7.0, -3.4, 0.6, 0.1]]), 4, group=2)
    torch.testing.assert_close(two, torch.tensor([[7.0, -3.0, 0.6, 0.6 / 7]]))
    ragged = nearest(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), 8, group=2)
    assert ragged.shape == (3, 5)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_moves_by_more_than_half_a_step(bits):
    weight = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    got = nearest(weight, bits)
    step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((got - weight).abs() <= step / 2 + 1e-6).all()
    assert all(
        len((row / s).round().unique()) <= 2**bits - 1 for row, s in zip(got, step, strict=True)
    )
    torch.testing.assert_close(nearest(got, bits), got)  # what is rounded stays


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert", "opt", "gemma2", "t5-gated"])
def test_a_rounded_block_is_near_the_block_and_nearer_with_more_bits(name):
    model = tiny.model(name)
    block = blocks(model)[1]
    x = torch.randn(50, block.d_in, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = as_module(model, block)(x)
        off = {b: float((rounded(model, block, b)(x) - y).square().sum()) for b in (4, 8)}
        assert torch.equal(as_module(model, block)(x), y)  # the model's own weights are untouched
    assert 0 < off[8] < 0.01 * off[4] < 0.01 * float(y.square().sum())


def test_errors_are_over_the_variance():
    model = tiny.model("llama")
    block = blocks(model)[0]
    ids = torch.randint(3, 49, (40, 8), generator=torch.Generator().manual_seed(0))
    report = gather(model, [block], ids)[0]
    found, layers = rounding_errors(model, block, report)
    off = (layers["int4"](report.x) - report.y).double().square().sum()
    total = (report.y.double() - report.y.double().mean(0)).square().sum()
    assert found["int4"]["error"] == pytest.approx(float(off / total), rel=1e-6)
    assert found["int8"]["error"] < found["int4"]["error"]


def test_experts_are_refused():
    name = next(n for n, row in tiny.TINY.items() if row.experts)
    model = tiny.model(name)
    with pytest.raises(ValueError, match="no plain projections"):
        rounded(model, blocks(model)[-1], 4)
