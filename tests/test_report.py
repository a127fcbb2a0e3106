"""The page and its figures: what is drawn is what was measured, and strings stay strings."""

import base64
import csv
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from io import BytesIO
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import scipy.stats

from howlinear.records.verdicts import SAFE
from howlinear.report import draw, page, read_run, read_runs
from howlinear.report.canvas import Canvas, Panel, Scale, reach
from howlinear.report.files import cell, converted, drawings, write_figures
from howlinear.report.markup import json_inside, tag
from howlinear.report.styles import DARK, LIGHT, RUNS, heat, shades
from howlinear.report.svg import standalone
from howlinear.report.verdicts import WORDS, verdict
from howlinear.run.folder import RunFolder
from reports import CONTROL, HOSTILE, block, planted_run, swap

NAMES = ["profile", "kinds", "rest", "signals", "smaller", "training", "spectra"]


class Parsed(HTMLParser):
    """Every element of a page: (name, attributes), in order; unclosed ones are an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in {"meta", "link", "br", "input"}:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def every(self, name, **wanted):
        wanted = {key.rstrip("_"): value for key, value in wanted.items()}
        return [a for n, a in self.elements if n == name and wanted.items() <= a.items()]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return planted_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def made(full):
    runs = read_runs([full])
    figures = draw(runs)
    return runs, {f.name: f for f in figures}, page(runs, figures)


def marks(figure, kind, part):
    return [m for m in figure.canvas.marks if m.kind == kind and part in m.part.split()]


def test_a_full_run_has_every_figure_in_a_small_page(made):
    _, figures, html = made
    assert list(figures) == NAMES  # runs side by side need two
    assert len(html.encode()) < 400_000
    parsed = Parsed(html)
    titles = [text for name, text in parsed.texts if name == "h2"]
    assert all(figure.title in titles for figure in figures.values())
    assert len(parsed.every("details")) == len(figures)  # numbers of each


def r2_axis(figure):
    """The y of R2 0, and the pixels from there to R2 1: from the labels of the axis."""
    ticks = [m for m in figure.canvas.marks if m.kind == "text" and m.anchor == "end"]
    at = {m.text: m.points[0][1] - 3.5 for m in reversed(ticks) if m.text in ("0", "1")}
    return at["0"], at["0"] - at["1"]


def test_points_stand_where_their_numbers_say(made):
    runs, figures, _ = made
    dots = marks(figures["profile"], "dot", "main")
    dots = [d for d in dots if d.about]  # not the legend's
    assert len(dots) == 30
    bottom, height = r2_axis(figures["profile"])
    pixels = [bottom - height * b.r2 for b in runs[0].blocks]
    assert [d.points[0][1] for d in dots] == pytest.approx(pixels)
    xs = [d.points[0][0] for d in dots]
    steps = [b - a for a, b in pairwise(xs)]
    assert steps == pytest.approx([steps[0]] * 29)
    bars = [m for m in marks(figures["profile"], "line", "main") if m.mode == "thin"]
    halves = [abs(m.points[1][1] - m.points[0][1]) / 2 for m in bars if len(m.points) == 2]
    assert halves == pytest.approx([height * (b.r2_se or 0) for b in runs[0].blocks])


def test_costs_are_on_a_log_scale(made):
    runs, figures, _ = made
    costs = [m for m in marks(figures["profile"], "dot", "r0") if "KL" in m.about]
    at = {int(re.search(r"block (\d+)", m.about)[1]): m for m in costs}
    y = {k: m.points[0][1] for k, m in at.items()}
    logs = {k: math.log(s.kl) for k, s in runs[0].swaps.items()}
    slope = (y[29] - y[0]) / (logs[29] - logs[0])
    assert slope < 0
    assert all(y[k] - y[0] == pytest.approx(slope * (logs[k] - logs[0])) for k in logs)
    assert at[5].shape == "circle"


def test_a_page_shows_blocks_of_several_settings_and_says_so(tmp_path):
    run = RunFolder(planted_run(tmp_path / "run", blocks=3))
    control = {"kind": "control-random-init", "schema": 1, "settings": {"seeds": 2}}
    run.write(control | {"blocks": [{"index": i, "low": 0.1, "high": 0.2} for i in range(3)]})
    one = {"settings": {"seeds": 9}, "blocks": [{"index": 1, "low": 0.3, "high": 0.4}]}
    run.add(control | one)
    read = read_run(run.folder)
    assert read.untrained == {0: (0.1, 0.2), 1: (0.3, 0.4), 2: (0.1, 0.2)}
    note = "control-random-init of blocks 0,2 with other settings: seeds 2"
    assert read.left_out == [note]
    assert note in page([read], draw([read]))


def test_untrained_blocks_and_the_tokens_that_leave_most(made):
    _, figures, html = made
    bands = marks(figures["profile"], "line", "untrained")
    assert len(bands) == 29
    bottom, height = r2_axis(figures["profile"])
    ends = [bottom - height * r for r in (0.096, 0.204)]
    assert [y for _, y in bands[0].points] == pytest.approx(ends)
    (below,) = marks(figures["profile"], "dot", "untrained")
    assert below.shape == "down"
    assert html.count("␣to\\x1b[31mken\\u202e\\x00\\ud800") == 8  # a probed block each
    assert "Grey" in figures["profile"].reading


def test_rank_correlations_are_scipys(made):
    runs, figures, _ = made
    found = {row[1]: row[2] for row in figures["signals"].rows}
    assert len(found) == 5
    costs = [runs[0].swaps[b.index].kl_plain for b in runs[0].blocks]
    for name, value in {
        "1 - R2": [1 - b.r2 for b in runs[0].blocks],
        "expected KL": [b.expected_kl for b in runs[0].blocks],
    }.items():
        assert found[name] == pytest.approx(scipy.stats.spearmanr(value, costs).statistic)


def test_every_figure_has_its_numbers_and_says_them_on_hovering(made):
    _, figures, html = made
    rows = {"profile": 30, "kinds": 30, "rest": 8, "signals": 5, "smaller": 12}
    rows |= {"training": 4, "spectra": 60}
    assert {name: len(f.rows) for name, f in figures.items()} == rows
    assert all(len(row) == len(f.columns) for f in figures.values() for row in f.rows)
    for figure in figures.values():
        said = [m for m in figure.canvas.marks if m.about]
        assert len(said) >= 12
    drawn = [canvas for f in figures.values() for canvas in (f.canvas, f.narrow)]
    assert html.count("<title>") == 1 + sum(bool(m.about) for c in drawn for m in c.marks)


@pytest.mark.parametrize("count", [1, 3])
def test_no_drawing_has_anything_outside_it(full, count):
    runs = read_runs([full]) * count
    for figure in draw(runs):
        for canvas in (figure.canvas, figure.narrow):
            for m in canvas.marks:
                wide = 6.0 * len(m.text) * (not m.turned)
                start = {"start": 0.0, "middle": wide / 2, "end": wide}[m.anchor]
                ends = [(x - start, x - start + wide) for x, _ in m.points]
                assert min(low for low, _ in ends) >= -1, (figure.name, m)
                assert max(high for _, high in ends) <= canvas.width + 1, (figure.name, m)
                assert all(-1 <= y <= canvas.height + 1 for _, y in m.points), (figure.name, m)


def test_the_heat_map_is_darker_where_r2_is_lower(made):
    _, figures, _ = made
    boxes = {m.about: m.colour for m in figures["training"].canvas.marks if m.about}
    assert boxes["step 0, block 0: 0.000"] == heat(0.0) == "#00224e"
    assert boxes["step 100, block 15: 0.500"] == heat(0.5)
    light = [sum(int(heat(k / 20)[i : i + 2], 16) for i in (1, 3, 5)) for k in range(18)]
    assert light == sorted(light)


def contrast(a, b):
    """As the accessibility guidelines define it."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(palette):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name in RUNS:
        assert contrast(palette[name], palette["paper"]) >= 3
    for name in ("ink", "muted"):
        assert contrast(palette[name], palette["paper"]) >= 4.5
    for name in ("safe", "some", "costly", "undecided"):
        assert contrast(palette[name], palette["paper"]) >= 3
    for name in ("safe", "some", "costly"):
        assert contrast(palette[name], palette[f"on-{name}"]) >= 4.5
    assert all(
        contrast(*shade) >= 4.5 for shade in re.findall(r"(#\w{6});color:(#\w{6})", shades())
    )


