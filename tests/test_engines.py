"""Exports in other engines, beside the original: `howlinear bench --engines`."""

import dataclasses
import importlib.util
import io
import json
import math
import re
import sys

import pytest
from rich.console import Console

from howlinear import load
from howlinear.cli.bench import show_engines
from howlinear.export import engines
from howlinear.export import write as export_write
from howlinear.export.engines import EngineSettings, Stored, run_engines
from howlinear.export.gguf_write import FILE
from howlinear.export.llama_cpp import LlamaCpp
from howlinear.models.loading import describe
from test_export_gguf import IDS, maps_of
from test_export_write import compression
from test_models import needs_gguf, tiny_llama
from test_models import write_gguf as write_source

pytestmark = [needs_gguf, pytest.mark.usefixtures("alone")]
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp"
)
SHORT = EngineSettings(length=24, new_tokens=4, repeats=2)
WINDOWS = IDS[:, :24] % 94  # whole characters


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch):
    monkeypatch.setenv("HOWLINEAR_CACHE", "off")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("packed") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def exported(packed, tmp_path_factory):
    """A GGUF export with one replaced block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOWLINEAR_CACHE", "off")
        model, out = load(str(packed))[0], tmp_path_factory.mktemp("exported") / "out"
    result = compression(model, maps_of(model), change=False)
    result.about["model"] = describe(model, str(packed))
    export_write.write_export(model, None, result, out, "gguf", packed, IDS[:2])
    return out


@needs_llama_cpp
def test_llama_cpp_runs_an_export_beside_the_original(exported, packed):
    found = run_engines(exported, load(str(packed))[0], packed, WINDOWS, SHORT)
    data = found.to_dict() | {"text": "a text"}
    rows = {row["model"]: row for row in data["rows"]}
    assert list(rows) == [
        *(
            "export f16",
            "original f16",
            "original q8_0",
            "export q8_0",
            "original q4_0",
            "export q4_0",
        )
    ]
    for row in rows.values():
        assert row["scored"] == WINDOWS[:, 1:].numel()
        assert row["largest_difference"] < (5e-3 if "f16" in row["model"] else 0.1)
        assert row["perplexity"] == pytest.approx(row["perplexity_ours"], rel=5e-3)
        assert row["top1"] > 0.95
        assert row["prefill"]["median"] > row["decode"]["median"] > 0
    assert rows["export f16"]["bytes"] == (exported / FILE).stat().st_size
    for model in ("export", "original"):
        sizes = [rows[f"{model} {kind}"]["bytes"] for kind in ("f16", "q8_0", "q4_0")]
        assert sizes == sorted(sizes, reverse=True)
    assert rows["export f16"]["perplexity"] != rows["original f16"]["perplexity"]
    problems = {engine["name"]: engine["problem"] for engine in data["engines"]}
    assert problems["llama.cpp"] is None
    assert problems["transformers"] == "does not run gguf"
    console = Console(file=io.StringIO(), width=80)
    show_engines(console, data)
    shown = console.file.getvalue()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "5 of 5" in shown


@needs_llama_cpp
def test_an_export_says_what_it_ran_in(exported):
    (line,) = [
        n
        for n in json.loads((exported / "compress.json").read_text())["exported"]["notes"]
        if "ran in" in n
    ]
    assert re.fullmatch(
        r"ran in llama.cpp [\d.]+: log-probabilities of \d\d tokens differ .* at most [\de.-]+ nats",
        line,
    )
    assert "- ran in llama.cpp" in (exported / "README.md").read_text()


@needs_llama_cpp
def test_another_model_is_told_apart(exported, packed):
    """A control: the engine runs the export, and ours is the original."""
    original = load(str(packed))[0]
    with LlamaCpp.start(exported / FILE, SHORT.most) as engine:
        wrong = engines._agreement(engine, original, WINDOWS)
    assert wrong["largest_difference"] > 0.05
    assert wrong["continuations_same"] < 5
    assert wrong["largest_margin"] > 0.001


def test_transformers_runs_in_a_process_of_its_own(tmp_path):
    model = tiny_llama().eval()
    model.save_pretrained(tmp_path)
    stored = Stored("export", tmp_path, model)
    with engines.ENGINES["transformers"].start(stored, SHORT) as (version, engine):
        same = engines._agreement(engine, model, WINDOWS)
        read, wrote = engine.speed(WINDOWS[0].tolist(), WINDOWS[0, :8].tolist(), 2)
    assert version.startswith("5.")
    assert same["largest_difference"] < 1e-4
    assert same["continuations_same"] == same["continuations"] == 5
    assert read > 0
    assert math.isfinite(wrote)  # a difference of two times: noise may make it negative here


def test_an_engine_that_fails_says_why(tmp_path):
    """vLLM is not in this environment: the process ends at its import."""
    start = engines._worker(lambda: sys.executable, "vllm", Stored("export", tmp_path, None), SHORT)
    with pytest.raises(ValueError, match="ModuleNotFoundError: No module named 'vllm'"), start:
        pass
    text = "a\nTraceback:\nValueError: the first line\nmore of it\n\n"
    assert engines._reason(text) == "ValueError: the first line"
    assert engines._reason("") == "it ended without a word"


def test_what_is_not_there_is_said(exported, monkeypatch):
    monkeypatch.setattr("howlinear.export.llama_cpp.installed", lambda: None)
    monkeypatch.setenv("PATH", "")
    found = run_engines(exported, None, None, WINDOWS, SHORT).to_dict()
    problems = {engine["name"]: engine["problem"] for engine in found["engines"]}
    assert problems["llama.cpp"] == "is not there: pip install xllamacpp"
    assert problems["vLLM"] == "is not there: no vllm on the path"
    assert found["rows"] == []


def test_code_is_run_only_if_asked_for(tmp_path):
    (tmp_path / "compress.json").write_text(json.dumps(recorded("hf", "float32")))
    found = run_engines(tmp_path, None, None, WINDOWS, SHORT)
    assert "trust_remote_code is off" in found.engines[0]["problem"]


def test_code_of_a_stock_folder_is_not_run(tmp_path):
    """Even if asked to trust: the kind is what the folder says of itself."""
    model, out = tiny_llama(), tmp_path / "out"
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    (out / "config.json").write_text(json.dumps(config))
    (out / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (out / "compress.json").write_text(json.dumps(recorded("stock", "float32")))
    (tmp_path / "work").mkdir()
    engines._stored(out, model, None, tmp_path / "work", trust=True)
    assert not (tmp_path / "ran").exists()


def recorded(kind, dtype, **more):
    model = {"id": "org/name", "weights": "0"}
    record = {"kind": "compress", "schema": 1, "model": model}
    return record | {"exported": {"kind": kind, "dtype": dtype}} | more


@pytest.mark.parametrize(
    "record",
    [
        *(recorded("hf", "nope"), recorded("gguf", "/tmp/x"), recorded("onnx", "float32")),
        *(recorded("hf", "float32", model={}), recorded("hf", "float32", exported="x")),
        {"kind": "compress", "schema": 1},
    ],
)
def test_a_foreign_record_is_refused(record, tmp_path):
    (tmp_path / "compress.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="no folder with a model that `howlinear compress` wrote"):
        engines.exported_kind(tmp_path)


def test_an_engine_that_breaks_spoils_no_export(exported, monkeypatch):
    def breaks(*args):
        raise RuntimeError("no such thing\nat all")

    row = dataclasses.replace(engines.ENGINES["llama.cpp"], missing=lambda: None, start=breaks)
    monkeypatch.setattr(engines, "ENGINES", {"llama.cpp": row})
    (note,) = engines.engine_notes(exported, "gguf", tiny_llama(), WINDOWS)
    assert note == "does not run in llama.cpp here: no such thing at all"


# ------------------------------------------------------------------------------- the command


@needs_llama_cpp
def test_the_command(exported, packed, here, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the moon. " * 200)
    short = ("--max-length", 24, "--new-tokens", 2, "--repeats", 1, "--tokens", 64)
    done = here("bench", exported, "--engines", "--against", packed, "--text-file", text, *short)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp" in done.stdout
    wrong = here("bench", packed.parent, "--engines")
    assert wrong.returncode == 2
    assert "no folder with a model that `howlinear compress` wrote" in wrong.stderr
