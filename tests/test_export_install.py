"""Maps put in a model for good: what it computes is what the swapped model computed."""

import pytest
import torch

import tiny
from howlinear import Affine, blocks, swapped
from howlinear.export.install import install_maps
from howlinear.linear.affine import Factored, UnitMap
from howlinear.models.families import backbone
from howlinear.models.units import taken

DENSE = [name for name, row in tiny.TINY.items() if not row.experts]


def maps_of(model, seed=0):
    """One map of each kind, by turns: matrix, matrix and units, rank 2 and units, units alone."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for block in blocks(model):
        d, e, k = block.d_in, block.d_out, (3, 1, 30)
        bias = torch.randn(e, generator=g)
        full = Affine(torch.randn(e, d, generator=g) / 4, bias, d)
        rank = 2 if block.index % 4 == 2 else 0
        low = Factored(torch.randn(rank, d, generator=g), torch.randn(e, rank, generator=g), bias)
        write = torch.randn(e, len(k), generator=g)
        affine = full if block.index % 4 < 2 else low
        if block.index % 4:
            found[block] = UnitMap(affine, k, write, taken(model, block, k))
        else:
            found[block] = affine
    return found


def output(model, name):
    with torch.no_grad():
        return model(**tiny.inputs(name))[0]


@pytest.mark.parametrize("name", DENSE)
def test_installed_maps_compute_what_swapped_ones_do(name):
    model = tiny.model(name)
    maps = maps_of(model)
    with swapped(model, maps):
        want = output(model, name)
    before = sum(p.numel() for p in model.parameters())
    install_maps(model, maps)
    torch.testing.assert_close(output(model, name), want)
    after = sum(p.numel() for p in model.parameters())
    spared = sum(
        sum(p.numel() for p in tiny_block(name, b)) - m.parameters for b, m in maps.items()
    )
    assert before - after == spared
    names = {
        n.rpartition("linear_mlp.")[2] for n, _ in model.named_parameters() if "linear_mlp" in n
    }
    assert {"weight", "bias"} <= names
    assert len(backbone(model).config.linear_blocks) == len(maps)


def tiny_block(name, block):
    from howlinear.models.hooks import as_module

    return list(as_module(tiny.model(name), block).parameters())


@pytest.mark.parametrize("name", [n for n, row in tiny.TINY.items() if row.experts])
def test_experts_become_one_matrix(name):
    model = tiny.model(name)
    block = blocks(model)[-1]
    affine = Affine(torch.randn(block.d_out, block.d_in) / 4, torch.randn(block.d_out), block.d_in)
    with swapped(model, {block: affine}):
        want = output(model, name)
    install_maps(model, {block: affine})
    torch.testing.assert_close(output(model, name), want)
