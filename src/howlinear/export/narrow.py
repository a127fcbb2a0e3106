"""Maps as hidden units of the model's own kind: a checkpoint of a stock class, without code.

    small, notes = narrowed(model, {block: affine})  # the same class, another width in its config
    save(small, folder)                              # plain `from_pretrained` loads it

A map W x + b with W = B A of rank r is a few stock hidden units. Hidden units of the original that a
map keeps are added as they are:

    ungated: up = [A; -A], down = [B, -B]             2 r units: act(z) - act(-z) = z
    gated:   gate = 0 x + 32, up = A / 32, down = B   r units: act(32) = 32 in every float format

The first holds for ReLU, SiLU and every GELU up to rounding (in float32 an error of at most 1.7e-7
|z| for |z| from 1e-12 to 1e4): neither term is larger than |z|, so nothing cancels and A needs no
scaling. The second is exact, 32 being a power of two. Both are tried on the block's own activation,
whatever its name; an activation without the identity (squared ReLU, a clipped GELU) is refused. A
gate without bias cannot be held open.

transformers builds every layer with the width of the config, so blocks are padded with zero units to
the widest block. If any block is not replaced, the width stays and nothing is saved.
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

from howlinear.export.folder import write_generation
from howlinear.export.hf import INSTEAD, check_dense
from howlinear.export.stock_units import OPEN, Units, factors, kept_units
from howlinear.linear.affine import Affine, Factored, Map, UnitMap
from howlinear.models.families import Block, blocks, projection_shape
from howlinear.models.hooks import Chain
from howlinear.models.twins import rebuilt
from howlinear.models.units import taken, weight_of


def narrowed(
    model: nn.Module, maps: Mapping[Block, Map], *, add_biases: bool = False
) -> tuple[Any, list[str]]:
    """A stock model that computes the same as `model` under `swapped(model, maps)`, and notes on it.

    `add_biases` turns on `mlp_bias` where the config has it (llama, smollm3, granite, ...): still a
    stock model, but an engine must read `mlp_bias` to run it. O(parameters).
    """
    config = _config(model, add_biases)
    shell = _shell(model, config)
    units = dict(_dense(model))
    for block, fitted in maps.items():
        if block not in units:
            raise ValueError(f"{block} has no plain hidden units: {INSTEAD}")
        units[block] = _embedded(model, shell, block, units[block], fitted)
    widths, notes = _widths(model, shell, units, maps)
    for setting, width in widths.items():
        _set(config, setting, width)
    small = _filled(model, config, units)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    return small, [*notes, f"parameters: {before:,} before, {after:,} now"]


def check_exportable(model: nn.Module, *, add_biases: bool = False) -> None:
    """Refuse a family whose blocks cannot hold a map of rank 1, before hours of work."""
    import transformers

    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__name__} is not a class of transformers, as narrow needs: {INSTEAD}"
        )
    check_dense(model)
    block, units = next(_dense(model), (None, None))
    if block is None or units is None:
        raise ValueError(f"{_family(model)} has no block of plain hidden units: {INSTEAD}")
    row, column = (units.writes.new_ones(size) for size in ((1, block.d_in), (block.d_out, 1)))
    shell = _shell(model, _config(model, add_biases))
    _embedded(model, shell, block, units, Factored(row, column, column[:, 0]))


def save(small: Any, folder: Path) -> None:
    """Save as transformers does, and also generation settings that it would refuse to write."""
    generation = getattr(small, "generation_config", None)
    small.generation_config = generation and type(generation)()
    try:
        small.save_pretrained(folder)
    finally:
        small.generation_config = generation
    write_generation(small, folder)


def _config(model: nn.Module, add_biases: bool) -> Any:
    config: Any = copy.deepcopy(model.config)
    if add_biases and getattr(config, "mlp_bias", None) is False:
        config.mlp_bias = True
    vars(config).pop("auto_map", None)  # a stock model needs no code
    return config


# ------------------------------------------------------------------------------------- units


def _dense(model: nn.Module) -> Iterator[tuple[Block, Units]]:
    """The blocks that consist of plain hidden units, with these units; not experts."""
    for block in blocks(model):
        try:
            taken(model, block, [0])  # raises unless units can be taken out; tried on random rows
        except ValueError:
            continue
        reads: list[tuple[Tensor, Tensor]] = []
        for path, parts in _projections(model, block):
            weight, bias = _weights(model, path)
            reads += zip(weight.chunk(parts), bias.chunk(parts), strict=True)
        yield block, Units(tuple(reads), *_weights(model, str(block.down)))


def _projections(model: nn.Module, block: Block) -> list[tuple[str, int]]:
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


def _weights(model: nn.Module, path: str) -> tuple[Tensor, Tensor]:
    """Weight (outputs, inputs) and bias (outputs,), zero where there is none."""
    module = model.get_submodule(path)
    weight, bias = weight_of(module).detach(), getattr(module, "bias", None)
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.detach()


# ---------------------------------------------------------------------------------- embedding


def _embedded(model: nn.Module, shell: nn.Module, block: Block, units: Units, fitted: Map) -> Units:
    """The map as hidden units of the block's own kind; `units` are those of the original."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    if (affine.d_in, affine.d_out) != (block.d_in, block.d_out):
        raise ValueError(
            f"{block} goes from {block.d_in} to {block.d_out} features, its map from "
            f"{affine.d_in} to {affine.d_out}"
        )
    for linear in _ways(affine, len(units.reads), units.writes):
        if _computes(model, block, linear, affine):
            _check_room(shell, block, linear)
            if isinstance(fitted, UnitMap):
                return linear.beside(kept_units(fitted, linear.bias))
            return linear
    identity = "act(z) - act(-z) = z" if len(units.reads) == 1 else f"act({OPEN:g}) = {OPEN:g}"
    raise ValueError(f"{block}: its activation does not obey {identity}; {INSTEAD}")


