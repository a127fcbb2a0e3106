"""A checkpoint of a stock class, without code: every block keeps the same number of its hidden units.

    small = with_one_width(model, {block: unit_map})    # the same class, another width in its config
    save(small, folder)                                 # plain `from_pretrained` loads it

The rows of the kept units are the original's, the columns that they write are fitted. The last projection has
a bias only where the family gives it one; maps are fitted without an intercept elsewhere.

There are no linear units here (`stock_units`), although a gated block with biases could hold some. In the built-in
model with 1,280 of 1,536 units, giving 8 to 256 of them to a linear map leaves more unexplained in 21 of 30
blocks, and at best 2.3 % less (docs/compress.md).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.compression.targets import INSTEAD
from howlinear.export.folder import write_generation
from howlinear.export.hf import check_dense
from howlinear.export.stock_units import kept_units
from howlinear.linear.affine import Map, UnitMap
from howlinear.models.families import Block, blocks, projection_shape
from howlinear.models.units import taken, weight_of


def with_one_width(model: nn.Module, maps: Mapping[Block, Map]) -> Any:
    """A stock model that computes the same as `model` under `swapped(model, maps)`. O(parameters)."""
    check_exportable(model)
    width = _width(model, maps)
    config = _config(model)
    for setting in _settings(model):
        _set(config, setting, width)
    small: Any = type(model)(config).to(next(model.parameters())).train(model.training)
    state = dict(model.state_dict())
    for block, fitted in maps.items():
        assert isinstance(fitted, UnitMap)
        state |= _tensors(small, block, fitted)
    small.load_state_dict(state, strict=True)
    if hasattr(model, "generation_config"):
        small.generation_config = copy.deepcopy(model.generation_config)
    return small


def check_exportable(model: nn.Module) -> None:
    """Refuse, before hours of work, a model whose blocks cannot all be made narrower."""
    import transformers

    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__name__} is not a class of transformers, as stock needs: {INSTEAD}"
        )
    check_dense(model)
    for block in blocks(model):
        try:
            taken(model, block, [0])  # raises unless units can be taken out; tried on random rows
        except ValueError as problem:
            raise ValueError(
                f"{block} has no plain hidden units that stock could keep: {INSTEAD}"
            ) from problem
    settings = _settings(model)
    for block in blocks(model):
        if not any(block in group for group in settings.values()):
            raise ValueError(
                f"the config of {_family(model)} has no setting for the width of {block}: {INSTEAD}"
            )


def save(small: Any, folder: Path) -> None:
    """Save as transformers does, and also generation settings that it would refuse to write."""
    generation = getattr(small, "generation_config", None)
    small.generation_config = generation and type(generation)()
    try:
        small.save_pretrained(folder)
    finally:
        small.generation_config = generation
    write_generation(small, folder)


# ------------------------------------------------------------------------------------- tensors


def _width(model: nn.Module, maps: Mapping[Block, Map]) -> int:
    """Hidden units of all maps, which must be the same number."""
    for block, fitted in maps.items():
        if not isinstance(fitted, UnitMap) or fitted.affine.rank:
            raise ValueError(f"{block}: a stock block holds hidden units and no matrix; {INSTEAD}")
    widths = {len(fitted.units) for fitted in maps.values() if isinstance(fitted, UnitMap)}
    if len(maps) < len(blocks(model)) or len(widths) > 1:
        raise ValueError(f"a stock model has one width for all of its blocks: {INSTEAD}")
    return widths.pop()


def _tensors(small: nn.Module, block: Block, fitted: UnitMap) -> dict[str, Tensor]:
    """Weights and biases of a block by name, as the narrower model stores them."""
    bias = fitted.affine.bias
    units = kept_units(fitted, next(small.parameters()).new_zeros(len(bias)))
    parts = {str(block.down): (units.writes, bias.to(units.writes))}
    reads = iter(units.reads)
    for path, count in projections(small, block):
        weights, biases = zip(*(next(reads) for _ in range(count)), strict=True)
        parts[path] = torch.cat(weights), torch.cat(biases)
    tensors = {}
    for path, (weight, offset) in parts.items():
        module = small.get_submodule(path)
        tensors[f"{path}.weight"] = weight.t() if hasattr(module, "nf") else weight
        if module.bias is not None:
            tensors[f"{path}.bias"] = offset
        elif bool(offset.any()):
            raise ValueError(f"{block}: {path} has no bias to hold the map's; {INSTEAD}")
    return tensors


def projections(model: nn.Module, block: Block) -> list[tuple[str, int]]:
    """(path, parts) of the projections to the hidden units; 2 parts where one holds gate and up."""
    projections = []
    hidden = weight_of(attrgetter(str(block.down))(model)).shape[1]
    for path in block.steps:
        step = attrgetter(path)(model)
        for name, module in step.named_modules() if isinstance(step, nn.Module) else ():
            full, shape = f"{path}.{name}".rstrip("."), projection_shape(module)
            if shape is not None and full != block.down:
                projections.append((full, shape[1] // hidden))
    return projections


# ------------------------------------------------------------------------------------- widths


def _settings(model: nn.Module) -> dict[str, list[Block]]:
    """Settings of the config -> the blocks whose width they set, found by trial.

    A setting counts if changing it changes the width of these blocks and no other tensor.
    """
    shell = _shell(model, _config(model))
    hidden = {block: _hidden(shell, block) for block in blocks(model)}
    paths = {path for block in hidden for path, _ in projections(shell, block)}
    paths |= {str(block.down) for block in hidden}
    settings: dict[str, list[Block]] = {}
    trial = 2 * max(hidden.values(), default=0) + 2
    for setting in _candidates(shell.config, set(hidden.values())):
        config = copy.deepcopy(shell.config)
        _set(config, setting, trial)
        try:
            other = _shell(model, config)
        except Exception:  # of any type: this setting cannot change alone
            continue
        known = {block for group in settings.values() for block in group}
        group = [b for b in hidden if _hidden(other, b) == trial and b not in known]
        before, after = (
            {(name, t.shape) for name, t in m.state_dict().items()} for m in (shell, other)
        )
        if group and {name.rpartition(".")[0] for name, _ in before ^ after} <= paths:
            settings[setting] = group
    return settings


def _candidates(config: Any, widths: set[int]) -> Iterator[str]:
    """Settings ("name" or "text_config.name") that equal a width, or are null and named like one."""
    parts = {"": config} | {f"{name}.": getattr(config, name) for name in config.sub_configs}
    for prefix, part in parts.items():
        for name, value in vars(part).items() if part is not None else ():
            named = value is None and re.search("inner|ffn|intermediate", name)
            if named or (type(value) is int and value in widths):
                yield prefix + name


def _set(config: Any, setting: str, value: int) -> None:
    where, _, name = setting.rpartition(".")
    setattr(getattr(config, where) if where else config, name, value)


def _config(model: nn.Module) -> Any:
    config: Any = copy.deepcopy(model.config)
    vars(config).pop("auto_map", None)  # a stock model needs no code
    return config


def _shell(model: nn.Module, config: Any) -> nn.Module:
    """A model of this config without storage, for its shapes."""
    with torch.device("meta"):
        shell: nn.Module = type(model)(copy.deepcopy(config))
    return shell


def _hidden(model: nn.Module, block: Block) -> int:
    shape = projection_shape(model.get_submodule(str(block.down)))
    assert shape is not None
    return shape[0]


def _family(model: Any) -> str:
    return str(model.config.model_type)
