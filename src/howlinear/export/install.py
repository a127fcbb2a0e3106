"""Put maps in a model for good: the blocks are gone, the model is smaller, and its config says how.

    install_maps(model, {block: affine, other: unit_map})
    model.config.linear_blocks          # what code that loads the checkpoint needs to know

Inside, each replaced block is a `LinearMLP` of `export.linear_blocks`: the very code that an export
brings along, so that names of tensors here and there are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export import linear_blocks
from howlinear.linear.affine import Affine, Factored, Map, UnitMap
from howlinear.models.families import FAMILIES, Block, backbone, projection_shape
from howlinear.models.units import weight_of


def install_maps(model: nn.Module, maps: Mapping[Block, Map]) -> None:
    """Replace blocks for good, and write `linear_blocks` into the model's config."""
    base: Any = backbone(model)
    described = [describe(model, block, fitted) for block, fitted in maps.items()]
    steps = [[attrgetter(path)(base) for path in d["steps"]] for d in described]
    downs = [attrgetter(d["down"])(base) if d["down"] else None for d in described]
    linear_blocks.install(base, described)
    for d, own, down, fitted in zip(described, steps, downs, maps.values(), strict=True):
        layer = attrgetter(d["steps"][0])(base)
        layer.to(_weights(own)).requires_grad_(False).train(model.training)
        with torch.no_grad():
            _fill(layer, own, down, fitted)
    base.config.linear_blocks = [*(getattr(base.config, "linear_blocks", None) or ()), *described]


def describe(model: nn.Module, block: Block, fitted: Map) -> dict[str, Any]:
    """What `linear_blocks.install` has to know; paths are the backbone's."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    units = fitted.units if isinstance(fitted, UnitMap) else ()
    hidden = None
    if block.down is not None:
        hidden = weight_of(attrgetter(block.down)(model)).shape[1]
    return {
        "index": block.index,
        "steps": [_from_backbone(model, path) for path in block.steps],
        "down": None if block.down is None else _from_backbone(model, block.down),
        "d_in": block.d_in,
        "d_out": block.d_out,
        "rank": affine.rank if isinstance(affine, Factored) else None,
        "units": len(units),
        "hidden": hidden,
        "extras": _extras(model, block),
    }


def _from_backbone(model: nn.Module, path: str) -> str:
    base = backbone(model)
    if base is model:
        return path
    prefix = next(name for name, module in model.named_modules() if module is base)
    if not path.startswith(f"{prefix}."):
        raise ValueError(f"{path} is not part of the backbone {prefix}: it cannot be exported")
    return path.removeprefix(f"{prefix}.")


def _extras(model: nn.Module, block: Block) -> int:
    """How many values the block returns beside y; -1: it is no tuple."""
    if block.family in FAMILIES or len(block.steps) > 1:
        return -1
    module = model.get_submodule(block.entry)
    like = next(module.parameters())
    with torch.no_grad():
        output = module(like.new_zeros(1, 1, block.d_in))
    return len(output) - 1 if isinstance(output, tuple) else -1


def _weights(steps: list[Any]) -> Tensor:
    return next(p for step in steps if isinstance(step, nn.Module) for p in step.parameters())


def _fill(layer: Any, steps: list[Any], down: nn.Module | None, fitted: Map) -> None:
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    last = matrix = layer.linear_mlp
    if isinstance(affine, Affine):
        matrix.weight.copy_(affine.weight)
    elif affine.rank:
        last = matrix[1]
        matrix[0].weight.copy_(affine.into)
        last.weight.copy_(affine.out)
    last.bias.copy_(affine.bias)
    if not isinstance(fitted, UnitMap):
        return
    kept = torch.tensor(fitted.units)
    parts = layer.units.steps() if len(steps) > 1 else [layer.units]
    for part, step in zip(parts, steps, strict=True):
        for name, original in step.named_modules() if isinstance(step, nn.Module) else ():
            if original is down:
                part.get_submodule(name).weight.copy_(fitted.write)
            elif (shape := projection_shape(original)) is not None:
                hidden = shape[1] * len(kept) // part.get_submodule(name).out_features
                rows = torch.cat([kept + start for start in range(0, shape[1], hidden)])
                part.get_submodule(name).weight.copy_(weight_of(original)[rows])
                if original.bias is not None:
                    part.get_submodule(name).bias.copy_(original.bias[rows])
