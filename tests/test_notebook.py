"""Results in a notebook, and the notebooks of examples/, which run as they are."""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest

import howlinear
from howlinear.report.notebook import html_of, training_html
from reports import HOSTILE, block


def test_a_result_is_a_drawing_and_a_table_with_names_as_text():
    blocks = [block(i, path=f"{HOSTILE}{i}") for i in range(4)]
    data = {"kind": "profile", "blocks": [b.to_dict() for b in blocks]}
    html = html_of(HOSTILE, data, [("run", blocks)])
    root = ElementTree.fromstring(html)  # well-formed
    assert root.find("p").text == HOSTILE
    rows = root.findall("table/tbody/tr")
    assert [row.findall("td")[1].text for row in rows] == [f"{HOSTILE}{i}" for i in range(4)]
    assert "<script" not in html
    assert html.count("<svg") == 1


def test_a_monitor_is_a_heat_map_once_it_has_measured():
    assert "<svg" not in training_html("nothing yet", [])
    rows = [
        {"step": s, "blocks": [{"index": i, "r2": 0.5} for i in range(3)]} for s in (0, 10, 20, 30)
    ]
    root = ElementTree.fromstring(training_html("a line", rows))
    space = "{http://www.w3.org/2000/svg}"
    cells = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert len(cells) == 12


def test_results_of_other_kinds_show_what_is_plain():
    many = [{"index": i, "r2": 0.5, "nested": {"a": 1}, "none": None} for i in range(250)]
    root = ElementTree.fromstring(html_of("a line", {"kind": "other", "blocks": many}))
    assert [th.text for th in root.findall("table/thead/tr/th")] == ["index", "r2", "none"]
    assert len(root.findall("table/tbody/tr")) == 200
    assert root.findall("p")[1].text == "and 50 more"
    assert ElementTree.fromstring(html_of("a line", {"kind": "other"})).findall("table") == []


# -- examples/ ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
SAYS = {  # what each notebook prints or shows, whatever the machine
    "profile": ["model.layers.7.mlp", "RunComparison: 2 runs", "SwapCost of block 7"],
    "tokens": ["TokenErrors of 8192 rows of block 2", "x the mean", "hidden units: ["],
    "compress": ["BlockPlan(index=", "parameters removed; perplexity ", "hf 1,", "The game was"],
}


def run_cell(source, scope):
    """Run a cell as a notebook does; what its last line is, if that is an expression."""
    parsed = ast.parse(source)
    last = parsed.body[-1]
    if isinstance(last, ast.Expr):
        parsed.body.pop()
    exec(compile(parsed, "notebook", "exec"), scope)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "notebook", "eval"), scope)
    return None


def test_every_notebook_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(SAYS)


@pytest.mark.usefixtures("alone", "reloaded_here")
@pytest.mark.parametrize("name", SAYS)
def test_a_notebook_runs(name, wikitext, tmp_path, monkeypatch, capsys):
    """With the text of this session, and with a stand-in for matplotlib."""
    texts = {"wikitext": wikitext, "python-docs": howlinear.builtin_text("python-docs")}
    monkeypatch.setattr(
        howlinear, "builtin_text", lambda name="wikitext": texts[name], raising=False
    )
    plots = SimpleNamespace(subplots=lambda: (None, MagicMock()))
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(pyplot=plots))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plots)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    scope = {}
    for cell in cells:
        if (
            cell["cell_type"] == "code"
            and (value := run_cell("".join(cell["source"]), scope)) is not None
        ):
            print(value, getattr(value, "_repr_html_", lambda: "")())
    shown = capsys.readouterr().out
    assert [words for words in SAYS[name] if words not in shown] == []
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell["source"]))
