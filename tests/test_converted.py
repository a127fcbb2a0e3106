"""Converted copies of GGUF files: the same model to the bit, and never the cause of an error."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from howlinear.models import converted, ggufs
from howlinear.models.families import blocks
from howlinear.models.loading import describe, load
from test_models import IDS, complaint, needs_gguf, tiny_llama, write_gguf

TEXTS = ("hello", "<s>hello <extra>", "  é\n\t日本", "")

pytestmark = needs_gguf


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("packed") / "tiny.gguf", tiny_llama(), add_bos=True)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOWLINEAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def unpacked(monkeypatch) -> list[int]:
    """One item for each time that a GGUF file is unpacked."""
    times, original = [], ggufs.parsed_once

    def counted():
        times.append(1)
        return original()

    monkeypatch.setattr(ggufs, "parsed_once", counted)
    return times


def copies(cache: Path) -> list[Path]:
    return sorted(cache.glob("converted/*"))  # unfinished ones too


def without_copy(path: Path, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOWLINEAR_CACHE", "off")
        return load(str(path), **options)


def assert_equal(one, other) -> None:
    (model, tokenizer), (again, tokens) = one, other
    assert type(again) is type(model)
    assert again.config.to_dict() == model.config.to_dict()
    assert vars(again.config) == vars(model.config)
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    assert vars(again).keys() == vars(model).keys()
    for name in ("name_or_path", "stored_dtype", "dtype", "training"):
        assert getattr(again, name) == getattr(model, name), name
    assert describe(again, "x") == describe(model, "x")
    for held in ("state_dict", "named_buffers"):
        ours, theirs = dict(getattr(again, held)()), dict(getattr(model, held)())
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype
            assert torch.equal(ours[name], value), name
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert not any(p.requires_grad for p in again.parameters())
    for ids in (IDS, IDS[:, :1]):  # a single row shows where weights are aligned otherwise
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert type(tokens) is type(tokenizer)
    assert tokens.special_tokens_map == tokenizer.special_tokens_map
    assert tokens.name_or_path == tokenizer.name_or_path
    assert (tokens.bos_token_id, tokens.eos_token_id) == (256, tokenizer.eos_token_id)
    assert tokens.chat_template == tokenizer.chat_template
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer(text, add_special_tokens=special).input_ids
            assert tokens(text, add_special_tokens=special).input_ids == ids
            assert tokens.decode(ids) == tokenizer.decode(ids)


def test_the_second_load_reads_the_copy_and_is_equal_to_the_bit(packed, cache, unpacked, caplog):
    caplog.set_level("INFO", logger="howlinear")
    first = load(str(packed))
    assert len(unpacked) == 1
    (copy,) = copies(cache)
    assert [r.getMessage() for r in caplog.records] == [
        f"tiny.gguf is converted and kept in {copy} (95.4 kB), to load faster; "
        "HOWLINEAR_CACHE=off keeps nothing"
    ]
    assert {p.name for p in copy.iterdir()} == {
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    second = load(str(packed))
    assert len(unpacked) == 1
    assert len(caplog.records) == 1
    assert_equal(first, second)
    assert_equal(without_copy(packed), second)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "auto"])
def test_a_copy_serves_every_dtype(packed, cache, unpacked, dtype):
    load(str(packed), dtype="float16")
    assert copies(cache) == []  # only float32 is kept
    load(str(packed))
    before = len(unpacked)
    again = load(str(packed), dtype=dtype)
    assert len(unpacked) == before
    assert_equal(without_copy(packed, dtype=dtype), again)


def test_the_same_file_elsewhere_has_the_same_copy(packed, cache, unpacked, tmp_path):
    load(str(packed))
    other = shutil.copy(packed, tmp_path / "other.gguf")
    model, _ = load(str(other))
    assert len(unpacked) == 1
    assert model.name_or_path == str(tmp_path)
    write_gguf(tmp_path / "other.gguf", tiny_llama(), add_bos=False)
    load(str(other))
    assert len(unpacked) == 2
    assert len(copies(cache)) == 2


def _flip(copy: Path) -> None:
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def _another(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"sha256": "0" * 64}))


def _replace(copy: Path) -> None:
    shutil.rmtree(copy)
    copy.write_text("a file")


DAMAGES = {
    "a bit": _flip,
    "no tokenizer": lambda copy: (copy / "tokenizer.json").unlink(),
    "no manifest": lambda copy: (copy / "manifest.json").unlink(),
    "half a manifest": lambda copy: os.truncate(copy / "manifest.json", 90),
    "a list": lambda copy: (copy / "manifest.json").write_text("[]"),
    "a pickle": lambda copy: (copy / "pytorch_model.bin").write_bytes(b"x"),
    "a folder": lambda copy: (copy / "more").mkdir(),
    "of another file": _another,
    "no folder": _replace,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_made_again(packed, cache, unpacked, damage):
    first = load(str(packed))
    (copy,) = copies(cache)
    DAMAGES[damage](copy)
    assert_equal(first, load(str(packed)))
    assert len(unpacked) == 2
    assert copies(cache) == [copy]
    assert_equal(first, load(str(packed)))
    assert len(unpacked) == 2


def test_two_processes_leave_one_copy(packed, cache, unpacked, monkeypatch):
    compare = converted._is_same

    def meanwhile(*parts):
        monkeypatch.setattr(converted, "_is_same", compare)
        load(str(packed))  # another process is first
        return compare(*parts)

    monkeypatch.setattr(converted, "_is_same", meanwhile)
    first = load(str(packed))
    assert len(unpacked) == 2
    assert len(copies(cache)) == 1
    assert_equal(first, load(str(packed)))
    assert len(unpacked) == 2


def _full(*_args):
    raise RuntimeError("No space left on device")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("safetensors.torch.save_file", _full),
        ("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10**3)),
        ("howlinear.models.converted._is_same", lambda *_: False),
        ("howlinear.models.converted.LARGEST", 1000),
    ],
)
def test_what_cannot_be_kept_is_no_error(packed, cache, monkeypatch, name, replacement):
    monkeypatch.setattr(name, replacement)
    assert_equal(without_copy(packed), load(str(packed)))
    assert copies(cache) == []


def test_a_cache_that_cannot_be_written_is_no_error(packed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HOWLINEAR_CACHE", str(tmp_path / "file"))
    assert load(str(packed))
    assert (tmp_path / "file").read_text() == "not a folder"


def test_with_settings_beside_it_the_file_itself_is_read(packed, cache, tmp_path, unpacked):
    shutil.copy(packed, tmp_path)
    load(str(tmp_path / "tiny.gguf"))
    settings = tmp_path / "tokenizer_config.json"  # transformers takes the class from it
    settings.write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert type(load(str(tmp_path / "tiny.gguf"))[1]).__name__ == "GPT2Tokenizer"
    settings.unlink()
    assert type(load(str(tmp_path / "tiny.gguf"))[1]).__name__ != "GPT2Tokenizer"
    assert len(unpacked) == 2


def test_unfinished_copies_of_killed_processes_are_removed(packed, cache):
    for name, age in ((".old", converted.ABANDONED + 60), (".new", 60)):
        (cache / "converted" / name / "copy").mkdir(parents=True)
        then = (cache / "converted" / name).stat().st_mtime - age
        os.utime(cache / "converted" / name, (then, then))
    load(str(packed))
    assert [p.name for p in copies(cache)][:-1] == [".new"]


def test_offloaded_models_are_read_from_their_file(packed, cache):
    load(str(packed))
    assert "is packed" in complaint(str(packed), device_map="disk")
    model, _ = load(str(packed), device_map="auto")
    assert torch.equal(model(IDS).logits, without_copy(packed, device_map="auto")[0](IDS).logits)


def test_mistakes_have_the_same_line(packed, cache):
    def check(net, tokenizer):
        blocks(net, "nothing")

    before = complaint(str(packed), check=check)
    load(str(packed))
    assert complaint(str(packed), check=check) == before


@pytest.mark.parametrize("value", ["", "off", "OFF"])
def test_switched_off_nothing_is_written(packed, tmp_path, monkeypatch, value):
    monkeypatch.setenv("HOWLINEAR_CACHE", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    load(str(packed))
    assert list(tmp_path.iterdir()) == []


def test_where_copies_are(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value, folder in (
        ("HOWLINEAR_CACHE", "~/kept", "/home/someone/kept"),
        ("XDG_CACHE_HOME", "/xdg", "/xdg/howlinear"),
        ("XDG_CACHE_HOME", "", "/home/someone/.cache/howlinear"),
    ):
        monkeypatch.delenv("HOWLINEAR_CACHE", raising=False)
        monkeypatch.setenv(name, value)
        assert converted.cache_folder() == Path(folder)
