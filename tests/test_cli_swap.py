"""`howlinear swap` as a person meets it, on a tiny model with a real tokenizer and on a real encoder."""

import json
import shutil

import pytest

import tiny
from howlinear.models import cutting
from howlinear.run.folder import RunFolder

CUT = ("--eval", "windows-32", "--positions", "all")


@pytest.fixture
def copied(little, tmp_path):
    """The same in a folder of the test's own."""
    others = shutil.ignore_patterns("swap.json", "probe.json")
    return shutil.copytree(little / "run", tmp_path / "run", ignore=others)


def test_swap_prints_a_table_and_writes_a_file(little, here):
    done = here("swap", little / "run", "--tokens", "600", "--all-tokens", *CUT)
    assert done.returncode == 0, done.stderr
    data = json.loads((little / "run" / "swap.json").read_text())
    assert [b["index"] for b in data["blocks"]] == [0, 1, 2]
    assert data["base"]["protocol"] == "windows-32"
    assert data["base"]["tokens"] >= 600
    assert data["base"]["bits_per_byte"] > 0
    assert data["corpus"] == {
        "name": str(little / "text.txt"),
        "choose": "80 to 90 %",
        "report": "last 10 %",
    }
    assert "windows-32" in done.stdout
    assert "rank correlations of signals with costs need 8 blocks or more" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[2:] if "json" not in line)
    profile = json.loads((little / "run" / "profile.json").read_text())
    assert all(b["expected_kl"] > 0 for b in profile["blocks"])  # the estimate stays
    words = RunFolder(little / "run").costs_in_words()
    assert all(word.startswith("measured") for word in words.values())
    assert not list((little / "run").glob(".*"))  # nothing half-written


@pytest.mark.parametrize("protocol", ["stride-64-32", "gptq-128"])
def test_json_is_one_document_under_any_protocol(little, here, protocol):
    flags = ("--tokens", "300", "--units", "1", "--blocks", "1", "--eval", protocol, "--json")
    done = here("swap", little / "run", *flags)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["settings"]["protocol"] == protocol
    assert len(data["blocks"]) == 1
    assert len(data["blocks"][0]["units"]) == 1


def test_weightings_read_the_fit_text_again(little, here):
    flags = ("--tokens", "200", "--units", "0", "--blocks", "1", "--eval", "windows-32")
    seen = set()
    for weighting in ("none", "body", "stream", "output"):
        done = here("swap", little / "run", *flags, "--weighting", weighting, "--json")
        assert done.returncode == 0, done.stderr
        seen.add(json.loads(done.stdout)["blocks"][0]["rmse"])
    assert len(seen) == 4


def test_an_encoder_is_told_why_there_is_no_perplexity(small_run, here, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "LONG", 100_000)  # shorter excerpts of the text
    _, out, _ = small_run
    shutil.copytree(out, tmp_path / "run")
    done = here("swap", tmp_path / "run", "--tokens", "500")
    assert done.returncode == 0, done.stderr
    assert "no perplexity: BertModel has no language-model head" in " ".join(done.stdout.split())
    data = json.loads((tmp_path / "run" / "swap.json").read_text())
    assert data["base"] is None
    assert all(b["cosine"] > 0.4 and b["stream_error"] > 0 for b in data["blocks"])


def test_runs_that_do_not_fit_are_refused(little, copied, complaint):
    assert "nowhere does not exist" in complaint("swap", copied.parent / "nowhere")
    path = copied / "profile.json"
    data = json.loads(path.read_text())

    def changed(**parts):
        path.write_text(json.dumps(data | parts))
        return complaint("swap", copied)

    model = data["model"]
    assert "another model: weights was 0123" in changed(model=model | {"weights": "0123"})
    assert "another model: family was gpt2" in changed(model=model | {"family": "gpt2"})
    assert "text" in changed(corpus=data["corpus"] | {"fingerprint": "0" * 64})
    assert "from stdin" in changed(
        asked=data["asked"] | {"text": ["-", None, None, "train", "text"]}
    )
    assert "does not say how" in changed(asked=None)
    narrow = [b | {"d_in": 8} for b in data["blocks"]]
    assert "its block 0" in changed(blocks=narrow)  # a map of the wrong width


def test_a_run_outlives_a_move_of_its_model_and_its_text(
    little, here, complaint, tmp_path, monkeypatch
):
    """Typed as relative paths, read from elsewhere, then moved; another model or text is refused."""
    shutil.copytree(little / "model", tmp_path / "model")
    shutil.copy(little / "text.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    common = ("--text-file", "text.txt", "--tokens", "8192", "--max-length", "64")
    assert here("profile", "model", *common, "-o", "run").returncode == 0
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    swap = ("swap", tmp_path / "run", "--tokens", "200", "--blocks", "1", "--json")
    done = here(*swap)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["model"]["id"], data["corpus"]["name"]) == ("model", "text.txt")  # as typed
    for name in ("model", "text.txt"):
        (tmp_path / name).rename(tmp_path / "new" / name)
    gone = "which does not exist: name its new place with"
    assert f"{tmp_path / 'text.txt'}, {gone} --text-file" in complaint(*swap)
    assert f"{tmp_path / 'model'}, {gone} --model" in complaint(*swap, "--text-file", "text.txt")
    moved = ("--text-file", "text.txt", "--model", "model")
    assert json.loads(here(*swap, *moved).stdout)["blocks"] == data["blocks"]
    assert "is not the text of" in complaint(*swap, *moved[2:], "--text-file", "python-docs")
    tiny.change_weights(tmp_path / "new" / "model")
    assert "was made with another model: weights was" in complaint(*swap, *moved)


def test_an_empty_test_text_is_refused(little, wikitext, tmp_path, here, complaint):
    (tmp_path / "text.txt").write_text(wikitext.fit[:60_000] + 30_000 * "\n")
    common = ("--text-file", tmp_path / "text.txt", "--tokens", "8192", "--max-length", "64")
    assert here("profile", little / "model", *common, "-o", tmp_path / "run").returncode == 0
    assert "the held-out text is empty" in complaint("swap", tmp_path / "run")


def test_windows_longer_than_the_positions_are_shortened(little, here):
    flags = ("--tokens", "300", "--units", "0", "--blocks", "1", "--eval", "windows-4096")
    done = here("swap", little / "run", *flags, "--json")
    assert "the model has no more positions" in done.stderr
    assert json.loads(done.stdout)["base"]["protocol"] == "windows-128"
