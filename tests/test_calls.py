"""Calls that people write first, as they write them, on a random model of three layers."""

import sys
from collections.abc import Sequence
from unittest.mock import MagicMock

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModel, BatchEncoding

import howlinear as hl
import tiny
from howlinear.linear.affine import UnitMap
from howlinear.models.units import taken
from howlinear.profiling.needs import profile_needs

IDS = torch.randint(tiny.VOCABULARY, (48, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def result(model):
    return hl.profile(model, IDS, at=[1, 2])


def read(block, rows):
    assert block.index == 3


CALLS = """
result = hl.profile(model, windows, at=[1, 2])
with hl.swapped(model, {2: m}): model(windows[:2])
hl.install_maps(copy, {2: m})
with hl.tap(model, read, at="3"): model(windows[:2])
hl.profile(model, windows.numpy(), at=1)
hl.profile(model, windows.tolist(), at=1)
hl.profile(model, DataLoader(TensorDataset(windows), batch_size=8), at=1)
hl.profile(model, BatchEncoding({"input_ids": windows}), at=1)
hl.Moments(3, 3).update(x, x)
hl.Moments.from_arrays(x, x)
hl.fit(x, x).predict(x)
result.to_dataframe()
result.plot(axes)
hl.compare_runs([result, other])
hl.residuals(model, windows, 1)
result.W_skip(1)
"""


def test_calls_as_written(result):
    """Each line in turn, as a user types them."""
    scope = globals() | {"windows": IDS, "m": result.maps[2], "other": result, "axes": MagicMock()}
    scope |= {name: tiny.model("llama", num_hidden_layers=4) for name in ("model", "copy")}
    scope["x"] = np.random.default_rng(0).standard_normal((100, 3))
    for line in CALLS.strip().splitlines():
        exec(line, scope)
    assert [b.index for b in scope["result"].blocks] == [1, 2]
    assert len(scope["copy"].config.linear_blocks) == 1


class Column(Sequence):
    """A column of a dataset, as `datasets` gives it: a sequence that is no list."""

    def __len__(self):
        return len(IDS)

    def __getitem__(self, i):
        return IDS[i].tolist()


DICTS = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in IDS]
HELD = {
    "numpy": IDS.numpy(),
    "a list": IDS.tolist(),
    "a DataLoader": DataLoader(TensorDataset(IDS), batch_size=8),
    "a DataLoader of dicts": DataLoader(DICTS, batch_size=8),
    "a BatchEncoding": BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    "a dataset's column": Column(),
    "a dataset's rows": DICTS,
    "a data frame's column": pandas.DataFrame({"input_ids": IDS.tolist()})["input_ids"],
}


@pytest.mark.parametrize("held", HELD)
def test_windows_as_people_hold_them(held, model, result):
    windows, maps = HELD[held], {1: result.maps[1]}
    again = hl.profile(model, windows, at=1, signal=False)
    assert again.blocks[0].r2 == pytest.approx(result.blocks[0].r2, abs=0.2)  # other folds
    assert torch.allclose(again.maps[1].weight, result.maps[1].weight, atol=1e-9)
    assert torch.equal(hl.residuals(model, windows, 1).token, IDS.reshape(-1))
    loss = hl.text_loss(model, windows)
    assert loss.perplexity == pytest.approx(hl.text_loss(model, IDS).perplexity)
    assert hl.compare(
        model, lambda: hl.swapped(model, maps), windows
    ).original.perplexity == pytest.approx(loss.perplexity)
    assert hl.swap_costs(model, maps, windows)[0].change.original.perplexity == pytest.approx(
        loss.perplexity
    )
    assert hl.LinearityMonitor(model, windows, at=1).windows.equal(IDS)


def test_texts_of_probes_and_compressions(model, result, tmp_path):
    result.save(tmp_path)
    kinds = ("a DataLoader of dicts", "a BatchEncoding", "a dataset's column")
    texts = {
        name: HELD[kind] for name, kind in zip(("fit", "choose", "report"), kinds, strict=True)
    }
    settings, predict = hl.ProbeSettings(("quantised",)), HELD["a dataset's rows"]
    assert hl.probe(model, tmp_path, **texts, predict=predict, at=1, settings=settings).blocks
    assert list(hl.compress_model(model, tmp_path, **texts, at=[1]).maps) == hl.blocks(model, 1)


def test_batches_of_other_lengths_are_scored_where_they_are_padded(model):
    mask = torch.ones_like(IDS)
    mask[24:, 20:] = 0
    short = {"input_ids": IDS[24:, :20], "attention_mask": mask[24:, :20]}
    batches = [{"input_ids": IDS[:24], "attention_mask": mask[:24]}, short]
    padded = hl.text_loss(model, {"input_ids": IDS, "attention_mask": mask})
    assert hl.text_loss(model, (b for b in batches)).perplexity == pytest.approx(padded.perplexity)
    with pytest.raises(ValueError, match="without padding and other inputs"):
        hl.LinearityMonitor(model, batches)


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
    axes = MagicMock()
    assert result.plot(axes) is axes
    assert axes.errorbar.call_args.args == ((1, 2), tuple(b.r2 for b in result.blocks))
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
    once = hl.residuals(model, iter(IDS.split(8)), 1)
    assert torch.equal(once.error, found.error)
    with pytest.raises(ValueError, match="the text is empty"):
        hl.residuals(model, iter([]), 1)


def test_positions_are_counted_from_the_first_token(model, result):
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0  # padding on the left
    padded = hl.residuals(model, {"input_ids": IDS, "attention_mask": mask}, 1, result.maps[1])
    assert padded.position.min() == 0
    assert padded.position.max() == IDS.shape[1] - 6


def test_maps_with_hidden_units_have_errors_too(model, result):
    block = hl.blocks(model)[1]
    none = torch.zeros(block.d_out, 1)
    kept = UnitMap(result.maps[1], (0,), none, taken(model, block, (0,)))  # writes nothing
    own, plain = (hl.residuals(model, IDS, 1, m).error for m in (kept, result.maps[1]))
    torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)


