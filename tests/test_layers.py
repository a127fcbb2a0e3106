"""Each package imports only packages listed above it: who may import whom, read from one list."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import howlinear

ROOT = Path(howlinear.__file__).parent

#: Lower packages first. A package may import itself and the packages before it.
ORDER = (
    "records",
    "linear",
    "run",
    "report",
    "models",
    "losses",
    "profiling",
    "swapping",
    "probing",
    "compression",
    "controls",
    "export",
    "cli",
)
LIGHT = ("records", "report", "cli")  # imported without torch
HEAVY = {"torch", "transformers", "numpy", "accelerate", "datasets"}


def modules(root):
    """Every module below a folder, by its dotted name within the package."""
    paths = sorted(root.rglob("*.py"))
    names = (".".join(path.relative_to(root).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


@cache
def imported(path, inside_functions=True):
    """Dotted names that a file imports: everywhere, or only when it is imported itself."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("a relative import")
    return names


def violations(root, order=ORDER):
    """Imports that point to a package further down the list, to `cli`, or to no package."""
    wrong = []
    for name, path in modules(root).items():
        package = name.partition(".")[0]
        for target in sorted(imported(path)):
            if target == "a relative import":
                wrong.append(f"{name}: {target}")
            parts = target.split(".")
            if parts[0] != "howlinear" or len(parts) < 2 or parts[1] not in order:
                continue
            allowed = order[: order.index(package) + 1] if package in order else order
            if parts[1] not in allowed and package != "__init__":
                wrong.append(f"{name} imports {target}")
    return wrong


def test_every_package_is_in_the_order():
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__"}


def test_each_package_imports_only_packages_above_it():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("records/deep/low.py", "from howlinear.linear.affine import fit"),
        ("models/hooks.py", "def f():\n    from howlinear.losses import perplexity"),
        ("export/hf.py", "import howlinear.cli.app"),
        ("report/page.py", "from howlinear import models"),
        ("linear/affine.py", "from ..models import hooks"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, module, line):
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text("from howlinear.records.files import clean\n")
    assert violations(tmp_path) == []
    imported.cache_clear()
    path.write_text(line)
    assert len(violations(tmp_path)) == 1
    imported.cache_clear()


def test_nobody_imports_the_command_line():
    importers = {
        name
        for name, path in modules(ROOT).items()
        if any(target.startswith("howlinear.cli") for target in imported(path))
    }
    assert {name for name in importers if not name.startswith("cli")} == {"__main__"}


def circles(root):
    """Chains of modules that import each other when they are imported."""
    every = modules(root)

    def targets(name):
        names = imported(every[name], inside_functions=False)
        local = [n.removeprefix("howlinear.") for n in names if n.startswith("howlinear.")]
        return {m for n in local for m in (n, n.rpartition(".")[0]) if m in every and m != name}

    found, done = [], set()

    def walk(name, trail):
        if name in trail:
            found.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for target in sorted(targets(name)):
                walk(target, (*trail, name))
            done.add(name)

    for name in every:
        walk(name, ())
    return found


def test_nothing_points_back(tmp_path):
    assert circles(ROOT) == []
    (tmp_path / "a.py").write_text("from howlinear.b import x")
    (tmp_path / "b.py").write_text("import howlinear.a")
    assert circles(tmp_path) == ["a -> b -> a"]


@pytest.mark.parametrize("package", LIGHT)
def test_results_are_read_and_drawn_without_torch(package):
    names = [n for n in modules(ROOT) if n.partition(".")[0] == package]
    program = "; ".join(f"import howlinear.{name}" for name in names)
    program += f"; import sys; print(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_linear_knows_no_models():
    for name, path in modules(ROOT).items():
        if name.startswith("linear."):
            assert not any(n.startswith("transformers") for n in imported(path)), name


def test_every_package_says_what_lives_there():
    for package in ORDER:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
        assert len(text.splitlines()) >= 3, package


def test_public_names_are_there_and_share_no_modules_name():
    """Outside the command line, where a command's module is called as the command is."""
    names = {part for m in modules(ROOT) if not m.startswith("cli") for part in m.split(".")}
    for name in howlinear.__all__:
        assert getattr(howlinear, name).__name__ == name
        assert name not in names
