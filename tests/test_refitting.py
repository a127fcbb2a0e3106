"""Maps refitted behind one another in one forward, beside doing it block by block."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from howlinear import Moments, blocks, fit, swapped
from howlinear.compression.refitting import Refitter, Sums
from howlinear.linear.accumulators import merged
from howlinear.linear.metric import Metric
from howlinear.models import loading
from howlinear.models.forward import run_rows
from howlinear.models.hooks import as_module
from howlinear.models.offload import is_offloaded
from howlinear.models.units import taken
from howlinear.probing.samples import gather

WINDOWS = torch.randint(3, 49, (60, 16), generator=torch.Generator().manual_seed(0))


def exactly(x, y, weight):
    rows = Moments(x.shape[1], y.shape[1])
    rows.update(x, y, weight)
    return fit(rows)


def weights(model, block):
    """1/|h| of each row of a block, in the order of the windows."""
    rows = []
    run_rows(model, WINDOWS, lambda _, b, r: rows.append(r.inverse_stream), at=[block])
    return torch.cat(rows)


def streams(model, block, maps):
    """(n, d), the residual stream after a block, with some blocks replaced."""
    rows = []
    with swapped(model, maps):
        run_rows(model, WINDOWS, lambda _, b, r: rows.append(r.h.clone()), at=[block])
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_neox", "opt", "gemma2"])
def test_a_walk_fits_what_block_by_block_does(name):
    model = tiny.model(name)
    at = blocks(model)[:2]
    fitter = Refitter(model, at, WINDOWS)
    maps = fitter.refit(dict.fromkeys(at, (None, 0)))
    first = gather(model, at, WINDOWS)[at[0].index]
    want = exactly(first.x, first.y, weights(model, at[0]))
    torch.testing.assert_close(maps[at[0]].weight.double(), want.weight, rtol=1e-4, atol=1e-5)
    with swapped(model, {at[0]: maps[at[0]]}):
        second = gather(model, at[1:], WINDOWS)[at[1].index]
        y = as_module(model, at[1])(second.x).detach()
        weight = weights(model, at[1])
    if fitter.corrections[at[1]]:  # the stream after the second block, as the original has it
        drift = streams(model, at[1], {}) - streams(model, at[1], {at[0]: maps[at[0]]})
        y = y + fitter.corrections[at[1]] * drift / at[1].scale
    want = exactly(second.x, y, weight)
    torch.testing.assert_close(maps[at[1]].weight.double(), want.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps[at[1]].bias.double(), want.bias, rtol=1e-4, atol=1e-5)


def stream_after(model, block, maps):
    """The residual stream after a block, with some blocks replaced."""
    heard = []
    handle = model.get_submodule(block.stream[1]).register_forward_hook(
        lambda _, a, out: heard.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad(), swapped(model, maps):
        model(input_ids=WINDOWS)
    handle.remove()
    return heard[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_the_correction_brings_the_stream_nearer(name):
    """On the rows of the fit all of it is best; the share that is used stands between all and none."""
    model = tiny.model(name)
    at = blocks(model)[:2]
    off = {}
    for share in (None, 0.0, 1.0):
        fitter = Refitter(model, at, WINDOWS, correction=share)
        maps = fitter.refit(dict.fromkeys(at, (None, 0)))
        assert fitter.corrections[at[0]] is None  # nothing before it was replaced
        with swapped(model, {at[0]: maps[at[0]]}):
            weight = weights(model, at[1]).reshape(-1, 1)
        error = stream_after(model, at[1], {}) - stream_after(model, at[1], maps)
        off[share] = float((weight * error.reshape(-1, error.shape[-1]).double().square()).sum())
        assert share in (None, fitter.corrections[at[1]])
    assert off[1.0] < off[0.0]
    assert off[1.0] <= off[None] <= off[0.0]


@pytest.mark.parametrize("name", ["gemma2", "bert"])
def test_where_a_norm_follows_the_block_the_stream_is_left_or_found(name):
    """An output norm lies between the block and the stream: no output brings the stream back."""
    model = tiny.model(name)
    at = blocks(model)[:2]
    fitter = Refitter(model, at, WINDOWS)
    fitter.refit(dict.fromkeys(at, (None, 0)))
    assert (fitter.corrections[at[1]] is None) == (name == "gemma2")


def test_units_are_the_blocks_own_and_shapes_are_kept():
    model = tiny.model("llama")
    at = blocks(model)
    fitter = Refitter(model, at, WINDOWS)
    shapes = {at[0]: (None, 3), at[1]: (0, 20), at[2]: (2, 4)}
    maps = fitter.refit(shapes)
    for block, (rank, k) in shapes.items():
        assert maps[block].units == tuple(fitter.ladders[block][rank != 0].order[:k])
        found = maps[block].affine
        assert (found.rank if rank is not None else None) == rank
    with torch.no_grad(), swapped(model, maps):
        assert model(input_ids=WINDOWS[:2]).logits.isfinite().all()


def test_units_are_kept_by_what_their_errors_cost():
    """Where predictions depend on one direction of the output alone, the errors there are the smallest."""
    model = tiny.model("llama")
    block = blocks(model)[0]
    rows = gather(model, [block], WINDOWS)[block.index]
    y = as_module(model, block)(rows.x).detach()
    assert Refitter(model, [block], WINDOWS).metric(block) is not None  # the model's own
    weight = weights(model, block)[:, None].to(y)
    errors = {}
    for direction in (3, 5, None):
        fitter = Refitter(model, [block], WINDOWS)
        fitter.products = {block: torch.zeros(block.d_out, block.d_out)}
        if direction is not None:
            fitter.products[block][direction, direction] = 1.0
        (fitted,) = fitter.survey({block: [(0, 16)]})[block]
        errors[direction] = (fitted(rows.x) - y).square().mean(0)
        metric = fitter.metric(block)
        cost = metric.scaled if metric else lambda e: e
        left = (weight * cost(fitted(rows.x) - y).square()).sum()
        spread = y - (weight * y).sum(0) / weight.sum()
        rest = float(left / (weight * cost(spread).square()).sum())
        assert fitter.rests[block][0, 16] == pytest.approx(rest, rel=1e-4)
    for direction in (3, 5):
        others = [e[direction] for d, e in errors.items() if d != direction]
        assert errors[direction][direction] < 0.8 * min(others)


@pytest.mark.parametrize("units", [(), (3, 0, 7)])
def test_a_matrix_of_low_rank_is_refitted_by_what_its_errors_cost(units):
    """Against the lowest cost that numpy finds: rows without what is free, fitted, and all but 3 directions lost."""
    model = tiny.model("llama")
    block = blocks(model)[0]
    products = torch.diag(torch.rand(block.d_out, generator=torch.Generator().manual_seed(0)) ** 4)
    rows = gather(model, [block], WINDOWS)[block.index]
    y = as_module(model, block)(rows.x).detach()
    weight = weights(model, block)[:, None].sqrt().double()
    metric = Metric.of(products)

    def cost(e):
        return float((weight * metric.scaled(e.double())).square().sum())

    found = []
    for mine in ({block: products}, {}):
        fitter = Refitter(model, [block], WINDOWS)
        fitter.products = mine
        fitter.keep_units(block, units)
        fitted = fitter.refit({block: (3, len(units))})[block]
        found.append(cost(fitted(rows.x).detach() - y))
    hidden = taken(model, block, units)(rows.x).detach().double() if units else rows.x[:, :0]
    free = (weight * torch.cat([hidden, torch.ones(len(y), 1)], 1)).numpy()
    x, target = (
        t - free @ np.linalg.lstsq(free, t, rcond=None)[0]
        for t in ((weight * rows.x).numpy(), (weight * metric.scaled(y.double())).numpy())
    )
    explained = x @ np.linalg.lstsq(x, target, rcond=None)[0]
    lost = np.linalg.svd(explained, compute_uv=False)[3:]
    lowest = ((target - explained) ** 2).sum() + (lost**2).sum()
    assert found[0] == pytest.approx(lowest, rel=1e-4)
    assert found[1] > 1.01 * lowest  # by squares


@pytest.mark.parametrize("name", ["gemma2", "bert"])
def test_without_gradients_errors_are_squares(name):
    """By the norm's output, or no next token."""
    model = tiny.model(name)
    fitter = Refitter(model, blocks(model), WINDOWS)
    assert [fitter.metric(block) for block in fitter.at] == [None] * len(fitter.at)
    assert fitter.products == {}


