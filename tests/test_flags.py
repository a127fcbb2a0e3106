"""Messages of the library name Python's arguments; the command line turns them into its flags."""

import ast
import functools
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

import howlinear
from howlinear.cli.app import _flags
from howlinear.cli.flags import with_flags

SOURCES = Path(howlinear.__file__).parent
FLAGS = _flags()
QUOTED = re.compile(r'`([a-z_]+)(?:="?[\w-]+"?)?`')
ELSEWHERE = (
    "vllm serve",
    "pip install",
    "--force-reinstall",
    "--port",
    "howlinear ",
)  # other commands


@functools.cache
def _texts():
    """What the library may say: strings of its modules that are no docstrings, but for model cards."""
    texts = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0] in ("cli", "report") or path.name == "card.py":
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant))
        for node in strings:
            if isinstance(node.value, str) and id(node) not in docstrings:
                texts.append((path.name, node.value))
    return texts


def test_the_library_names_no_flags():
    flags = [(name, text) for name, text in _texts() if re.search(r"(^|[\s(])(--[a-z]|-o\b)", text)]
    assert [f for f in flags if not any(part in f[1] for part in ELSEWHERE)] == []


def test_every_argument_in_a_message_is_a_flag():
    named = [m[0] for _, text in _texts() for m in QUOTED.finditer(text)]
    assert len(named) > 50
    assert {name for name in named if with_flags(name, FLAGS) == name} == set()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ('use `bos="auto"` or `bos="never"`', "use --bos auto or --bos never"),
        ("lower `length` or give more text", "lower --max-length or give more text"),
        ("add `trust_remote_code=True`", "add --trust-remote-code"),
        ("`at` '9' is not among the blocks", "--blocks '9' is not among the blocks"),
        ("run `hf auth login`", "run `hf auth login`"),
        ("`tiktoken` is required", "`tiktoken` is required"),  # of another library
    ],
)
def test_arguments_become_flags(message, line):
    assert with_flags(message, FLAGS) == line


def test_hf_runs_it_as_an_extension(tmp_path, monkeypatch, capfd):
    """`hf howlinear` finds the executable that `hf extensions install` wrote into its manifest."""
    extensions = pytest.importorskip("huggingface_hub.cli.extensions")
    project = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["hf-howlinear"] == project["scripts"]["howlinear"]
    script = tmp_path / "script"  # what an installer makes of that line
    script.write_text(f"#!{sys.executable}\nfrom howlinear.cli.app import main\nmain()\n")
    script.chmod(0o755)
    about = {"owner": "someone", "repo": "hf-howlinear", "repo_id": "someone/hf-howlinear"}
    about |= {"short_name": "howlinear", "executable_path": str(script), "type": "python"}
    (tmp_path / "hf-howlinear").mkdir()
    manifest = json.dumps(about | {"installed_at": "2026-01-01T00:00:00"})
    (tmp_path / "hf-howlinear" / "manifest.json").write_text(manifest)
    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path)
    monkeypatch.setattr(extensions.constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    code = extensions.dispatch_unknown_top_level_extension(["howlinear", "--version"], set())
    assert code == 0
    assert capfd.readouterr().out == f"howlinear {howlinear.__version__}\n"
