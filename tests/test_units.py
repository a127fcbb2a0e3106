"""Hidden units taken out of their block, sinks found among them, and maps that keep a few."""

import numpy as np
import pytest
import torch

import tiny
from howlinear import Moments, blocks, fit, profile, swapped, tap
from howlinear.compression.prices import Sizes
from howlinear.linear.affine import UnitMap
from howlinear.models.families import parameter_count
from howlinear.models.hooks import as_module
from howlinear.models.loading import describe
from howlinear.models.units import sinks, taken, writes

DENSE = [name for name, row in tiny.TINY.items() if not row.experts]


@pytest.mark.parametrize("name", DENSE)
def test_units_of_every_family_come_out_alone(name):
    model = tiny.model(name)
    heard = {}
    wanted = {b.index: torch.tensor([3, 1, 30]) for b in blocks(model)}

    def receive(block, rows):
        heard[block] = (rows.x.clone(), rows.hidden.clone())

    with torch.no_grad(), tap(model, receive, units=wanted):
        model(**tiny.inputs(name))
    assert heard
    for block, (x, hidden) in heard.items():
        torch.testing.assert_close(taken(model, block, [3, 1, 30])(x), hidden)


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "bert", "phi3", "t5-gated"])
def test_all_units_and_what_they_write_are_the_block(name):
    model = tiny.model(name)
    block = blocks(model)[1]
    module, down = as_module(model, block), model.get_submodule(block.down)
    m = len(writes(model, block))
    x = torch.randn(5, block.d_in)
    with torch.no_grad():
        y = module(x)
        got = down(taken(model, block, range(m))(x))
    torch.testing.assert_close(got, y)
    weight = down.weight if name != "gpt2" else down.weight.t()
    torch.testing.assert_close(writes(model, block), weight.double().square().sum(0).detach())


@pytest.mark.parametrize("name", [n for n, row in tiny.TINY.items() if row.experts])
def test_experts_have_no_units(name):
    model = tiny.model(name)
    block = blocks(model)[-1]
    assert writes(model, block) is None
    with pytest.raises(ValueError, match="no hidden units"):
        taken(model, block, [0])
    found = profile(model, torch.randint(3, 49, (200, 8)), batch_size=50, folds=2)
    assert found.blocks[-1].sink_units is None


def test_units_that_are_mixed_are_refused():
    model = tiny.model("llama")
    block = blocks(model)[0]
    model.model.layers[0].mlp.act_fn = torch.nn.Softmax(-1)  # every unit depends on all
    with pytest.raises(ValueError, match="mixes its hidden units"):
        taken(model, block, [0])
    assert writes(model, block) is None


def test_taking_units_leaves_the_model_and_the_seed_alone():
    model = tiny.model("falcon").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    taken(model, blocks(model)[0], [0, 1])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_sinks_are_the_units_of_most_energy():
    hidden = torch.tensor([[1.0, 0.0, 3.0], [1.0, 0.0, -1.0]])
    units, shares = sinks(hidden, torch.tensor([10.0, 99.0, 1.0], dtype=torch.float64), most=2)
    assert units.tolist() == [0, 2]  # energies 10, 0, 5
    torch.testing.assert_close(shares, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert sinks(torch.zeros(2, 3), torch.ones(3, dtype=torch.float64))[1].tolist() == [0, 0, 0]


def planted(model, index, unit=5, size=400.0):
    """Make one hidden unit of a block fire at first positions alone: their token is 1, only there."""
    layer = model.model.layers[index]
    model.model.embed_tokens.weight.data[1] *= 5
    seen = []
    hook = layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        ids = torch.randint(3, 49, (64, 8))
        ids[:, 0] = 1
        model(ids)
        hook.remove()
        x = seen[0]
        apart = x[:, 0].mean(0) - x[:, 1:].mean((0, 1))
        layer.mlp.gate_proj.weight[unit] = 6 * apart / apart.square().sum()
        layer.mlp.up_proj.weight[unit] = 6 * apart / apart.square().sum()
        layer.mlp.down_proj.weight[:, unit] = size * torch.randn(len(apart)).sign()
    return unit


def test_a_planted_sink_is_found_and_keeping_it_frees_the_matrix():
    torch.manual_seed(0)
    model = tiny.model("llama")
    unit = planted(model, 1)
    ids = torch.randint(3, 49, (1500, 8))
    ids[:, 0] = 1
    result = profile(model, ids)
    planted_block, other = result.blocks[1], result.blocks[2]
    assert planted_block.sink_units[0] == unit
    assert planted_block.sink_shares[0] > 0.95
    assert other.sink_shares[0] < 0.9  # nothing planted there
    store = result.stores[1]
    total = store.body[0].copy()
    for more in (*store.body[1:], *store.first):
        total.merge(more)
    block = blocks(model)[1]
    plain = fit(total.narrow(block.d_in))
    one = UnitMap.split(fit(total.narrow(block.d_in + 1)), (unit,), taken(model, block, [unit]))
    torch.testing.assert_close(plain.weight, result.maps[1].weight)
    x, y = rows_of(model, block, ids[:300])
    body = torch.arange(len(x)) % 8 > 0

    def error(guess):
        return float((y - guess(x)).square().sum(1)[body].mean())

    assert error(one.to(x)) < 0.2 * error(plain)


def rows_of(model, block, ids):
    got = []
    with torch.no_grad(), tap(model, lambda _, rows: got.append((rows.x, rows.y)), at=[block]):
        model(ids)
    return got[0]


def test_a_map_with_units_is_least_squares_on_inputs_and_units():
    model = tiny.model("gpt2")
    block = blocks(model)[0]
    x = torch.randn(400, block.d_in)
    units = (7, 2)
    hidden = taken(model, block, units)
    with torch.no_grad():
        y, h = as_module(model, block)(x), hidden(x)
    joint = Moments(block.d_in + 2, block.d_out)
    joint.update(torch.cat([x, h], 1), y)
    one = UnitMap.split(fit(joint), units, hidden)
    columns = np.column_stack([x, h, np.ones(len(x))]).astype(np.float64)
    want = columns @ np.linalg.lstsq(columns, y.double().numpy(), rcond=None)[0]
    np.testing.assert_allclose(one(x.double().float()).double().numpy(), want, atol=1e-4)
    d = block.d_in
    assert (one.d_in, one.d_out) == (d, d)
    assert one.parameters == d * d + d + 2 * d + 2 * (d + 1)  # W, b, D, two rows of c_fc and biases
    assert one.multiply_adds == d * d + 2 * d + 2 * d
    with torch.no_grad(), swapped(model, {block: one.to(x)}):
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


class Packed(torch.nn.Module):
    """A projection that keeps two weights in each byte, as bitsandbytes does."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias


def test_packed_and_shared_weights_are_counted_once_and_as_many_as_they_stand_for():
    model = tiny.model("llama-bias")
    whole, count = parameter_count(model), 3 * 16 * 40 + 2 * 40 + 16
    assert whole == sum(p.numel() for p in model.parameters())
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj = Packed(second.down_proj)
    assert parameter_count(model) == describe(model, "packed")["parameters"] == whole
    assert list(Sizes(model, blocks(model)).parameters.values()) == [count, count]
    second.up_proj.weight = first.up_proj.weight  # goes only when both blocks do
    assert parameter_count(model) == whole - 16 * 40
    assert list(Sizes(model, blocks(model)).parameters.values()) == [count - 16 * 40] * 2