# How colours look without one of the three kinds of cones (Machado, Oliveira and Fernandes 2009)
MISSING = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def seen(colour, missing):
    """A colour as a reader without these cones sees it, in CIE Lab."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    rgb = [min(1, max(0, dot(row, linear))) for row in MISSING[missing]]
    xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (max(dot(row, rgb), 0.008856) ** (1 / 3) for row in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_verdicts_look_different_to_everybody(palette, missing):
    looks = [seen(palette[name], missing) for name in ("safe", "some", "costly", "undecided")]
    assert min(math.dist(a, b) for a, b in combinations(looks, 2)) > 15
    if missing == "green":  # the negative control: red and green of the same lightness
        assert math.dist(seen("#c0504d", missing), seen("#7a7a3a", missing)) < 15


def test_the_page_needs_and_allows_nothing_else(made):
    *_, html = made
    parsed = Parsed(html)
    (policy,) = parsed.every("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.split(" ", 1) for rule in policy["content"].split("; "))
    assert rules["default-src"] == "'none'"
    for name, text in (("style", parsed.texts), ("script", parsed.texts)):
        (inside,) = [t for n, t in text if n == name and not t.lstrip().startswith("{")]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    attributes = [pair for _, given in parsed.elements for pair in given.items()]
    assert not [k for k, _ in attributes if k.startswith("on") or k in ("style", "src")]
    links = {v for k, v in attributes if k in ("href", "action", "xlink:href")}
    assert links == {"data:,", *(f"#block-0-{i}" for i in range(30))}
    assert links - {"data:,"} <= {f"#{v}" for k, v in attributes if k == "id"}
    assert "http" not in re.sub(r"arXiv|http-equiv", "", html)
    assert "@import" not in html
    assert "url(" not in html


def test_switches_act_on_parts_that_are_there(made):
    *_, html = made
    parsed = Parsed(html)
    (style,) = [t for n, t in parsed.texts if n == "style"]
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    classes = {c for _, a in parsed.elements for c in (a.get("class") or "").split()}
    rules = re.findall(r"^#(\w+)\S*\(#([\w-]+):.*?\) \.hl \.(\w+)\{display:none\}", style, re.M)
    assert len(rules) == 1 + 30
    for figure, switch, part in rules:
        assert figure in ids
        assert switch in ids
        assert part in classes
    labels = parsed.every("label")
    assert len(parsed.every("input")) + len(parsed.every("select")) == len(labels)


def test_strange_names_are_text_everywhere(tmp_path):
    names = {"model": HOSTILE, "command": f"howlinear profile {HOSTILE}", "notes": [CONTROL]}
    a = planted_run(
        tmp_path / "a", blocks=3, model=HOSTILE, **{k: names[k] for k in ("command", "notes")}
    )
    data = json.loads((a / "profile.json").read_text())
    data["blocks"][1]["path"] = f'"]]>{HOSTILE}{CONTROL}'
    data["blocks"][2]["kind"] = HOSTILE
    data["corpus"]["name"] = CONTROL
    (a / "profile.json").write_text(json.dumps(data))
    curve = json.loads((a / "compress.json").read_text())
    curve["curve"][0]["method"] = f"=HYPERLINK{HOSTILE}"
    (a / "compress.json").write_text(json.dumps(curve))
    runs = read_runs([a])
    figures = draw(runs)
    html = page(runs, figures)
    parsed = Parsed(html)
    assert len(parsed.every("script")) == 2  # ours, and the numbers
    shown = [t for n, t in parsed.texts if n not in ("script", "style")]
    assert any(f"How linear is {HOSTILE}?" == t for t in shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", html)
    html.encode("utf-8")  # a lone surrogate would raise
    (numbers,) = [t for n, t in parsed.texts if n == "script" and t.startswith("{")]
    assert json.loads(numbers)["runs"][0]["model"]["id"] == HOSTILE
    assert not re.search("[<>&]", numbers)
    for figure in figures:
        ElementTree.fromstring(standalone(figure.canvas, HOSTILE + CONTROL))
    write_figures([f for f in figures if f.name == "smaller"], tmp_path / "figures")
    table = list(csv.reader((tmp_path / "figures" / "smaller.csv").open(newline="")))
    assert f"'=HYPERLINK{HOSTILE}" in {row[1] for row in table}


def test_cells_of_a_spreadsheet():
    assert [cell(v) for v in (-1.5, 3, None, math.nan, "-x", "@a", "a=b", "\ta")] == [
        *(-1.5, 3, "", "", "'-x", "'@a", "a=b", "\\ta")
    ]


def test_markup_escapes_what_is_not_markup():
    assert tag("a", "x<y", class_='"q"', hidden=True, title=None) == (
        '<a class="&quot;q&quot;" hidden>x&lt;y</a>'
    )
    assert tag("p", tag("b", "&")) == "<p><b>&amp;</b></p>"
    assert json.loads(json_inside({"a": "</script>\u2028&", "b": math.inf})) == {
        "a": "</script>\u2028&",
        "b": None,
    }
    assert "</" not in json_inside({"a": "</script>"})


@pytest.mark.parametrize(
    ("own", "cost", "word", "says"),
    [
        ({"r2": 0.7}, {"kl": 0.02}, "safe", ""),
        ({"r2": 0.5}, {"kl": 0.02}, "safe", "R2 is low, but the model hardly depends"),
        (
            {"first_share": 0.93, "kind": "first-position only"},
            {"kl": 0.02, "units": [1, 2], "kl_plain": 2.0},
            "safe with units",
            "One matrix beside 2 hidden units of the block. An attention sink: the first position "
            "carries 93 % of the variance.",
        ),
        ({}, {"kl": 0.05}, "some cost", ""),
        ({}, {"kl": 0.029}, "undecided", "interval of KL is 0.0275 to 0.0306 nats: more held-out"),
        ({}, {"kl": 0.02, "windows": 9}, "undecided", "nats on 9 windows of at least 16: more"),
        ({}, {"kl": 0.02, "kl_se": None}, "undecided", "no standard error"),
        ({"r2": 0.9}, {"kl": 0.3}, "costly", "R2 is high, but the model depends"),
        ({}, {"kl": 0.3, "kl_mean": 0.31}, "costly", "A constant does about as well (0.3100 nats)"),
        ({"r2_scalar": 0.8, "r2": 0.6}, None, "likely safe", "raise the scalar R2."),
        ({"expected_kl": 0.05}, None, "likely some cost", "Estimated from the profile"),
        (
            {"expected_kl": 2.0, "first_share": 0.9, "sink_shares": [0.5, 0.1]},
            None,
            "likely costly",
            "With the hidden units kept that write the sink, likely far less.",
        ),
        ({"expected_kl": None}, None, "not measured", "there is no estimate"),
        ({}, {"kl": None}, "not measured", "Its map: cosine 0.900, stream error 0.02."),
        ({"kind": "outlier-concentrated"}, {"kl": 1e3}, "costly", "A few large features carry R2."),
    ],
)
def test_verdicts_say_why(own, cost, word, says):
    found, why = verdict(block(0, **own), None if cost is None else swap(0, **cost), SAFE)
    assert found == word
    assert found in WORDS
    assert says in why


def test_scales_place_and_mark():
    linear, log = Scale(0, 10, 100, 200), Scale(1, 100, 0, 50, log=True)
    assert [linear(v) for v in (0, 5, 10, 99, -9)] == [100, 150, 200, 200, 100]
    assert [log(v) for v in (1, 10, 100, 0, -3)] == pytest.approx([0, 25, 50, 0, 0])
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    assert log.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Scale(1e-9, 1e6, 0, 1, log=True).ticks()[0] == pytest.approx(1e-9)
    assert len(Scale(1e-9, 1e6, 0, 1, log=True).ticks()) <= 8
    low, high = reach([3.0])
    assert low < 3 < high
    assert reach([-1.0, 0.0], log=True) == (0.1, 10.0)
    panel = Panel(Canvas(10, 10), linear, Scale(0, 1, 100, 0))
    panel.dot(1, -5.0, "c0")
    panel.dot(1, 5.0, "c0")
    panel.dot(-3, 0.5, "c0")
    panel.dot(30, 0.5, "c0")
    panel.line([(0, 0.0), (1, 1.0), (2, None), (3, 0.5)], "c0")
    assert [m.shape for m in panel.canvas.marks[:4]] == ["down", "up", "left", "right"]
    assert len(panel.canvas.marks) == 5  # a single point is no line


def test_several_runs_are_laid_over_one_another(tmp_path):
    folders = [planted_run(tmp_path / name, blocks=6, full=False) for name in ("a", "b")]
    data = json.loads((folders[1] / "profile.json").read_text())
    for b in data["blocks"]:
        b["r2"] = 1 - b["r2"]
        b["fold_sums"] = [[tot - res, tot] for res, tot in b["fold_sums"]]
    (folders[1] / "profile.json").write_text(json.dumps(data))
    runs = read_runs(folders)
    figures = {f.name: f for f in draw(runs)}
    assert list(figures) == ["profile", "kinds", "alike", "spectra"]
    for i in (0, 1):
        of_run = [m.part.split()[1:] for m in marks(figures["profile"], "dot", f"r{i}") if m.about]
        assert [of_run.count(series) for series in (["main"], ["body"], [])] == [6, 6, 6]
    (row,) = figures["alike"].rows
    assert row[:2] == ("a", "b")
    assert row[2] == pytest.approx(-1)
    html = page(runs, list(figures.values()))
    assert {a["id"] for a in Parsed(html).every("input", type="checkbox")} >= {"on-r0", "on-r1"}


def test_three_runs_are_told_apart_by_mark_and_name(tmp_path):
    runs = read_runs([planted_run(tmp_path / n, blocks=4) for n in ("a", "b", "c")])
    figures = {f.name: f for f in draw(runs)}
    for name in ("profile", "kinds", "rest", "signals", "spectra"):
        texts = [m for m in figures[name].canvas.marks if m.kind == "text" and m.text in "abc"]
        assert [(m.text, m.part) for m in texts] == [("a", "r0"), ("b", "r1"), ("c", "r2")]
        assert max(m.points[0][1] for m in texts) < figures[name].canvas.height
    shapes = [
        {m.shape for m in marks(figures["profile"], "dot", f"r{i}") if m.mode == "" and m.about}
        for i in range(3)
    ]
    assert shapes == [{"circle"}, {"square"}, {"diamond"}]
    assert all(len(marks(figures["smaller"], "line", f"r{i}")) > 2 for i in range(3))
    assert all(len(marks(figures["training"], "box", f"r{i}")) > 15 for i in range(3))


def test_blocks_of_one_model_stand_at_their_index_however_few_were_profiled(tmp_path):
    runs = read_runs([planted_run(tmp_path / str(n), blocks=n, full=False) for n in (3, 9)])
    dots = [marks(draw(runs)[0], "dot", f"r{i}") for i in (0, 1)]
    at = [next(m.points[0][0] for m in d if "block 1:" in m.about) for d in dots]
    assert at[0] == at[1]


def test_runs_of_other_depths_share_an_axis_but_no_correlation(tmp_path):
    runs = read_runs(
        [planted_run(tmp_path / str(n), blocks=n, full=False, model=str(n)) for n in (3, 9)]
    )
    figures = {f.name: f for f in draw(runs)}
    assert "alike" not in figures
    dots = [
        [m.points[0][0] for m in marks(figures["profile"], "dot", f"r{i}") if m.about]
        for i in (0, 1)
    ]
    assert [max(d) for d in dots] == pytest.approx([max(dots[0])] * 2)
    assert any("depth" in m.text for m in figures["profile"].canvas.marks)


def test_what_is_not_there_is_not_drawn(tmp_path):
    bare = planted_run(tmp_path / "bare", blocks=2, full=False)
    data = json.loads((bare / "profile.json").read_text())
    for b in data["blocks"]:
        b.update(r2_se=None, r2_body=None, fold_sums=None, expected_kl=None, effective_rank=None)
        b.update(input_spectrum=None, map_spectrum=None)
        b["r2_feature"] = {"median": None}
    (bare / "profile.json").write_text(json.dumps(data))
    run = read_run(bare)
    assert [f.name for f in draw([run])] == ["profile"]
    html = page([run], draw([run]))
    assert f"<code>howlinear swap {bare}</code> measures the cost" in html
    signs = re.findall(r'class="heat\d+".*?<b>(.*?)</b>', html)
    assert signs == [f"{b.r2:.2f}".removeprefix("0") for b in run.blocks]  # no cost is known
    log = tmp_path / "log"
    log.mkdir()
    full = planted_run(tmp_path / "full", blocks=2)
    (full / "monitor.jsonl").rename(log / "monitor.jsonl")
    assert [f.name for f in draw([read_run(log)])] == ["training"]


def test_junk_inside_files_is_left_out(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=4)
    probe = json.loads((folder / "probe.json").read_text())
    probe["blocks"][0]["bilinear"] = {"gain": "much", "gain_se": []}
    probe["blocks"][0]["units"] = {"steps": [1, {"k": None}, {"k": 0, "r2": 0.1}]}
    (folder / "probe.json").write_text(json.dumps(probe))
    smaller = json.loads((folder / "compress.json").read_text())
    smaller["curve"] = [3, {"method": None, "share": "x"}, {"share": 0.1, "perplexity": -3}]
    smaller["change"] = "none"
    (folder / "compress.json").write_text(json.dumps(smaller))
    found = json.loads((folder / "profile.json").read_text())
    found |= {"model": [1], "corpus": "text", "settings": None, "versions": 3, "notes": "none"}
    found["blocks"][0]["input_spectrum"] = [[0, 2], [3, -1], [2, 0.5]]
    (folder / "profile.json").write_text(json.dumps(found))
    run = read_run(folder)
    assert [f.name for f in draw([run])] == ["profile", "kinds", "signals", "training", "spectra"]
    Parsed(page([run], draw([run])))


def changed(folder, name, change):
    """The same file with something else in it."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("profile.json", lambda d: d["blocks"][1].update(r2=1e308), "a block's r2 is 1e+308"),
        ("profile.json", lambda d: d["blocks"][1].update(r2=10**400), "a block's r2 is 1000"),
        ("profile.json", lambda d: d["blocks"][1].update(fold_sums=[[1]]), "a block's fold_sums"),
        ("profile.json", lambda d: d["blocks"][1].update(index=0), "lists a block twice"),
        ("profile.json", lambda d: [b.update(r2=None) for b in d["blocks"]], "no R2 of any block"),
        ("swap.json", lambda d: d.update(model={"weights": "other"}), "is about other weights"),
        ("swap.json", lambda d: d["blocks"][0].update(delta_nll=1e308), "a block's delta_nll"),
    ],
)
def test_files_that_cannot_be_right_are_refused(name, change, said, tmp_path):
    folder = planted_run(tmp_path / "run", blocks=3)
    changed(folder, "profile.json", lambda d: d["model"].update(weights="own"))
    changed(folder, name, change)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_run(folder)


