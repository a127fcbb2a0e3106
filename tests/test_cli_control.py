"""`howlinear control` and `howlinear compare`, as typed."""

import json
import shutil

import pytest
import torch

import tiny
from howlinear import blocks, profile
from howlinear.cli.control import _Subject
from howlinear.cli.sources import Loader, RunSource
from howlinear.controls import random_init
from howlinear.models import cutting
from howlinear.run.tensors import read_store

COMMON = ("--tokens", "8192", "--max-length", "64")


@pytest.fixture
def text(little):
    return ("--text-file", little / "text.txt", *COMMON)


def document(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_interrupted_random_init_keeps_the_models_it_has_measured(
    here, little, tmp_path, monkeypatch
):
    run = shutil.copytree(little / "run", tmp_path / "run")
    drawn, real = [], random_init.untrained

    def third_interrupted(*args):
        drawn.append(args)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(random_init, "untrained", third_interrupted)
    command = ("control", "random-init", run, "--seeds", "3", "--blocks", "1")
    assert here(*command).returncode == 130
    kept = json.loads((run / "control-random-init.json").read_text())
    assert [len(b["untrained"]) for b in kept["blocks"]] == [2]
    assert kept["notes"][-1] == "unfinished: 2 of 3 untrained models measured"
    again = document(here(*command, "--json"))
    assert [len(b["untrained"]) for b in again["blocks"]] == [3]
    assert "earlier" not in json.loads((run / "control-random-init.json").read_text())


def test_random_init_of_a_run_uses_what_the_run_holds(here, little, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(little / "run", run)
    done = here("control", "random-init", run, "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "the trained model" not in done.stderr
    assert "Trained R2 is" in done.stdout
    written = json.loads((run / "control-random-init.json").read_text())
    profile = json.loads((run / "profile.json").read_text())
    assert [b["r2"] for b in written["blocks"]] == [b["r2"] for b in profile["blocks"]]
    assert written["corpus"]["fingerprint"] == profile["corpus"]["fingerprint"]
    assert len(written["blocks"][0]["untrained"]) == 2
    some = document(here("control", "random-init", run, "--seeds", "1", "--blocks", "1", "--json"))
    assert [b["r2"] for b in some["blocks"]] == [profile["blocks"][1]["r2"]]


def test_cross_feed_of_a_model_with_itself(here, little, text, tmp_path):
    model = little / "model"
    done = here("control", "cross-feed", model, model, *text, "-o", tmp_path, "--json")
    data = document(done)
    assert data == json.loads((tmp_path / "control-cross-feed.json").read_text())
    profile = json.loads((little / "run" / "profile.json").read_text())
    for row, b in zip(data["blocks"], profile["blocks"], strict=True):
        assert row["cells"]["ab"]["value"] == pytest.approx(b["r2"], abs=1e-12)
    assert data["model_b"]["id"] == str(model)


def test_matched_prints_a_table_that_fits(here, little, text, tmp_path):
    done = here("control", "matched", little / "model", *text, "--blocks", "0", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert max(map(len, done.stdout.splitlines()[:4])) <= 80
    assert len(json.loads((tmp_path / "control-matched.json").read_text())["blocks"]) == 1


def test_checkpoints_of_a_folder_in_order_and_resumed(here, complaint, little, text, tmp_path):
    for name in ("checkpoint-10", "checkpoint-9"):
        shutil.copytree(little / "model", tmp_path / "t" / name)
    args = ("control", "checkpoints", tmp_path / "t", *text, "-o", tmp_path / "out")
    first = here(*args, "--revisions", "checkpoint-10")
    assert first.returncode == 0, first.stderr
    again = here(*args, "--json")
    assert "profiling checkpoint-9" in again.stderr
    assert "1 checkpoint to come, about" in again.stderr
    assert "profiling checkpoint-10" not in again.stderr
    data = document(again)
    assert data["summary"]["measured"] == ["checkpoint-9", "checkpoint-10"]
    assert data["blocks"][0]["r2"][0] == data["blocks"][0]["r2"][1]  # the same weights
    shown = here(*args)
    assert "checkpoint-9" in shown.stdout
    tiny.change_weights(tmp_path / "t" / "checkpoint-9")
    assert "checkpoint-9 has changed since it was measured: weights was" in complaint(*args)
    assert json.loads((tmp_path / "out" / "control-checkpoints.json").read_text()) == data


def test_profile_of_several_texts_and_compare(here, complaint, little, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "LONG", 200_000)  # shorter excerpts of long texts
    out, model = tmp_path / "runs", tmp_path / "model"
    shutil.copytree(little / "model", model)
    given = (f"own={little / 'text.txt'}", "docs=python-docs", "python-code")
    flags = [flag for source in given for flag in ("--corpus", source)]
    profile = ("profile", model, *flags, "--tokens", 4096, "--max-length", 64, "-o", out)
    done = here(*profile)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"own", "docs", "python-code"}
    assert "own to docs, with 95 % intervals over folds" in done.stdout
    data = document(here("compare", out / "own", out / "docs", "--json"))
    assert [run["corpus"]["name"] for run in data["runs"]][1].startswith(
        "Python language reference"
    )
    assert {(c["fit"], c["scored"]) for c in data["crossed"]} == {("own", "docs"), ("docs", "own")}
    shown = here("compare", out / "own", out / "docs", "-o", tmp_path / "c.json")
    assert "fitted on" in shown.stdout
    assert json.loads((tmp_path / "c.json").read_text())["kind"] == "compare"
    odd = here("control", "cross-feed", out / "own", out / "docs")
    assert "read Python language reference" in odd.stderr
    assert odd.returncode == 2
    fed = document(here("control", "cross-feed", out / "docs", little / "model", "--json"))
    assert fed["settings"]["same_tokens"] is True  # the text of the run, for both
    # a text of its own for each run: what reads it later finds it
    again = here("control", "matched", out / "docs", "--blocks", "0")
    assert again.returncode == 0, again.stderr
    assert "profiling" not in here(*profile).stderr  # what is measured is shown
    tiny.change_weights(model)
    assert "was made with another model: weights was" in complaint(*profile)


def test_commands_read_the_rows_of_the_shards_that_were_merged(here, little, text, tmp_path):
    """Of three shards the middle one is missing: not the first tokens of the text are read."""
    parts = [tmp_path / name for name in "02"]
    for part in parts:
        done = here("profile", little / "model", *text, "--shard", f"{part.name}/3", "-o", part)
        assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert here("merge", *parts, "-o", run).returncode == 0
    source = RunSource(run)
    net = source.load(Loader())
    ids = source.fit_windows().ids
    whole = cutting.spread_windows(source.text.fit, source.tokenizer, 64, tokens=8192)
    whole = whole["input_ids"]
    expected = [w for i, w in enumerate(whole) if i // 8 % 3 != 1]
    assert torch.equal(ids, torch.stack(expected))
    store = read_store(run, blocks(net)[0])
    again = profile(net, ids).stores[0]
    for field in ("first", "body"):  # the moments of the run are those of these rows
        one, two = (sum(m.n * m.mean_x for m in getattr(s, field) if m.n) for s in (store, again))
        assert torch.allclose(one, two, rtol=1e-9)
    subject = _Subject(str(run), None, None, 512, 5)
    assert torch.equal(subject.load(Loader())[1].ids, ids)
    other = _Subject(str(little / "model"), None, None, 512, 5)
    other.read_text_of(subject, 64)
    assert torch.equal(other.load(Loader())[1].ids, ids)
    assert torch.equal(source.short_windows(32, 640), ids[:20, :32])
    late = RunSource(run)
    late.load(Loader())
    late.settings["tokens"] += 64
    with pytest.raises(ValueError, match="was fitted on 5696 tokens and its text gives 5632"):
        late.fit_windows()


def test_what_memory_cannot_hold_is_refused_before_the_work(complaint, little, text, monkeypatch):
    monkeypatch.setattr("howlinear.run.room.available_memory", lambda: 1000)
    said = complaint("control", "matched", little / "run")
    assert "are free: measure fewer --blocks" in said
    model = str(little / "model")
    assert "name fewer --pairs" in complaint("control", "cross-feed", model, model, *text)
