"""Exported folders: they load without howlinear and compute the same, or do not load at all."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import howlinear
import tiny
from howlinear import Affine, blocks
from howlinear.export import hf, reload, weights
from howlinear.export.install import install_maps
from test_export_install import DENSE, maps_of, output

pytestmark = pytest.mark.usefixtures("alone")


def compressed(name, **settings):
    model = tiny.model(name, **settings)
    install_maps(model, maps_of(model))
    return model


def export(model, folder, dtype=torch.float32):
    folder.mkdir(exist_ok=True)
    hf.write(model, folder, dtype)
    return folder


def config_of(folder):
    return json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail)


def load(folder, auto=None, **options):
    """By the Auto class of the head, or another: the model, and what was missing or unused."""
    told = config_of(folder)
    head = [a for a, c in told["auto_map"].items() if c.endswith(f".{told['architectures'][0]}")]
    found, info = getattr(transformers, auto or head[-1]).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    return found.eval(), sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])


def places(model):
    return [(b.index, b.path, b.steps, b.d_in, b.d_out) for b in blocks(model)]


# ------------------------------------------------------------------------------ every family


@pytest.mark.parametrize("name", DENSE)
def test_every_family_loads_as_what_was_written_or_not_at_all(name, tmp_path):
    before = places(tiny.model(name))
    model = compressed(name)
    folder = export(model, tmp_path / "out")
    loaded, wrong = load(folder)
    assert wrong == []
    assert type(loaded).__name__ == f"Howlinear{type(model).__name__}"
    assert torch.equal(output(loaded, name), output(model, name))
    assert places(loaded) == before
    assert_backbone_is_part_of(model, *load(folder, "AutoModel"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):  # no gaps with random weights
        type(model).from_pretrained(folder)


def assert_backbone_is_part_of(model, base, wrong):
    """A pooler that the head had no use for may be new; and the head's weights are not used."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    mine = {prefix + n: t for n, t in base.state_dict().items() if "pooler." not in n}
    theirs = model.state_dict()
    assert sum(".linear_mlp." in n for n in mine) >= len(blocks(model))
    assert all(torch.equal(tensor, theirs[n]) for n, tensor in mine.items())
    assert all("pooler." in n or n in theirs.keys() - mine.keys() for n in wrong)


@pytest.mark.parametrize("name", [n for n, row in tiny.TINY.items() if row.experts])
def test_experts_that_stay_keep_their_fused_weights(name, tmp_path):
    model = tiny.model(name)
    block = blocks(model)[-1]
    affine = Affine(torch.randn(block.d_out, block.d_in) / 4, torch.randn(block.d_out), block.d_in)
    install_maps(model, {block: affine})
    loaded, wrong = load(export(model, tmp_path / "out"))
    assert wrong == []
    torch.testing.assert_close(output(loaded, name), output(model, name))


def other(kind, config, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**settings)
    return getattr(transformers, kind)(config).eval()


