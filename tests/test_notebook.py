"""Results in a notebook, and the example notebook, which runs."""

import ast
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from howlinear.report.notebook import html_of
from reports import HOSTILE, block

NOTEBOOK = Path(__file__).parents[1] / "examples" / "profile.ipynb"


def run_cell(source, scope):
    """Run a cell as a notebook does; what its last line is, if that is an expression."""
    parsed = ast.parse(source)
    last = parsed.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(parsed, NOTEBOOK.name, "exec"), scope)
        return None
    parsed.body.pop()
    exec(compile(parsed, NOTEBOOK.name, "exec"), scope)
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), scope)


@pytest.mark.real
@pytest.mark.usefixtures("wikitext")
def test_the_example_notebook_runs(builtin, monkeypatch, capsys):
    monkeypatch.setattr("howlinear.models.load", lambda *_: builtin)  # loaded once for all tests
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    scope, shown = {}, []
    for cell in code:
        value = run_cell("".join(cell["source"]), scope)
        if hasattr(value, "_repr_html_"):
            shown.append(value._repr_html_())
    (html,) = shown
    assert "model.layers.11.mlp" in html
    printed = capsys.readouterr().out
    for (
        cell
    ) in code:  # the stored outputs say the same in other digits, which depend on the machine
        for output in cell["outputs"]:
            words = "".join(output.get("text", [])).split()
            assert all(word in printed for word in words if word.isalpha())
    assert "block 11: R2 0." in printed
    assert "first-position only" in printed


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


def test_results_of_other_kinds_show_what_is_plain():
    many = [{"index": i, "r2": 0.5, "nested": {"a": 1}, "none": None} for i in range(250)]
    root = ElementTree.fromstring(html_of("a line", {"kind": "other", "blocks": many}))
    assert [th.text for th in root.findall("table/thead/tr/th")] == ["index", "r2", "none"]
    assert len(root.findall("table/tbody/tr")) == 200
    assert root.findall("p")[1].text == "and 50 more"
    assert ElementTree.fromstring(html_of("a line", {"kind": "other"})).findall("table") == []
