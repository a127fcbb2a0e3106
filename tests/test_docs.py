"""What the documentation says is what the code does: examples run, commands exist, links lead somewhere."""

import importlib.util
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import howlinear
import tiny
from howlinear.models import cutting
from howlinear.records.fields import (
    BlockCompression,
    BlockExpert,
    BlockPlan,
    BlockProbe,
    BlockProfile,
    BlockSwap,
    ExpertSwap,
)
from howlinear.records.verdicts import KINDS, kind_of
from howlinear.report.sections import CITATION

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"

spec = importlib.util.spec_from_file_location("paste", ROOT / "docs" / "paste.py")
paste = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paste)

PAGES = [README, ROOT / "CONTRIBUTING.md", *paste.pages()]
COMMANDS = paste.commands()
FLAGS = set().union(*map(paste.flags, COMMANDS.values())) | {"--version"}
OTHERS = {"--model_args", "--nproc-per-node"}  # flags of lm-evaluation-harness and torchrun

# A block of Python, perhaps with a reason not to run it before it and what it prints after it.
PYTHON = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n+)?^```python\n(?P<code>.*?)^```$(?:\n\n^```\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def name_of(page):
    return str(page.relative_to(ROOT))


def examples(page):
    return list(PYTHON.finditer(page.read_text()))


def run_example(match, scope, capsys):
    if match["why"]:
        print(f"not run: {match['why']}")
        return ""
    exec(compile(match["code"], "example", "exec"), scope)
    said = capsys.readouterr().out
    if match["shown"]:
        assert said == match["shown"]
    return said


# ---------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    "page", [p for p in PAGES if examples(p) and p not in (README, TUTORIAL)], ids=name_of
)
def test_examples_run_and_print_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {}
    for match in examples(page):
        run_example(match, scope, capsys)


def test_few_examples_are_left_out():
    reasons = [m["why"] for page in PAGES for m in examples(page) if m["why"]]
    print(reasons)
    assert reasons == []  # only what needs a GPU, the hub or hours may ever be added here


def test_an_example_that_prints_something_else_is_found(capsys):
    text = "```python\nprint(1)\n```\n\n```\n2\n```\n"
    with pytest.raises(AssertionError):
        run_example(PYTHON.search(text), {}, capsys)


@pytest.fixture
def wombat(tmp_path):
    """A tiny causal model with a tokenizer of its own."""
    source, folder = ROOT / "tests" / "models" / "llama", tmp_path / "wombat"
    tiny.model("llama", vocab_size=2048, max_position_embeddings=128).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


SMALLER = {  # what the tutorial's commands take for a model of three blocks
    "profile": ["--tokens", "4096"],
    "swap": ["--tokens", "256"],
    "probe": ["--tokens", "256"],
    "compress": ["--tokens", "256"],
    "bench": ["--max-length", "32", "--new-tokens", "2", "--repeats", "2"],
}
FEWER = {"11,28": "1,2", "11": "1", "14-16": "0,2"}  # blocks


@pytest.mark.usefixtures("alone", "reloaded_here", "wikitext")
def test_the_tutorial_runs_from_end_to_end(wombat, here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cutting, "LONG", 200_000)  # shorter excerpts of the text
    text = TUTORIAL.read_text()
    steps = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ran = []
    for language, code in steps:
        if language == "python":
            exec(compile(code, "tutorial.md", "exec"), {})
            assert capsys.readouterr().out.startswith("The capital")
            continue
        for line in code.splitlines():
            _, command, *rest = shlex.split(line, comments=True)
            rest = [str(wombat) if word == "built-in" else FEWER.get(word, word) for word in rest]
            given = [wombat] if command == "profile" else []
            done = here(command, *given, *rest, *SMALLER.get(command, []))
            assert done.returncode == 0, done.stderr
            ran.append(command)
    assert ran[:6] == ["profile", "swap", "probe", "compress", "compress", "bench"]


# ---------------------------------------------------------------------------------- commands


def typed(text):
    """What a page says one may type: lines of its code, and `howlinear ...` in its sentences."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^ {4}(.*)$", text, re.M)
    lines += re.findall(r"(?<!`)`(howlinear [^`]+)`(?!`)", " ".join(text.split("\n")))
    found = (re.match(r"\s*(?:torchrun .* -m )?howlinear ([a-z].*)", line) for line in lines)
    return [match[1].split("#")[0] for match in found if match]


def problem(line):
    """What is wrong with a command line, or None."""
    command, *rest = line.split()
    if command == "control":
        if not rest or not rest[0].islower():
            return None  # of all kinds
        command = f"control {rest[0]}"
    if command not in COMMANDS:
        return f"there is no howlinear {command}"
    known = {flag.replace("_", "-") for flag in paste.flags(COMMANDS[command])}
    asked = re.findall(r"(?<![\w.-])--?[a-z][\w-]*", " ".join(rest))
    unknown = [flag for flag in asked if flag.replace("_", "-") not in known]
    return f"howlinear {command} has no {unknown}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist_with_their_flags(page):
    assert [found for line in typed(page.read_text()) if (found := problem(line))] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_sentences_exist(page):
    named = set(re.findall(r"`(--[a-z][\w-]*)", page.read_text()))
    assert named - FLAGS - OTHERS == set()