def _ways(affine: Affine | Factored, projections: int, like: Tensor) -> Iterator[Units]:
    """Candidate units that compute the map; of two projections, either may be the gate."""
    A, B = factors(affine)
    zero, none = torch.zeros_like(A).to(like), like.new_zeros(len(A))
    bias = affine.bias.to(like)
    if projections == 1:
        up = torch.cat([A, -A]).to(like), torch.cat([none, none])
        yield Units((up,), torch.cat([B, -B], 1).to(like), bias)
        return
    gate, up = (zero, none + OPEN), ((A / OPEN).to(like), none)
    for reads in ((gate, up), (up, gate)):
        yield Units(reads, B.to(like), bias)


def _computes(model: nn.Module, block: Block, units: Units, affine: Affine | Factored) -> bool:
    """Does the block with these units compute the map?

    Rows of sizes from 0.001 to 1000 reveal clipped and curved activations. The rounding error of a
    sum of k terms is about sqrt(k) eps times the sum of their magnitudes.
    """
    like = units.writes
    sizes = torch.logspace(-3, 3, 7).repeat_interleave(4)[:, None]
    x = sizes * torch.randn(len(sizes), block.d_in, generator=torch.Generator().manual_seed(0))
    x = x.to(like)
    with torch.no_grad():
        got = _run(model, block, units)(x).double()
    A, B = factors(affine)
    rows, b = x.double(), affine.bias.to(A)
    want = rows @ A.t() @ B.t() + b
    size = rows.abs() @ A.abs().t() @ B.abs().t() + b.abs()
    close = 16 * (block.d_in + len(units)) ** 0.5 * torch.finfo(like.dtype).eps
    return bool(((got - want).abs() <= close * size).all())


def _run(model: nn.Module, block: Block, units: Units) -> nn.Module:
    """The block with other projections; everything between them is the family's own."""
    narrow: dict[nn.Module, nn.Module] = {}
    for path, (weight, bias) in _tensors(model, block, units).items():
        linear = nn.Linear(1, 1, device="meta")  # its weights, assigned below, set its width
        linear.weight, linear.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
        narrow[model.get_submodule(path)] = linear
    return Chain([rebuilt(attrgetter(path)(model), narrow) for path in block.steps])


def _tensors(model: nn.Module, block: Block, units: Units) -> dict[str, tuple[Tensor, Tensor]]:
    """Path of each projection -> its weight (outputs, inputs) and bias."""
    reads, tensors = iter(units.reads), {}
    for path, parts in _projections(model, block):
        weights, biases = zip(*(next(reads) for _ in range(parts)), strict=True)
        tensors[path] = torch.cat(weights), torch.cat(biases)
    return tensors | {str(block.down): (units.writes, units.bias)}


