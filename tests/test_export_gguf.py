"""Llama-likes as GGUF files of architecture deci: the bytes are the model, and llama.cpp agrees."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from howlinear import blocks, load, swapped
from howlinear.compression.refitting import Refitter
from howlinear.compression.targets import GGUF
from howlinear.export import write as export_write
from howlinear.export.gguf_family import check_family_file, write_family
from howlinear.export.gguf_read import check_file, read_back
from howlinear.export.gguf_write import Source, tensor_bytes, write_gguf
from howlinear.export.stock import with_one_width
from howlinear.export.widths import widen
from howlinear.linear.affine import Affine, Factored, UnitMap
from howlinear.models.units import taken
from test_export_write import compression
from test_models import byte_tokenizer, needs_gguf, tiny_llama
from test_models import write_gguf as write_source

pytestmark = [needs_gguf, pytest.mark.usefixtures("alone")]

IDS = torch.randint(0, 250, (6, 32), generator=torch.Generator().manual_seed(0))
CLOSE = {"f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "source": 1e-5}  # of the largest logit


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch):
    monkeypatch.setenv("HOWLINEAR_CACHE", "off")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A tiny GGUF file as llama.cpp's converter writes it, in float32."""
    return write_source(tmp_path_factory.mktemp("packed") / "tiny.gguf", tiny_llama())


@pytest.fixture
def model(packed):
    return load(str(packed))[0]


def maps_of(model):
    """Block 0 keeps hidden units beside a matrix of low rank; block 1 stays."""
    g, block = torch.Generator().manual_seed(0), blocks(model)[0]
    d, units = block.d_in, (3, 0, 17)
    into, out, write = (torch.randn(*s, generator=g) / 4 for s in ((5, d), (d, 5), (d, len(units))))
    affine = Factored(into, out, torch.randn(d, generator=g))
    return {block: UnitMap(affine, units, write, taken(model, block, units))}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def written(model, packed, path, kind="f16"):
    maps = maps_of(model)
    widen(model, maps, GGUF)
    write_gguf(model, path, kind, Source.of(packed), [b.entry for b in maps])
    return path


@pytest.mark.parametrize("kind", CLOSE)
def test_the_file_is_the_swapped_model(kind, model, packed, tmp_path):
    with swapped(model, maps_of(model)):
        want = logits(model)
    assert (logits(model) - want).abs().max() > 0.1 * want.abs().max()  # a real change
    path = written(model, packed, tmp_path / "model.gguf", kind)
    torch.testing.assert_close(
        logits(model), want, rtol=0, atol=CLOSE[kind] * float(want.abs().max())
    )
    assert torch.equal(logits(read_back(path)), logits(model))
    check_file(path, model, Source.of(packed), {"input_ids": IDS})


def test_what_llama_cpp_looks_for_is_there(model, packed, tmp_path):
    file = Source.of(written(model, packed, tmp_path / "model.gguf"))
    fields = {key: entry.value for key, entry in file.fields.items()}
    assert fields["general.architecture"] == "deci"
    assert fields["deci.feed_forward_length"] == [32, 48]
    assert fields["deci.attention.head_count"] == [2, 2]
    assert fields["deci.attention.head_count_kv"] == [1, 1]
    assert fields["general.file_type"] == 1
    for key, entry in Source.of(packed).fields.items():
        if key.startswith("tokenizer."):
            assert file.fields[key] == entry
    assert not any(key.startswith("llama.") for key in fields)
    types = {name: tensor.tensor_type.name for name, tensor in file.tensors.items()}
    assert types["blk.0.ffn_gate.bias"] == types["blk.0.ffn_down.bias"] == "F32"
    assert types["blk.0.ffn_gate.weight"] == types["token_embd.weight"] == "F16"
    assert "blk.0.ffn_up.bias" not in types  # zero
    assert "blk.1.ffn_down.bias" not in types  # not replaced


