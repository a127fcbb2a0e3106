"""Budgets kept, plans followed, baselines beside them; on tiny models, where everything is quick."""

import copy
import math
import re
import shutil

import pytest
import torch

import tiny
from howlinear import blocks, profile, swapped
from howlinear.compression.compress import CompressSettings, compress_model
from howlinear.compression.plan import Budget
from howlinear.compression.prices import PRICED, Losses
from howlinear.compression.refitting import Refitter
from howlinear.compression.targets import FORMATS
from howlinear.export.install import install_maps
from howlinear.export.stock import with_one_width
from howlinear.export.widths import widen
from howlinear.losses.perplexity import compare
from howlinear.models import loading
from howlinear.models.families import parameter_count
from howlinear.models.hooks import as_module
from howlinear.models.offload import is_offloaded
from howlinear.records.fields import BlockPlan
from howlinear.run.work import Work
from howlinear.swapping.swaps import SwapOptions, measure_swaps
from test_swap import drawn


def sharpened(name, **settings):
    """Random blocks write little; these write enough to be missed."""
    model = tiny.model(name, **settings)
    with torch.no_grad():
        for block in blocks(model):
            model.get_submodule(block.down).weight.mul_(30)
    return model


def written(model, windows, length=16):
    """Text that the model itself writes: a changed model finds it harder."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 49, (windows, 1), generator=g)
    with torch.no_grad():
        for _ in range(length - 1):
            p = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=g)], 1)
    return ids


FIT, CHOOSE, REPORT = written(sharpened("llama"), 500).split((400, 50, 50))
TEXTS = {"fit": FIT, "choose": CHOOSE, "report": REPORT}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a tiny llama with blocks that matter."""
    model = sharpened("llama")
    folder = tmp_path_factory.mktemp("run")
    profile(model, FIT, batch_size=50).save(folder)
    return folder


def squeezed(run, budget=None, plan=None, at=None, **options):
    model = sharpened("llama")
    settings = CompressSettings(**options)
    return model, compress_model(model, run, budget, **TEXTS, plan=plan, at=at, settings=settings)


@pytest.fixture(scope="module")
def by_share(run):
    return squeezed(run, Budget(parameters=0.3))


@pytest.fixture(scope="module")
def by_perplexity(run):
    return squeezed(run, Budget(perplexity=0.3))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prices_are_those_of_measured_swaps_as_long_as_errors_are_small(name):
    """A block and a little of another one beside it, and the block itself, which costs nothing."""
    torch.manual_seed(0)
    model = tiny.model(name).requires_grad_(False)
    losses = Losses(model, CHOOSE, REPORT, None, Work())
    variants = []
    for block in blocks(model):
        module, other = as_module(model, block), torch.nn.Linear(block.d_in, block.d_out)
        for size in (0.0, 0.1):
            scale = size * float(module(torch.randn(64, block.d_in)).norm() / 8)
            variants.append((block, lambda x, m=module, o=other, s=scale: m(x) + s * o(x)))
    with torch.no_grad():
        expected = losses.expected(variants)
        measured = [change.kl for change in losses.alone("measuring", variants)]
    assert max(expected[::2]) < 1e-12
    for price, cost in zip(expected[1::2], measured[1::2], strict=True):
        assert cost / 4 < price < 4 * cost


def test_windows_are_priced_in_parts_and_weigh_the_same():
    """Parts of 12 windows: the same part twice costs what it costs once, and another one something else."""
    torch.manual_seed(0)
    model = tiny.model("llama").requires_grad_(False)
    variants = [(b, torch.nn.Linear(b.d_in, b.d_out)) for b in blocks(model)]
    first, other, few = drawn(model, 30, 3).split(12)

    def prices(*parts):
        return Losses(model, torch.cat(parts), REPORT, None, Work()).expected(variants)

    once, twice, both = prices(first), prices(first, first), prices(first, other)
    alone = prices(other)
    assert twice == pytest.approx(once)
    assert both != pytest.approx(once)
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(once, alone, strict=True)])
    uneven = [(2 * a + b) / 3 for a, b in zip(once, prices(few), strict=True)]
    assert prices(first, few) == pytest.approx(uneven)  # 12 windows and 6