ODD = [
    None,
    True,
    -1,
    10**400,
    1e308,
    1e-320,
    "x",
    [],
    [1],
    {},
    [[1, 2, 3]],
    -0.5,
    10**9,
    "\ud800<",
]


def places(data, trail=()):
    """Where something could be put in the place of something else."""
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in inside:
        yield (*trail, key)
        if isinstance(value, dict | list):
            yield from places(value, (*trail, key))


def test_odd_values_anywhere_are_drawn_or_refused_in_one_line(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=2)
    files = sorted(folder.glob("*.json"))
    whole = {path: path.read_text() for path in files}
    chance = random.Random(0)
    refused, drawn = [], 0
    for _ in range(60):
        path = chance.choice(files)
        data = json.loads(whole[path])
        *trail, last = chance.choice(list(places(data)))
        at = data
        for key in trail:
            at = at[key]
        at[last] = chance.choice(ODD)
        path.write_text(json.dumps(data))
        try:
            run = read_run(folder)
        except ValueError as err:
            refused.append(str(err))
        else:
            drawn += 1
            page([run, run], draw([run, run])).encode()
        path.write_text(whole[path])
    assert min(len(refused), drawn) > 10
    assert not any("\n" in line for line in refused)


def test_blocks_without_r2_are_left_out_and_told(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=4)
    changed(folder, "profile.json", lambda d: d["blocks"][1].update(r2=None))
    changed(folder, "profile.json", lambda d: d["blocks"].reverse())
    changed(folder, "probe.json", lambda d: d["blocks"][0].update(r2=None))
    run = read_run(folder)
    assert [b.index for b in run.blocks] == [0, 2, 3]
    assert "blocks without R2 are left out: 1" in page([run], draw([run]))


