"""Colour where somebody watches and nowhere else, tried on a pseudo-terminal; and odd encodings."""

import io
import json
import os
import re
import sys
from contextlib import contextmanager

import pytest

import shown
from howlinear.cli import app, output
from howlinear.cli.output import progress_bars
from howlinear.cli.printer import terminal_console
from howlinear.records.files import SCHEMA, write_json
from howlinear.records.words import duration

pty = pytest.importorskip("pty")  # there is none on Windows

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])[\d;]*m")
NAME = "modèle 模"  # which Python would escape as JSON does not
PLAIN = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "80"}


@contextmanager
def watched(monkeypatch, stream):
    """A stream of this process as a terminal; yields a list that gets what was written."""
    ours, theirs = pty.openpty()
    seen = []
    with os.fdopen(theirs, "w", encoding="utf-8") as file:
        with monkeypatch.context() as patch:
            patch.setattr(sys, stream, file)
            yield seen
        file.write("\0")  # the end
        file.flush()
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(ours, 65536)
    os.close(ours)
    seen.append(found[:-1].decode().replace("\r\n", "\n"))


@contextmanager
def piped(monkeypatch, stream, encoding="utf-8"):
    seen, buffer = [], io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, io.TextIOWrapper(buffer, encoding=encoding, newline="\n"))
        yield seen
        getattr(sys, stream).flush()
        seen.append(buffer.getvalue().decode(encoding))


def surrounded(monkeypatch, **more):
    for name, value in (PLAIN | more).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("where", "env", "coloured"),
    [
        (watched, {}, True),
        (watched, {"NO_COLOR": "1"}, False),
        (watched, {"NO_COLOR": "no"}, False),  # whatever it says
        (watched, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (watched, {"TERM": "dumb"}, False),
        (piped, {}, False),
        (piped, {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_of_a_table(monkeypatch, where, env, coloured):
    surrounded(monkeypatch, **env)
    show, data, blocks = shown.profile(shown.USUAL)
    with where(monkeypatch, "stdout") as seen:
        show(terminal_console(), data, blocks)
    assert bool(COLOUR.search(seen[0])) is coloured
    words = re.sub(r"\x1b\[[\d;]*m", "", seen[0])
    assert "0.887 ±.003 ████████▉  " in words
    assert "outlier-concentrated" in words
    assert coloured or "\x1b[3" not in seen[0]


@pytest.fixture
def runs(tmp_path):
    """Two run folders with maps that nobody opens, of a model with a foreign name."""
    for name in ("a", "b"):
        blocks = [shown.profile_block(shown.USUAL, i).to_dict() for i in range(3)]
        about = {
            "model": {"id": NAME},
            "corpus": {"name": name},
            "settings": {"protocol": "paper"},
        }
        lists = "r2_curve sink_units sink_shares fold_sums input_spectrum map_spectrum"
        whole = [b | dict.fromkeys(lists.split()) | {"n_fit": 9, "n_heldout": 9} for b in blocks]
        (tmp_path / name / "maps").mkdir(parents=True)
        for b in whole:
            (tmp_path / name / "maps" / f"{b['index']}.safetensors").touch()
        head = {"kind": "profile", "schema": SCHEMA, **about}
        write_json(tmp_path / name / "profile.json", head | {"blocks": whole})
    return [str(tmp_path / name) for name in ("a", "b")]


def called(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["howlinear", *args])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == 0


def test_a_command_on_a_terminal_and_through_a_pipe(monkeypatch, runs):
    surrounded(monkeypatch)
    with watched(monkeypatch, "stdout") as on_terminal:
        called(monkeypatch, "compare", *runs)
    with piped(monkeypatch, "stdout") as through_pipe:
        called(monkeypatch, "compare", *runs)
    assert "\x1b[1m" in on_terminal[0]
    assert "\x1b" not in through_pipe[0]
    assert re.sub(r"\x1b\[[\d;]*m", "", on_terminal[0]) == through_pipe[0]


@pytest.mark.parametrize("where", [watched, piped])
def test_json_has_no_codes(monkeypatch, runs, where):
    surrounded(monkeypatch, FORCE_COLOR="1")
    with where(monkeypatch, "stdout") as seen:
        called(monkeypatch, "compare", *runs, "--json")
    assert "\x1b" not in seen[0]
    assert json.loads(seen[0])["runs"][0]["model"]["id"] == NAME


def test_a_stdout_that_holds_only_ascii(monkeypatch, runs):
    surrounded(monkeypatch)
    with piped(monkeypatch, "stdout", "ascii") as table:
        called(monkeypatch, "compare", *runs)
    with piped(monkeypatch, "stdout", "ascii") as document:
        called(monkeypatch, "compare", *runs, "--json")
    assert "0.887 +-.003 #####" in table[0]
    assert r"a: mod\xe8le \u6a21, a" in table[0]
    assert json.loads(document[0])["runs"][0]["model"]["id"] == NAME


NAMED = "[red]step\x1b[31m"


def test_progress_on_a_terminal(monkeypatch):
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        surrounded(monkeypatch, **env)
        with watched(monkeypatch, "stderr") as seen, progress_bars() as begin:
            begin(NAMED, 100)(50)
        assert bool(COLOUR.search(seen[0])) is coloured
        assert r"[red]step\x1b[31m" in seen[0]
        assert "50/100 tokens" in seen[0]


@pytest.mark.parametrize("force", [None, "1"])
def test_progress_in_a_log_is_lines(monkeypatch, force):
    surrounded(monkeypatch, FORCE_COLOR=force)
    with piped(monkeypatch, "stderr") as seen, progress_bars() as begin:
        begin(NAMED, 100)(50)
    assert seen[0] == "[red]step\\x1b[31m: 100 tokens to run\n"


def test_the_time_that_is_left_is_told_from_work_done(monkeypatch, capsys):
    """Not at once, again when half of it is left, and when it was far off."""
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    tell = output._time_teller("swapping", 1000)
    for seconds, done in (
        (2, 10),
        (6, 10),
        (12, 20),
        (400, 500),
        (2500, 600),
        (2600, 800),
        (2601, 1000),
    ):
        clock[0] = float(seconds)
        tell(done)
    told = [line.removeprefix("swapping: about ") for line in capsys.readouterr().err.splitlines()]
    assert told == ["10 min left", "28 min left", "11 min left"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (8.6, "9 s"), (44, "40 s"), (130, "2 min"), (5000, "83 min"), (9000, "2.5 h")],
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == f"about {words}"
