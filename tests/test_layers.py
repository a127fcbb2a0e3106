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


@pytest.mark.parametrize("name", ["moments", "affine", "records", "families", "ggufs", "words"])
def test_the_ground_floor_imports_no_sibling(name):
    assert siblings(name) == set()


LIGHT = "records plan jackknife escaping words results tables reproducing terminal terminal_probe"
LIGHT += (
    " terminal_compress terminal_compare terminal_reproduce cli cli_parts cli_control cli_report"
)
LIGHT += " cli_reproduce"


@pytest.mark.parametrize("name", LIGHT.split())
def test_torch_is_not_needed_for_reading_results(name):
    top = {
        n
        for n in ast.parse(MODULES[name].read_text()).body
        if isinstance(n, ast.Import | ast.ImportFrom)
    }
    heavy = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    heavy |= {n.module for n in top if isinstance(n, ast.ImportFrom)}
    assert not heavy & {"torch", "transformers", "numpy", "howlinear.profiling", "howlinear.affine"}


def test_the_report_is_pure():
    for path in (ROOT / "report").rglob("*.py"):
        ours = {n for n in imports(path) if n.startswith("howlinear.")}
        names = ("report", "records", "words", "jackknife", "escaping")
        below = tuple(f"howlinear.{name}" for name in names)
        assert not imports(path) & {"torch", "transformers", "numpy", "rich"}, path
        assert all(n.startswith(below) for n in ours), path


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