def test_an_encoder_is_not_told_to_swap_again(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=2)
    nothing = dict.fromkeys(("kl", "kl_se", "kl_plain", "kl_mean", "verdict"))
    changed(folder, "swap.json", lambda d: d.update(base=None, notes=["no perplexity: encoder"]))
    changed(folder, "swap.json", lambda d: [b.update(nothing) for b in d["blocks"]])
    run = read_run(folder)
    html = page([run], draw([run]))
    assert "The model has no next-token loss" in html
    assert "no perplexity: encoder" in html
    assert "howlinear swap" not in html


def test_the_headline_counts_what_was_measured(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=8)  # block k costs 0.004 (k + 1), block 4 0.01
    changed(folder, "swap.json", lambda d: d["blocks"][6].update(verdict="costly"))
    changed(folder, "swap.json", lambda d: d["blocks"][5].update(verdict="undecided"))
    changed(folder, "swap.json", lambda d: d["blocks"].pop(7))
    html = page([read_run(folder)], [])
    assert (
        "5 of 7 blocks that were tried can become one matrix for less than 0.03 nats per token, one at a "
        "time, 1 of them with hidden units kept." in html
    )
    cells = re.findall(r'<a href="#block-0-(\d)" class="([\w ]+)".*?<b>(.*?)</b>', html)
    assert cells == [
        *(("0", "safe", "✓"), ("1", "safe", "✓"), ("2", "safe", "✓+"), ("3", "safe", "✓")),
        *(("4", "safe", "✓"), ("5", "undecided", "?"), ("6", "costly", "✕")),
        ("7", "some open", "~"),  # expected, not measured
    ]


