"""A model larger than memory, layer by layer: one layer's weights and its blocks' moments at a time.

    for stores in layer_by_layer(Pass(model, text, at, split, course)):
        ...                     # stores of one layer's blocks that have seen every row

All windows go through one layer before the next one is loaded. Between layers their hidden states are
in files, which the system caches in memory while there is room. The model's own forward runs, with
its masks and positions: layers before the current one return at once what is in the files, and the
forward ends after the current one. Peak memory does not grow with depth. A family that passes more than
hidden states from layer to layer is refused.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.stores import BlockStore
from howlinear.models.families import FAMILIES, Block
from howlinear.models.forward import Batch, Forward, StopForward
from howlinear.models.offload import resident
from howlinear.models.recording import answering
from howlinear.profiling.passes import Pass
from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.tensors import read_tensors, write_tensors


def layer_by_layer(reading: Pass) -> Iterator[list[BlockStore]]:
    """As `passes.whole_model`, a layer at a time."""
    saves, ranks = reading.course.saves, reading.course.ranks
    layers, where = stack_of(reading.model, reading.at)
    every = list(reading.text.batches(reading.course.batch_size))  # once: it may be a stream
    if not every:
        raise ValueError("the text is empty: there is no window to read")
    mine = [batch for batch in every if reading.course.mine(batch.number)]
    if any("input_ids" not in batch.inputs for batch in every):
        raise ValueError("images and audio do not go layer by layer: run without --layerwise")
    stack, last = _Stack(reading.model, layers), max(where.values())
    beginning = Batch(-1, -1, reading.beginning(every[0]), [], 0)
    if not all(block.family in FAMILIES for block in reading.at):
        stack.check(beginning.inputs, last)
    with tempfile.TemporaryDirectory(prefix="howlinear-") as temporary:
        folder = saves.partial / "states" if saves else Path(temporary)
        states = States(folder, saves.asked if saves else {})
        done = min(ranks.gather(states.layer))  # after an interruption, ranks may differ by one
        states.layer, stack.extras = done, states.extras
        advance = reading.begin(last + 1)

        def run(batch: Batch) -> None:
            states.write(batch, stack.run(states.layer, batch.inputs, states.before(batch)))

        for i in range(last + 1):
            group = [block for block in reading.at if where[block] == i]
            if i < done:
                yield reading.finished(group)
                advance(sum(batch.tokens for batch in mine))
                continue
            with resident([layers[i]]):
                run(beginning)
                stores = reading.make(group, lambda: run(beginning)) if group else []
                reading.read(mine, stores, run, advance)
            yield ranks.collect_all(stores)
            ranks.share(None)  # wait until rank 0 has written this layer's blocks
            states.advance(i + 1, stack.extras)


def stack_of(model: nn.Module, at: Sequence[Block]) -> tuple[list[nn.Module], dict[Block, int]]:
    """The model's layers, and in which of them each block is."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has two stacks of layers: run it without --layerwise"
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
            "--layerwise"
        )
    ((path, where),) = lists.items()
    layers: Any = model.get_submodule(path)
    return list(layers), where


class _Stack:
    """A model's layers, run one at a time."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self.model, self.layers, self.forward = model, layers, Forward(model)
        net: Any = self.forward.net
        takes_embeddings = "inputs_embeds" in inspect.signature(net.forward).parameters
        table: Any = net.get_input_embeddings() if takes_embeddings else None
        self.embedding_width = getattr(table, "embedding_dim", None)
        self.extras = -1  # values that a layer returns beside hidden states; -1: it is no tuple

    def run(self, i: int, inputs: dict[str, Tensor], state: Tensor | None) -> Tensor:
        """Hidden states after layer i, from those before it, or from tokens if there are none yet."""
        answers: dict[nn.Module, Any] = {}
        outputs: list[Any] = []
        if state is not None:
            state = state.to(self.forward.device)
            whole = state if self.extras < 0 else (state, *[None] * self.extras)
            answers = dict.fromkeys(self.layers[:i], whole)
            if state.shape[-1] == self.embedding_width:  # the embedding's weights are not needed
                inputs = {"inputs_embeds": state, **inputs}
                del inputs["input_ids"]

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise StopForward

        handle = self.layers[i].register_forward_hook(keep)
        try:
            with answering(answers):
                self.forward(inputs)
        finally:
            handle.remove()
        if not outputs:
            raise RuntimeError(f"layer {i} did not run in a forward")
        self.extras = len(outputs[0]) - 1 if isinstance(outputs[0], tuple) else -1
        after: Tensor = outputs[0][0] if self.extras >= 0 else outputs[0]
        return after

    def check(self, inputs: dict[str, Tensor], last: int) -> None:
        """For an unknown family: refuse it if layers pass anything but hidden states.

        Two batches take turns, so that state that one leaves in the model changes the other.
        """
        ids = inputs["input_ids"]
        batches = [inputs, inputs | {"input_ids": ids[:, :1].expand_as(ids)}]
        wanted = [self.run(last, batch, None).float() for batch in batches]
        states: list[Any] = [None, None]
        for i in range(last + 1):
            with resident([self.layers[i]]):
                states = [self.run(i, *pair) for pair in zip(batches, states, strict=True)]
        for state, plain in zip(states, wanted, strict=True):
            near = 1e-3 * float(plain.std())
            if not torch.allclose(state.float(), plain, rtol=1e-3, atol=near):
                raise ValueError(
                    f"layers of {type(self.model).__name__} pass more than hidden states to one "
                    "another: run it without --layerwise"
                )


class States:
    """Hidden states of all batches between two layers: a file for each layer and batch.

    Files of layer i hold what enters it. They are removed when layer i + 1 is done, so that an
    interruption at any moment leaves the last complete ones.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder, self.request = folder, clean(dict(request))
        self.layer, self.extras = 0, -1
        path = folder / "states.json"
        about = read_json(path, "states") if path.is_file() else {}
        if about and about.get("asked") == self.request:  # else a profile of something else
            numbers: list[Any] = [about.get(name) for name in ("layer", "extras")]
            if any(type(n) is not int or n > 2**16 for n in numbers):
                raise ValueError(f"{path} is damaged: pass --overwrite to start again")
            self.layer, self.extras = numbers

    def _path(self, layer: int, batch: Batch) -> Path:
        return self.folder / str(layer) / f"{batch.number}.safetensors"

    def before(self, batch: Batch) -> Tensor | None:
        """What enters the current layer; None before the first."""
        if self.layer == 0:
            return None
        path = self._path(self.layer, batch)
        try:
            return read_tensors(path, kind="states")["states"].clone()  # aligned: the same rounding
        except ValueError:
            raise ValueError(f"{path} is damaged: pass --overwrite to start again") from None

    def write(self, batch: Batch, states: Tensor) -> None:
        """Write what enters the next layer."""
        write_tensors(self._path(self.layer + 1, batch), {"states": states}, kind="states")

    def advance(self, layer: int, extras: int) -> None:
        """The layers before this one are done."""
        self.layer, self.extras = layer, extras
        about = {"kind": "states", "schema": SCHEMA, "asked": self.request}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "states.json", {**about, "layer": layer, "extras": extras})
        shutil.rmtree(self.folder / str(layer - 2), ignore_errors=True)
