"""Calls that people write first, as they write them, on a random model of three layers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import howlinear as hl
import tiny

IDS = torch.randint(tiny.VOCABULARY, (48, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def result(model):
    return hl.profile(model, IDS, at=[1, 2])


def test_blocks_by_index(model, result):
    assert [b.index for b in result.blocks] == [1, 2]
    seen = []
    with hl.swapped(model, {2: result.maps[2]}):
        model(IDS[:2])
    with hl.tap(model, lambda block, rows: seen.append(block.index), at="2"):
        model(IDS[:2])
    assert seen == [2]
    smaller = tiny.model("llama")
    hl.install_maps(smaller, {2: result.maps[2]})
    assert smaller(IDS[:2]).logits.isfinite().all()


HELD = {
    "numpy": IDS.numpy(),
    "a list": IDS.tolist(),
    "a DataLoader": DataLoader(TensorDataset(IDS), batch_size=8),
    "a DataLoader of dicts": DataLoader([{"input_ids": row} for row in IDS], batch_size=8),
    "a BatchEncoding": BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
}


@pytest.mark.parametrize("held", HELD)
def test_windows_as_people_hold_them(held, model, result):
    again = hl.profile(model, HELD[held], at=1, signal=False)
    assert again.blocks[0].r2 == pytest.approx(result.blocks[0].r2, abs=0.2)  # other folds
    assert torch.allclose(again.maps[1].weight, result.maps[1].weight, atol=1e-9)


def test_regression_alone():
    x = np.random.default_rng(0).standard_normal((100, 3))
    moments = hl.Moments(3, 3)
    moments.update(x, x)
    for fitted in (hl.fit(moments), hl.fit(hl.Moments.from_arrays(x, x)), hl.fit(x, x)):
        assert np.allclose(fitted.predict(x), x)


def test_a_profile_as_a_table(result):
    table = result.to_dataframe()
    assert table["r2"].tolist() == [b.r2 for b in result.blocks]
    assert table["path"].tolist() == [b.path for b in result.blocks]


def test_a_profile_as_a_plot(result, monkeypatch):
    drawn = []
    axes = SimpleNamespace(
        errorbar=lambda x, y, **_: drawn.append((x, y)),
        plot=lambda x, y, **_: drawn.append((x, y)),
        **dict.fromkeys(("set_xlabel", "set_ylabel"), lambda text: None),
        legend=lambda: None,
    )
    assert result.plot(axes) is axes
    assert drawn[0] == ((1, 2), tuple(b.r2 for b in result.blocks))
    for package, call in (("pandas", result.to_dataframe), ("matplotlib", result.plot)):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.pyplot", None)
        with pytest.raises(ImportError, match=f"needs {package}: pip install {package}"):
            call()


def test_profiles_are_compared(model, result):
    other = hl.profile(model, IDS.flip(0), at=[1, 2])
    found = hl.compare_runs([result, other])
    assert found.names == ["profile 1", "profile 2"]
    assert len(found.pairs) == 1


def test_errors_of_tokens(model, result):
    found = hl.residuals(model, IDS, 1)
    assert torch.equal(found.token, IDS.reshape(-1))
    assert torch.equal(found.position, torch.arange(32).repeat(48))
    r2 = 1 - float(found.error.sum() / found.output.sum())
    assert r2 == pytest.approx(result.blocks[0].r2, abs=0.05)  # halves instead of folds
    seen = hl.residuals(model, IDS, 1, result.maps[1])
    assert seen.error.sum() < found.error.sum()  # the map was fitted on these rows
    mask = torch.ones_like(IDS)
    mask[0, 20:] = 0
    padded = hl.residuals(model, {"input_ids": IDS, "attention_mask": mask}, 1, result.maps[1])
    assert len(padded.to_dataframe()) == IDS.numel() - 12
    with pytest.raises(ValueError, match="read only once"):
        hl.residuals(model, iter([IDS]), 1)


def test_the_skip_connection_of_a_transcoder(result):
    skip, x = result.W_skip(2), torch.randn(5, 16)
    assert torch.allclose(x @ skip["W_skip"].T + skip["b_dec"], result.maps[2](x), atol=1e-5)
    with pytest.raises(ValueError, match="names 2 blocks"):
        result.W_skip("mlp")
