"""A model's layers run a few at a time, from hidden states that were kept between them.

    stack = Stack(model, at)
    state = stack.run(0, 3, inputs)                 # hidden states after layers 0, 1 and 2
    state = stack.run(3, 4, inputs, state)          # after layer 3
    stack.where[block]                              # the layer that a block is in

The model's own forward runs, with its masks and positions: layers before the first one to run return at
once what was kept, and the forward ends after the last one. A model whose layers pass more than
hidden states to one another is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.families import Block
from howlinear.models.forward import Forward, StopForward
from howlinear.models.offload import resident
from howlinear.models.recording import answering


class Stack:
    """The one list of layers that all blocks of `at` are in; ValueError where there is none."""

    def __init__(self, model: nn.Module, at: Sequence[Block]) -> None:
        self.model, self.forward = model, Forward(model)
        self.layers, self.where = layers_of(model, at)
        net: Any = self.forward.net
        takes_embeddings = "inputs_embeds" in inspect.signature(net.forward).parameters
        table: Any = net.get_input_embeddings() if takes_embeddings else None
        self.embedding_width = getattr(table, "embedding_dim", None)
        self.extras = -1  # values that a layer returns beside hidden states; -1: it is no tuple

    def run(
        self, first: int, last: int, inputs: dict[str, Tensor], state: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the layers `first` to `last` - 1, from those before them.

        They begin with tokens where `first` is 0.
        """
        answers: dict[nn.Module, Any] = {}
        outputs: list[Any] = []
        if first:
            assert state is not None
            state = state.to(self.forward.device)
            whole = state if self.extras < 0 else (state, *[None] * self.extras)
            answers = dict.fromkeys(self.layers[:first], whole)
            if state.shape[-1] == self.embedding_width:  # the embedding's weights are not needed
                inputs = {"inputs_embeds": state, **inputs}
                del inputs["input_ids"]

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise StopForward

        handle = self.layers[last - 1].register_forward_hook(keep)
        try:
            with answering(answers):
                self.forward(inputs)
        finally:
            handle.remove()
        if not outputs:
            raise RuntimeError(f"layer {last - 1} did not run in a forward")
        self.extras = len(outputs[0]) - 1 if isinstance(outputs[0], tuple) else -1
        after: Tensor = outputs[0][0] if self.extras >= 0 else outputs[0]
        return after

    def check(self, inputs: dict[str, Tensor], last: int) -> None:
        """For an unknown family: refuse it if layers pass anything but hidden states.

        Two batches take turns, so that state that one leaves in the model changes the other.
        """
        ids = inputs["input_ids"]
        batches = [inputs, inputs | {"input_ids": ids[:, :1].expand_as(ids)}]
        wanted = [self.run(0, last + 1, batch).float() for batch in batches]
        states: list[Any] = [None, None]
        for i in range(last + 1):
            with resident([self.layers[i]]):
                pairs = zip(batches, states, strict=True)
                states = [self.run(i, i + 1, batch, state) for batch, state in pairs]
        for state, plain in zip(states, wanted, strict=True):
            near = 1e-3 * float(plain.std())
            if not torch.allclose(state.float(), plain, rtol=1e-3, atol=near):
                raise ValueError(
                    f"layers of {type(self.model).__name__} pass more than hidden states to one "
                    "another: run it without `layerwise`"
                )


def layers_of(model: nn.Module, at: Sequence[Block]) -> tuple[list[nn.Module], dict[Block, int]]:
    """The model's layers, and in which of them each block is."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has two stacks of layers: run it without `layerwise`"
        )
    lists: dict[str, dict[Block, int]] = {}  # by path: layer of each block
    for block in at:
        parts = block.entry.split(".")
        for k in range(1, len(parts)):
            path = ".".join(parts[:k])
            if parts[k].isdecimal() and isinstance(model.get_submodule(path), nn.ModuleList):
                lists.setdefault(path, {})[block] = int(parts[k])
                break
    if len(lists) != 1 or sum(map(len, lists.values())) != len(at):
        raise ValueError(
            f"the blocks of {type(model).__name__} are not in one list of layers: run it without "
            "`layerwise`"
        )
    ((path, where),) = lists.items()
    layers: Any = model.get_submodule(path)
    return list(layers), where
