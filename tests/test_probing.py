"""Every kind of probe on a tiny run: what is written, merged, left out and costed."""

import json
import shutil
from dataclasses import fields

import pytest
import torch

import tiny
from howlinear import blocks, profile
from howlinear.models.hooks import as_module
from howlinear.probing import bilinear, training
from howlinear.probing.kinds import KINDS, ProbeSettings
from howlinear.probing.probes import count, needs, probe
from howlinear.probing.results import Probes, summarise
from howlinear.records.fields import BlockProbe
from howlinear.records.files import read_json
from howlinear.report.runs import read_run
from howlinear.run.folder import RunFolder
from howlinear.swapping.swaps import SwapOptions, measure_swaps
from test_swap import drawn


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """A tiny model with a block that is far from linear, and its run."""
    torch.manual_seed(0)
    model = tiny.model("llama")
    for p in as_module(model, blocks(model)[1]).parameters():
        p.data *= 6
    folder = tmp_path_factory.mktemp("runs") / "strong"
    profile(model, drawn(model, 600, 0), batch_size=64).save(folder)
    return model, folder


def windows(model):
    fit, choose, report = drawn(model, 600, 0), drawn(model, 100, 1), drawn(model, 150, 2)
    return {"fit": fit.split(50), "choose": choose.split(50), "report": report.split(50)}


@pytest.fixture(scope="module")
def probed(strong):
    model, folder = strong
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "EVERY", 10)
        patch.setattr(training, "GAIN", 1.0)  # nothing is one: networks stop after ten checks
        return probe(
            model,
            folder,
            **windows(model),
            settings=ProbeSettings(
                KINDS, rank=4, seeds=2, train_steps=60, heal_steps=10, decode=str
            ),
            at="1",
            predict=drawn(model, 60, 3),
            heal_on=drawn(model, 60, 0),
        )


def test_every_kind_is_found_and_costed(probed):
    (block,) = probed.blocks
    assert block.index == 1
    assert block.r2 < 0.95
    costs = {kind: set((getattr(block, kind) or {}).get("swap", ())) for kind in ("linear", *KINDS)}
    assert costs.pop("where") == set()
    assert costs.pop("healing") == {"swapped", "healed", "control"}
    assert costs.pop("quantised") == {"int8", "int4"}
    assert len(costs.pop("degree")) >= 2
    assert len(costs.pop("trained")) == 6
    k = block.units["at_two_matrices"]
    assert costs.pop("units") == {f"{k} units"}
    assert costs == {kind: {kind} for kind in ("linear", "bilinear", "dense", "poly", "seeded")}
    assert block.linear["conjunction"] == pytest.approx(0, abs=1e-4)
    assert block.linear["conjunction_block"] > 0.01
    assert len(block.bilinear["seeds"]) == 2
    assert [step["rank"] for step in block.bilinear["ranks"]] == [1, 2, 4, 8, 16, 32, 64]
    assert block.bilinear["beyond_map"] == 4 * 3 * 16
    assert block.bilinear["gain"] > 2 * block.bilinear["gain_se"]
    assert all(getattr(block, kind)["seconds"] >= 0 for kind in KINDS)
    assert block.where["directions"]


def test_the_best_seed_is_chosen_by_rows_that_are_not_reported(probed):
    found = probed.blocks[0].bilinear
    best = max(found["seeds"], key=lambda seed: max(gain for _, gain in seed["curve"]))
    assert found["gain"] == best["gain"]
    assert found["seed"] == best["seed"]


def test_int8_costs_less_than_one_matrix_and_the_layers_are_there_to_swap(probed):
    block = probed.blocks[0]
    quantised = block.quantised["swap"]["int8"]["delta_nll"]
    assert abs(quantised) < block.linear["swap"]["linear"]["delta_nll"]
    assert probed.layers[1]["units"].keys() == block.units["swap"].keys()
    x = torch.randn(2, 3, 16)
    for layers in probed.layers[1].values():
        assert all(layer(x).shape == (2, 3, 16) for layer in layers.values())


def test_the_file_is_the_result(probed, strong):
    _, folder = strong
    data = read_json(folder / "probe.json", "probe")
    record = BlockProbe.from_dict(data["blocks"][0])
    assert record.bilinear["gain"] == probed.blocks[0].bilinear["gain"]
    assert data["settings"]["rows"] == {"fit": 4800, "choose": 800, "report": 1200}