def _check_room(shell: nn.Module, block: Block, units: Units) -> None:
    """Refuse a family that lacks a bias which the units need."""
    for path, (_, bias) in _tensors(shell, block, units).items():
        if getattr(shell.get_submodule(path), "bias", None) is not None or not bias.any():
            continue
        why = f"the gates of {_family(shell)} have no biases, and without one a gate cannot be held open, "
        why += "so no stock unit is linear;"
        if path == block.down:
            why = f"the last projection of {_family(shell)} has no bias to hold the map's; fit it "
            why += "without an intercept, or"
        raise ValueError(f"{block}: {why} {INSTEAD}")


# ------------------------------------------------------------------------------------- widths


def _widths(
    model: nn.Module, shell: nn.Module, units: Mapping[Block, Units], maps: Mapping[Block, Map]
) -> tuple[dict[str, int], list[str]]:
    """The new widths by setting of the config, and notes for the user."""
    controls = _controls(model, shell, units)
    widths: dict[str, int] = {}
    notes: list[str] = []
    for setting, group in controls.items():
        before, width = _hidden(shell, group[0]), max(1, *(len(units[b]) for b in group))
        widths |= {setting: width} if width != before else {}
        kept = [b for b in group if b not in maps]
        notes.append(_note(setting, before, width, len(group), kept))
    fixed = [b for b in units if not any(b in group for group in controls.values())]
    for block in fixed:
        if len(units[block]) > _hidden(shell, block):
            raise ValueError(
                f"{block}: its map needs {len(units[block])} hidden units, and "
                f"{_family(shell)} always has {_hidden(shell, block)}: a lower rank, or {INSTEAD}"
            )
    if fixed:
        notes.append(
            f"{_family(shell)} cannot be made narrower: {len(fixed)} blocks padded, nothing saved"
        )
    return widths, notes


def _note(setting: str, before: int, width: int, count: int, kept: list[Block]) -> str:
    if width == before:
        why = f", as wide as block {kept[0].index}, which was not replaced" if kept else ""
        return f"{setting}: replaced blocks padded to {before} hidden units{why}: nothing saved"
    note = f"{setting}: {width} hidden units in each of {count} blocks instead of {before}"
    larger = f": larger than before; use maps of lower rank, or {INSTEAD}"
    return note + (larger if width > before else "")


def _controls(
    model: nn.Module, shell: nn.Module, dense: Mapping[Block, Units]
) -> dict[str, list[Block]]:
    """Settings of the config -> the blocks whose width they set, found by trial.

    A setting counts if changing it changes the width of these blocks and no other tensor.
    """
    hidden = {block: _hidden(shell, block) for block in dense}
    paths = {path for block in dense for path, _ in _projections(shell, block)}
    paths |= {str(block.down) for block in dense}
    controls: dict[str, list[Block]] = {}
    probe = 2 * max(hidden.values(), default=0) + 2
    for setting in _candidates(shell.config, set(hidden.values())):
        config = copy.deepcopy(shell.config)
        _set(config, setting, probe)
        try:
            other = _shell(model, config)
        except Exception:  # of any type: this setting cannot change alone
            continue
        known = {block for group in controls.values() for block in group}
        group = [b for b in hidden if _hidden(other, b) == probe and b not in known]
        before, after = (
            {(name, t.shape) for name, t in m.state_dict().items()} for m in (shell, other)
        )
        if group and {name.rpartition(".")[0] for name, _ in before ^ after} <= paths:
            controls[setting] = group
    return controls


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


# ------------------------------------------------------------------------------------- models


def _shell(model: nn.Module, config: Any) -> nn.Module:
    """A model of this config without storage, for its shapes and biases."""
    with torch.device("meta"):
        shell: nn.Module = type(model)(copy.deepcopy(config))
    return shell


def _filled(model: nn.Module, config: Any, units: Mapping[Block, Units]) -> Any:
    """A model of this config with these units and all other weights of the original."""
    small: Any = type(model)(config).to(next(model.parameters())).train(model.training)
    state = dict(model.state_dict())
    for block, narrow in units.items():
        padded = narrow.padded(_hidden(small, block))
        for path, (weight, bias) in _tensors(small, block, padded).items():
            module = small.get_submodule(path)
            state[f"{path}.weight"] = weight.t() if hasattr(module, "nf") else weight
            if module.bias is not None:
                state[f"{path}.bias"] = bias
    small.load_state_dict(state, strict=True)
    if hasattr(model, "generation_config"):
        small.generation_config = copy.deepcopy(model.generation_config)
    return small


def _hidden(model: nn.Module, block: Block) -> int:
    shape = projection_shape(model.get_submodule(str(block.down)))
    assert shape is not None
    return shape[0]


def _family(model: Any) -> str:
    return str(model.config.model_type)
