"""Maps written exactly into narrow blocks of the model's own kind: a checkpoint without any code.

    small, notes = narrowed(model, {block: affine})  # the same class, another width in its config
    save(small, folder)                              # plain `from_pretrained` loads it, anywhere

A map W x + b with W = B A of rank r is a handful of stock hidden units, and units of the original
that a map keeps go beside them as they are:

    ungated: up = [A; -A], down = [B, -B]             2 r units: act(z) - act(-z) = z
    gated:   gate = 0 x + 32, up = A / 32, down = B   r units: act(32) = 32 in every float format

The first holds for ReLU, SiLU and every GELU to a rounding or so of z (in float32 1.7e-7 of |z| at
most, for |z| from 1e-12 to 1e4), because neither term is ever larger than |z|: nothing cancels, and
no scaling of A is called for. The second loses nothing, 32 being a power of two. Both are tried on
the block's own activation, whatever its name: one without the identity (squared ReLU, a clipped
GELU) is refused. A gate without bias cannot be held open.

transformers builds every layer as wide as the config says, so blocks are padded with zero units to
the widest. Where a block is left as it was, that is its own width, and nothing is saved.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export.folder import write_generation
from howlinear.linear.affine import Affine, Factored, Map, UnitMap
from howlinear.models.families import Block, blocks, projection_shape
from howlinear.models.hooks import Chain
from howlinear.models.units import rebuilt, taken, weight_of

OPEN = 32.0  # what a gate is held at
INSTEAD = "use --export hf"


def narrowed(
    model: nn.Module, maps: Mapping[Block, Map], *, add_biases: bool = False
) -> tuple[Any, list[str]]:
    """A stock model that computes what `model` does under `swapped(model, maps)`, and notes on it.

    `add_biases` lets families whose config has `mlp_bias` (llama, smollm3, granite, ...) turn it
    on: still a stock model, but one that an engine must read `mlp_bias` to run. O(parameters).
    """
    config = _config(model, add_biases)
    shell = _shell(model, config)
    own = dict(_dense(model))
    strangers = [block for block in maps if block not in own]
    if strangers:
        raise ValueError(f"{_name(strangers[0])} has no plain hidden units: {INSTEAD}")
    units = {b: _embedded(model, shell, b, own[b], maps[b]) if b in maps else own[b] for b in own}
    widths, notes = _widths(model, shell, units, maps)
    for setting, width in widths.items():
        _set(config, setting, width)
    made = _filled(model, config, units)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, made))
    return made, [*notes, f"parameters: {before:,} before, {after:,} now"]


def check_exportable(model: nn.Module, *, add_biases: bool = False) -> None:
    """Refuse, before hours of work, a family that holds no map: one of rank 1 is tried on a block."""
    import transformers

    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__name__} is not a class of transformers, as narrow asks: {INSTEAD}"
        )
    if getattr(model.config, "quantization_config", None):
        raise ValueError(f"{kind.__name__} is quantised and cannot be exported: load dense weights")
    shell = _shell(model, _config(model, add_biases))
    for block, own in _dense(model):
        row, column = (own.writes.new_ones(size) for size in ((1, block.d_in), (block.d_out, 1)))
        _embedded(model, shell, block, own, Factored(row, column, column[:, 0]))
        return
    raise ValueError(f"{_family(model)} has no block of plain hidden units: {INSTEAD}")


def save(small: Any, folder: Path) -> None:
    """As transformers does, under the names that engines know, but for what it refuses to write."""
    kept = getattr(small, "generation_config", None)
    try:
        if kept is not None:
            small.generation_config = type(kept)()
        small.save_pretrained(folder)
    finally:
        small.generation_config = kept
    write_generation(small, folder)


def _config(model: nn.Module, add_biases: bool) -> Any:
    config: Any = copy.deepcopy(model.config)
    if add_biases and getattr(config, "mlp_bias", None) is False:
        config.mlp_bias = True
    vars(config).pop("auto_map", None)  # a stock model has no code of its own
    return config


# ------------------------------------------------------------------------------------- units


@dataclass(frozen=True, eq=False)
class Units:
    """Hidden units: what each reads, by one projection or by gate and up, and what it writes."""

    reads: tuple[tuple[Tensor, Tensor], ...]  # (k, d_in) and (k,), the biases; zero where none
    writes: Tensor  # (d_out, k)
    bias: Tensor  # (d_out,)

    def __len__(self) -> int:
        return self.writes.shape[1]

    def beside(self, other: Units) -> Units:
        """With the units of `other`, whose bias is not taken."""
        pairs = zip(self.reads, other.reads, strict=True)
        reads = tuple((torch.cat([V, W]), torch.cat([v, w])) for (V, v), (W, w) in pairs)
        return Units(reads, torch.cat([self.writes, other.writes], 1), self.bias)

    def take(self, units: Sequence[int], writes: Tensor) -> Units:
        """Some of them, writing something else."""
        at = list(units)
        reads = tuple((W[at], b[at]) for W, b in self.reads)
        return Units(reads, writes.to(self.writes), self.bias)

    def padded(self, width: int) -> Units:
        """With zero units up to `width`."""
        reads = tuple((_longer(W, width), _longer(b, width)) for W, b in self.reads)
        return Units(reads, _longer(self.writes.t(), width).t(), self.bias)


def _longer(rows: Tensor, count: int) -> Tensor:
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _dense(model: nn.Module) -> Iterator[tuple[Block, Units]]:
    """The blocks that consist of plain hidden units, and these. Experts are left out."""
    for block in blocks(model):
        try:
            taken(model, block, [0])  # do units come out alone? tried on random rows
        except ValueError:
            continue
        reads: list[tuple[Tensor, Tensor]] = []
        for path, parts in _projections(model, block):
            weight, bias = _weights(model, path)
            reads += zip(weight.chunk(parts), bias.chunk(parts), strict=True)
        yield block, Units(tuple(reads), *_weights(model, str(block.down)))


def _projections(model: nn.Module, block: Block) -> list[tuple[str, int]]:
    """Paths of the projections to the hidden units; 2 where one holds both gate and up."""
    found = []
    hidden = weight_of(attrgetter(str(block.down))(model)).shape[1]
    for path in block.steps:
        step = attrgetter(path)(model)
        for name, module in step.named_modules() if isinstance(step, nn.Module) else ():
            full, shape = f"{path}.{name}".rstrip("."), projection_shape(module)
            if shape is not None and full != block.down:
                found.append((full, shape[1] // hidden))
    return found


def _weights(model: nn.Module, path: str) -> tuple[Tensor, Tensor]:
    """(outputs, inputs) and (outputs,)."""
    module = model.get_submodule(path)
    weight, bias = weight_of(module).detach(), getattr(module, "bias", None)
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.detach()


# ---------------------------------------------------------------------------------- embedding


def _embedded(model: nn.Module, shell: nn.Module, block: Block, own: Units, fitted: Map) -> Units:
    """The map as hidden units of the block's own kind."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    if (affine.d_in, affine.d_out) != (block.d_in, block.d_out):
        raise ValueError(
            f"{_name(block)} goes from {block.d_in} to {block.d_out} features, its map from "
            f"{affine.d_in} to {affine.d_out}"
        )
    for linear in _ways(affine, len(own.reads), own.writes):
        if _computes(model, block, linear, affine):
            _check_room(shell, block, linear)
            if isinstance(fitted, UnitMap):
                return linear.beside(own.take(fitted.units, fitted.write))
            return linear
    identity = "act(z) - act(-z) = z" if len(own.reads) == 1 else f"act({OPEN:g}) = {OPEN:g}"
    raise ValueError(f"{_name(block)}: its activation does not obey {identity}; {INSTEAD}")