SMALL = tiny.GQA | {"vocab_size": 50, "pad_token_id": 0}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
BART |= {"vocab_size": 50, "max_position_embeddings": 32}
OTHERS = {  # heads that ask AutoModel for a backbone, no heads, half a model, an unknown family
    "LlamaForSequenceClassification": ("LlamaConfig", SMALL | {"num_labels": 3}),
    "LlamaModel": ("LlamaConfig", SMALL),
    "BertModel": ("BertConfig", tiny.HF | {"vocab_size": 50}),
    "BertForSequenceClassification": ("BertConfig", tiny.HF | {"vocab_size": 50, "num_labels": 3}),
    "T5EncoderModel": ("T5Config", tiny.T5 | {"vocab_size": 50}),
    "BartForConditionalGeneration": ("BartConfig", BART),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_heads_and_none(kind, tmp_path):
    model = other(kind, OTHERS[kind][0], **OTHERS[kind][1])
    before = places(model)
    install_maps(model, maps_of(model))
    folder = export(model, tmp_path / "out")
    loaded, wrong = load(folder)
    assert wrong == []
    assert torch.equal(output(loaded, "llama"), output(model, "llama"))
    assert places(loaded) == before
    assert_backbone_is_part_of(model, *load(folder, "AutoModel"))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generation_goes_on_as_before(name, tmp_path):
    settings = {"num_decoder_layers": 2} if name == "t5" else {}  # or transformers itself fails
    model = compressed(name, **settings)
    loaded, _ = load(export(model, tmp_path / "out"))
    want, got = (reload._results(m, tiny.inputs(name)) for m in (model, loaded))
    assert want["tokens"].shape[1] == tiny.BATCH
    assert torch.equal(want["tokens"], got["tokens"])
    reload._compare(tmp_path, want, got)


def test_an_export_can_be_saved_by_its_user_and_compressed_again(tmp_path):
    model = tiny.model("llama")
    first, *rest = maps_of(model).items()
    install_maps(model, dict([first]))
    loaded, _ = load(export(model, tmp_path / "one"))
    loaded.save_pretrained(tmp_path / "two")
    again, wrong = load(tmp_path / "two")
    assert wrong == []
    assert torch.equal(output(again, "llama"), output(model, "llama"))
    install_maps(model, dict(rest))
    install_maps(again, dict(rest))
    last, wrong = load(export(again, tmp_path / "three"))
    assert wrong == []
    assert type(last).__name__ == "HowlinearLlamaForCausalLM"
    assert torch.equal(output(last, "llama"), output(model, "llama"))
    assert [b["index"] for b in last.config.linear_blocks] == [0, 1, 2]


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("trust", [None, False])
@pytest.mark.parametrize("auto", ["AutoConfig", "AutoModel", "AutoModelForCausalLM"])
def test_without_trust_nothing_loads(auto, trust, tmp_path):
    folder = export(compressed("llama"), tmp_path / "out")
    load(folder)  # not even after somebody else trusted it
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        getattr(transformers, auto).from_pretrained(folder, trust_remote_code=trust)


def test_the_guard_of_stock_classes_works_as_described(tmp_path):
    """Each habit of transformers that the comment at hf.GUARD names, one by one."""
    stock = transformers.LlamaForCausalLM
    folder = export(compressed("llama"), tmp_path / "out")
    assert config_of(folder)["attn_implementation"] == hf.GUARD
    config = transformers.LlamaConfig(**SMALL, attn_implementation=hf.GUARD)
    assert config._attn_implementation == hf.GUARD  # a config takes the value ...
    with pytest.raises(ValueError, match=re.escape(hf.GUARD)):  # ... and a model refuses it
        stock(config)
    with pytest.raises(ValueError, match=re.escape(hf.GUARD)):
        stock.from_pretrained(folder)
    loaded, _ = load(folder)  # the class of the export removes it
    assert loaded.config._attn_implementation != hf.GUARD
    _, info = stock.from_pretrained(  # not stopped: only the load report tells
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert any(".mlp." in name for name in info["missing_keys"])


def test_load_of_ours(tmp_path):
    model = compressed("llama")
    folder = export(model, tmp_path / "out")
    loaded, tokenizer = howlinear.load(str(folder), trust_remote_code=True)
    assert tokenizer is None
    assert torch.equal(output(loaded, "llama"), output(model, "llama"))
    assert loaded.config.model_type == "howlinear_llama"
    with pytest.raises(ValueError, match="add `trust_remote_code=True`"):
        howlinear.load(str(folder))


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "whisper"])
def test_load_of_ours_keeps_the_head(name, tmp_path):
    model = compressed(name)
    folder = export(model, tmp_path / "out", torch.bfloat16)
    loaded, _ = howlinear.load(str(folder), trust_remote_code=True)
    assert type(loaded).__name__ == f"Howlinear{type(model).__name__}"
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert loaded.stored_dtype == torch.bfloat16


def test_code_of_others_and_quantised_weights_are_refused():
    class Mine(transformers.LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match=r"Mine is not a class of transformers"):
        hf.check_exportable(Mine(tiny.model("llama").config))
    model = tiny.model("llama")
    hf.check_exportable(model)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="is quantised"):
        hf.check_exportable(model)


# --------------------------------------------------------------------------- weights on the disk


def test_shards_dtype_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD", "4KB")
    model = compressed("llama")
    weights.round_weights(model, torch.bfloat16)
    folder = export(model, tmp_path / "out", torch.bfloat16)
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    saved = {n: t for path in files for n, t in load_file(path).items()}
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() for t in saved.values()) == count
    size = sum(path.stat().st_size for path in files)
    assert 2 * count < size < 2 * count + 4096 * len(files)
    assert config_of(folder)["dtype"] == "bfloat16"
    loaded, wrong = load(folder, dtype="float32")
    assert wrong == []
    assert torch.equal(output(loaded, "llama"), output(model, "llama"))
    assert load(folder)[0].dtype == torch.bfloat16


def test_tied_weights_are_saved_once(tmp_path):
    model = compressed("gpt2")
    folder = export(model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load(folder)[0]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_what_is_written_is_data_and_one_file_of_code(tmp_path):
    folder = export(compressed("llama"), tmp_path / "out")
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_howlinear.py",
    ]
    code = (folder / "modeling_howlinear.py").read_text()
    assert code.startswith(Path(hf.linear_blocks.__file__).read_text())
    assert len(code.splitlines()) < 160
    told = config_of(folder)
    assert told["model_type"] == "howlinear_llama"
    assert told["architectures"] == ["HowlinearLlamaForCausalLM"]
    assert not [key for key in told if key.startswith("_")]
