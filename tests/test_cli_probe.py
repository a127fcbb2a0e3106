"""`howlinear probe` as a person meets it, on tiny models with a real tokenizer."""

import json
import re
import shutil

import pytest

import tiny
from howlinear.probing import bilinear


def test_probe_prints_tables_and_writes_a_file(little, here, monkeypatch):
    monkeypatch.setattr(bilinear, "RANKS", (1, 2, 4))  # test_probing goes up to 64
    done = here(
        "probe", little / "run", "--blocks", "1,2", "--tokens", "300", "--seeds", "1", "--rank", "4"
    )
    assert done.returncode == 0, done.stderr
    assert "rows to fit on" in done.stderr
    assert "B of memory" in done.stderr
    assert re.search(r"^block 2: bilinear, about \d+ s left$", done.stderr, re.M)
    for title in ("bilinear:", "degree:", "units:", "where:", "quantised:"):
        assert title in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[2:] if "json" not in line)
    data = json.loads((little / "run" / "probe.json").read_text())
    assert [b["index"] for b in data["blocks"]] == [1, 2]
    assert data["corpus"]["report"] == "last 10 %"
    assert data["blocks"][0]["bilinear"]["swap"]["bilinear"]["delta_ppl_se"] > 0
    assert not list((little / "run").glob(".*"))  # nothing half-written


def test_json_is_one_document_and_fewer_rows_are_drawn(little, here):
    flags = ("--kind", "where,quantised", "--blocks", "1", "--rows", "1000", "--tokens", "0")
    done = here("probe", little / "run", *flags, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["settings"]["rows"]["fit"] == 1000 // 64 * 64
    assert "swap" not in data["blocks"][0]["linear"]


def test_the_papers_solver(little, here, monkeypatch):
    monkeypatch.setitem(bilinear.train_products.__kwdefaults__, "steps", 400)
    flags = ("--kind", "bilinear", "--solver", "paper", "--blocks", "1", "--rank", "2")
    done = here("probe", little / "run", *flags, "--seeds", "1", "--tokens", "0", "--json")
    found = json.loads(done.stdout)["blocks"][0]["bilinear"]
    assert found["solver"] == "paper"
    assert found["gate"] > 0
    assert found["ranks"] is None


def test_an_encoder_whose_checkpoint_lacks_the_pooler(little, here, tmp_path):
    shutil.copytree(little / "model", tmp_path / "model")  # its tokenizer
    tiny.model("bert", vocab_size=2048).base_model.save_pretrained(tmp_path / "model")
    text = ("--text-file", little / "text.txt", "--tokens", "4096", "--max-length", "32")
    assert here("profile", tmp_path / "model", *text, "-o", tmp_path / "run").returncode == 0
    flags = ("--kind", "units,quantised,where", "--blocks", "1", "--rows", "4096")
    done = here("probe", tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    assert "no perplexity: BertModel has no language-model head" in " ".join(done.stdout.split())
    block = json.loads((tmp_path / "run" / "probe.json").read_text())["blocks"][0]
    r2 = [step["r2"] for step in block["units"]["steps"]]
    assert r2 == sorted(r2)
    assert r2[-1] == pytest.approx(1, abs=1e-6)
    assert block["quantised"]["int8"]["error"] < 0.01
