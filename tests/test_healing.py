"""Fine-tuning a swapped layer, and nothing but it."""

import torch

import tiny
from howlinear import Affine, blocks, compare, swapped
from howlinear.linear.affine import UnitMap
from howlinear.models.hooks import as_module
from howlinear.models.units import taken
from howlinear.probing.healing import TrainableMap, heal
from test_swap import drawn


def test_a_bad_map_is_healed_and_nothing_else_moves():
    torch.manual_seed(0)
    model = tiny.model("llama")
    for p in as_module(model, blocks(model)[1]).parameters():
        p.data *= 6
    block = blocks(model)[1]
    windows = drawn(model, 200, 0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.model.embed_tokens.weight.requires_grad_(False)
    start = TrainableMap(Affine(torch.zeros(16, 16), torch.zeros(16), 16))
    healed, record = heal(model, block, start, windows, steps=300)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    assert not wanted.pop("model.embed_tokens.weight")
    assert all(wanted.values())
    assert record["tokens"] == 300 * 2 * 8
    assert len(record["losses"]) == 10
    assert not start.linear.weight.any()  # a copy was trained
    test = drawn(model, 200, 1)
    costs = [
        compare(model, lambda layer=layer: swapped(model, {block: layer}), test).delta_nll
        for layer in (start, healed)
    ]
    assert costs[1] < costs[0]


def test_kept_units_stay_as_they_are():
    model = tiny.model("llama")
    block = blocks(model)[0]
    joint = Affine(torch.randn(16, 18), torch.zeros(16), 18)
    layer = UnitMap.split(joint, (3, 5), taken(model, block, [3, 5]))
    start = TrainableMap(layer)
    x = torch.randn(4, 16)
    torch.testing.assert_close(start(x), layer(x))
    healed, _ = heal(model, block, start, torch.randint(3, 49, (10, 8)), steps=3)
    same = zip(start.hidden.parameters(), healed.hidden.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(start.write, healed.write)
    assert not torch.equal(start.linear.weight, healed.linear.weight)