def test_unchanged_tensors_keep_the_bytes_of_the_source(model, packed, tmp_path):
    quantised = tmp_path / "q8.gguf"
    write_gguf(model, quantised, "q8_0", Source.of(packed))
    before = Source.of(quantised)
    maps = maps_of(model)
    widen(model, maps, GGUF)
    write_gguf(model, tmp_path / "out.gguf", "source", before, [b.entry for b in maps])
    after = Source.of(tmp_path / "out.gguf").tensors
    for name, tensor in before.tensors.items():
        if not name.startswith("blk.0.ffn_") or "norm" in name:
            assert after[name].tensor_type == tensor.tensor_type
            assert np.array_equal(after[name].data, tensor.data)
    assert after["blk.0.ffn_gate.weight"].tensor_type.name == "Q8_0"
    assert after["blk.0.ffn_down.weight"].tensor_type.name == "F16"  # rows of 48 do not fit q8_0


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_sizes_are_those_on_disk(kind, model, packed, tmp_path):
    source = Source.of(packed)
    write_gguf(model, tmp_path / "before.gguf", kind, source)
    stored = Source.of(tmp_path / "before.gguf").tensors.values()
    assert tensor_bytes(model, kind, source) == sum(t.n_bytes for t in stored)
    block = blocks(model)[0]
    parameters = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in model.get_submodule(block.entry).parameters())
    widen(model, maps_of(model), GGUF)
    left = sum(p.numel() for p in model.parameters())
    assert parameters - left == own - GGUF.parameters(block.d_in, 5, 3)


def test_the_whole_way(model, packed, tmp_path):
    result, report = compression(model, maps_of(model), change=False), IDS[:2]
    args = (result, tmp_path / "out", "gguf", packed, report)
    export_write.write_export(model, None, *args, gguf_type="q8_0")
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        *("model.gguf", "README.md", "plan.json", "compress.json")
    }
    exported = json.loads((out / "compress.json").read_text())["exported"]
    assert exported["bytes"] == (out / "model.gguf").stat().st_size
    assert exported["dtype"] == "q8_0"
    card = (out / "README.md").read_text()
    assert "llama-server -m model.gguf" in card
    assert "| MB in q8_0 |" in card


# --------------------------------------------------------------------------------- refusals


def test_what_cannot_be_written_is_known_beforehand(model, packed, tmp_path):
    export_write.check_exportable(model, "gguf", packed)
    with pytest.raises(ValueError, match=r'no \.gguf file.*or use `kind="stock"` and convert that'):
        export_write.check_exportable(model, "gguf", "org/name")
    assert export_write.plan_target(model, "gguf", packed) == "gguf"
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert export_write.plan_target(model, "gguf", packed) == "stock"
    with torch.no_grad():  # weights that are not those of the file
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r'blk\.0\.ffn_up.* is not the projection.*`kind="stock"`'):
        export_write.check_exportable(model, "gguf", packed)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_weights_that_do_not_fit_are_refused(model, packed, tmp_path):
    big = {blocks(model)[0]: Affine(torch.full((32, 32), 1e12), torch.zeros(32), 32)}
    widen(model, big, GGUF)
    with pytest.raises(ValueError, match='does not fit in F16: use `gguf_type="bf16"`'):
        write_gguf(model, tmp_path / "out.gguf", "f16", Source.of(packed), ["model.layers.0.mlp"])


@pytest.mark.parametrize("part", ["weights", "tokenizer"])
def test_a_changed_byte_is_noticed(part, model, packed, tmp_path):
    path = written(model, packed, tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    place = data.index(b"<extra>") if part == "tokenizer" else len(data) - 20
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"weights are not|another tokenizer"):
        check_file(path, model, Source.of(packed), {"input_ids": IDS})