def test_the_cheapest_block_is_named_where_none_is_safe(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=3)
    dear = {"kl": 0.2, "verdict": "costly"}
    changed(folder, "swap.json", lambda d: [b.update(dear) for b in d["blocks"]])
    changed(folder, "swap.json", lambda d: d["blocks"][1].update(kl=0.15))
    html = page([read_run(folder)], [])
    assert "None of 3 blocks is shown to cost less than 0.03 nats" in html
    assert "the cheapest is block 1 with 0.15." in html


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("/home/somebody/models/gpt2", "gpt2"),
        ("C:\\models\\gpt2", "gpt2"),
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m"),
        ("models/gpt2/", "models/gpt2/"),
    ],
)
def test_a_title_has_no_absolute_path(model, title, tmp_path):
    html = page([read_run(planted_run(tmp_path / "run", blocks=2, full=False, model=model))], [])
    titles = [text for name, text in Parsed(html).texts if name in ("title", "h1")]
    assert titles == [f"How linear is {title}?"] * 2


def test_small_costs_have_an_axis_that_rises(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=4)
    small = {"kl": 3e-5, "kl_plain": 3e-5, "kl_se": 1e-6}
    changed(folder, "swap.json", lambda d: [b.update(small) for b in d["blocks"]])
    figures = {f.name: f for f in draw([read_run(folder)])}
    costs = [m for m in figures["profile"].canvas.marks if "KL 3e-05" in m.about]
    assert {m.shape for m in costs} == {"down"}
    axis = [m for m in figures["profile"].canvas.marks if m.kind == "line" and m.colour == "axis"]
    assert {m.points[0][1] for m in costs} == {axis[-3].points[1][1]}  # before the two limits


