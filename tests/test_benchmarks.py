"""Benchmarks are too long to run here: what they import from the package must at least be there."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from howlinear.models.generated import generated_windows

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_what_a_benchmark_imports_is_there(file):
    imports = [
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    ours = [node for node in imports if (node.module or "").split(".")[0] == "howlinear"]
    assert ours or file.parent != FOLDER
    for node in ours:
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                importlib.import_module(f"{node.module}.{name}")


@pytest.fixture
def heal(monkeypatch):
    """benchmarks/heal.py as a module; it drops the first entry of sys.path, its own folder."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("heal_command", FOLDER / "heal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_best_temperature_grows_with_the_logits(heal, capsys):
    folder = Path(__file__).parent / "models" / "llama"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = generated_windows(model, AutoTokenizer.from_pretrained(folder), 40, 64)
    text = {"input_ids": ids}
    heal.at_best_temperatures(model, {"the same": {}}, text, {"own": text})
    first, same = capsys.readouterr().out.splitlines()
    assert abs(float(first.split()[2].rstrip(":")) - 1) < 0.07  # the model's own text
    assert same.endswith("own +0.0000")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.2)
    assert heal.TEMPERATURES[int(heal.losses_at(model, text).argmin())] > 1.1
