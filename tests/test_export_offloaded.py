"""Weights that stay on disk: the export has the tensors of the export of the same model in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from howlinear.export import hf, weights
from howlinear.export.install import install_maps
from howlinear.export.reload import verify
from howlinear.export.weights import round_weights
from howlinear.export.write import FROM_DISK, check_exportable
from howlinear.models import loading
from howlinear.models.families import parameter_count
from howlinear.models.offload import is_offloaded
from test_export_write import REPORT, compression, maps_of, units_of, write

pytestmark = pytest.mark.usefixtures("alone", "no_network", "reloaded_here")


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.model_info", lambda *a, **k: 1 / 0)


def both(name, tmp_path, dtype="float32", **settings):
    """The model in memory and with weights on disk. Its files are in float32, whatever its config says."""
    folder = tmp_path / "model"
    tiny.model(name, **settings).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    place = {"device_map": "disk", "offload_folder": tmp_path / "off"}
    return loading.load(folder)[0], loading.load(folder, **place)[0]


def tensors(folder):
    return {k: v for p in folder.glob("*.safetensors") for k, v in load_file(p).items()}


CASES = {
    "llama": ("llama", maps_of, {}),
    "llama, units": ("llama", units_of, {}),
    "tied": ("llama", units_of, {"tie_word_embeddings": True}),
    "gpt2, tied": ("gpt2", units_of, {}),
    "parallel": ("gpt_neox", maps_of, {}),
    "experts": ("qwen3_moe", maps_of, {}),  # transformers rewrites their weights
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_export_is_that_of_the_model_in_memory(case, dtype, tmp_path):
    name, made, settings = CASES[case]
    plain, disk = both(name, tmp_path, dtype, **settings)
    results = {}
    for label, model in (("plain", plain), ("disk", disk)):
        results[label] = compression(model, made(model))
        write(model, results[label], tmp_path / label, "hf")
    assert is_offloaded(disk)
    one, other = tensors(tmp_path / "plain"), tensors(tmp_path / "disk")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert {t.dtype for t in other.values()} == {getattr(torch, dtype)}
    for file in ("config.json", "modeling_howlinear.py", "plan.json"):
        assert (tmp_path / "plain" / file).read_text() == (tmp_path / "disk" / file).read_text()
    ours, theirs = results["disk"].exported, results["plain"].exported
    assert ours["parameters"] == theirs["parameters"]
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-5)
    assert (ours["notes"], theirs["notes"]) == ([FROM_DISK], [])


def test_a_block_of_several_modules_is_replaced_on_disk_too(tmp_path):
    found = []
    for model in both("opt", tmp_path):
        install_maps(model, units_of(model))
        found.append(tmp_path / f"out{len(found)}")
        found[-1].mkdir()
        round_weights(model, torch.float32)
        hf.write(model, found[-1], torch.float32)
        verify(found[-1], model, {"input_ids": REPORT}, "hf")
    one, other = map(tensors, found)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_tied_weights_on_disk_are_counted_once_after_a_forward(tmp_path):
    plain, disk = both("llama", tmp_path, tie_word_embeddings=True)
    disk(REPORT)
    assert disk.lm_head.weight is not disk.model.embed_tokens.weight  # a forward separates them
    assert parameter_count(disk) == parameter_count(plain)


def written(tmp_path, dtype=torch.bfloat16):
    """A model with weights on disk as it was written, and its folder."""
    _, disk = both("llama", tmp_path)
    install_maps(disk, maps_of(disk))
    round_weights(disk, dtype)
    (tmp_path / "out").mkdir()
    hf.write(disk, tmp_path / "out", dtype)
    return disk, tmp_path / "out"


def test_one_flipped_weight_on_disk_is_found(tmp_path):
    disk, out = written(tmp_path)
    verify(out, disk, {"input_ids": REPORT}, "hf")
    stored, name = load_file(out / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    stored[name][0, 0] += 2**-7 * stored[name][0, 0]
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"1 weights are not what the model has, first {name}"):
        verify(out, disk, {"input_ids": REPORT}, "hf")


def test_weights_on_disk_that_are_not_rounded_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "round_offloaded", lambda *_: None)
    disk, out = written(tmp_path)
    with pytest.raises(ValueError, match="weights are not what the model has"):
        verify(out, disk, {"input_ids": REPORT}, "hf")


def test_weights_on_disk_go_to_small_shards(tmp_path, monkeypatch):
    """Never more than one shard is in memory; the largest tensor here takes 3.2 kB."""
    whole = tensors(written(tmp_path / "whole")[1])
    monkeypatch.setattr(weights, "SMALL_SHARD", 4000)
    disk, out = written(tmp_path / "parts")
    parts = list(out.glob("*.safetensors"))
    assert len(parts) > 3
    assert all(sum(t.nbytes for t in load_file(p).values()) <= 4000 for p in parts)
    again = tensors(out)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[n], whole[n]) for n in whole)
    verify(out, disk, {"input_ids": REPORT}, "hf")


def test_a_weight_on_disk_that_does_not_fit_the_dtype_is_refused(tmp_path):
    folder = tmp_path / "model"
    model = tiny.model("llama")
    model.lm_head.weight.data[0, 0] = 1e6
    model.save_pretrained(folder)
    disk, _ = loading.load(folder, device_map="disk", offload_folder=tmp_path / "off")
    round_weights(disk, torch.float16)
    with pytest.raises(ValueError, match=r"lm_head.weight does not fit in torch.float16"):
        hf.write(disk, tmp_path, torch.float16)


def test_other_exports_of_weights_on_disk_are_refused(tmp_path):
    plain, disk = both("llama", tmp_path)
    check_exportable(disk, "hf")
    check_exportable(plain, "stock")
    for kind in ("stock", "nemotron-nas", "gguf"):
        with pytest.raises(ValueError, match=f"{kind} needs all weights in memory: use `kind="):
            check_exportable(disk, kind)