def test_a_log_with_strange_indices_or_many_steps_stays_small(tmp_path):
    folder = planted_run(tmp_path / "run", blocks=30)
    rows = [
        {"step": s, "blocks": [{"index": i, "r2": 0.5} for i in (-1, 3, 10**7)]} for s in range(999)
    ]
    text = "".join(json.dumps(r) + "\n" for r in [{"kind": "monitor", "schema": 1}, *rows])
    (folder / "monitor.jsonl").write_text(text)
    figure = {f.name: f for f in draw([read_run(folder)])}["training"]
    assert figure.columns == ("run", "step", "block 3", "block 10000000")
    assert figure.canvas.height < 200
    assert figure.rows[-1][1] == 998
    assert len([m for m in figure.canvas.marks if m.about]) <= 500


def test_a_page_of_thirty_blocks_with_everything_is_small(tmp_path):
    folder = planted_run(tmp_path / "run")
    ks = (0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 1536)
    steps = [{"k": k, "r2": 0.5 + 0.01 * i} for i, k in enumerate(ks)]

    def every(data):
        (first, *_) = data["blocks"]
        first["units"]["steps"] = steps
        data["blocks"] = [{**first, "index": i} for i in range(30)]

    changed(folder, "probe.json", every)
    places = sorted({round(576 ** (i / 47)) for i in range(48)})
    spectra = [[k, 1.234567 / k] for k in places]
    wide = {"input_spectrum": spectra, "map_spectrum": spectra}
    changed(folder, "profile.json", lambda d: [b.update(wide) for b in d["blocks"]])
    run = read_run(folder)
    assert len(page([run], draw([run])).encode()) < 400_000