def _ways(affine: Affine | Factored, projections: int, like: Tensor) -> Iterator[Units]:
    """Units that are linear if the activation is of the usual kind. Which is the gate? Both ways."""
    A, B = _factors(affine)
    zero, none = torch.zeros_like(A).to(like), like.new_zeros(len(A))
    bias = affine.bias.to(like)
    if projections == 1:
        up = torch.cat([A, -A]).to(like), torch.cat([none, none])
        yield Units((up,), torch.cat([B, -B], 1).to(like), bias)
        return
    gate, up = (zero, none + OPEN), ((A / OPEN).to(like), none)
    for reads in ((gate, up), (up, gate)):
        yield Units(reads, B.to(like), bias)


def _factors(affine: Affine | Factored) -> tuple[Tensor, Tensor]:
    """(A, B), float64. Of full rank, one is the identity: W is then rounded once and no more."""
    d_in, d_out = affine.d_in, affine.d_out
    if isinstance(affine, Factored):
        A, B = affine.into.double(), affine.out.double()
        if affine.rank <= min(d_in, d_out):
            return A, B
        W = B @ A
    else:
        W = affine.weight.double()
    one = torch.eye(min(d_in, d_out)).to(W)
    return (one, W) if d_in <= d_out else (W, one)


def _computes(model: nn.Module, block: Block, units: Units, affine: Affine | Factored) -> bool:
    """Does the block with these units compute the map, on rows of every size?

    Sizes from 0.001 to 1000 see clipped activations and curved ones. The rounding of a sum of k
    terms is about sqrt(k) eps of the sum of their sizes.
    """
    like = units.writes
    sizes = torch.logspace(-3, 3, 7).repeat_interleave(4)[:, None]
    x = sizes * torch.randn(len(sizes), block.d_in, generator=torch.Generator().manual_seed(0))
    x = x.to(like)
    with torch.no_grad():
        got = _run(model, block, units)(x).double()
    A, B = _factors(affine)
    rows, b = x.double(), affine.bias.to(A)
    want = rows @ A.t() @ B.t() + b
    size = rows.abs() @ A.abs().t() @ B.abs().t() + b.abs()
    close = 16 * (block.d_in + len(units)) ** 0.5 * torch.finfo(like.dtype).eps
    return bool(((got - want).abs() <= close * size).all())


