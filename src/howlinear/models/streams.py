"""Where the residual stream before a block's add can be read, so that an error in it can be made good.

    inlet = inlets(model, at)[block]        # a module's path, "" for x itself, or None

In most models a norm takes the stream h_before to the block's input x, and the stream after the block
is h_before + y. Where the block stands beside the attention (gpt_neox, falcon, phi), nothing that has
run when the block begins adds up to the stream after it. Which it is gets tried, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.models.families import Block, backbone, call_options
from howlinear.models.hooks import evaluating, tap


def inlets(
    model: nn.Module, at: Sequence[Block], inputs: dict[str, Tensor]
) -> dict[Block, str | None]:
    """For each block, the module whose input is the stream before it; "" where that is x itself."""
    heard: dict[int, tuple[str, Tensor, Tensor]] = {}  # by the address of what a module returned
    found: dict[Block, str | None] = {}

    def keep(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, Tensor) and isinstance(output, Tensor):
                heard[output.data_ptr()] = (path, given, output)

        return hook

    def receive(block: Block, rows: Rows) -> None:
        y = model.get_submodule(block.out_norm)(rows.y) if block.out_norm else rows.y
        path, before, _ = heard.get(rows.x.data_ptr(), (None, rows.x, rows.x))
        ways = {path: before.reshape(-1, before.shape[-1]), "": rows.x}
        found[block] = next(
            (p for p, h in ways.items() if p is not None and _adds_up(h, y, rows.h)), None
        )

    own = tuple(f"{step}." for b in at for step in b.steps)
    handles = [
        module.register_forward_hook(keep(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path and not f"{path}.".startswith(own)
    ]
    net = backbone(model)
    try:
        with torch.no_grad(), evaluating(model), tap(model, receive, at=at):
            net(**inputs, **call_options(net))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adds_up(before: Tensor, y: Tensor, after: Tensor | None) -> bool:
    if after is None or before.shape != after.shape:
        return False
    slack = 8 * torch.finfo(after.dtype).eps * float(after.abs().max())
    return torch.allclose(before + y, after, rtol=0, atol=slack)
