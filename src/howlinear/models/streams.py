"""Where the residual stream before a block's add can be read, so that a map can correct errors in it.

    inlet = inlets(model, at, inputs)[block]    # a module's path, "" for x itself, or None

In most models a norm takes the stream h_before to the block's input x, and the stream after the block
is h_before + s y, s being `Block.scale`, most often 1. Where block and attention run in parallel
(gpt_neox, falcon, phi), no tensor that exists before the block adds up with y to the stream after it.
A forward tells which case it is.

The module that made x is found by the address of its output (`data_ptr`). This relies on a layer
passing the norm's output to the block as it is, without a copy. Outputs are kept until the forward
ends, so that no address is used twice. The sum is checked in any case: where x was copied, the answer
is None, never a wrong module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.models.families import Block
from howlinear.models.forward import Batch, run_rows


def inlets(
    model: nn.Module, at: Sequence[Block], inputs: dict[str, Tensor]
) -> dict[Block, str | None]:
    """For each block, the module whose input is the stream before it; "" where that is x itself."""
    made: dict[int, tuple[str, Tensor, Tensor]] = {}  # address of an output: path, input, output
    inlet: dict[Block, str | None] = {}

    def keep(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(first, Tensor) and isinstance(output, Tensor):
                made[output.data_ptr()] = (path, first, output)

        return hook

    def receive(_: Batch, block: Block, rows: Rows) -> None:
        y = model.get_submodule(block.out_norm)(rows.y) if block.out_norm else rows.y
        path, before, _output = made.get(rows.x.data_ptr(), (None, rows.x, rows.x))
        ways = {path: before.reshape(-1, before.shape[-1]), "": rows.x}
        inlet[block] = next(
            (p for p, h in ways.items() if p is not None and _adds_up(h, block.scale * y, rows.h)),
            None,
        )

    inside = tuple(f"{step}." for b in at for step in b.steps)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path and not f"{path}.".startswith(inside):
                stack.enter_context(module.register_forward_hook(keep(path), with_kwargs=True))
        run_rows(model, [inputs], receive, at=at)
    return inlet


def _adds_up(before: Tensor, y: Tensor, after: Tensor | None) -> bool:
    """Is before + y = after, up to rounding?"""
    if after is None or before.shape != after.shape:
        return False
    slack = 8 * torch.finfo(after.dtype).eps * float(after.abs().max())
    return torch.allclose(before + y, after, rtol=0, atol=slack)