def test_commands_that_do_not_exist_are_found():
    assert problem("swap runs/demo --units 1") is None
    assert problem("swop runs/demo") == "there is no howlinear swop"
    assert problem("swap runs/demo --unit 1") == "howlinear swap has no ['--unit']"
    assert problem("control magic runs/demo") == "there is no howlinear control magic"
    assert typed("run `howlinear swap\nRUN --units 1` now") == ["swap RUN --units 1"]


def test_the_index_has_an_example_of_every_command():
    shown = {
        " ".join(line.split()[:2]) for line in typed((ROOT / "docs" / "README.md").read_text())
    }
    assert [c for c in COMMANDS if not any(f"{s} ".startswith(f"{c} ") for s in shown)] == []


def test_the_readme_and_the_help_name_every_command_in_the_order_of_work():
    named = list(dict.fromkeys(line.split()[0] for line in typed(README.read_text())))
    assert named[:4] == ["profile", "swap", "report", "compress"]
    assert sorted(named) == sorted({c.split()[0] for c in COMMANDS})
    assert list(dict.fromkeys(c.split()[0] for c in COMMANDS)) == [
        *("profile", "swap", "report", "compress", "probe", "compare", "control", "merge"),
        *("reproduce", "bench"),
    ]


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def test_the_citations_agree():
    cff, readme = (ROOT / "CITATION.cff").read_text(), README.read_text()
    (title,) = re.findall(r"title = \{(.+?)\}", readme)
    assert f"version: {howlinear.__version__}\n" in cff
    for text in (cff, readme, CITATION):
        assert title in " ".join(text.split())
        assert "2606.19379" in text
        assert "Stuart" in text


def test_nobody_is_told_to_install_from_an_index_where_it_is_not():
    places = [*(ROOT / "src").rglob("*.py"), *PAGES, *(ROOT / "benchmarks").glob("*.py")]
    assert [p for p in places if re.search(r"pip install \W?howlinear\b", p.read_text())] == []


# ------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", paste.pages(), ids=name_of)
def test_what_is_pasted_is_what_the_code_says(page):
    text = page.read_text()
    assert text == paste.pasted(text), "run `make docs`"


def test_a_stale_page_is_found():
    stale = "<!-- paste: options swap -->\nold\n<!-- end -->"
    assert "| `--units` | `auto`, `0`, `1`, `2`, `4` | `auto` |" in paste.pasted(stale)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page(command):
    text = paste.page_of(command).read_text()
    assert f"<!-- paste: options {command} -->" in text
    assert "```sh" in text, "an example is missing"


def test_every_public_name_is_documented():
    text = (ROOT / "docs" / "python.md").read_text()
    named = [
        name for names in re.findall(r"<!-- paste: api (.+?) -->", text) for name in names.split()
    ]
    assert sorted(named) == sorted(howlinear.__all__)


def anchors(page):
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def links(page):
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [link for link in found if not link.startswith(("http:", "https:"))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {name_of(p) for p in paste.pages() if p != index and p not in linked} == set()


def test_every_field_and_kind_is_documented():
    text = (ROOT / "docs" / "fields.md").read_text()
    records = (BlockProfile, BlockSwap, BlockProbe, BlockPlan, BlockCompression)
    records += (BlockExpert, ExpertSwap)
    assert all(f"`{f.name}`" in text for record in records for f in fields(record))
    assert all(word in text for word in KINDS)


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [  # r2, r2_body, median feature, first_share, effective rank / d_out
        ((0.98, 0.38, 0.8, 0.93, 0.002), "first-position only"),
        ((0.88, 0.88, 0.74, 0.0, 0.25), "broadly linear"),
        ((0.93, 0.91, 0.84, 0.3, 0.01), "broadly linear"),
        ((0.77, 0.73, 0.37, 0.2, 0.1), "outlier-concentrated"),
        ((0.77, 0.73, 0.45, 0.2, 0.002), "outlier-concentrated"),
        ((0.55, 0.55, 0.50, 0.0, 0.3), "partly linear"),
        ((0.35, 0.35, 0.30, 0.0, 0.3), "nonlinear"),
        ((-0.1, -0.1, -0.1, 0.0, float("inf")), "nonlinear"),
        ((0.99, float("nan"), 0.9, 1.0, 0.3), "broadly linear"),
    ],
)
def test_kinds_follow_the_documented_rules(numbers, kind):
    assert kind_of(*numbers) == kind
    assert kind in KINDS
