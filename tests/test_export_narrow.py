"""Maps as stock blocks: plain transformers loads them, and they compute what the swap computed."""

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

import tiny
from howlinear import Affine, blocks, swapped
from howlinear.export.narrow import check_exportable, narrowed, save
from howlinear.linear.affine import Factored, UnitMap
from howlinear.models.units import taken

# family -> the setting of its config that is the width; None: there is none
UNGATED = {
    "gpt2": "n_inner",
    "gpt_neo": "intermediate_size",
    "gptj": "n_inner",
    "gpt_neox": "intermediate_size",
    "phi": "intermediate_size",
    "starcoder2": "intermediate_size",
    "bloom": None,
    "opt": "ffn_dim",
    "bert": "intermediate_size",
    "distilbert": "hidden_dim",
    "vit": "intermediate_size",
    "whisper": "encoder_ffn_dim",
}
NO_BIAS_AFTER = {"falcon": "ffn_hidden_size", "mpt": None, "t5": "d_ff"}
GATES_WITHOUT_BIAS = ["llama", "mistral", "gemma", "gemma3", "phi3", "t5-gated"]


def maps_of(model, only=None, bias=True):
    """By turns: a matrix, rank 2 beside three units of the block's own, those units alone."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    maps, k = {}, (3, 1, 30)
    for block in blocks(model, only):
        d, e = block.d_in, block.d_out
        b, rank = draw(e) * bias, 2 if block.index % 3 == 1 else 0
        if block.index % 3 == 0:
            maps[block] = Affine(draw(e, d) / 4, b, d)
        else:
            low = Factored(draw(rank, d), draw(e, rank), b)
            maps[block] = UnitMap(low, k, draw(e, 3), taken(model, block, k))
    return maps


def output(model, name):
    with torch.no_grad():
        return model(**tiny.inputs(name))[0]


def swapped_output(model, name, maps):
    with swapped(model, maps):
        return output(model, name)


def reloaded(model, name, folder):
    """By stock transformers, without remote code; every tensor must have its place."""
    save(model, folder)
    auto = getattr(transformers, tiny.TINY[name].auto)
    loaded, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return loaded


@pytest.mark.parametrize("name", [*UNGATED, *NO_BIAS_AFTER, "llama-bias"])
def test_stock_transformers_computes_the_maps(name, tmp_path):
    model = tiny.model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    maps = maps_of(model, bias=name not in NO_BIAS_AFTER)
    want = swapped_output(model, name, maps)
    assert (output(model, name) - want).abs().max() > 0.01 * want.abs().max()  # a real change
    new, _ = narrowed(model, maps)
    loaded = reloaded(new, name, tmp_path)
    torch.testing.assert_close(output(loaded, name), want, rtol=1e-5, atol=1e-5)
    assert type(loaded) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original changed"


@pytest.mark.parametrize(("name", "setting"), [*UNGATED.items(), *NO_BIAS_AFTER.items()])
def test_the_width_is_the_widest_block(name, setting):
    model = tiny.model(name)
    found = blocks(model)
    zero = torch.zeros(16, dtype=torch.float64)
    ranks = {b: 2 if b.index else 3 for b in found}
    maps = {b: Factored(torch.ones(r, 16), torch.ones(16, r), zero) for b, r in ranks.items()}
    new, notes = narrowed(model, maps)
    count = sum(p.numel() for p in new.parameters())
    before = sum(p.numel() for p in model.parameters())
    assert notes[-1] == f"parameters: {before:,} before, {count:,} now"
    if setting is None:
        assert count == before
        assert "cannot be made narrower" in notes[0]
    else:
        assert getattr(new.config, setting) == 6  # 2 x rank 3
        assert count < before
        assert any(f"{setting}: 6 hidden units" in note for note in notes)


def test_a_gated_unit_is_one_unit_not_two():
    model = tiny.model("llama-bias")
    new, _ = narrowed(model, maps_of(model))
    assert new.config.intermediate_size == 16  # of a 16 x 16 matrix
    first = new.model.layers[0].mlp
    assert torch.equal(first.up_proj.weight, torch.eye(16) / 32)  # so that the matrix stays itself


@pytest.mark.parametrize("name", ["gpt2", "llama-bias"])
def test_blocks_that_stay_keep_the_common_width(name, tmp_path):
    model = tiny.model(name)
    maps = maps_of(model, "1")
    new, notes = narrowed(model, maps)
    assert "nothing saved" in notes[0]
    assert "block 0, which was not replaced" in notes[0]
    assert {n: p.shape for n, p in new.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    want = swapped_output(model, name, maps)
    torch.testing.assert_close(output(new, name), want, rtol=1e-5, atol=1e-5)


def test_a_matrix_too_large_for_the_block_widens_all_of_them():
    model = tiny.model("opt", ffn_dim=31)
    maps = {blocks(model)[0]: Affine(torch.randn(16, 16), torch.randn(16), 16)}
    new, notes = narrowed(model, maps)
    assert new.config.ffn_dim == 32
    assert "larger than before" in notes[0]
    want = swapped_output(model, "opt", maps)
    torch.testing.assert_close(output(new, "opt"), want, rtol=1e-5, atol=1e-5)


def test_the_width_cannot_grow_where_it_is_fixed():
    model = tiny.model("bloom")
    block = blocks(model)[0]
    k = tuple(range(40))  # 2 x 16 + 40 units, in a block of 64
    affine = Affine(torch.randn(16, 16), torch.randn(16), 16)
    fitted = UnitMap(affine, k, torch.randn(16, 40), taken(model, block, k))
    with pytest.raises(
        ValueError, match=r"block 0 .* needs 72 hidden units, and bloom always has 64"
    ):
        narrowed(model, {block: fitted})


# ------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "quick_gelu", "silu", "gelu_fast"])
def test_the_identity_holds_at_every_size(name):
    act = ACT2FN[name]
    z = torch.logspace(-12, 4, 20001)
    assert ((act(z) - act(-z) - z).abs() / z).max() <= 1.7e-7
    assert act(torch.tensor(32.0)) == 32


@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "quick_gelu"])
def test_activations_are_tried_and_taken(act):
    model = tiny.model("gpt2", activation_function=act)
    maps = maps_of(model)
    want = swapped_output(model, "gpt2", maps)
    new, _ = narrowed(model, maps)
    torch.testing.assert_close(output(new, "gpt2"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ["relu2", "leaky_relu", "gelu_10", "relu6", "mish", "tanh"])
def test_activations_are_tried_and_refused(act):
    model = tiny.model("gpt2", activation_function=act)
    with pytest.raises(ValueError, match=r'block 0 .*act\(z\) - act\(-z\) = z; use `kind="hf"`'):
        narrowed(model, maps_of(model))


def test_a_gate_that_does_not_stay_open_is_refused():
    model = tiny.model("llama-bias", hidden_act="tanh")
    with pytest.raises(ValueError, match=r'act\(32\) = 32; use `kind="hf"`'):
        narrowed(model, maps_of(model))


def test_every_unit_counts():
    """A negative control: one weight of one linear unit is enough to move the output."""
    model = tiny.model("gpt2")
    maps = maps_of(model)
    want = swapped_output(model, "gpt2", maps)
    new, _ = narrowed(model, maps)
    with torch.no_grad():
        new.transformer.h[0].mlp.c_fc.weight[0, 0] = 0
    assert (output(new, "gpt2") - want).abs().max() > 1e-3


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", GATES_WITHOUT_BIAS)
def test_gates_without_biases_are_refused(name):
    model = tiny.model(name)
    with pytest.raises(ValueError, match=r"block 0 .*gates of .* have no biases") as refusal:
        narrowed(model, maps_of(model, bias=False))
    assert "\n" not in str(refusal.value)
    assert '`kind="hf"`' in str(refusal.value)


@pytest.mark.parametrize("name", NO_BIAS_AFTER)
def test_a_bias_needs_a_place(name):
    model = tiny.model(name)
    with pytest.raises(ValueError, match=r"no bias to hold the map's; fit it without an intercept"):
        narrowed(model, maps_of(model))


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_families_with_a_switch_can_be_given_biases(name, tmp_path):
    model = tiny.model(name)
    maps = maps_of(model, "1")
    new, _ = narrowed(model, maps, add_biases=True)
    loaded = reloaded(new, name, tmp_path)
    assert loaded.config.mlp_bias
    want = swapped_output(model, name, maps)
    torch.testing.assert_close(output(loaded, name), want, rtol=1e-5, atol=1e-5)


def test_families_without_a_switch_cannot_be_given_biases():
    model = tiny.model("gemma")
    with pytest.raises(ValueError, match="gates of gemma have no biases"):
        narrowed(model, maps_of(model), add_biases=True)


@pytest.mark.parametrize("name", [*UNGATED, "llama-bias"])
def test_what_can_be_narrowed_is_known_beforehand(name):
    check_exportable(tiny.model(name))


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        *((name, {}, "gates of .* have no biases") for name in GATES_WITHOUT_BIAS),
        *((name, {}, "no bias to hold the map's") for name in NO_BIAS_AFTER),
        ("gpt2", {"activation_function": "relu2"}, r"act\(z\) - act\(-z\) = z"),
        ("mixtral", {}, "no block of plain hidden units"),
    ],
)
def test_what_cannot_be_narrowed_is_known_beforehand(name, settings, reason):
    with pytest.raises(ValueError, match=rf'{reason}.* use `kind="hf"`'):
        check_exportable(tiny.model(name, **settings))


def test_biases_that_may_be_added_are_known_beforehand():
    check_exportable(tiny.model("llama"), add_biases=True)
    with pytest.raises(ValueError, match="gates of gemma have no biases"):
        check_exportable(tiny.model("gemma"), add_biases=True)


def test_only_classes_of_transformers_load_without_code():
    class Mine(transformers.GPT2LMHeadModel):
        pass

    with pytest.raises(ValueError, match="Mine is not a class of transformers"):
        check_exportable(Mine(tiny.model("gpt2").config))


def test_settings_of_generation_are_written_as_they_came(tmp_path):
    model = tiny.model("gpt2")
    model.generation_config.temperature = 0.5  # without do_sample: save_pretrained refuses it
    small, _ = narrowed(model, maps_of(model))
    with pytest.raises(ValueError, match="temperature"):
        small.save_pretrained(tmp_path)
    save(small, tmp_path)
    assert small.generation_config.temperature == 0.5
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.5


def test_experts_are_refused():
    model = tiny.model("mixtral")
    affine = Affine(torch.randn(16, 16), torch.zeros(16), 16)
    with pytest.raises(ValueError, match=r'block 1 .* no plain hidden units: use `kind="hf"`'):
        narrowed(model, {blocks(model)[1]: affine})


def test_a_map_of_another_size_is_refused():
    model = tiny.model("gpt2")
    with pytest.raises(ValueError, match="from 16 to 16 features, its map from 8 to 16"):
        narrowed(model, {blocks(model)[0]: Affine(torch.randn(16, 8), torch.zeros(16), 8)})
