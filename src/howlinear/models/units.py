"""A few hidden units of a block: which of them write the attention sink, and a module that computes
them without the others.

    taken(model, block, [217])          # a module x (..., d_in) -> h (..., 1), from one row of weights
    sinks(hidden, writes(model, block)) # the units that write the first position, and their shares

Hidden units are what the block's last projection reads. Unit j of a gated block is
act(gate_j . x) (up_j . x): it needs row j of each projection before the last, and nothing else. So a
block with only the units S is the same module with narrower projections, in every family that
works unit by unit between them. Whether a block does is tested on random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.linear.stores import MOST
from howlinear.models.families import Block, projection_shape
from howlinear.models.hooks import Chain, evaluating, tap
from howlinear.models.offload import resident
from howlinear.models.twins import rebuilt


def taken(model: nn.Module, block: Block, units: Sequence[int]) -> nn.Module:
    """The chosen hidden units as a module x -> h_S with its own copy of the weights.

    ValueError for a block whose units cannot be computed alone: experts, quantised weights, and
    blocks that mix units before the last projection. Offloaded weights are loaded for this.
    """
    _, steps = _parts(model, block)
    with torch.no_grad(), evaluating(model), resident(steps):  # copies keep the mode: no dropout
        made = _sliced(model, block, torch.as_tensor(units, dtype=torch.long))
        weight = next(made.parameters())
        x = torch.randn(4, block.d_in, generator=torch.Generator().manual_seed(0)).to(weight)
        every, got = hidden_units(model, block)(x), made(x)
    if not bool(every.isfinite().all()):
        raise ValueError(f"{block} has hidden units that are not finite")
    close = 8 * block.d_in * torch.finfo(weight.dtype).eps * every.abs().max()  # of a dot product
    if not torch.allclose(got, every[:, list(units)], rtol=0, atol=float(close)):
        raise ValueError(f"{block} mixes its hidden units before the last projection")
    return made


def hidden_units(model: nn.Module, block: Block) -> nn.Module:
    """x -> all hidden units, by a copy of the block without hooks that shares its weights."""
    down, steps = _parts(model, block)
    through = {down: Through(weight_of(down))}
    return Chain([rebuilt(step, through) for step in steps])


def _parts(model: nn.Module, block: Block) -> tuple[nn.Module, list[Any]]:
    """The block's last projection and its steps."""
    if block.down is None:
        raise ValueError(f"{block} has no hidden units of its own: experts, or not known")
    try:
        down, *steps = [attrgetter(path)(model) for path in (block.down, *block.steps)]
    except AttributeError as error:  # swapped out at the moment
        raise ValueError(f"{block} has no hidden units: {error}") from None
    return down, steps


def hidden_count(model: nn.Module, block: Block) -> int:
    """How many hidden units a block has; 0 where they cannot be computed alone."""
    norms = writes(model, block)
    return 0 if norms is None else len(norms)


def writes(model: nn.Module, block: Block) -> Tensor | None:
    """(m,) squared norms of each hidden unit's column of the last projection; None where units
    cannot be computed alone."""
    try:
        down, steps = _parts(model, block)
        with resident(steps):
            taken(model, block, [0])
            return weight_of(down).detach().cpu().double().square().sum(0)
    except ValueError:
        return None


def sinks(hidden: Tensor, norms: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """The units that write most, on rows `hidden` (n, m) of first positions: (units, shares).

    A unit's energy is its mean squared activation times its squared norm (`writes`); its share is
    its energy over that of all units.
    """
    energy = hidden.cpu().double().square().mean(0) * norms
    shares, units = (energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)).topk(
        min(most, len(energy))
    )
    return units, shares


def sink_units(
    model: nn.Module, at: Sequence[Block], run: Callable[[], Any]
) -> dict[int, tuple[list[int], list[float]]]:
    """The sink units of each block and their shares, by block index. `run` runs the model once.

    Blocks whose units cannot be computed alone are left out.
    """
    sink: dict[int, tuple[list[int], list[float]]] = {}
    norms = {b.index: n for b in at if (n := writes(model, b)) is not None}

    def receive(block: Block, rows: Rows) -> None:
        assert rows.hidden is not None
        first = rows.hidden[(rows.position == 0).nonzero().flatten()]
        units, shares = sinks(first, norms[block.index])
        sink[block.index] = (units.tolist(), shares.tolist())

    known = [b for b in at if b.index in norms]
    if known:
        every: dict[int, Tensor | None] = dict.fromkeys(norms)
        with torch.no_grad(), tap(model, receive, at=known, units=every):
            run()
    return sink


def _sliced(model: nn.Module, block: Block, units: Tensor) -> nn.Module:
    down, steps = _parts(model, block)
    m = weight_of(down).shape[1]
    if not all(0 <= u < m for u in units.tolist()):
        raise ValueError(f"{block} has {m} hidden units, not {units.tolist()}")
    narrow: dict[nn.Module, nn.Module] = {down: Through(weight_of(down))}
    for step in steps:
        for module in step.modules() if isinstance(step, nn.Module) else ():
            shape = projection_shape(module)
            if module is down or shape is None:
                continue
            if shape[1] not in (m, 2 * m):
                raise ValueError(f"{block} has a projection to {shape[1]}, not to {m} units")
            rows = torch.cat([units + start for start in range(0, shape[1], m)])  # 2 m: gate and up
            weight, bias = weight_of(module), getattr(module, "bias", None)
            linear = nn.Linear(shape[0], len(rows), bias=bias is not None, device="meta")
            at = rows.to(weight.device)
            linear.weight = nn.Parameter(weight.detach()[at].contiguous(), requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias.detach()[at], requires_grad=False)
            narrow[module] = linear
    return Chain([rebuilt(step, narrow) for step in steps])


class Through(nn.Identity):
    """In place of the last projection; has a weight, whose dtype T5 reads."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.new_empty(0), persistent=False)


def weight_of(projection: nn.Module) -> Tensor:
    """(outputs, inputs); gpt2's Conv1D keeps the transpose."""
    weight, shape = getattr(projection, "weight", None), projection_shape(projection)
    if shape is None or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(f"{type(projection).__name__} has no plain weights to take units from")
    conv1d = hasattr(projection, "nf")
    if tuple(weight.shape) != (shape if conv1d else shape[::-1]):
        raise ValueError(f"{type(projection).__name__} keeps its weights in an unknown layout")
    return weight.t() if conv1d else weight
