"""From a compression to a folder: measured as stored, told in the card, or nothing is written."""

import json

import pytest
import torch

import tiny
from howlinear import Affine, blocks, load, swapped
from howlinear.compression.compress import Compression
from howlinear.compression.plan import from_dict
from howlinear.export import write as export_write
from howlinear.export.nemotron_nas import read_back
from howlinear.linear.affine import Factored, UnitMap
from howlinear.losses.perplexity import compare, text_loss
from howlinear.models.units import taken
from howlinear.records.fields import BlockCompression
from howlinear.records.files import read_json
from test_export_nemotron_nas import SIZES

pytestmark = pytest.mark.usefixtures("alone")

REPORT = torch.randint(3, tiny.VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(0))


def maps_of(model, bias=True):
    """Matrices, but for the last block, which stays."""
    g = torch.Generator().manual_seed(0)
    return {
        b: Affine(torch.randn(b.d_out, b.d_in, generator=g) / 8, torch.ones(b.d_out) * bias, b.d_in)
        for b in blocks(model)[:-1]
    }


def units_of(model):
    """Eight hidden units of each block, in the place of all."""
    maps = {}
    for block in blocks(model):
        constant = Factored(torch.zeros(0, block.d_in), torch.zeros(block.d_out, 0), torch.ones(16))
        write = torch.full((block.d_out, 8), 0.3)
        maps[block] = UnitMap(constant, tuple(range(8)), write, taken(model, block, range(8)))
    return maps


