"""The small models of docs/learned.md: real weights that are fast. `examples/learned/train.py` made them."""

import json
from pathlib import Path

import pytest
import torch

from howlinear import load, profile, windows
from howlinear.controls.cross_feed import cross_feed
from howlinear.controls.matched import matched
from howlinear.controls.random_init import random_init
from howlinear.records.files import read_monitor

FOLDER = Path(__file__).parent / "models"
FAMILIES = ("gpt2", "gpt-neox", "llama")


@pytest.fixture(scope="module", params=FAMILIES)
def learned(request, wikitext):
    """A model, the windows that its monitor watched, and its folder."""
    folder = FOLDER / request.param
    model, tokenizer = load(str(folder))
    return model, windows(wikitext.report(), tokenizer, 128, tokens=10_240), folder


def test_the_folder_is_what_its_log_says(learned):
    model, _, folder = learned
    about = json.loads((folder / "train.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == about["parameters"]
    assert about["seconds"] < 600
    assert (folder / "model.safetensors").stat().st_size < 3 * 2**20
    # ln 2048 = 7.6 is what no learning has
    assert about["held_out_loss"] < 5.2
    assert sum(about["losses"][-100:]) / 100 < 5.2


def test_the_monitors_last_row_is_the_profile_of_the_checkpoint(learned):
    """But for float16, in which the checkpoint is kept: weights move by 2^-11 of themselves at most."""
    model, ids, folder = learned
    _, rows = read_monitor(folder / "monitor.jsonl")
    found = profile(model, ids, signal=False)
    first, last = (
        torch.tensor([[b["r2"], b["r2_body"]] for b in rows[k]["blocks"]]) for k in (0, -1)
    )
    now = torch.tensor([[b.r2, b.r2_body] for b in found.blocks])
    assert float((now - last).abs().max()) < 0.005
    assert float((now - first).abs().max()) > 0.05  # training moved it


def test_training_moved_every_profile_out_of_the_untrained_band(learned):
    model, ids, _ = learned
    found = random_init(model, ids[:16], seeds=2)
    assert found.summary["below"] + found.summary["above"] >= 6  # of 8


def test_a_gaussian_of_the_same_moments_is_predicted_from_weights_alone(learned):
    model, ids, _ = learned
    for row in matched(model, ids, at="1,6").blocks:
        assert row["predicted"]["r2_gaussian"] == pytest.approx(
            row["r2"]["gaussian"]["value"], abs=0.02
        )


def test_architectures_feed_each_other(wikitext):
    a, b = (load(str(FOLDER / name))[0] for name in ("gpt2", "llama"))
    tokenizer = load(str(FOLDER / "gpt2"))[1]
    ids = windows(wikitext.report(), tokenizer, 128, tokens=5_120)
    found = cross_feed(a, b, ids, ids, pairs="4:4")
    split = {name: s["value"] for name, s in found.blocks[0]["split"].items()}
    assert split["weights"] + split["inputs"] == pytest.approx(split["difference"], abs=1e-9)
    own = profile(a, ids, at="4", signal=False).blocks[0].r2
    assert found.blocks[0]["cells"]["aa"]["value"] == pytest.approx(own, abs=1e-9)
