"""Rows of a block, and how a layer that stands in for it is scored on them."""

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

import planted
import tiny
from howlinear import blocks, tap
from howlinear.models.hooks import as_module
from howlinear.probing.samples import (
    Cast,
    Sample,
    conjunction,
    errors,
    gather,
    outcome,
    ratio,
    sample_bytes,
)


def test_every_row_is_gathered_with_where_it_comes_from():
    model = tiny.model("llama")
    at = blocks(model)[1:]
    ids = torch.randint(3, 49, (19, 6), generator=torch.Generator().manual_seed(0))
    got = gather(model, at, ids)
    heard = {}
    with torch.no_grad(), tap(model, lambda b, rows: heard.update({b.index: rows}), at=at):
        model(ids)
    assert list(got) == [b.index for b in at]
    for b in at:
        sample = got[b.index]
        torch.testing.assert_close(sample.x, heard[b.index].x)
        torch.testing.assert_close(sample.y, heard[b.index].y)
        assert torch.equal(sample.token, ids.reshape(-1))
        assert torch.equal(sample.cluster, torch.arange(19).repeat_interleave(6))
        assert torch.equal(sample.position, torch.arange(6).repeat(19))
        held = (sample.x, sample.y, sample.cluster, sample.position, sample.token)
        assert sample_bytes(b, len(sample)) == sum(t.numel() * t.element_size() for t in held)


def test_padding_is_no_row_and_tokens_stay_beside_theirs():
    model = tiny.model("llama")
    inputs = tiny.inputs("llama", "left")
    sample = gather(model, blocks(model)[:1], [inputs])[0]
    kept = inputs["attention_mask"].reshape(-1).bool()
    assert torch.equal(sample.token, inputs["input_ids"].reshape(-1)[kept])
    assert sample.position[0] == 0


def test_scores_are_those_of_scikit_learn_and_body_leaves_first_positions_out():
    _, _, report, affine = planted.samples(planted.bilinear(0), d=24)
    other = lambda x: affine(x) + 0.1 * x[:, :16] ** 2  # noqa: E731
    done = outcome(other, affine, report)
    y, a, b = report.y.double(), affine(report.x).double(), other(report.x).double()

    def authority(guess, rows=slice(None)):
        return r2_score(y[rows], guess[rows], multioutput="variance_weighted")

    assert done.r2 == pytest.approx(authority(b), abs=1e-6)
    assert done.gain == pytest.approx(authority(b) - authority(a), abs=1e-6)
    body = report.position > 0
    assert done.r2_body == pytest.approx(authority(b, body), abs=1e-6)
    assert done.gain_body == pytest.approx(authority(b, body) - authority(a, body), abs=1e-6)
    cosines = torch.cosine_similarity(y, b).mean()
    assert done.cosine == pytest.approx(float(cosines), abs=1e-6)


def test_standard_error_is_that_of_a_bootstrap_over_windows():
    """A thousand draws know a standard error to 1 / sqrt(2 x 1000) = 2 %; 15 % is far beyond that."""
    _, _, report, affine = planted.samples(planted.bilinear(0), d=24, sizes=(2000, 10, 4000))
    before, after = errors(affine, report)[0], errors(lambda x: 0.9 * affine(x), report)[0]
    part, whole = (before - after).numpy(), report.spread.numpy()
    value, se = ratio(before - after, report.spread, report.cluster)
    windows = report.cluster.numpy()
    parts = np.bincount(windows, part)
    wholes = np.bincount(windows, whole)
    draws = np.random.default_rng(0).integers(0, len(parts), (1000, len(parts)))
    spread = (parts[draws].sum(1) / wholes[draws].sum(1)).std()
    assert value == pytest.approx(part.sum() / whole.sum())
    assert se == pytest.approx(spread, rel=0.15)


def test_one_window_has_no_standard_error():
    value, se = ratio(torch.ones(4), torch.full((4,), 2.0), torch.zeros(4, dtype=torch.long))
    assert value == 0.5
    assert np.isnan(se)
    assert all(np.isnan(v) for v in ratio(torch.ones(2), torch.zeros(2), torch.arange(2)))


def test_conjunction_is_of_products_across_the_halves():
    x = torch.rand(256, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    linear = lambda x: 3 * x + 1  # noqa: E731
    assert conjunction(linear, x) == pytest.approx(0, abs=1e-6)
    across = lambda x: x[:, :4] * x[:, 4:]  # noqa: E731
    assert conjunction(across, x) == pytest.approx(1)  # either half gone, all is gone
    within = lambda x: x[:, :2] * x[:, 2:4] + x[:, 4:6]  # noqa: E731
    assert conjunction(within, x) == pytest.approx(0, abs=1e-6)
    mixed = lambda x: across(x) + x[:, :4]  # noqa: E731
    assert 0.1 < conjunction(mixed, x) < 0.9


def test_a_block_in_bfloat16_runs_on_float_rows():
    model = tiny.model("llama").to(torch.bfloat16)
    block = blocks(model)[0]
    x = torch.randn(3, block.d_in)
    with torch.no_grad():
        y = Cast(as_module(model, block))(x)
    assert y.dtype == torch.float32


def test_a_sample_without_tokens_is_a_sample():
    sample = Sample(torch.ones(3, 2), torch.ones(3, 2), torch.zeros(3), torch.arange(3))
    assert sample.token is None
    assert float(sample.spread.sum()) == 0