def compression(model, maps, change=True):
    sizes = {b: sum(p.numel() for p in model.get_submodule(b.path).parameters()) for b in maps}
    found = [
        BlockCompression(b.index, b.path, 1, None, [], sizes[b], m.parameters, None)
        for b, m in maps.items()
    ]
    return Compression(
        blocks=found,
        maps=maps,
        change=compare(model, lambda: swapped(model, maps), REPORT) if change else None,
        removed=sum(sizes[b] - m.parameters for b, m in maps.items()),
        feed_forward=sum(sizes.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        curve=[],
        settings={},
        notes=["something *worth* knowing"],
        about={"command": "howlinear compress x", "corpus": {"name": "a|b", "report": "test"}},
    )


def made(name, dtype=torch.bfloat16, **settings):
    model = tiny.model(name, **settings)
    model.stored_dtype = dtype
    return model


def write(model, result, out, kind, **options):
    export_write.write_export(model, None, result, out, kind, "org/name", REPORT, **options)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.model_info", lambda *a, **k: 1 / 0)


@pytest.fixture
def unverified(monkeypatch):
    """What the new process would be asked; it takes seconds to start."""
    asked = []
    monkeypatch.setattr(export_write, "verify", lambda *given: asked.append(given))
    return asked


KINDS = {
    "hf": ("llama", {}, lambda folder: load(str(folder), trust_remote_code=True)[0]),
    "stock": ("gpt2", {}, lambda folder: load(str(folder))[0]),
    "nemotron-nas": ("llama", SIZES, lambda folder: read_back(folder).float()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_way(kind, tmp_path, request):
    if kind != "nemotron-nas":  # test_cli_compress goes the same way to the new process
        request.getfixturevalue("unverified" if kind == "hf" else "reloaded_here")
    name, settings, loaded_from = KINDS[kind]
    model = made(name, **settings)
    result = compression(model, units_of(model) if kind == "stock" else maps_of(model))
    write(model, result, tmp_path / "out", kind)
    folder, told = tmp_path / "out", result.exported
    assert [p.name for p in tmp_path.iterdir() if p.name != "modules"] == ["out"]
    loaded = loaded_from(folder)
    loss = text_loss(loaded, REPORT)
    assert told["perplexity"] == pytest.approx(loss.perplexity, rel=1e-6)
    assert told["perplexity_se"] == pytest.approx(loss.perplexity_se, rel=1e-5)
    gained = loss.perplexity - result.change.original.perplexity
    assert told["delta_ppl"] == pytest.approx(gained, rel=1e-5)
    assert loss.perplexity != result.change.changed.perplexity  # rounding is a change
    assert told["parameters"] == sum(p.numel() for p in loaded.parameters())
    assert (told["kind"], told["folder"], told["dtype"]) == (kind, "out", "bfloat16")
    size = (folder / "model.safetensors").stat().st_size
    assert told["bytes"] == size
    assert 0 < size - 2 * told["parameters"] < 8192
    assert read_json(folder / "compress.json", "compress")["exported"] == told
    assert len(from_dict(read_json(folder / "plan.json", "plan"))) == len(result.maps)
    if kind == "hf":
        assert told["parameters"] == result.parameters - result.removed
    elif kind == "stock":
        few = "vLLM on CPUs has no attention for heads of 4; llama.cpp runs a gguf export"
        assert told["notes"] == ["hidden units of each block: 8", few]
    assert told["tensor_bytes"] == 2 * told["parameters"]
    assert told["bytes_before"] == 2 * result.parameters
    assert_card(folder, result, total=len(blocks(loaded)))


def assert_card(folder, result, total):
    text, told = (folder / "README.md").read_text(), result.exported
    measured = f"{told['perplexity']:.3f} ± {told['perplexity_se']:.3f}"
    assert f"| perplexity | {result.change.original.perplexity:.3f} ± " in text
    assert f" | {measured} | {told['delta_ppl']:+.3f} ± " in text
    assert "windows of 16, first token not predicted; 90 tokens of a\\|b test" in text
    assert f"| parameters | {result.parameters:,} | {told['parameters']:,} |" in text
    assert "something \\*worth\\* knowing" in text
    assert f"{len(result.maps)} of the {total} feed-forward blocks" in text
    for b in result.blocks:
        assert (
            f"| {b.index} {b.path} | a matrix | {b.parameters_left:,} | {b.parameters:,} |" in text
        )


def test_no_perplexity_is_made_up_for_models_that_predict_nothing(tmp_path, unverified):
    model = made("t5", torch.float32)
    write(model, compression(model, maps_of(model), change=False), tmp_path / "out", "hf")
    told = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert told["exported"]["perplexity"] is None
    assert told["exported"]["dtype"] == "float32"
    assert "erplexity" not in (tmp_path / "out" / "README.md").read_text()
    (_, same, inputs, kind) = unverified[0]
    assert (same, kind) == (model, "hf")
    assert {name: tuple(ids.shape) for name, ids in inputs.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "decoder_input_ids"), (2, 16)
    )
    with torch.no_grad():
        model(**inputs)


def test_what_became_of_blocks_is_told_in_words(tmp_path, unverified):
    model = made("llama")
    zero = torch.zeros(16)
    low = {
        b: Factored(torch.ones(2 * b.index, 16), torch.ones(16, 2 * b.index), zero)
        for b in blocks(model)[:2]
    }
    result = compression(model, low)
    first, second = result.blocks
    result.blocks[:] = [
        BlockCompression(**first.to_dict() | {"rank": 0, "units": [3, 1]}),
        BlockCompression(**second.to_dict() | {"rank": 2, "units": [5]}),
        BlockCompression(**second.to_dict() | {"index": 2, "replaced": 0}),
    ]
    write(model, result, tmp_path / "out", "hf")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| 0 model.layers.0.mlp | 2 of its hidden units |" in text
    assert "| 1 model.layers.1.mlp | a matrix of rank 2 and 1 of its hidden units |" in text
    assert "| 2 model" not in text


# ---------------------------------------------------------------------------------- nothing


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("moment", ["add_files", "verify", "card"])
def test_an_interrupt_leaves_nothing(moment, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model = made("llama")
    result = compression(model, maps_of(model))
    monkeypatch.setattr(export_write, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(model, result, tmp_path / "out", "hf")
    assert list(tmp_path.iterdir()) == []
    assert result.exported == {}


REFUSED = {
    "stock": ("bloom", "no setting for the width.*use .kind=.hf."),
    "nemotron-nas": ("qwen2", "no llama and no mistral.*use .kind=.stock.. or hf"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_writes_nothing_and_leaves_the_model(kind, tmp_path):
    name, why = REFUSED[kind]
    model = made(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = compression(model, maps_of(model))
    with pytest.raises(ValueError, match=why):
        export_write.check_exportable(model, kind)
    with pytest.raises(ValueError, match=why):
        write(model, result, tmp_path / "out", kind)
    assert list(tmp_path.iterdir()) == []
    assert result.exported == {}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_each_kind_is_checked_by_its_own_rules():
    export_write.check_exportable(made("qwen2"), "hf")
    export_write.check_exportable(made("qwen2"), "stock")
    export_write.check_exportable(made("llama", **SIZES), "nemotron-nas")


def test_limits_of_engines_are_known_beforehand():
    (limit,) = export_write.engine_limits(made("qwen3"), "stock")
    assert "heads of 8; llama.cpp runs" in limit
    assert export_write.engine_limits(made("qwen3", head_dim=64), "stock") == []
    assert export_write.engine_limits(made("qwen3"), "hf") == []


def test_other_windows_than_those_of_the_change_are_refused(tmp_path):
    model = made("llama")
    result = compression(model, maps_of(model))
    with pytest.raises(ValueError, match="not those that the change was measured on"):
        export_write.write_export(model, None, result, tmp_path / "out", "hf", "x/y", REPORT[:3])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        export_write.check_free(tmp_path)


def test_nothing_is_printed(tmp_path, unverified, capfd):
    model = made("gpt2")
    write(model, compression(model, units_of(model)), tmp_path / "out", "stock")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
