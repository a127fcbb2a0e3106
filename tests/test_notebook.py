"""Results in a notebook. The example notebook runs in test_real."""

from xml.etree import ElementTree

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
