"""One width for all blocks: plain transformers loads the fitted weights, bit for bit, of every family."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from howlinear import blocks, load, swapped
from howlinear.compression.refitting import Refitter
from howlinear.export.stock import check_exportable, save, with_one_width
from howlinear.export.weights import round_weights, stored_as, tensor_bytes
from howlinear.linear.affine import Affine, Factored, UnitMap
from howlinear.models.families import parameter_count
from howlinear.models.units import taken

TRAINED = Path(__file__).parent / "models"
KEPT = 24  # hidden units of each block
# family -> the setting of its config that is the width
ZOO = {
    "gpt2": "n_inner",
    "gpt_neox": "intermediate_size",
    "llama": "intermediate_size",
    "qwen2": "intermediate_size",
    "qwen3": "intermediate_size",
    "gemma3": "text_config.intermediate_size",
    "opt": "ffn_dim",
    "phi3": "intermediate_size",  # gate and up in one projection
    "falcon": "ffn_hidden_size",
    "t5": "d_ff",
    "whisper": "encoder_ffn_dim",  # and decoder_ffn_dim
    "bert": "intermediate_size",
    "llama-bias": "intermediate_size",
}
WITH_BIASES = {"gpt2", "gpt_neox", "opt", "whisper", "bert", "llama-bias"}
IDS = torch.randint(3, tiny.VOCABULARY - 1, (40, 16), generator=torch.Generator().manual_seed(0))


def made(name):
    """Trained where there is a small one; its weights as they are stored, in bfloat16."""
    folder = TRAINED / name.replace("_", "-")
    model = load(str(folder))[0] if folder.exists() else tiny.model(name)
    round_weights(model, torch.bfloat16)
    return model


def drawn_maps(model, bias=False):
    g = torch.Generator().manual_seed(0)
    maps = {}
    for block in blocks(model):
        units = tuple(torch.randperm(30, generator=g)[:KEPT].tolist())
        constant = torch.randn(block.d_out, generator=g) * bias
        nothing = Factored(torch.zeros(0, block.d_in), torch.zeros(block.d_out, 0), constant)
        write = torch.randn(block.d_out, KEPT, generator=g)
        maps[block] = UnitMap(nothing, units, write, taken(model, block, units))
    return maps


def fitted_maps(model, name):
    """As `compress` fits them, front to back; drawn at random for what is no text model."""
    bias = name in WITH_BIASES
    if tiny.TINY[name].auto != "AutoModelForCausalLM" and name != "gemma3":
        return drawn_maps(model, bias)
    every = blocks(model)
    return Refitter(model, every, IDS, intercept=bias).refit(dict.fromkeys(every, (0, KEPT)))


def output(model, name):
    with torch.no_grad():
        return model(**tiny.inputs(name))[0]


@pytest.mark.parametrize("name", ZOO)
def test_stock_transformers_loads_what_was_fitted_bit_for_bit(name, tmp_path):
    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    maps = fitted_maps(model, name)
    with swapped(model, maps):
        fitted = output(model, name)
    assert (output(model, name) - fitted).abs().max() > 0.01 * fitted.abs().max()  # a real change
    small = with_one_width(model, maps)
    # the same products; only the bias may be added in another order
    close = 64 * torch.finfo(torch.float32).eps * float(fitted.abs().max())
    torch.testing.assert_close(output(small, name), fitted, rtol=0, atol=close)
    round_weights(small, torch.bfloat16)
    with stored_as(small, torch.bfloat16):
        save(small, tmp_path)

    auto = getattr(transformers, tiny.TINY[name].auto)
    loaded, info = auto.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    assert torch.equal(output(loaded, name), output(small, name))  # what is measured and reported
    assert_tensors(model, loaded, maps)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in config
    for part in ZOO[name].split("."):
        config = config[part]
    assert config == KEPT
    # the folder is smaller by what the plan counts, to the byte
    removed = parameter_count(model) - parameter_count(loaded)
    units = {b: taken(model, b, [0]) for b in maps}
    each = {b: sum(p.numel() for p in u.parameters()) + b.d_out for b, u in units.items()}
    hidden = {b: model.get_submodule(b.down).weight.numel() // b.d_out for b in maps}
    assert removed == sum((hidden[b] - KEPT) * each[b] for b in maps) > 0
    assert tensor_bytes(tmp_path) == 2 * parameter_count(loaded) + integers(loaded)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original changed"


def integers(model):
    """Bytes of saved tensors that are no parameters."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sum(t.numel() * t.itemsize for n, t in model.state_dict().items() if n not in known)


