"""Run a model again from the middle: modules before a block return what a recorded forward gave.

    recording = Recording(model, at)
    with recording.recording():
        states = run(inputs)                    # all layers, once
    for block in at:
        with recording.resumed(block), swapped(model, {block: linear}):
            changed = run(inputs)               # the same inputs: layers from the block's on

The model's own forward runs, so that masks, positions, the final norm and whatever else a family
does stay its own. Layers before the block return at once what they returned, and so does the
attention of the block's own layer: a swap at layer i of L costs L - 1 - i layers and the replacement.

This relies on three things. `nn.Module.__call__` looks up `forward` in the instance before the class,
so a value in `module.__dict__` takes its place. Layers are children of an `nn.ModuleList`, called in
order. A model passes nothing from layer to layer but return values: a cache that one layer writes and
a later one reads would be missing. The last is tested on each model before it is used (`problem`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.families import Block, projection_shape
from howlinear.models.ggufs import one_line
from howlinear.models.hooks import as_module, swapped


class Recording:
    """What the layers, and the modules beside each block, returned in one forward."""

    def __init__(self, model: nn.Module, at: Sequence[Block]) -> None:
        self.model = model
        self.before = {block: _before(model, block) for block in at}  # modules that need not run
        self.outputs: dict[nn.Module, Any] = {}
        self.done: dict[Block, set[nn.Module]] = {}  # modules that had returned before the block

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward that runs inside."""
        self.outputs.clear()
        self.done.clear()
        modules = dict.fromkeys(m for before in self.before.values() for m in before)

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            self.outputs[module] = output

        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(module.register_forward_hook(keep))
            for block in self.before:
                entry = self.model.get_submodule(block.entry)
                begins = partial(self._begins, block)
                stack.enter_context(entry.register_forward_pre_hook(begins))
            yield

    def _begins(self, block: Block, *_: Any) -> None:
        self.done[block] = set(self.outputs)

    def resumed(self, block: Block) -> AbstractContextManager[None]:
        """Inside, a forward of the same inputs starts at this block."""
        done = self.done[block]
        return answering({m: self.outputs[m] for m in self.before[block] if m in done})

    def problem(self, run: Callable[[], Tensor]) -> str | None:
        """Why `run` cannot be resumed at each block, the block unchanged; None if it gives the same
        to the bit."""
        with self.recording():
            want = run()
        try:
            for block in self.before:
                module = as_module(self.model, block)
                with self.resumed(block), swapped(self.model, {block: module}):
                    states = run()
                if states.shape != want.shape:
                    return f"{block}: resumed there, states have shape {tuple(states.shape)}"
                if not torch.equal(states, want):
                    off = float((states - want).abs().max())
                    return f"{block}: resumed there, states differ by up to {off:.2g}"
        except Exception as err:  # whatever a family's forward raises: the full model still runs
            return f"{block}: resumed there, {type(err).__name__}: {one_line(err, 160)}"
        finally:
            self.outputs.clear()
        return None


@contextmanager
def answering(outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Inside, these modules return these values at once, whatever they are called with.

    A `forward` in the instance's own dict takes precedence over the class's. accelerate keeps its
    wrapper there too, which is put back afterwards. Hooks of the modules still run.
    """
    before = {module: module.__dict__.get("forward") for module in outputs}
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
    """The layers before the block's layer, and the other modules of its layer that have projections."""
    parts = block.entry.split(".")
    for i in range(1, len(parts)):
        layers, name = model.get_submodule(".".join(parts[:i])), parts[i]
        if isinstance(layers, nn.ModuleList) and name.isdecimal():
            layer = f"{'.'.join(parts[:i])}.{name}"
            beside = [
                child
                for key, child in model.get_submodule(layer).named_children()
                if not any(f"{path}.".startswith(f"{layer}.{key}.") for path in block.steps)
                and any(projection_shape(part) for part in child.modules())
            ]
            return [*list(layers)[: int(name)], *beside]
    return []