def test_the_skip_connection_of_a_transcoder(result):
    skip, x = result.W_skip(2), torch.randn(5, 16)
    assert torch.allclose(x @ skip["W_skip"].T + skip["b_dec"], result.maps[2](x), atol=1e-5)
    with pytest.raises(ValueError, match="names 2 blocks"):
        result.W_skip("mlp")


def test_every_tower_of_clip():
    """Each on its own inputs alone, or both at once; what is left out is said."""
    text = tiny.HF | {"vocab_size": tiny.VOCABULARY, "eos_token_id": 2}
    vision = tiny.HF | {"num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
    config = AutoConfig.for_model("clip", text_config=text, vision_config=vision)
    model = AutoModel.from_config(config).eval()
    every = [f"text_model.encoder.layers.{i}.mlp" for i in range(2)]
    every += [f"vision_model.encoder.layers.{i}.mlp" for i in range(3)]
    inputs = {"input_ids": IDS[:, :12], "pixel_values": torch.randn(48, 3, 16, 16)}
    both = hl.profile(model, inputs, at=["text_model", "vision_model"], folds=2)
    assert {b.index: b.path for b in both.blocks} == dict(enumerate(every))
    alone = hl.profile(model, inputs["input_ids"])
    assert [b.path for b in alone.blocks] == every[:2]
    (note,) = (n for n in alone.notes if "outside" in n)
    assert note.startswith("3 feed-forward blocks outside the text stack are not measured")
    assert torch.allclose(alone.maps[0].weight, both.maps[0].weight, atol=1e-6)
    assert profile_needs(model, hl.blocks(model), windows=48, length=12).forward > 0
    images = hl.residuals(model, {"pixel_values": inputs["pixel_values"]}, every[2])
    assert len(images.error) == 48 * 17
    with pytest.raises(ValueError, match=r"without these blocks: 2 .*do the inputs reach them"):
        hl.profile(model, inputs["input_ids"], at=every[2])
