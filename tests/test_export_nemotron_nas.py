"""Llama-likes with a width for each block as nemotron-nas: what readers of the format would make of them."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from howlinear import Affine, blocks, swapped
from howlinear.compression.targets import NEMOTRON
from howlinear.export import nemotron_nas
from howlinear.export.nemotron_nas import check_exportable, ffn_mult, read_back, width_of
from howlinear.export.widths import widen
from howlinear.linear.affine import Factored, UnitMap
from howlinear.models.units import taken

SIZES = {"hidden_size": 64, "intermediate_size": 512}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "rope": ("llama", {"rope_parameters": LLAMA3}),
    "one head each": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def made(name="llama", **settings):
    return tiny.model(name, **SIZES | settings)


def maps_of(model, only="1"):
    g = torch.Generator().manual_seed(0)
    weights = {b: torch.randn(b.d_out, b.d_in + 1, generator=g) / 8 for b in blocks(model, only)}
    return {b: Affine(W[:, 1:].double(), W[:, 0].double(), 64) for b, W in weights.items()}


def save(model, maps, folder):
    """As an export does it; the model then has the stored blocks."""
    check_exportable(model)
    widen(model, maps, NEMOTRON)
    nemotron_nas.save(model, folder)


def logits(model):
    with torch.no_grad():
        return model(**tiny.inputs("llama")).logits


def swapped_logits(model, maps):
    with swapped(model, maps):
        return logits(model)


def said(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama_built_from_the_folder_computes_the_swapped_model(variant, tmp_path):
    name, settings = VARIANTS[variant]
    model = made(name, **settings)
    maps = maps_of(model)
    want = swapped_logits(model, maps)
    assert (logits(model) - want).abs().max() > 0.01 * want.abs().max()  # a real change
    save(model, maps, tmp_path)
    torch.testing.assert_close(logits(read_back(tmp_path)), want)


def test_every_kind_of_map_is_written(tmp_path):
    model = made()
    first, second, third = blocks(model)
    g = torch.Generator().manual_seed(0)
    low = Factored(torch.randn(2, 64, generator=g), torch.randn(64, 2, generator=g), torch.ones(64))
    none = Factored(torch.zeros(0, 64), torch.zeros(64, 0), torch.ones(64))
    units = torch.randn(64, 2, generator=g), taken(model, third, (3, 9))
    maps = {first: low, second: none, third: UnitMap(low, (3, 9), *units)}
    want = swapped_logits(model, maps)
    save(model, maps, tmp_path)
    torch.testing.assert_close(logits(read_back(tmp_path)), want)


def test_the_folder_says_what_readers_look_for(tmp_path):
    model = made(rope_parameters=LLAMA3)
    save(model, maps_of(model), tmp_path)
    config = said(tmp_path)
    assert config["model_type"] == "nemotron-nas"
    assert config["architectures"] == ["DeciLMForCausalLM"]
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    assert not config["attention_bias"]
    assert config["mlp_bias"] is True
    attention = {layer["attention"]["n_heads_in_group"] for layer in config["block_configs"]}
    assert attention == {2}
    ffn = [layer["ffn"] for layer in config["block_configs"]]
    wide = {"no_op": False, "replace_with_linear": False, "sparsify": None}
    assert ffn[1] == wide | {"intermediate_size": 256, "ffn_mult": 6.0}
    assert ffn[0] == ffn[2] == wide | {"intermediate_size": 512, "ffn_mult": 12.0}


def test_the_tensors_are_llamas_with_biases(tmp_path):
    model = made()
    names = {n for n in model.state_dict() if ".mlp." in n}
    save(model, maps_of(model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {n for n in tensors if ".mlp." in n} == names | {
        n.replace("weight", "bias") for n in names
    }
    gate = tensors["model.layers.1.mlp.gate_proj.bias"]
    assert gate.tolist() == [32.0] * 64 + [0.0] * 192
    assert not tensors["model.layers.0.mlp.gate_proj.bias"].any()


def test_the_embedding_is_written_once_if_tied(tmp_path):
    model = made(tie_word_embeddings=True)
    save(model, maps_of(model), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert said(tmp_path)["tie_word_embeddings"]


def test_plain_rotations_have_no_scaling(tmp_path):
    save(made(), {}, tmp_path)
    assert said(tmp_path)["rope_scaling"] is None
    assert said(tmp_path)["rope_theta"] == 10000.0


def test_engines_find_settings_as_attributes(tmp_path):
    model = made(rope_parameters=LLAMA3)
    save(model, maps_of(model), tmp_path)
    spec = importlib.util.spec_from_file_location("decilm", tmp_path / "configuration_decilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.DeciLMConfig.from_pretrained(tmp_path)
    assert config.block_configs[1].ffn.intermediate_size == 256
    assert config.block_configs[0].attention.n_heads_in_group == 2
    assert not hasattr(config.block_configs[0], "else")
    assert json.loads(config.to_json_string())["block_configs"] == said(tmp_path)["block_configs"]


def test_mlx_lm_computes_the_same(tmp_path):
    """Somebody else's reader of the format."""
    mx = pytest.importorskip("mlx.core")
    loading = pytest.importorskip("mlx_lm.utils")
    model = made(rope_parameters=LLAMA3)
    maps = maps_of(model)
    want = swapped_logits(model, maps)
    save(model, maps, tmp_path)
    theirs, _ = loading.load_model(tmp_path)
    got = theirs(mx.array(tiny.inputs("llama")["input_ids"].tolist()))
    torch.testing.assert_close(torch.tensor(got.tolist()), want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------- widths


def readers_width(multiple, d):
    """As readers have it."""
    width = int(2 * multiple * d / 3)
    return width if width % 256 == 0 else width + 256 - (width % 256)


@pytest.mark.parametrize("d", [64, 576, 960, 2048, 3072, 4096, 5120, 8192, 16384])
def test_readers_get_the_width_back(d):
    for width in range(256, 6 * d, 256):
        multiple = ffn_mult(width, d)
        assert isinstance(multiple, float)
        assert readers_width(multiple, d) == width_of(multiple, d) == width
        assert readers_width(round(multiple, 6), d) == width


@pytest.mark.parametrize("width", [40, 255, 257, 1000, 5504])
def test_other_widths_are_refused(width, tmp_path):
    model = made(intermediate_size=width)
    rounded = -(-width // 256) * 256
    with pytest.raises(ValueError, match=rf"{width} hidden units .* would make it {rounded}; use"):
        save(model, maps_of(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("qwen2", {}, "no llama and no mistral that predicts text"),
        ("gemma", {}, "no llama and no mistral that predicts text"),
        ("mistral", {"sliding_window": 4}, "sliding window"),
        ("llama", {"attention_bias": True}, "attention has biases"),
        ("llama", {"mlp_bias": True}, "feed-forward blocks have biases"),
        ("llama", {"hidden_act": "gelu"}, "gelu, not silu"),
        ("llama", {"head_dim": 8}, "heads are not 64 / 4 wide"),
    ],
)
def test_what_is_no_llama_is_refused(name, settings, reason, tmp_path):
    model = made(name, **settings)
    for refused in (lambda: save(model, {}, tmp_path / "out"), lambda: check_exportable(model)):
        with pytest.raises(ValueError, match=rf'{reason}; use `kind="stock"` or hf'):
            refused()
    assert not (tmp_path / "out").exists()


def test_what_can_be_written_is_known_beforehand():
    for name, settings in VARIANTS.values():
        check_exportable(made(name, **settings))
    with pytest.raises(ValueError, match="would make it 256; use"):
        check_exportable(made(intermediate_size=40))
    with pytest.raises(ValueError, match="that predicts text; use"):
        check_exportable(made().model)


def test_rotations_are_not_rounded_with_the_weights(tmp_path):
    model = made(head_dim=None, hidden_size=128, num_attention_heads=2)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    assert not torch.equal(frequencies.bfloat16().float(), frequencies)  # a control
    save(model.bfloat16(), {}, tmp_path)
    loaded = read_back(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.rotary_emb.inv_freq, frequencies)


def test_a_map_of_another_model_is_refused():
    other = Affine(torch.randn(32, 32), torch.zeros(32), 32)
    with pytest.raises(ValueError, match=r"from 64 to 64 features, its map from 32 to 32"):
        widen(made(), {blocks(made())[0]: other}, NEMOTRON)


# --------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize("tied", [False, True])
def test_a_missing_tensor_is_noticed(tied, tmp_path):
    model = made(tie_word_embeddings=tied)
    save(model, maps_of(model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="gate_proj"):
        read_back(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 100.0), ("rms_norm_eps", 0.1)])
def test_another_setting_is_another_model(key, value, tmp_path):
    model = made()
    save(model, maps_of(model), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said(tmp_path) | {key: value}))
    assert (logits(read_back(tmp_path)) - logits(model)).abs().max() > 1e-2


def test_two_widths_of_one_block_are_noticed(tmp_path):
    model = made()
    save(model, maps_of(model), tmp_path)
    config = said(tmp_path)
    config["block_configs"][1]["ffn"]["intermediate_size"] = 300
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="two widths of one block"):
        read_back(tmp_path)
