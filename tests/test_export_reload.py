"""Loading in a new process: what is wrong with a folder is found."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from howlinear.export import hf
from howlinear.export.reload import _compare, _compare_tensors, verify
from howlinear.export.weights import round_weights, stored_as
from test_export_hf import compressed, config_of, export

pytestmark = pytest.mark.usefixtures("alone")


# ----------------------------------------------------------------------------------- rounding


def test_rounding_is_idempotent_and_refuses_overflow():
    model = tiny.model("llama")
    weight = model.lm_head.weight
    before = weight.clone()
    round_weights(model, torch.bfloat16)
    once = weight.clone()
    assert 0 < (once - before).abs().max() <= before.abs().max() * 2**-8
    assert torch.equal(once.bfloat16().float(), once)
    round_weights(model, torch.bfloat16)
    assert torch.equal(weight, once)
    assert weight.dtype == torch.float32
    with torch.no_grad():
        weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"lm_head.weight does not fit in torch.float16"):
        round_weights(model, torch.float16)


def test_storing_touches_what_is_saved_and_gives_it_back():
    model = tiny.model("gpt2", tie_word_embeddings=True)
    round_weights(model, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with stored_as(model, torch.bfloat16):
        assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
        assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    rotary = tiny.model("llama", head_dim=32)
    frequencies = rotary.model.rotary_emb.inv_freq.clone()
    with stored_as(rotary, torch.bfloat16):
        pass
    assert torch.equal(rotary.model.rotary_emb.inv_freq, frequencies)
    assert not torch.equal(frequencies.bfloat16().float(), frequencies)  # a control


# ---------------------------------------------------------------------------------- verifying


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The model that it must be, and a folder of it in bfloat16."""
    model = compressed("llama")
    round_weights(model, torch.bfloat16)
    return model, export(model, tmp_path_factory.mktemp("written") / "out", torch.bfloat16)


@pytest.mark.usefixtures("reloaded_here")
def test_another_config_is_found_by_what_it_computes(tmp_path, caplog):
    """Here transformers does not generate, a decoder being longer than its encoder."""
    model = compressed("t5")
    round_weights(model, torch.float16)
    folder = export(model, tmp_path / "out", torch.float16)
    changed = config_of(folder) | {"layer_norm_epsilon": 0.1}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="gives other outputs when loaded"):
        verify(folder, model, tiny.inputs("t5"), "hf")
    assert "only outputs are compared" in caplog.text


def test_code_that_needs_howlinear_is_found(written, tmp_path):
    model, folder = written
    changed = copy(folder, tmp_path / "changed")
    code = changed / f"{hf.MODULE}.py"
    code.write_text(f"import howlinear\n{code.read_text()}")
    with pytest.raises(ValueError, match=r"does not load in a new process: .*howlinear"):
        verify(changed, model, tiny.inputs("llama"), "hf")


@pytest.mark.usefixtures("reloaded_here")
def test_one_flipped_weight_is_found(written, tmp_path):
    model, folder = written
    changed = copy(folder, tmp_path / "changed")
    file = changed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.linear_mlp.weight"
    tensors[name][0, 0] += 2**-7 * tensors[name][0, 0]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"1 weights are not .* first {re.escape(name)}"):
        verify(changed, model, tiny.inputs("llama"), "hf")


def test_tensors_must_be_the_same_by_name_and_value():
    want = {"a": "1", "b": "2"}
    _compare_tensors(Path("out"), want, dict(want))
    for got in ({"a": "1"}, {**want, "c": "3"}, {"a": "1", "b": "3"}):
        with pytest.raises(ValueError, match=r"out: 1 weights are not what .*, first [bc]"):
            _compare_tensors(Path("out"), want, got)


def test_weights_in_a_larger_dtype_are_found(written, tmp_path):
    model, folder = written
    changed = copy(folder, tmp_path / "changed")
    file = changed / "model.safetensors"
    save_file({n: t.float() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    size = 2 * sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=f"has {2 * size} bytes of weights, {size} at most"):
        verify(changed, model, tiny.inputs("llama"), "hf")


def copy(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize(
    ("scores", "tokens", "agrees"),
    [
        ([5.0, 1.0, 0.0], 0, True),
        ([5.0, 1.0, 0.0], 1, False),
        ([5.0, 5.0 - 1e-4, 0.0], 1, True),  # a choice between equals
    ],
)
def test_generation_may_differ_between_equals_only(scores, tokens, agrees):
    want = {"output": torch.ones(1, 2), "scores": torch.tensor([[scores]])}
    got = want | {"tokens": torch.tensor([[tokens]])}
    want["tokens"] = torch.tensor([[0]])
    if agrees:
        _compare(Path("out"), want, got)
        return
    with pytest.raises(ValueError, match="generates other text"):
        _compare(Path("out"), want, got)


def test_no_number_is_no_agreement():
    want = {"output": torch.ones(1, 2)}
    for bad in (torch.full((1, 2), torch.nan), torch.ones(1, 3), torch.ones(1, 2) + 2e-4):
        with pytest.raises(ValueError, match="output"):
            _compare(Path("out"), want, {"output": bad})
