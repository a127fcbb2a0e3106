"""Experts through the whole way: measured by definition, refused when starved, added up, swapped."""

import json
import shutil

import numpy as np
import pytest
import torch

import tiny
from howlinear import Profile, blocks, merge_runs, profile
from howlinear.losses.perplexity import compare
from howlinear.models.experts import mixtures, replaced
from howlinear.models.hooks import swapped
from howlinear.profiling.gathering import Scope, profile_shard
from howlinear.profiling.passes import Course
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_map, read_store
from howlinear.run.work import Work
from howlinear.swapping.expert_swaps import chosen, measure_expert_swaps
from test_merging import MODEL, close
from test_profiling import lstsq, ss
from test_saving import Killed, files, killed_after

LENGTH = 64
FAMILIES = [name for name, t in tiny.TINY.items() if t.experts]


def ids(windows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, LENGTH), generator=g)


WINDOWS = ids(2048 // LENGTH + 3)


@pytest.fixture(scope="module")
def mixtral():
    return tiny.model("mixtral")


def by_hand(model, layer, windows):
    """Of every expert: rows of x, of its own output by its weights, and the window of each."""
    moe = model.model.layers[layer].mlp
    seen = []
    hook = moe.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for window in windows:
            model(window[None])
    hook.remove()
    x = torch.cat(seen).reshape(-1, seen[0].shape[-1])
    window = torch.arange(len(windows)).repeat_interleave(LENGTH)
    with torch.no_grad():
        _, _, chosen = moe.gate(x)
    for e in range(moe.experts.num_experts):
        at = (chosen == e).any(1)
        gate, up = (x[at] @ moe.experts.gate_up_proj[e].T).chunk(2, -1)
        y = (moe.experts.act_fn(gate) * up) @ moe.experts.down_proj[e].T
        yield x[at].detach().double().numpy(), y.detach().double().numpy(), window[at].numpy()


def test_every_expert_by_definition(mixtral):
    """On the tokens routed to it: cross-validated R2 by numpy, fold by fold."""
    result = profile(mixtral, WINDOWS, experts="routed")
    for e, (x, y, window) in zip(result.experts[:4], by_hand(mixtral, 0, WINDOWS), strict=True):
        assert (e.index, e.path) == (0, f"model.layers.0.mlp.experts.{e.expert}")
        assert e.tokens == len(x)
        assert e.share == len(x) / WINDOWS.numel()
        count = len(WINDOWS)
        fold = np.searchsorted(np.round(np.arange(1, 5) * count / 5), window, side="right")
        res = tot = 0.0
        for f in np.unique(fold):
            guess = lstsq(x[fold != f], y[fold != f])
            res += ((y[fold == f] - guess(x[fold == f])) ** 2).sum()
            tot += ss(y[fold == f]).sum()
        assert e.r2 == pytest.approx(1 - res / tot, abs=1e-6)
        assert e.problem is None
    assert sum(e.tokens for e in result.experts[:4]) == 2 * WINDOWS.numel()
    # the layer as a whole is another question, and asking about experts does not change it
    close(
        [b.to_dict() for b in profile(mixtral, WINDOWS).blocks],
        [b.to_dict() for b in result.blocks],
    )
    every = profile(mixtral, WINDOWS, experts="all").experts
    assert {e.tokens for e in every} == {WINDOWS.numel()}
    assert abs(every[0].r2 - result.experts[0].r2) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_and_in_groups(family):
    model = tiny.model(family)
    want = [e.to_dict() for e in profile(model, WINDOWS, experts="routed", folds=2).experts]
    assert want
    for course in (Course(layerwise=True), Course(together=3)):
        got = profile(model, WINDOWS, experts="routed", folds=2, course=course).experts
        close(want, [e.to_dict() for e in got])


def test_starved_experts_are_not_scored():
    """Sixteen experts of a wide layer, few tokens: what noise would print, a reason stands for."""
    model = tiny.model("qwen3_moe", num_experts=16, num_experts_per_tok=1)
    with torch.no_grad():  # one expert that nobody asks
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight[5] *= 8
    result = profile(model, ids(2048 // LENGTH + 4), experts="routed", folds=2)
    starved = [e for e in result.experts if e.problem]
    assert starved
    for e in starved:
        assert e.r2 is None
        assert e.rows_per_column < 4
        assert "tokens would do" in e.problem or "hardly a token" in e.problem
    assert all(e.rows_per_column >= 4 for e in result.experts if not e.problem)


def test_experts_add_up_go_on_and_read_back(mixtral, tmp_path):
    made = []
    for i in range(3):
        saves = Saves(tmp_path / f"{i}", {}, 1e9)
        course = Course(shard=(i, 3), saves=saves, batch_size=4)
        scope = Scope(experts="routed")
        shard = profile_shard(mixtral, WINDOWS, at=blocks(mixtral), scope=scope, course=course)
        saves.close()
        shard.settings.update(window=LENGTH, batch_size=4)
        shard.about.update(model=MODEL, corpus={"name": "t", "part": "x", "fingerprint": "t"})
        shard.save(tmp_path / f"{i}")
        made.append(tmp_path / f"{i}")
    merged = merge_runs(made, tmp_path / "all")
    merged.save(tmp_path / "all")
    again = Profile.load(tmp_path / "all")
    whole = profile(mixtral, WINDOWS, experts="routed", batch_size=4)
    close([e.to_dict() for e in whole.experts], [e.to_dict() for e in again.experts])
    assert read_store(tmp_path / "all", again.experts[1]).n == again.experts[1].tokens

    one = Course(saves=Saves(tmp_path / "one", {}, 1e9))
    profile(mixtral, WINDOWS, experts="routed", course=one).save(tmp_path / "one")
    for stop in (0.4 * WINDOWS.numel(), 0.7 * WINDOWS.numel(), None):
        two = Course(saves=Saves(tmp_path / "two", {}, 0.0))
        try:
            progress = killed_after(stop) if stop else None
            result = profile(mixtral, WINDOWS, experts="routed", course=two, progress=progress)
        except Killed:
            continue
    result.save(tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_swapping_one_expert_costs_what_running_it_says(family, tmp_path):
    model = tiny.model(family)
    few = profile(model, WINDOWS, experts="routed", folds=2)
    few.save(tmp_path)  # moments of experts are not kept here
    with pytest.raises(ValueError, match="does not exist"):
        measure_expert_swaps(model, tmp_path, "1.0", report=ids(5, 9))
    shutil.rmtree(tmp_path)
    course = Course(saves=Saves(tmp_path, {}, 1e9))
    run = profile(model, WINDOWS, experts="routed", course=course)
    run.save(tmp_path)
    report = ids(9, 9)
    work = Work(batch_size=4)
    result = measure_expert_swaps(model, tmp_path, "1.0,1", report=report, work=work)
    keys = [e.expert for e in run.experts if e.index == 1 and not e.problem]
    assert [b.expert for b in result.blocks] == keys
    (mixture,) = [m for m in mixtures(model) if m.block.index == 1]
    for b, e in zip(result.blocks, [e for e in run.experts if e.index == 1], strict=True):
        affine = read_map(tmp_path, e)[0].to(next(model.parameters()))
        key = int(e.expert) if e.expert.isdecimal() else e.expert
        swap = {mixture.block: replaced(model, mixture, {key: affine})}
        change = compare(model, lambda swap=swap: swapped(model, swap), report, f"windows-{LENGTH}")
        assert b.delta_nll == pytest.approx(change.delta_nll, abs=1e-6)
        assert b.kl == pytest.approx(change.kl, abs=1e-6)
        assert b.kl > 0
    result.save(tmp_path)
    data = json.loads((tmp_path / "swap-experts.json").read_text())
    if family == "mixtral":  # gate, up and down, less a matrix and a bias
        assert data["blocks"][0]["params_saved"] == 3 * 16 * 40 - 16 * 17
    for which, said in (
        ("9.1", "no such expert"),
        ("../x", "write all, a block"),
        ("1.99", "no such expert"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen(run.experts, which)
    with pytest.raises(ValueError, match="measured no experts"):
        chosen([], "all")


def test_the_command(tmp_path, little, here, complaint):
    model = tiny.model("qwen2_moe", vocab_size=2048)
    model.save_pretrained(tmp_path / "moe")
    for path in (little / "model").glob("*token*"):
        shutil.copy(path, tmp_path / "moe")
    text = ("--text-file", little / "text.txt", "--tokens", "4096", "--max-length", "64")
    args = ("profile", tmp_path / "moe", *text, "-o", tmp_path / "run")
    done = here(*args, "--experts")
    assert done.returncode == 0, done.stderr
    assert "experts, on the tokens routed to each" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    done = here("swap", tmp_path / "run", "--experts", "1", "--tokens", "600")
    assert done.returncode == 0, done.stderr
    assert "1.shared" in done.stdout
    assert (tmp_path / "run" / "swap-experts.json").is_file()
    assert "add --experts" in complaint(*args, "--all-tokens")
    other = ("profile", little / "model", *text, "-o", tmp_path / "dense", "--experts")
    assert "no mixtures of experts: drop --experts" in complaint(*other)
    # weights of experts are written anew when they stay on disk, and the numbers are the same
    done = here(*args[:-1], tmp_path / "layers", "--experts", "--layerwise", "--json")
    assert done.returncode == 0, done.stderr
    one = json.loads((tmp_path / "run" / "profile.json").read_text())["experts"]
    for a, b in zip(one, json.loads(done.stdout)["experts"], strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["r2"] == pytest.approx(b["r2"], rel=1e-6)
    assert not (tmp_path / "layers" / "partial").exists()
