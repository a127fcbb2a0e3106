"""Llama-likes with linear blocks as nemotron-nas: what readers of the format would make of them."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from howlinear import Affine, blocks, swapped
from howlinear.export.nemotron_nas import check_exportable, ffn_mult, read_back, save, width_of
from howlinear.linear.affine import Factored, UnitMap
from howlinear.models.units import taken

SIZES = {"hidden_size": 64, "intermediate_size": 256}
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
    return {
        b: Affine(torch.randn(b.d_out, b.d_in, generator=g).double() / 8, torch.zeros(b.d_out), 64)
        for b in blocks(model, only)
    }


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


def test_the_folder_says_what_readers_look_for(tmp_path):
    model = made(rope_parameters=LLAMA3)
    notes = save(model, maps_of(model), tmp_path)
    config = said(tmp_path)
    assert config["model_type"] == "nemotron-nas"
    assert config["architectures"] == ["DeciLMForCausalLM"]
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    assert not config["attention_bias"]
    assert not config["mlp_bias"]
    attention = {layer["attention"]["n_heads_in_group"] for layer in config["block_configs"]}
    assert attention == {2}
    ffn = [layer["ffn"] for layer in config["block_configs"]]
    linear = {"no_op": False, "replace_with_linear": True, "sparsify": None, "ffn_mult": None}
    assert ffn[1] == linear
    assert ffn[0] == ffn[2] == linear | {"replace_with_linear": False, "ffn_mult": 6.0}
    assert "1 of 3 blocks" in notes[0]


def test_the_tensors_are_llamas_but_for_the_replaced_blocks(tmp_path):
    model = made()
    maps = maps_of(model)
    save(model, maps, tmp_path)
    tensors, prefix = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp."
    assert [n for n in tensors if n.startswith(prefix)] == [f"{prefix}linear_mlp.weight"]
    weight = next(iter(maps.values())).weight.float()
    assert torch.equal(tensors[f"{prefix}linear_mlp.weight"], weight)
    rest = {n for n in model.state_dict() if not n.startswith(prefix)}
    assert rest == {n for n in tensors if not n.startswith(prefix)}


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
    save(made(rope_parameters=LLAMA3), maps_of(made()), tmp_path)
    spec = importlib.util.spec_from_file_location("decilm", tmp_path / "configuration_decilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.DeciLMConfig.from_pretrained(tmp_path)
    assert config.block_configs[1].ffn.replace_with_linear is True
    assert config.block_configs[0].attention.n_heads_in_group == 2
    assert not hasattr(config.block_configs[0], "else")
    assert json.loads(config.to_json_string())["block_configs"] == said(tmp_path)["block_configs"]


def test_mlx_lm_computes_the_same(tmp_path):
    """Somebody else's reader of the format. It calls the tensor `linear`."""
    pytest.importorskip("mlx.core")
    loading = pytest.importorskip("mlx_lm.utils")
    mx = pytest.importorskip("mlx.core")
    model = made(rope_parameters=LLAMA3)
    maps = maps_of(model)
    save(model, maps, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {n.replace("linear_mlp", "linear"): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    theirs, _ = loading.load_model(tmp_path)
    got = theirs(mx.array(tiny.inputs("llama")["input_ids"].tolist()))
    torch.testing.assert_close(
        torch.tensor(got.tolist()), swapped_logits(model, maps), rtol=1e-4, atol=1e-4
    )


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


def test_widths_do_not_matter_if_no_block_has_one(tmp_path):
    model = made(intermediate_size=40)
    maps = maps_of(model, "0-2")
    save(model, maps, tmp_path)
    torch.testing.assert_close(logits(read_back(tmp_path)), swapped_logits(model, maps))


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
        with pytest.raises(ValueError, match=rf"{reason}; use --export hf"):
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


def test_maps_that_are_not_one_matrix_are_refused(tmp_path):
    model = made()
    block = blocks(model)[0]
    affine = Affine(torch.randn(64, 64), torch.zeros(64), 64)
    refused = {
        "a bias": Affine(torch.randn(64, 64), torch.full((64,), 1e-9), 64),
        "two factors": Factored(torch.randn(2, 64), torch.randn(64, 2), torch.zeros(64)),
        "hidden units": UnitMap(affine, (3,), torch.randn(64, 1), taken(model, block, (3,))),
    }
    for what, fitted in refused.items():
        with pytest.raises(ValueError, match=rf"block 0 .* has {what}.*; fit whole matrices"):
            save(model, {block: fitted}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save(model, {block: affine}, tmp_path / "out")


# --------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize("tied", [False, True])
def test_a_missing_tensor_is_noticed(tied, tmp_path):
    model = made(tie_word_embeddings=tied)
    save(model, maps_of(model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.linear_mlp.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="linear_mlp"):
        read_back(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 100.0), ("rms_norm_eps", 0.1)])
def test_another_setting_is_another_model(key, value, tmp_path):
    model = made()
    maps = maps_of(model)
    save(model, maps, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said(tmp_path) | {key: value}))
    assert (logits(read_back(tmp_path)) - swapped_logits(model, maps)).abs().max() > 1e-2