def test_kinds_and_blocks_add_up_in_the_file(strong, tmp_path):
    model, folder = strong
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "probe.json").unlink(missing_ok=True)

    def again(kind, at, how=None, **options):
        settings = ProbeSettings((kind,), **(how or {}))
        return probe(model, tmp_path, **windows(model), settings=settings, at=at, **options)

    def written():
        return read_json(tmp_path / "probe.json", "probe")["blocks"]

    again("quantised", "1", predict=drawn(model, 20, 3))
    assert written()[0]["quantised"]["swap"]
    again("where", "0-1", predict=drawn(model, 20, 3))
    first, second = written()
    assert (first["index"], second["index"]) == (0, 1)
    assert first["quantised"] is None
    assert second["quantised"]["swap"]
    assert second["linear"]["swap"]
    costed = written()
    again("where", "1")  # no costs asked for: another set
    assert [b["index"] for b in written()] == [1]
    assert "swap" not in written()[0]["linear"]
    again("where", "1", how={"seed": 5})  # other rows may be drawn: not to be mixed
    sets = RunFolder(tmp_path).sets("probe")
    assert [s["settings"]["seed"] for s in sets] == [5, 0, 0]
    assert sets[2]["blocks"] == costed
    run = read_run(tmp_path)
    assert run.probes.keys() == {0, 1}
    assert run.probes[1].quantised == costed[1]["quantised"]
    assert len(run.left_out) == 2
    profile(model, drawn(model, 600, 0), batch_size=64).save(tmp_path)
    assert (tmp_path / "probe.json").exists()  # the same profile again
    other = profile(model, drawn(model, 600, 1), batch_size=64)
    with pytest.raises(ValueError, match=r"holds a run already \(profile.json, probe.json\)"):
        other.save(tmp_path)
    assert (tmp_path / "probe.json").exists()
    other.save(tmp_path, overwrite=True)
    assert not (tmp_path / "probe.json").exists()  # of maps that are gone


def test_groups_of_blocks_give_what_all_at_once_give(strong, tmp_path):
    model, folder = strong
    results = []
    for memory in (None, 1):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        (tmp_path / "probe.json").unlink(missing_ok=True)
        how = ProbeSettings(("quantised",), memory=memory)
        predict = drawn(model, 20, 3)
        found = probe(model, tmp_path, **windows(model), settings=how, predict=predict).to_dict()
        for block in found["blocks"]:
            block["quantised"].pop("seconds")
        results.append(json.dumps(found))
    assert results[0] == results[1]
    at = blocks(model)
    assert needs(model, at, 6800, None)[0] == 3
    assert needs(model, at, 6800, 1)[0] == 1


def test_experts_and_encoders_say_what_is_left_out(tmp_path):
    name = next(n for n, row in tiny.TINY.items() if row.experts and row.model_type == "mixtral")
    model = tiny.model(name)
    ids = [
        torch.randint(3, 49, (n, 8), generator=torch.Generator().manual_seed(n))
        for n in (700, 50, 60)
    ]
    profile(model, ids[0], batch_size=50).save(tmp_path)
    texts = dict(zip(("fit", "choose", "report"), ids, strict=True))
    how = ProbeSettings(("units", "quantised", "where"))
    block = probe(model, tmp_path, **texts, settings=how, at="1").blocks[0]
    assert "hidden units" in block.units["skipped"]
    assert "no plain projections" in block.quantised["skipped"]
    assert block.where["positions"]

    encoder = tiny.model("bert")
    profile(encoder, ids[0], batch_size=50).save(tmp_path, overwrite=True)
    how = ProbeSettings(("healing", "quantised"))
    found = probe(encoder, tmp_path, **texts, settings=how, at="1", predict=ids[1], heal_on=ids[1])
    assert found.base is None
    assert "no perplexity" in found.notes[0]
    assert "next-token loss" in found.blocks[0].healing["skipped"]
    assert "swap" not in found.blocks[0].quantised


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("magic",)}, "there is no probe 'magic'"),
        ({"solver": "theirs"}, "unknown solver 'theirs'"),
        ({"rank": 0}, "1 at least"),
        ({"seeds": 0}, "1 at least"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        ProbeSettings(**settings)


def test_the_summary_correlates_over_blocks():
    def block(index, r2, gain):
        return BlockProbe(index, "b", r2, r2, {}, bilinear={"gain": gain})

    blocks = [block(i, 1 - 0.1 * i, 0.01 * i**2) for i in range(9)]
    found = summarise(blocks)["bilinear_gain"]
    assert found["median"] == pytest.approx(0.16)
    assert found["spearman_with_1_minus_r2"]["value"] == pytest.approx(1)
    pearson = found["pearson_with_1_minus_r2"]
    assert 0.8 < pearson["low"] < pearson["value"] < pearson["high"] < 1
    assert summarise(blocks[:7])["bilinear_gain"]["pearson_with_1_minus_r2"]["value"] is None
    assert summarise([]) == {}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"kind": "probe", "schema": 1}',
        '{"kind": "probe", "schema": 1, "settings": {"rows": {}, "seed": 0}, "blocks": 3}',
        '{"kind": "probe", "schema": 1, "settings": {"rows": {}, "seed": 0}, "blocks": [3]}',
        '{"kind": "probe", "schema": 1, "settings": [3], "blocks": []}',
    ],
)
def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path, content):
    (tmp_path / "probe.json").write_text(content)
    with pytest.raises(ValueError, match=r"probe\.json"):
        Probes([], {}, None, {"rows": {}, "seed": 0}, []).save(tmp_path)
    assert (tmp_path / "probe.json").read_text() == content