def _run(model: nn.Module, block: Block, units: Units) -> nn.Module:
    """The block with other weights: what its family does between the projections stays."""
    narrow: dict[nn.Module, nn.Module] = {}
    for path, (weight, bias) in _tensors(model, block, units).items():
        linear = nn.Linear(1, 1, device="meta")  # its weights say how wide it is
        linear.weight, linear.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
        narrow[model.get_submodule(path)] = linear
    return Chain([rebuilt(attrgetter(path)(model), narrow) for path in block.steps])


def _tensors(model: nn.Module, block: Block, units: Units) -> dict[str, tuple[Tensor, Tensor]]:
    """Path of each projection -> its weight (outputs, inputs) and bias."""
    reads, found = iter(units.reads), {}
    for path, parts in _projections(model, block):
        chosen = [next(reads) for _ in range(parts)]
        found[path] = torch.cat([W for W, _ in chosen]), torch.cat([b for _, b in chosen])
    return found | {str(block.down): (units.writes, units.bias)}


def _check_room(shell: nn.Module, block: Block, units: Units) -> None:
    """Is there a bias wherever one must be written?"""
    for path, (_, bias) in _tensors(shell, block, units).items():
        if getattr(shell.get_submodule(path), "bias", None) is not None or not bias.any():
            continue
        kind = _family(shell)
        if path == block.down:
            raise ValueError(
                f"{_name(block)}: the last projection of {kind} has no bias to hold the map's; "
                f"fit it without an intercept, or {INSTEAD}"
            )
        raise ValueError(
            f"{_name(block)}: the gates of {kind} have no biases, and without one a gate cannot be "
            f"held open, so that no stock unit is linear; {INSTEAD}"
        )


# ------------------------------------------------------------------------------------- widths


def _widths(
    model: nn.Module, shell: nn.Module, units: Mapping[Block, Units], maps: Mapping[Block, Map]
) -> tuple[dict[str, int], list[str]]:
    """Settings of the config and the widths that they get, and what to tell people about them."""
    controls = _controls(model, shell, units)
    widths: dict[str, int] = {}
    notes: list[str] = []
    for setting, group in controls.items():
        before, width = _hidden(shell, group[0]), max(1, *(len(units[b]) for b in group))
        widths |= {setting: width} if width != before else {}
        whole = [b for b in group if b not in maps]
        notes.append(_note(setting, before, width, whole, group))
    fixed = [b for b in units if not any(b in group for group in controls.values())]
    for block in fixed:
        if len(units[block]) > _hidden(shell, block):
            raise ValueError(
                f"{_name(block)}: its map needs {len(units[block])} hidden units, and "
                f"{_family(shell)} always has {_hidden(shell, block)}: a lower rank, or {INSTEAD}"
            )
    if fixed:
        notes.append(
            f"{_family(shell)} cannot be made narrower: {len(fixed)} blocks padded, nothing saved"
        )
    return widths, notes


