"""docs/architecture.md names what is there: packages in their order, functions, files."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import howlinear
from test_layers import ORDER

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def resolve(name):
    """A module, or what a module holds, by its dotted name below `howlinear`."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(["howlinear", *parts[:n]]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def named(text):
    """Dotted names of the package that a page mentions."""
    packages = "|".join(ORDER)
    return sorted(set(re.findall(rf"`((?:{packages})(?:\.\w+)+)(?:\([^`]*\))?`", text)))


def walks():
    """Command -> the dotted names of its steps."""
    section = TEXT.partition("## Four walks")[2].partition("\n## ")[0]
    parts = re.split(r"^### `howlinear (\w+)`.*$", section, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_tree_lists_every_package_in_order():
    tree = TEXT.partition("```\n")[2].partition("```")[0]
    assert re.findall(r"^  (\w+)/", tree, flags=re.M) == list(ORDER)


@pytest.mark.parametrize("name", named(TEXT))
def test_everything_named_exists(name):
    resolve(name)


def test_a_name_that_does_not_exist_is_found():
    assert named("`run.folder.nothing` and `models.hooks.tap(model)`, `nope.x`") == [
        "models.hooks.tap",
        "run.folder.nothing",
    ]
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("records.files.nothing")
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("records.nothing.at_all")


@pytest.mark.parametrize("command", ["profile", "swap", "compress", "report"])
def test_a_walk_has_ten_hops_or_fewer(command):
    hops = re.findall(r"^\d+\. ", walks()[command], flags=re.M)
    assert 3 <= len(hops) <= 10
    for step in re.split(r"^\d+\. ", walks()[command], flags=re.M)[1:]:
        assert named(step), step


def test_every_file_named_exists():
    paths = set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", TEXT))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_there_are_recipes_for_what_people_add():
    titles = re.findall(r"^### Add (.+)$", TEXT, flags=re.M)
    assert titles == ["a model family", "a probe", "an export", "a column of the report"]


def functions(root):
    """(lines, module, name) of every function."""
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node.end_lineno - node.lineno + 1, path.relative_to(root), node


def test_files_and_functions_can_be_read_in_one_sitting():
    root = Path(howlinear.__file__).parent
    assert [p for p in root.rglob("*.py") if len(p.read_text().splitlines()) > 500] == []
    long = [(lines, str(path), f.name) for lines, path, f in functions(root) if lines > 40]
    assert [f for f in long if f[0] > 60] == []
    assert len(long) <= 8, long
    many = [
        (str(path), f.name)
        for _, path, f in functions(root)
        if len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs) > 10
        and path.parts[0] != "cli"  # a flag is a parameter there
    ]
    assert many == []
