"""A block whose output is constant: exactly affine, without an R2. Every command works on it."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from howlinear.linear.moments import Moments
from howlinear.linear.scoring import score
from howlinear.linear.solving import solve
from howlinear.report.runs import read_run


@pytest.fixture(scope="module")
def constant(little, tmp_path_factory):
    """The tiny model with block 1 switched off: a run on the text of the other."""
    folder = tmp_path_factory.mktemp("constant")
    shutil.copytree(little / "model", folder / "model")
    net = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        net.model.layers[1].mlp.down_proj.weight.zero_()
    net.save_pretrained(folder / "model")
    return folder, ("--text-file", little / "text.txt", "--tokens", "4096", "--max-length", "64")


def test_rounding_of_a_constant_is_no_variance():
    x = torch.randn(3000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.full((3000, 2), 0.1) + torch.tensor([0.0, 7e3])
    moments = Moments(4, 2)
    for part in (slice(0, 700), slice(700, 3000)):
        moments.update(x[part], y[part])
    found = score(solve(moments)[0], moments)
    assert math.isnan(found.r2)
    assert found.r2_by_feature.isnan().all()
    assert found.r2_scalar == pytest.approx(1)


def test_every_command_works_on_a_constant_block(constant, here):
    folder, text = constant
    run, tokens = folder / "run", ("--tokens", "256")
    for args in (
        ("profile", folder / "model", *text, "-o", run),
        ("swap", run, *tokens),
        ("compress", run, "--dry-run", "--remove-params", "10%", *tokens),
        ("control", "random-init", run, "--seeds", "1"),
        ("control", "matched", run),
        ("report", run, "-o", folder / "page.html"),
    ):
        done = here(*args)
        assert done.returncode == 0, done
        assert "nan" not in done.stdout
    block = json.loads((run / "profile.json").read_text())["blocks"][1]
    assert (block["r2"], block["kind"], block["fold_sums"][0][1]) == (None, "constant", 0)
    assert json.loads((run / "swap.json").read_text())["blocks"][1]["delta_nll"] == pytest.approx(0)
    assert [b.index for b in read_run(run).blocks] == [0, 2]
