"""Blocks are named by index, path, pattern or Block, wherever a block is taken."""

import numpy as np
import pytest
import torch

import howlinear as hl
import tiny
from howlinear.models.families import one_block
from howlinear.models.hooks import as_module
from howlinear.models.naming import indices_of

PATHS = [f"model.layers.{i}.mlp" for i in range(3)]


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


NAMES = {
    "all": (None, [0, 1, 2]),
    "an index": (1, [1]),
    "an index of numpy": (np.int64(1), [1]),
    "from the end": (-1, [2]),
    "indices": ([1, 2], [1, 2]),
    "a range": (range(2), [0, 1]),
    "text": ("0,2", [0, 2]),
    "a path": (PATHS[1], [1]),
    "a pattern": (r"layers\.[12]\.", [1, 2]),
    "a mixture": ([2, PATHS[0], "2"], [2, 0]),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_finds_its_blocks(name, model):
    at, expected = NAMES[name]
    assert [b.index for b in hl.blocks(model, at)] == expected
    assert indices_of(at, dict(enumerate(PATHS))) == set(expected)
    blocks = hl.blocks(model, at)
    assert hl.blocks(model, blocks) == blocks
    assert indices_of(blocks, dict(enumerate(PATHS))) == set(expected)


def test_a_path_with_a_sign_of_regular_expressions_is_a_path():
    model = tiny.model("opt")
    assert [b.index for b in hl.blocks(model, "model.decoder.layers.1.fc1+fc2")] == [1]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (3, "block 3 is not among the blocks, which are 0-2"),
        ([-4], "block -4 is not among"),
        (1.5, "expected a block's index, path, pattern or Block; got float"),
        ([None], "expected a block's index, path, pattern or Block; got NoneType"),
    ],
)
def test_other_names_are_refused(at, message, model):
    with pytest.raises(ValueError, match=message):
        hl.blocks(model, at)


def test_one_block_is_one(model):
    assert one_block(model, 2).index == 2
    with pytest.raises(ValueError, match="'mlp' names 3 blocks, expected one"):
        one_block(model, "mlp")


def test_swaps_taps_and_costs_take_any_name(model):
    ids, linear = torch.randint(tiny.VOCABULARY, (4, 12)), torch.nn.Linear(16, 16)
    block, results = hl.blocks(model)[2], []
    for name in (2, "2", -1, PATHS[2], block):
        with hl.swapped(model, {name: linear}), torch.no_grad():
            results.append(model(ids).logits)
    assert all(torch.equal(results[0], other) for other in results)
    costs = hl.swap_costs(model, {PATHS[2]: linear, 0: linear, block: linear}, ids)
    assert [cost.block.index for cost in costs] == [0, 2, 2]
    seen = []
    with hl.tap(model, lambda block, rows: seen.append(block.index), at="1"):
        model(ids)
    assert seen == [1]
    with (
        pytest.raises(ValueError, match="is named twice"),
        hl.swapped(model, {2: linear, "2": linear}),
    ):
        pass
    assert torch.equal(as_module(model, 2)(torch.ones(16)), as_module(model, block)(torch.ones(16)))


def test_maps_are_installed_by_any_name():
    affine, kept = hl.Affine(torch.eye(16), torch.zeros(16), 16), []
    for name in (2, PATHS[2]):
        model = tiny.model("llama")
        hl.install_maps(model, {name: affine})
        kept.append(model.model.config.linear_blocks)
    assert kept[0] == kept[1]
    assert kept[0][0]["index"] == 2
