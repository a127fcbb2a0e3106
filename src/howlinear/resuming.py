"""Run a model again from the middle: what comes before a block is answered from a recorded forward.

    recording = Recording(model, at)
    with recording.listening():
        states = run(inputs)                    # all layers, once
    for block in at:
        with recording.resumed(block), swapped(model, {block: linear}):
            changed = run(inputs)               # the same inputs: layers from the block's on

The model's own forward runs, so that masks, positions, the final norm and whatever else a family
does stay its own. Layers before the block's return at once what they returned, and so does the
attention beside the block: a swap at layer i of L costs L - 1 - i layers and the replacement. That a
model passes nothing else from layer to layer is tried (`works`), not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.families import Block, as_module, projection_shape, swapped


class Recording:
    """What the layers, and the attention beside each block, returned in one forward."""

    def __init__(self, model: nn.Module, at: Sequence[Block]) -> None:
        self.model = model
        self.before: dict[Block, list[nn.Module]] = {}  # modules to answer for
        for block in at:
            self.before[block] = _before(model, block)
        self.outputs: dict[nn.Module, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the forward that runs inside."""
        self.outputs.clear()
        modules = dict.fromkeys(m for before in self.before.values() for m in before)

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            self.outputs[module] = output

        handles = [module.register_forward_hook(keep) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resumed(self, block: Block) -> Iterator[None]:
        """Inside, a forward of the same inputs starts at this block."""
        with answering({m: self.outputs[m] for m in self.before[block] if m in self.outputs}):
            yield

    def works(self, run: Callable[[], Tensor]) -> bool:
        """Does `run` give the same to the bit when resumed at each block, the block unchanged?"""
        with self.listening():
            want = run()
        try:
            for block in self.before:
                with (
                    self.resumed(block),
                    swapped(self.model, {block: as_module(self.model, block)}),
                ):
                    if not torch.equal(run(), want):
                        return False
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError):
            return False
        finally:
            self.outputs.clear()
        return True


@contextmanager
def answering(outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Inside, these modules return these values at once, whatever they are called with."""
    before = {module: module.__dict__.get("forward") for module in outputs}  # accelerate's is there
    try:
        for module, output in outputs.items():
            module.__dict__["forward"] = lambda *args, output=output, **kwargs: output
        yield
    finally:
        for module, forward in before.items():
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


def _before(model: nn.Module, block: Block) -> list[nn.Module]:
    """The layers before the block's own, and what stands beside the block with weights to multiply."""
    parts = block.entry.split(".")
    for i in range(1, len(parts)):
        layers, name = model.get_submodule(".".join(parts[:i])), parts[i]
        if isinstance(layers, nn.ModuleList) and name.isdecimal():
            own = f"{'.'.join(parts[:i])}.{name}"
            beside = [
                child
                for key, child in model.get_submodule(own).named_children()
                if not any(f"{path}.".startswith(f"{own}.{key}.") for path in block.steps)
                and any(projection_shape(part) for part in child.modules())
            ]
            return [*list(layers)[: int(name)], *beside]
    return []