def test_files_of_figures(made, tmp_path):
    pytest.importorskip("typst")
    _, figures, _ = made
    chosen = [figures["profile"], figures["training"]]
    written = write_figures(chosen, tmp_path / "figures")
    names = {p.name for p in written}
    assert names == {f"{f.name}.{kind}" for f in chosen for kind in ("svg", "csv", "png", "pdf")}
    for f in chosen:
        root = ElementTree.parse(tmp_path / "figures" / f"{f.name}.svg").getroot()
        space = "{http://www.w3.org/2000/svg}"
        drawn = [e for e in root if e.tag not in (f"{space}title", f"{space}style")]
        (canvas,) = drawings(f).values()
        assert len(drawn) == len(canvas.marks) + 1  # and the ground
        assert not any("scalar" in mark.part.split() for mark in canvas.marks)  # hidden at first
        head = (tmp_path / "figures" / f"{f.name}.png").read_bytes()[:24]
        size = [int.from_bytes(head[i : i + 4], "big") for i in (16, 20)]
        assert size == pytest.approx([2 * f.canvas.width, 2 * f.canvas.height], abs=1)
        assert (tmp_path / "figures" / f"{f.name}.pdf").read_bytes().startswith(b"%PDF")
    spectra = drawings(figures["spectra"])
    assert len(spectra) == 30
    curves = [m for m in spectra["spectra-b7"].marks if m.about]
    assert [m.part for m in curves] == ["r0 b7", "r0 b7"]