def _note(setting: str, before: int, width: int, whole: list[Block], group: list[Block]) -> str:
    if width < before:
        return f"{setting}: {width} hidden units in each of {len(group)} blocks instead of {before}"
    if width > before:
        return (
            f"{setting}: {width} hidden units in each of {len(group)} blocks instead of {before}: "
            f"larger than before; maps of lower rank, or {INSTEAD}"
        )
    why = f", as wide as block {whole[0].index}, which was not replaced" if whole else ""
    return f"{setting}: replaced blocks padded to {before} hidden units{why}: nothing saved"


def _controls(
    model: nn.Module, shell: nn.Module, dense: Mapping[Block, Units]
) -> dict[str, list[Block]]:
    """Settings of the config -> the blocks whose width they set, found by trying.

    A setting counts if its value becomes the width of these blocks and no other tensor changes.
    """
    hidden = {block: _hidden(shell, block) for block in dense}
    paths = {path for block in dense for path, _ in _projections(shell, block)}
    paths |= {str(block.down) for block in dense}
    found: dict[str, list[Block]] = {}
    probe = 2 * max(hidden.values(), default=0) + 2
    for setting in _candidates(shell.config, set(hidden.values())):
        config = copy.deepcopy(shell.config)
        _set(config, setting, probe)
        try:
            other = _shell(model, config)
        except Exception:  # whatever a family raises: it is not a width that can change alone
            continue
        known = {block for group in found.values() for block in group}
        group = [b for b in hidden if _hidden(other, b) == probe and b not in known]
        if group and {name.rpartition(".")[0] for name in _changed(shell, other)} <= paths:
            found[setting] = group
    return found


def _candidates(config: Any, widths: set[int]) -> Iterator[str]:
    """Settings, "name" or "text_config.name", that are a width, or null and named like one."""
    parts = {"": config} | {f"{name}.": getattr(config, name) for name in config.sub_configs}
    for prefix, part in parts.items():
        for name, value in vars(part).items() if part is not None else ():
            named = value is None and re.search("inner|ffn|intermediate", name)
            if named or (type(value) is int and value in widths):
                yield prefix + name


def _changed(shell: nn.Module, other: nn.Module) -> set[str]:
    """Names of tensors that are not of the same shape."""
    ours, theirs = ({n: t.shape for n, t in m.state_dict().items()} for m in (shell, other))
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


def _set(config: Any, setting: str, value: int) -> None:
    where, _, name = setting.rpartition(".")
    setattr(getattr(config, where) if where else config, name, value)


# ------------------------------------------------------------------------------------- models


def _shell(model: nn.Module, config: Any) -> nn.Module:
    """The model that this config makes, without storage: what shapes and biases does it have?"""
    with torch.device("meta"):
        made: nn.Module = type(model)(copy.deepcopy(config))
    return made


def _filled(model: nn.Module, config: Any, units: Mapping[Block, Units]) -> Any:
    """The model that this config makes, with these units and everything else of the original."""
    made: Any = type(model)(config).to(next(model.parameters())).train(model.training)
    state = dict(model.state_dict())
    for block, own in units.items():
        wide = own.padded(_hidden(made, block))
        for path, (weight, bias) in _tensors(made, block, wide).items():
            module = made.get_submodule(path)
            state[f"{path}.weight"] = weight.t() if hasattr(module, "nf") else weight
            if module.bias is not None:
                state[f"{path}.bias"] = bias
    made.load_state_dict(state, strict=True)
    if hasattr(model, "generation_config"):
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _hidden(model: nn.Module, block: Block) -> int:
    shape = projection_shape(model.get_submodule(str(block.down)))
    assert shape is not None
    return shape[0]


def _family(model: Any) -> str:
    return str(model.config.model_type)


def _name(block: Block) -> str:
    return f"block {block.index} ({block.path})"
