"""Install maps in a model permanently: the model gets smaller, and its config describes the change.

    install_maps(model, {2: affine, 5: unit_map})
    model.config.linear_blocks          # the description that code which loads a checkpoint needs

Each replaced block becomes a `LinearMLP` of `export.linear_blocks`. Exports contain a copy of that
code, so tensors have the same names in memory and in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from howlinear.export import linear_blocks
from howlinear.linear.affine import Affine, Factored, Map, UnitMap
from howlinear.models.families import FAMILIES, Block, backbone, by_block
from howlinear.models.offload import like, release
from howlinear.models.units import Through, weight_of


def install_maps(model: nn.Module, maps: Mapping[Any, Map]) -> None:
    """Replace blocks permanently, and write `linear_blocks` into the model's config.

    Blocks are named as in `blocks`: by depth index, path, pattern or `Block`.
    """
    base: Any = backbone(model)
    maps = by_block(model, maps)
    described = [describe(model, block, fitted) for block, fitted in maps.items()]
    originals = [[attrgetter(path)(base) for path in d["steps"]] for d in described]
    modules = [[s for s in steps if isinstance(s, nn.Module)] for steps in originals]
    places = [like(nn.ModuleList(steps)) for steps in modules]
    for steps in modules:  # maps have all that they need of the blocks
        release(steps)
    linear_blocks.install(base, described)
    for d, place, fitted in zip(described, places, maps.values(), strict=True):
        layer = attrgetter(d["steps"][0])(base)
        layer.to(place).requires_grad_(False).train(model.training)
        with torch.no_grad():
            _fill_map(layer.linear_mlp, _affine(fitted))
            if isinstance(fitted, UnitMap):
                _fill_units(layer.units, fitted)
    base.config.linear_blocks = [*(getattr(base.config, "linear_blocks", None) or ()), *described]


def describe(model: nn.Module, block: Block, fitted: Map) -> dict[str, Any]:
    """The description that `linear_blocks.install` takes; paths are relative to the backbone."""
    affine = _affine(fitted)
    down = None if block.down is None else attrgetter(block.down)(model)
    return {
        "index": block.index,
        "steps": [_from_backbone(model, path) for path in block.steps],
        "down": None if block.down is None else _from_backbone(model, block.down),
        "d_in": block.d_in,
        "d_out": block.d_out,
        "rank": affine.rank if isinstance(affine, Factored) else None,
        "units": len(fitted.units) if isinstance(fitted, UnitMap) else 0,
        "hidden": None if down is None else weight_of(down).shape[1],
        "extras": _extras(model, block),
    }


def _affine(fitted: Map) -> Affine | Factored:
    return fitted.affine if isinstance(fitted, UnitMap) else fitted


def _from_backbone(model: nn.Module, path: str) -> str:
    base = backbone(model)
    if base is model:
        return path
    prefix = next(name for name, module in model.named_modules() if module is base)
    if not path.startswith(f"{prefix}."):
        raise ValueError(f"{path} is not part of the backbone {prefix}: it cannot be exported")
    return path.removeprefix(f"{prefix}.")


def _extras(model: nn.Module, block: Block) -> int:
    """The number of values that the block returns beside y; -1 if it returns no tuple."""
    if block.family in FAMILIES or len(block.steps) > 1:
        return -1
    module = model.get_submodule(block.entry)
    with torch.no_grad():
        output = module(like(module).new_zeros(1, 1, block.d_in))
    return len(output) - 1 if isinstance(output, tuple) else -1


def _fill_map(matrix: Any, affine: Affine | Factored) -> None:
    last = matrix
    if isinstance(affine, Affine):
        matrix.weight.copy_(affine.weight)
    elif affine.rank:
        last = matrix[1]
        matrix[0].weight.copy_(affine.into)
        last.weight.copy_(affine.out)
    last.bias.copy_(affine.bias)


def _fill_units(units: Any, fitted: UnitMap) -> None:
    """Copy the weights of the kept hidden units, which are those of the map, and the columns they write."""
    hidden: Any = fitted.hidden
    parts = units.steps() if len(hidden.steps) > 1 else [units]
    for part, step in zip(parts, hidden.steps, strict=True):
        for name, kept in step.named_modules() if isinstance(step, nn.Module) else ():
            if isinstance(kept, Through):
                part.get_submodule(name).weight.copy_(fitted.write)
            elif isinstance(kept, nn.Linear):
                narrow = part.get_submodule(name)
                narrow.weight.copy_(kept.weight)
                if kept.bias is not None:
                    narrow.bias.copy_(kept.bias)