@pytest.fixture
def sample():
    """A box, a dashed line and a turned label in the classes of the stylesheet."""
    canvas = Canvas(100, 60)
    canvas.box((10, 10), (50, 30), "c1")
    canvas.line([(0, 50), (100, 50)], "c0", "dash wide")
    canvas.text((80, 30), "turned", turned=True)
    return standalone(canvas, "a")


def test_a_png_holds_marks_dashes_and_turned_text(sample):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("typst")
    picture = image.open(BytesIO(converted(sample, "a", "png"))).convert("RGB")

    def colour(name):
        return tuple(int(LIGHT[name][i : i + 2], 16) for i in (1, 3, 5))

    assert picture.size == (200, 120)
    assert picture.getpixel((60, 40)) == colour("c1")
    assert picture.getpixel((60, 80)) == (255, 255, 255)
    row = [picture.getpixel((x, 100)) for x in range(200)]
    assert 0.55 < row.count(colour("c0")) / 200 < 0.7  # 6 pixels on, 3 off, soft edges
    inked = [
        (x, y) for x in range(120, 200) for y in range(90) if sum(picture.getpixel((x, y))) < 200
    ]
    wide, high = (max(p[i] for p in inked) - min(p[i] for p in inked) for i in (0, 1))
    assert high > 2 * wide


def test_a_pdf_is_the_same_every_time_and_has_a_font_of_its_own(sample):
    pytest.importorskip("typst")
    once, again = (converted(sample, "a", "pdf") for _ in range(2))
    assert once == again
    assert b"CreationDate" not in once
    assert b"DejaVuSansMono" in converted(sample, "a", "pdf", system_fonts=False)


def test_the_command_writes_a_page_and_says_where(full, tmp_path, here):
    out = tmp_path / "page.html"
    assert here("report", full, "-o", out).stdout.split() == [str(out)]
    assert out.read_text().startswith("<!doctype html>")
    assert json.loads(here("report", full, "-o", out, "--json").stdout) == {
        "page": str(out),
        "figures": [],
    }