def test_a_probe_of_another_rank_does_not_replace_the_first(tmp_path):
    def save(**found):
        record = BlockProbe(0, "a", 0.5, 0.5, {}, where={"tokens": []}, bilinear=found)
        Probes([record], {}, None, {"rows": {}, "seed": 0}, []).save(tmp_path)

    save(gain=0.1, rank=4)
    save(gain=0.2, rank=8)
    save(gain=0.3, rank=8)
    newest, earlier = RunFolder(tmp_path).sets("probe")
    assert newest["blocks"][0]["bilinear"] == {"gain": 0.3, "rank": 8}
    assert earlier["blocks"][0]["bilinear"] == {"gain": 0.1, "rank": 4}
    assert earlier["blocks"][0]["where"] is None


def test_odd_numbers_in_a_file_do_not_get_into_the_summary(tmp_path):
    odd = {"gain": "1", "rank": 4, "solver": "ours"}
    blocks = [
        BlockProbe(0, "a", 0.5, 0.5, {}, bilinear=odd, quantised={"int4": {"error": None}}),
        BlockProbe(1, "b", 0.5, 0.5, {}, bilinear=odd | {"gain": 0.25}, quantised={"int4": 3}),
        BlockProbe(2, "c", 0.5, 0.5, {}, bilinear=odd | {"gain": 0.5, "rank": 8}),
    ]
    assert summarise(blocks)["bilinear_gain"]["blocks"] == 1
    assert "int4_error" not in summarise(blocks)


def test_a_constant_block_is_left_out(tmp_path):
    model = tiny.model("llama")
    block = blocks(model)[1]
    model.get_submodule(block.down).weight.data.zero_()
    ids = [torch.randint(3, 49, (n, 8)) for n in (700, 50, 60)]
    profile(model, ids[0], batch_size=50).save(tmp_path)
    texts = dict(zip(("fit", "choose", "report"), ids, strict=True))
    found = probe(model, tmp_path, **texts, settings=ProbeSettings(("degree", "trained")), at="1")
    assert "does not vary" in found.blocks[0].degree["skipped"]
    assert "does not vary" in found.blocks[0].trained["skipped"]


def test_healing_reads_what_swap_chose_and_runs_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(bilinear, "RANKS", (1, 2))
    model = tiny.model("llama").to(torch.bfloat16)
    ids = [torch.randint(3, 49, (n, 8)) for n in (300, 50, 60)]
    profile(model, ids[0], batch_size=64).save(tmp_path)
    measure_swaps(
        model, tmp_path, choose=ids[1], report=ids[2], at="1", options=SwapOptions(2)
    ).save(tmp_path)
    texts = dict(zip(("fit", "choose", "report"), ids, strict=True))
    how = ProbeSettings(("healing", "units", "bilinear"), rank=2, seeds=1, heal_steps=3)
    found = probe(model, tmp_path, **texts, settings=how, at="0-1", predict=ids[1], heal_on=ids[1])
    assert [len(b.healing["units"]) for b in found.blocks] == [0, 2]  # swap knows of block 1 alone
    assert set(found.blocks[1].healing["swap"]) == {"swapped", "healed", "control"}


def test_tokens_are_counted_whatever_holds_them():
    ids = torch.zeros(3, 4, dtype=torch.long)
    assert count(ids) == count([ids]) == count([{"input_ids": ids}]) == 12
    assert {f.name for f in fields(BlockProbe)} >= set(KINDS)
