"""Runs that add up are one run; runs that do not are refused with what differs."""

import json
import math
import shutil

import pytest
import torch

import tiny
from howlinear import Profile, blocks, merge_runs, profile
from howlinear.linear.gradients import WINDOWS as SAMPLED
from howlinear.profiling.gathering import Scope, profile_shard
from howlinear.profiling.passes import Course
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_store

LENGTH = 64


def ids(windows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, LENGTH), generator=g)


WINDOWS = ids(5120 // LENGTH + 11)
MODEL = {"family": "llama", "revision": None, "parameters": 1, "dtype": "float32", "weights": "a"}


def close(one, two, path=""):
    """Equal to 1e-10, field by field, lists and all."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for name in one:
            close(one[name], two[name], f"{path}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(two)
        for i, pair in enumerate(zip(one, two, strict=True)):
            close(*pair, f"{path}[{i}]")
    elif isinstance(one, float) and not math.isnan(one):
        assert two == pytest.approx(one, rel=1e-10, abs=1e-10), path
    elif not isinstance(one, float):
        assert one == two, path


def shards(model, windows, folder, count, name="text", **options):
    """A text read in parts, as by an array of jobs; the folders."""
    made = []
    for i in range(count):
        out = folder / f"{name}-{i}"
        options = {"batch_size": 4} | options
        course = Course(shard=(i, count), saves=Saves(out, {}, 1e9), **options)
        shard = profile_shard(model, windows, at=blocks(model), scope=Scope(), course=course)
        course.saves.close()
        shard.settings.update(window=LENGTH, bos="auto")
        shard.settings.update(batch_size=options["batch_size"])
        shard.about.update(model=MODEL, corpus={"name": name, "part": "x", "fingerprint": name})
        shard.about["asked"] = {"text": name}
        shard.save(out)
        made.append(out)
    return made


@pytest.mark.parametrize(("family", "count"), [("llama", 5), ("gemma2", 2), ("gpt2", 5)])
def test_shards_add_up_to_the_run(family, count, tmp_path):
    """As many jobs as one likes, evenly divided or not; also the sample of rows and its errors."""
    model = tiny.model(family)
    whole = profile(model, WINDOWS, batch_size=4)
    merged = merge_runs(shards(model, WINDOWS, tmp_path, count), tmp_path / "all")
    merged.save(tmp_path / "all")
    again = Profile.load(tmp_path / "all")
    for one, two in zip(whole.blocks, again.blocks, strict=True):
        close(one.to_dict(), two.to_dict())
        assert math.isfinite(one.stream_error)
    for i, affine in whole.maps.items():
        assert torch.allclose(affine.weight, again.maps[i].weight, rtol=0, atol=1e-9)
    assert again.settings["tokens"] == WINDOWS.numel()
    assert len(again.about["merged"]) == count
    assert again.about["asked"] == {"text": "text"}
    assert merged.notes == whole.notes


def test_shards_need_not_be_enough_to_fit_anything(tmp_path):
    model = tiny.model("llama")
    made = shards(model, WINDOWS, tmp_path, 6, batch_size=16)  # a batch each
    rows = json.loads((made[0] / "shard.json").read_text())["blocks"][0]["rows"]
    assert rows == 16 * LENGTH  # of one fold: nothing else is left to fit by
    close(
        [b.to_dict() for b in profile(model, WINDOWS, batch_size=16).blocks],
        [b.to_dict() for b in merge_runs(made, tmp_path / "all").blocks],
    )
    missing = merge_runs(made[:4], tmp_path / "most")
    missing.save(tmp_path / "most")
    assert "shards [4, 5] of 6 are missing: text" in missing.notes[0]
    assert missing.settings["tokens"] == 4 * 16 * LENGTH
    with pytest.raises(ValueError, match="have read the same rows"):
        merge_runs([tmp_path / "most", made[3]], tmp_path / "twice")
    late = merge_runs([tmp_path / "most", *made[4:]], tmp_path / "late")  # those that came late
    assert late.settings["tokens"] == WINDOWS.numel()
    assert "shards" not in late.settings
    assert late.notes == []


def test_different_texts_add_up(tmp_path):
    """Rows of both, in the folds that each text gave them."""
    model = tiny.model("llama")
    other = ids(5120 // LENGTH, seed=1)
    made = shards(model, WINDOWS, tmp_path, 2) + shards(model, other, tmp_path, 3, "other")
    merged = merge_runs(made, tmp_path / "all")
    assert merged.about["corpus"]["name"] == "text + other"
    assert "asked" not in merged.about
    one, two = profile(model, WINDOWS), profile(model, other)
    for b in merged.blocks:
        assert b.n_heldout == WINDOWS.numel() + other.numel()
        ends = sorted((one.blocks[b.index].r2, two.blocks[b.index].r2))
        assert ends[0] - 0.02 < b.r2 < ends[1] + 0.02
        a, c = one.stores[b.index], two.stores[b.index]
        both = read_store(tmp_path / "all", b)
        units = len(both.known.units)
        a, c = a.narrow(units), c.narrow(units)
        for g in range(5):
            want = a.body[g].merge(c.body[g])
            assert torch.allclose(want.S_xx, both.body[g].S_xx, rtol=1e-9, atol=1e-9)
        keys = torch.cat([a.gradients.key, c.gradients.key]).unique()[:SAMPLED]
        assert torch.equal(both.gradients.key.unique(), keys)
        assert b.expected_kl > 0


def changed(folder, part, **values):
    twin = folder.parent / "changed"
    shutil.rmtree(twin, ignore_errors=True)
    shutil.copytree(folder, twin)
    data = json.loads((twin / "shard.json").read_text())
    data[part] = data[part] | values if isinstance(data[part], dict) else values["value"]
    (twin / "shard.json").write_text(json.dumps(data))
    return twin


def test_what_does_not_add_up_is_named(tmp_path):
    one, two = shards(tiny.model("llama"), WINDOWS, tmp_path, 2)
    out = tmp_path / "all"

    def told(*runs):
        with pytest.raises(ValueError, match=r".") as err:
            merge_runs(runs, out)
        assert not (out / "profile.json").exists()
        return str(err.value)

    for part, values, said in (
        ("model", {"weights": "b"}, "weights is b and a"),
        ("model", {"revision": "main"}, "revision is main and None"),
        ("settings", {"folds": 4}, "folds is 4 and 5"),
        ("settings", {"protocol": "paper"}, "protocol is paper and default"),
        ("settings", {"batch_size": 8}, "have read the same rows"),
        ("settings", {"tokens": 5}, "have read the same rows"),
        ("settings", {"shard": [1, 3]}, "have read the same rows"),
    ):
        assert said in told(one, changed(two, part, **values)), said
    data = json.loads((two / "shard.json").read_text())
    fewer = changed(two, "blocks", value=data["blocks"][:2])
    assert "only" in told(one, fewer)
    assert "has block 2 (model.layers.2.mlp, 16 to 16)" in told(one, fewer)
    assert "have read the same rows" in told(one, two, one)
    assert "nothing to be added to" in told(one)
    with pytest.raises(ValueError, match="is one of the runs"):
        merge_runs([one, two], one)
    assert "blocks are damaged" in told(one, changed(two, "blocks", value=[{"index": "x"}]))
    path = two / "moments" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert str(path) in told(one, two)