# --------------------------------------------------------------------------- other families


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny qwen2 in a file of its own architecture, in float32: its attention has biases."""
    import gguf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=260, tie_word_embeddings=True, **sizes, **heads)
    net = Qwen2ForCausalLM(config).eval()
    for parameter in net.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("qwen") / "qwen.gguf"
    llama = Source.of(write_source(path.with_name("llama.gguf"), tiny_llama()))
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, entry in llama.fields.items():
        if key not in ("general.architecture", "llama.feed_forward_length"):
            writer.add_key_value(key.replace("llama.", "qwen2."), *entry)
    writer.add_feed_forward_length(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, tensor in net.state_dict().items():
        if name != "lm_head.weight":
            there = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(there, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kept_half(net):
    """32 of 64 hidden units of each block, fitted."""
    shapes = dict.fromkeys(blocks(net), (0, 32))
    return Refitter(net, blocks(net), IDS, intercept=False).refit(shapes)


# relative to a weight's standard deviation: half a unit in the last place; of q8_0, the largest of 32
# (3 deviations) / 127 / sqrt(12)
ROUNDING = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 3 / 440, "source": 2**-20}


@pytest.mark.parametrize("kind", ROUNDING)
def test_another_family_keeps_its_architecture(kind, qwen, tmp_path):
    net = load(str(qwen))[0]
    export_write.check_exportable(net, "gguf", qwen)
    assert export_write.plan_target(net, "gguf", qwen) == "stock"
    maps = kept_half(net)
    with swapped(net, maps):
        want = logits(net)
    assert (logits(net) - want).norm() > 0.1 * want.norm()  # a real change
    result, out = compression(net, maps, change=False), tmp_path / "out"
    export_write.write_export(net, None, result, out, "gguf", qwen, IDS[:2], gguf_type=kind)
    file, before = Source.of(out / "model.gguf"), Source.of(qwen)
    assert file.architecture == "qwen2"
    assert file.fields["qwen2.feed_forward_length"].value == 32
    assert file.tensors.keys() == before.tensors.keys()
    for key, entry in before.fields.items():
        if key not in ("qwen2.feed_forward_length", "general.file_type"):
            assert file.fields[key] == entry
    got = logits(read_back(out / "model.gguf"))
    # 9 products in a row, each wrong by the rounding of its weights; 3 standard deviations
    assert (got - want).norm() <= 3 * 9**0.5 * ROUNDING[kind] * want.norm()
    exported = result.exported
    removed = 2 * 3 * 32 * 32  # of two blocks: half of 64 units, three vectors of 32 each
    assert result.parameters - exported["parameters"] == removed
    each = {"f16": 2, "bf16": 2, "q8_0": 34 / 32, "source": 4}[kind]
    assert exported["bytes_before"] - exported["tensor_bytes"] == removed * each


def test_a_changed_byte_of_another_family_is_noticed(qwen, tmp_path):
    net = load(str(qwen))[0]
    maps = kept_half(net)
    small, path = with_one_width(net, maps), tmp_path / "model.gguf"
    write_family(small, path, "f16", Source.of(qwen))
    check_family_file(path, small, Source.of(qwen))
    with torch.no_grad():
        small.model.layers[1].mlp.down_proj.weight[3, 4] += 0.01
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight is not what the model has"):
        check_family_file(path, small, Source.of(qwen))


# ---------------------------------------------------------------------------------- llama.cpp


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")
def test_llama_cpp_computes_the_same(model, packed, tmp_path):
    """Another's reader: a width and biases for each layer, tokens of an f16 file one by one."""
    from howlinear.export.llama_cpp import LlamaCpp

    path = written(model, packed, tmp_path / "model.gguf")
    ids = (IDS[0] % 94).tolist()  # whole characters, but for one
    ids[5] = byte_tokenizer().get_vocab()["â"]  # the first byte of three
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    with LlamaCpp.start(path, length=len(ids)) as engine:
        answers = engine.score(ids)
    assert [i for i, answer in enumerate(answers) if answer is None] == [4]
    known = [i for i in range(len(answers)) if i != 4]
    ours = [float(want[i, ids[i + 1]]) for i in known]
    theirs = [answers[i].log_probability for i in known]
    assert theirs == pytest.approx(ours, abs=5e-3)
    assert [answers[i].most_likely for i in known] == want[known].argmax(-1).tolist()
    assert sum(theirs) == pytest.approx(sum(ours), rel=1e-4)  # and so perplexity
    assert len({round(value, 3) for value in theirs}) > 20


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")
def test_llama_cpp_computes_the_same_of_another_family(qwen, tmp_path):
    from howlinear.export.llama_cpp import LlamaCpp

    net = load(str(qwen))[0]
    small, path = with_one_width(net, kept_half(net)), tmp_path / "model.gguf"
    write_family(small, path, "f16", Source.of(qwen))
    ids = (IDS[0] % 94).tolist()
    with torch.no_grad():
        want, other = (
            m(torch.tensor([ids])).logits[0].log_softmax(-1) for m in (read_back(path), net)
        )
    with LlamaCpp.start(path, length=len(ids)) as engine:
        theirs = torch.tensor([a.log_probability for a in engine.score(ids)])
    ours, original = (p[range(len(ids) - 1), ids[1:]] for p in (want, other))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=5e-3)
    assert (theirs - original).abs().max() > 0.1  # of the model before
