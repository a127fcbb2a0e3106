"""Run a model again from the middle: what comes before a block is answered from a recorded forward.

    recording = Recording(model, at)
    with recording.listening():
        states = run(inputs)                    # all layers, once
    for block in at:
        with recording.resumed(block), swapped(model, {block: linear}):
            changed = run(inputs)               # the same inputs: layers from the block's on

The model's own forward runs, so that masks, positions, the final norm and whatever else a family
does stay its own. Layers before the block's return at once what they returned, and so does what is
done in the block's own layer when the block begins, the attention: a swap at layer i of L costs
L - 1 - i layers and the replacement. That a model passes nothing else from layer to layer is tried
(`works`), not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.families import Block, projection_shape
from howlinear.models.hooks import as_module, swapped


class Recording:
    """What the layers, and what stands beside each block, returned in one forward."""

    def __init__(self, model: nn.Module, at: Sequence[Block]) -> None:
        self.model = model
        self.before: dict[Block, list[nn.Module]] = {}  # modules that may be answered for
        for block in at:
            self.before[block] = _before(model, block)
        self.outputs: dict[nn.Module, Any] = {}
        self.done: dict[Block, set[nn.Module]] = {}  # what had returned when the block began

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the forward that runs inside."""
        self.outputs.clear()
        self.done.clear()
        modules = dict.fromkeys(m for before in self.before.values() for m in before)

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            self.outputs[module] = output

        def begins(block: Block) -> Any:
            entry = self.model.get_submodule(block.entry)
            return entry.register_forward_pre_hook(
                lambda *_: self.done.__setitem__(block, set(self.outputs))
            )

        handles = [module.register_forward_hook(keep) for module in modules]
        handles += [begins(block) for block in self.before]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resumed(self, block: Block) -> Iterator[None]:
        """Inside, a forward of the same inputs starts at this block."""
        done = self.done[block]
        with answering({m: self.outputs[m] for m in self.before[block] if m in done}):
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
    """The layers before the block's own, and what else in its own layer has weights to multiply."""
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