def assert_tensors(model, loaded, maps):
    """Rows of the kept units are the original's; columns are the fitted ones; the rest is unchanged."""
    old, new = model.state_dict(), loaded.state_dict()
    assert old.keys() == new.keys()
    for block, fitted in maps.items():
        down = new[f"{block.down}.weight"]
        down = down if down.shape == fitted.write.shape else down.t()
        assert torch.equal(down, fitted.write.to(torch.bfloat16).float())
        if f"{block.down}.bias" in new:
            bias = fitted.affine.bias.to(torch.bfloat16).float()
            assert torch.equal(new[f"{block.down}.bias"], bias)
    for key, value in old.items():
        if new[key].shape == value.shape:
            ours = any(key == f"{block.down}.bias" for block in maps)
            assert ours or torch.equal(new[key], value), key
        elif not any(key == f"{block.down}.weight" for block in maps):
            block = next(b for b in maps if key.startswith(tuple(f"{s}." for s in b.steps)))
            axis = next(i for i in range(value.ndim) if value.shape[i] != new[key].shape[i])
            units = torch.tensor(maps[block].units)
            if value.shape[axis] == 2 * old[f"{block.down}.weight"].shape[1]:  # gate and up
                units = torch.cat([units, units + value.shape[axis] // 2])
            assert torch.equal(new[key], value.index_select(axis, units)), key


def test_one_weight_of_one_unit_counts():
    """A negative control of the comparison above."""
    model = tiny.model("gpt2")
    maps = drawn_maps(model)
    with swapped(model, maps):
        want = output(model, "gpt2")
    small = with_one_width(model, maps)
    with torch.no_grad():
        small.transformer.h[0].mlp.c_fc.weight[0, 0] += 1
    assert (output(small, "gpt2") - want).abs().max() > 1e-3


def test_settings_of_generation_are_written_as_they_came(tmp_path):
    model = tiny.model("gpt2")
    model.generation_config.temperature = 0.5  # without do_sample: save_pretrained refuses it
    small = with_one_width(model, drawn_maps(model))
    with pytest.raises(ValueError, match="temperature"):
        small.save_pretrained(tmp_path)
    save(small, tmp_path)
    assert small.generation_config.temperature == 0.5
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.5


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", r"bloom has no setting for the width of block 0 .*: use .kind=.hf."),
        ("mpt", r"mpt has no setting for the width of block 0 .*: use .kind=.hf."),
        ("mixtral", r"block 0 .* has no plain hidden units that stock could keep: use .kind=.hf."),
        ("qwen2_moe", r"block 1 .* has no plain hidden units"),
    ],
)
def test_what_cannot_be_written_is_known_beforehand(name, reason):
    with pytest.raises(ValueError, match=reason):
        check_exportable(tiny.model(name))


def test_only_classes_of_transformers_load_without_code():
    class Mine(transformers.GPT2LMHeadModel):
        pass

    with pytest.raises(ValueError, match="Mine is not a class of transformers, as stock needs"):
        check_exportable(Mine(tiny.model("gpt2").config))


def test_maps_of_other_shapes_are_refused():
    model = tiny.model("qwen2")
    first, second = blocks(model)
    maps = drawn_maps(model)
    matrix = Affine(torch.randn(16, 16), torch.zeros(16), 16)
    with pytest.raises(ValueError, match=r"block 1 .* hidden units and no matrix; use .kind=.hf."):
        with_one_width(model, maps | {second: matrix})
    fewer = UnitMap(maps[second].affine, (1, 2), torch.ones(16, 2), taken(model, second, (1, 2)))
    for unequal in (maps | {second: fewer}, {first: maps[first]}):
        with pytest.raises(ValueError, match="has one width for all of its blocks"):
            with_one_width(model, unequal)
    with pytest.raises(ValueError, match=r"down_proj has no bias to hold the map's"):
        with_one_width(model, drawn_maps(model, bias=True))