@pytest.mark.parametrize("intercept", [True, False])
def test_a_survey_of_units_alone_need_not_read_x(intercept):
    model = tiny.model("gpt2")
    at, maps = blocks(model), []
    for units_only in (False, True):
        fitter = Refitter(model, at, WINDOWS, intercept=intercept, units_only=units_only)
        maps.append(fitter.survey({b: [(0, 24)] for b in at}))
    for block in at:
        (whole,), (alone,) = (each[block] for each in maps)
        assert alone.units == whole.units
        assert alone.d_in == whole.d_in == block.d_in
        torch.testing.assert_close(alone.write, whole.write, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.affine.bias, whole.affine.bias, rtol=1e-4, atol=1e-5)
        assert bool(alone.affine.bias.any()) == intercept


def test_a_block_with_all_its_units_is_the_block():
    model = tiny.model("llama")
    at = blocks(model)
    with torch.no_grad():
        want = model(input_ids=WINDOWS).logits
        maps = Refitter(model, at, WINDOWS).refit(dict.fromkeys(at, (0, 40)))
        with swapped(model, maps):
            got = model(input_ids=WINDOWS).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_model_is_as_it_was():
    model = tiny.model("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    Refitter(model, blocks(model), WINDOWS).refit(dict.fromkeys(blocks(model)[:2], (None, 2)))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_experts_get_a_matrix():
    model = tiny.model("mixtral")
    at = blocks(model)
    maps = Refitter(model, at, WINDOWS).refit(dict.fromkeys(at, (None, 0)))
    assert set(maps) == set(at)


@pytest.mark.parametrize("repeated", [False, True])
def test_sums_are_in_float32_unless_columns_repeat_one_another(repeated):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 300, generator=g), torch.randn(2000, 3, generator=g)
    if repeated:
        x[:, 1] = x[:, 0]
    weight, exact = torch.rand(2000, generator=g).double(), Moments(300, 3)
    sums = Sums(300, 3, groups=2)
    for part in torch.arange(1500).split(100):
        sums.update(x[part], y[part], weight[part])
    for part in torch.arange(1500, 2000).split(100):
        sums.update(x[part], y[part], weight[part], 1)
    exact.update(x, y, weight)
    groups = sums.total()
    assert [m.n for m in groups] == [1500, 500]
    assert {m.precision for m in groups} == {"float64" if repeated else "mixed"}
    slack = 1e-12 if repeated else 1e-5  # float32 products: 7 u of the columns' norms
    for got, want in zip(merged(groups).gram(), exact.gram(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=slack * float(want.abs().max()))


def test_few_rows_are_summed_in_float64():
    x = torch.randn(310, 300)
    sums = Sums(300, 300)
    sums.update(x, x, None)
    (moments,) = sums.total()
    assert (moments.n, moments.precision) == (310, "float64")


def test_weights_on_disk_give_the_same_maps(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path / "model")
    plain, _ = loading.load(tmp_path / "model")
    disk, _ = loading.load(tmp_path / "model", device_map="disk", offload_folder=tmp_path / "off")
    assert is_offloaded(disk)
    maps = []
    for model in (plain, disk):
        at = blocks(model)
        fitter = Refitter(model, at, WINDOWS)
        maps.append(fitter.refit(dict.fromkeys(at, (None, 0))))
    for one, other in zip(*(m.values() for m in maps), strict=True):
        torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-5)


def test_layers_that_pass_lists_run_from_tokens():
    config = AutoConfig.for_model("openai-gpt", vocab_size=50, n_embd=16, n_layer=3, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    maps = Refitter(model, blocks(model), WINDOWS).refit(dict.fromkeys(blocks(model), (None, 0)))
    with torch.no_grad(), swapped(model, maps):
        assert model(input_ids=WINDOWS[:2]).logits.isfinite().all()


def test_an_empty_text_is_told():
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="the text is empty"):
        Refitter(model, blocks(model), WINDOWS[:0]).refit({blocks(model)[0]: (None, 0)})
