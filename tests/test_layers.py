"""Each arrow in the code points to a lower layer: who may import whom."""

import ast
from functools import cache
from pathlib import Path

import pytest

import howlinear

ROOT = Path(howlinear.__file__).parent
MODULES = {path.stem: path for path in ROOT.glob("*.py")}


@cache
def imports(path):
    """Names of modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def siblings(name):
    return {m for m in MODULES if f"howlinear.{m}" in imports(MODULES[name])}


@pytest.mark.parametrize("name", ["moments", "affine", "records", "families", "ggufs"])
def test_the_ground_floor_imports_no_sibling(name):
    assert siblings(name) == set()


@pytest.mark.parametrize(
    "name",
    [
        "records",
        "plan",
        "jackknife",
        "terminal",
        "reproducing",
        "terminal_reproduce",
        "cli",
        "cli_parts",
        "cli_control",
        "cli_reproduce",
    ],
)
def test_torch_is_not_needed_for_reading_results(name):
    top = {
        n
        for n in ast.parse(MODULES[name].read_text()).body
        if isinstance(n, ast.Import | ast.ImportFrom)
    }
    heavy = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    heavy |= {n.module for n in top if isinstance(n, ast.ImportFrom)}
    assert not heavy & {"torch", "transformers", "numpy", "howlinear.profiling", "howlinear.affine"}


def test_nobody_imports_the_command():
    assert {name for name in MODULES if "cli" in siblings(name)} == {"__main__"}


def test_nothing_points_back():
    seen = {}

    def depth(name, trail=()):
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name not in seen:
            seen[name] = 1 + max((depth(m, (*trail, name)) for m in siblings(name)), default=0)
        return seen[name]

    for name in MODULES.keys() - {"__init__"}:
        depth(name)
    assert seen["cli"] == max(seen[name] for name in seen if name != "__main__")


def test_public_names_are_there_and_share_no_modules_name():
    for name in howlinear.__all__:
        assert getattr(howlinear, name).__name__ == name
        assert name not in MODULES