def test_of_many_windows_those_that_are_priced_are_spread(monkeypatch):
    model, read = tiny.model("llama").requires_grad_(False), []
    block = blocks(model)[0]
    variants = [(block, torch.nn.Linear(block.d_in, block.d_out))]
    ids = drawn(model, 129, 3)

    def note(self, part, variants):
        read.extend(part.tolist())
        return [0.0 for _ in variants]

    monkeypatch.setattr(Losses, "_expected_on", note)
    Losses(model, ids, REPORT, None, Work()).expected(variants)
    places = [ids.tolist().index(row) for row in read]
    assert len(places) == PRICED
    assert places == [i * 129 // PRICED for i in range(PRICED)]


def test_a_share_of_parameters_goes(by_share):
    model, result = by_share
    share = result.removed / result.feed_forward
    assert 0.3 <= share < 0.45
    assert result.feed_forward == 3 * 3 * 16 * 40
    small = copy.deepcopy(model)
    install_maps(small, result.maps)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    assert before - after == result.removed
    left = sum(b.parameters_left for b in result.blocks)
    assert left == result.feed_forward - result.removed


def test_what_is_reported_is_what_the_swapped_model_costs(by_share):
    model, result = by_share
    again = compare(model, lambda: swapped(model, result.maps), REPORT)
    assert result.change.delta_nll == pytest.approx(again.delta_nll, abs=1e-6)


def test_a_perplexity_budget_is_kept_on_the_text_for_choosing(by_perplexity):
    model, result = by_perplexity
    on_choose = compare(model, lambda: swapped(model, result.maps), CHOOSE)
    assert on_choose.delta_nll <= math.log(1.3)
    assert result.removed > 0


def test_more_budget_removes_more(run, by_perplexity):
    assert by_perplexity[1].removed < squeezed(run, Budget(perplexity=1.0))[1].removed


@pytest.mark.parametrize("target", ["hf", "stock"])
def test_a_budget_that_cannot_be_met_gives_the_nearest_plan(run, target):
    _, tight = squeezed(run, Budget(perplexity=1e-9), target=target)
    assert tight.unmet.startswith("no plan costs less than 0.0% more perplexity")
    cost = re.search(r"the nearest, costs (.*)% on the text for choosing", tight.unmet)
    assert float(cost[1]) > 0
    assert 0 < tight.removed < 0.3 * tight.feed_forward
    _, small = squeezed(run, Budget(parameters=0.995), target=target, heal=2, curve=[0.1])
    assert small.unmet.startswith("99.5% of the feed-forward parameters cannot go")
    assert f"removes {small.removed / small.feed_forward:.1%}" in small.unmet
    assert small.to_dict()["unmet"] == small.unmet
    assert not small.healed
    assert len(small.curve) == 1


def test_a_budget_that_is_met_says_nothing(by_share, by_perplexity):
    assert not by_share[1].unmet
    assert not by_perplexity[1].unmet


def test_baselines_stand_beside_it(run):
    _, result = squeezed(run, Budget(parameters=0.5), curve=[0.2], baselines=True)
    methods = {p.method for p in result.curve}
    assert methods == {"ours", "swap", "r2", "zero"}
    for name in methods:
        removed = [p.removed for p in result.curve if p.method == name]
        assert max(removed) >= 0.5 * result.feed_forward
    zero = [p for p in result.curve if p.method == "zero"]
    assert [p.removed for p in zero] == [1920 * (i + 1) for i in range(len(zero))]
    data = result.to_dict()
    assert data["kind"] == "compress"
    assert {p["method"] for p in data["curve"]} == methods


def test_baselines_go_by_the_swaps_that_the_run_has_measured(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    model = sharpened("llama")
    swaps = measure_swaps(
        model,
        folder,
        choose=CHOOSE,
        report=REPORT,
        options=SwapOptions(baselines=True, all_tokens=True),
    )
    swaps.save(folder)
    measure_swaps(model, folder, choose=CHOOSE, report=REPORT[:9], at="0").save(folder)
    costs = {b.index: b.delta_nll_plain for b in swaps.blocks}
    _, result = squeezed(folder, at="0", units=0, baselines=True)
    (first,) = [p for p in result.curve if p.method == "swap" and len(p.chosen) == 1]
    assert list(first.chosen) == [min(costs, key=costs.get)]
    assert first.change.delta_nll == pytest.approx(min(costs.values()), abs=1e-6)


def test_named_blocks_become_one_matrix(run):
    _, result = squeezed(run, at="0,2", units=0)
    assert [(b.index, b.rank, b.units) for b in result.blocks if b.replaced] == [
        (0, None, []),
        (2, None, []),
    ]
    assert result.removed == 2 * (1920 - 16 * 16 - 16)


def test_a_plan_is_followed_to_the_letter(run):
    plan = [
        BlockPlan(0, "model.layers.0.mlp", 2, 5),
        BlockPlan(1, "model.layers.1.mlp", 0, 24),
    ]
    _, result = squeezed(run, plan=plan)
    assert result.plan == plan
    again = squeezed(run, plan=result.plan)[1]
    assert again.change.delta_nll == pytest.approx(result.change.delta_nll, abs=1e-6)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (BlockPlan(9, "model.layers.9.mlp", None, 0), "block 9"),
        (BlockPlan(0, "model.layers.1.mlp", None, 0), "not in the run"),
        (BlockPlan(0, "model.layers.0.mlp", None, 41), "has 40"),
    ],
)
def test_a_plan_of_another_model_is_refused(run, entry, told):
    with pytest.raises(ValueError, match=told):
        squeezed(run, plan=[entry])


def test_without_intercept_there_is_no_bias_and_its_price_is_told(run):
    _, result = squeezed(run, at="1", units=0, intercept=False)
    (fitted,) = result.maps.values()
    assert not fitted.bias.any()
    assert "without biases" in result.notes[-1]


def test_models_that_predict_nothing_take_named_blocks(tmp_path):
    model = tiny.model("bert")
    profile(model, FIT, batch_size=50).save(tmp_path)
    result = compress_model(model, tmp_path, at="0", **TEXTS)
    assert result.change is None
    assert result.removed > 0
    with pytest.raises(ValueError, match="`at`"):
        compress_model(model, tmp_path, Budget(perplexity=0.05), **TEXTS)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_stock_plan_has_one_width_and_counts_what_the_file_saves(tmp_path, family):
    model = sharpened(family)
    profile(model, FIT, batch_size=50).save(tmp_path)
    settings = CompressSettings(target="stock")
    result = compress_model(model, tmp_path, Budget(parameters=0.3), **TEXTS, settings=settings)
    small = with_one_width(model, result.maps)
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    assert result.removed == counts[0] - counts[1] >= 0.3 * result.feed_forward
    assert sum(b.parameters - b.parameters_left for b in result.blocks) == result.removed
    ((rank, kept),) = {(b.rank, len(b.units)) for b in result.blocks}
    assert rank == 0
    assert kept == 32 if family == "gpt2" else kept == 16  # of 64 and 40
    assert bool(result.notes) == (family == "qwen2")  # without biases
    again = compress_model(model, tmp_path, plan=result.plan, **TEXTS, settings=settings)
    assert again.removed == result.removed


def test_plans_that_a_stock_model_cannot_hold_are_refused(run, tmp_path):
    paths = [f"model.layers.{i}.mlp" for i in range(3)]
    for wrong, why in (
        ({"at": "0"}, "one width: replace all 3 blocks"),
        ({"plan": [BlockPlan(i, p, 0, 8 + i) for i, p in enumerate(paths)]}, "one width"),
        ({"plan": [BlockPlan(i, p, 2, 8) for i, p in enumerate(paths)]}, "holds no matrix"),
        ({"budget": Budget(parameters=0.3), "rank": "full"}, "leave out .rank"),
    ):
        with pytest.raises(ValueError, match=rf"{why}.* use .kind=.hf."):
            squeezed(run, target="stock", **wrong)
    profile(sharpened("llama"), FIT, at="0-1", batch_size=50).save(tmp_path)
    with pytest.raises(ValueError, match=r"not measured block 2 .*profile all blocks"):
        squeezed(tmp_path, Budget(parameters=0.3), target="stock")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_plan_counts_what_the_format_stores(tmp_path, form):
    model = sharpened("llama", intermediate_size=512)
    profile(model, FIT, batch_size=50).save(tmp_path)
    settings = CompressSettings(target=form.name)
    result = compress_model(model, tmp_path, Budget(parameters=0.2), **TEXTS, settings=settings)
    before = {b.index: parameter_count(model.get_submodule(b.path)) for b in blocks(model)}
    total = parameter_count(model)
    widen(model, result.maps, form)
    assert result.removed == total - parameter_count(model) >= 0.2 * result.feed_forward
    for b in result.blocks:
        assert b.parameters == before[b.index]
        if b.replaced:
            assert b.parameters_left == parameter_count(model.get_submodule(b.path))


def test_a_rank_of_the_whole_width_is_priced_and_a_larger_one_saves_nothing(run):
    _, result = squeezed(run, Budget(parameters=0.3), rank=16)
    assert result.removed >= 0.3 * result.feed_forward
    with pytest.raises(ValueError, match="no way to replace a block saves parameters"):
        squeezed(run, Budget(parameters=0.3), rank=100)


def test_blocks_of_few_hidden_units_are_planned(tmp_path):
    model = tiny.model("llama", intermediate_size=10)
    profile(model, FIT, batch_size=50).save(tmp_path)
    result = compress_model(model, tmp_path, Budget(parameters=0.2), **TEXTS)
    assert result.removed >= 0.2 * result.feed_forward


def test_weights_on_disk_are_compressed_as_in_memory(run, tmp_path, monkeypatch):
    """Without gradients units are chosen by squares and options are measured: the budget is kept all the same."""
    monkeypatch.setattr(Refitter, "metric", lambda *_: None)  # in memory, too
    sharpened("llama").save_pretrained(tmp_path / "model")
    place = {"device_map": "disk", "offload_folder": tmp_path / "off"}
    disk, _ = loading.load(tmp_path / "model", **place)
    settings = CompressSettings(units=2, baselines=True)
    found = compress_model(disk, run, **TEXTS, at="0,2", settings=settings)
    _, plain = squeezed(run, at="0,2", units=2, baselines=True)
    assert [b.units for b in found.blocks] == [b.units for b in plain.blocks]
    assert found.change.delta_nll == pytest.approx(plain.change.delta_nll, abs=1e-5)
    assert found.change.delta_nll > 1e-3  # the maps change something
    small = compress_model(disk, run, Budget(parameters=0.3), **TEXTS)
    assert small.removed >= 0.3 * small.feed_forward
    assert is_offloaded(disk)
