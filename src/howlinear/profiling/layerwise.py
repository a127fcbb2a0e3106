"""A model larger than memory, layer by layer: one layer's weights and its blocks' moments at a time.

    for stores in layer_by_layer(Pass(model, text, at, split, course, make)):
        ...                     # stores of one layer's blocks that have seen every row

All windows go through one layer before the next one is loaded. Between layers their hidden states are
in a file, which the system caches in memory while there is room. The model's own forward runs, with
its masks and positions: layers before the current one return at once what is in the file, and the
forward ends after the current one. Peak memory does not grow with depth. A family that passes more than
hidden states from layer to layer is refused.
"""

from __future__ import annotations

import inspect
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.stores import BlockStore
from howlinear.models.families import FAMILIES, Block
from howlinear.models.forward import Batch, Forward, StopForward
from howlinear.models.offload import resident
from howlinear.models.recording import answering
from howlinear.profiling.passes import Course, Pass
from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.work import Advance

CHECKSUM = 4  # bytes
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64)}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}


def layer_by_layer(reading: Pass) -> Iterator[list[BlockStore]]:
    """As `passes.whole_model`, a layer at a time."""
    course, ranks = reading.course, reading.course.ranks
    layers, where = stack_of(reading.model, reading.at)
    first = next(reading.text.batches(course.batch_size))
    mine = list(reading.batches())
    if any("input_ids" not in batch.inputs for batch in (first, *mine)):
        raise ValueError("images and audio do not go layer by layer: run without --layerwise")
    stack, last = _Stack(reading.model, layers), max(where.values())
    beginning = reading.beginning(first)
    if not all(block.family in FAMILIES for block in reading.at):
        stack.check(beginning, last)
    with _folder(course) as folder:
        batches = [Batch(-1, -1, beginning, [], 0), *mine]
        states = States(folder, batches, course.saves.asked if course.saves else {})
        done = min(ranks.gather(states.layer))  # after an interruption, ranks may differ by one
        states.layer, stack.extras = done, states.extras
        advance = reading.begin(last + 1)
        for i in range(last + 1):
            group = [block for block in reading.at if where[block] == i]
            if i < done:
                yield reading.finished(group)
                advance(sum(batch.tokens for batch in mine))
                continue
            with resident([layers[i]]):
                stores = _read_layer(reading, stack, states, i, group, advance)
            yield ranks.collect_all(stores)
            ranks.share(None)  # wait until rank 0 has written this layer's blocks
            states.extras = stack.extras
            states.advance(i + 1)


def _read_layer(
    reading: Pass,
    stack: _Stack,
    states: States,
    i: int,
    group: Sequence[Block],
    advance: Advance,
) -> list[BlockStore]:
    """All windows through layer i: stores of its blocks; hidden states to the next file."""
    beginning, *batches = states.batches
    saves = reading.course.saves

    def run(batch: Batch) -> Tensor:
        return stack.run(i, batch.inputs, states.before(batch))

    stores = reading.make(group, lambda: run(beginning)) if group else []
    begun = saves.resume(stores) if saves and stores else 0
    state = run(beginning)
    states.width, states.dtype = state.shape[-1], state.dtype
    with states.writing(begun + 1 if begun else 0) as write:
        if not begun:
            write(state)
        reading.read(
            batches,
            stores,
            lambda batch: write(run(batch)),
            advance,
            begun=begun,
            stop=False,
            before_save=states.sync,
        )
    return stores


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


@contextmanager
def _folder(course: Course) -> Iterator[Path]:
    if course.saves is not None:
        yield course.saves.partial / "states"
        return
    with tempfile.TemporaryDirectory(prefix="howlinear-") as name:
        yield Path(name)


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
        if state is not None:
            state = state.to(self.forward.device)
            whole = state if self.extras < 0 else (state, *[None] * self.extras)
            answers = dict.fromkeys(self.layers[:i], whole)
            if state.shape[-1] == self.embedding_width:  # the embedding's weights are not needed
                inputs = {"inputs_embeds": state, **inputs}
                del inputs["input_ids"]
        with answering(answers):
            return self._output(i, inputs, stop=True)

    def _output(self, i: int, inputs: dict[str, Tensor], stop: bool) -> Tensor:
        """The hidden states that layer i returns in one forward."""
        outputs: list[Any] = []

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            if stop:
                raise StopForward

        handle = self.layers[i].register_forward_hook(keep)
        try:
            self.forward(inputs)
        finally:
            handle.remove()
        if len(outputs) != 1:
            raise RuntimeError(f"layer {i} ran {len(outputs)} times in one forward")
        output = outputs[0]
        self.extras = len(output) - 1 if isinstance(output, tuple) else -1
        state: Tensor = output[0] if self.extras >= 0 else output
        return state

    def check(self, inputs: dict[str, Tensor], last: int) -> None:
        """For an unknown family: refuse it if layers pass anything but hidden states.

        Two batches take turns, so that state that one leaves in the model changes the other.
        """
        ids = inputs["input_ids"]
        batches = [inputs, inputs | {"input_ids": ids[:, :1].expand_as(ids)}]
        wanted = [self._output(last, batch, stop=False).float() for batch in batches]
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
    """Hidden states of all batches between two layers, in a file; batch 0 is the text's beginning.

    The file of layer i holds what enters it, each batch with a checksum. It is removed when layer
    i + 1 is done, so that an interruption at any moment leaves the last complete one.
    """

    def __init__(self, folder: Path, batches: Sequence[Batch], asked: Mapping[str, Any]) -> None:
        self.folder, self.batches, self.asked = folder, list(batches), clean(dict(asked))
        self.place = {batch.number: k for k, batch in enumerate(self.batches)}
        self.layer, self.width, self.dtype, self.extras = 0, 0, torch.float32, -1
        self.sizes = [tuple(batch.inputs["input_ids"].shape) for batch in self.batches]
        self.starts = [0, *accumulate(math.prod(size) for size in self.sizes)]
        self.file: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "states.json").is_file():
            self._resume(read_json(folder / "states.json", "states"))

    def _resume(self, about: dict[str, Any]) -> None:
        if about.get("asked") != self.asked:  # an interrupted profile of something else
            return
        numbers: list[Any] = [about.get(name) for name in ("layer", "width", "extras")]
        layer, width, extras = numbers
        dtype = DTYPES.get(str(about.get("dtype")))
        if any(type(n) is not int for n in numbers) or dtype is None or min(layer, width) < 1:
            raise ValueError(f"{self.folder / 'states.json'} is damaged: pass --overwrite")
        self.layer, self.width, self.dtype, self.extras = layer, width, dtype, min(extras, 16)

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer}.bin"

    def _start(self, number: int) -> int:
        """The first byte of a batch."""
        return self.starts[number] * self.width * self.dtype.itemsize + CHECKSUM * number

    @contextmanager
    def writing(self, begun: int) -> Iterator[Callable[[Tensor], None]]:
        """Write what enters the next layer, after the first `begun` batches, which are there."""
        path = self._path(self.layer + 1)
        with path.open("r+b" if begun else "wb") as self.file:
            if begun:
                start = self._start(begun)
                if path.stat().st_size < start:
                    raise ValueError(f"{path} is damaged: pass --overwrite to start again")
                self.file.truncate(start)
                self.file.seek(start)
            yield self._write
            self.sync()

    def _write(self, state: Tensor) -> None:
        data = state.cpu().contiguous().view(torch.uint8).numpy().data
        self.file.write(data)
        self.file.write(zlib.crc32(data).to_bytes(CHECKSUM, "little"))

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def before(self, batch: Batch) -> Tensor | None:
        """What enters the current layer; None before the first."""
        if self.layer == 0:
            return None
        path, number = self._path(self.layer), self.place[batch.number]
        size = self._start(number + 1) - self._start(number) - CHECKSUM
        with path.open("rb") as file:
            file.seek(self._start(number))
            data, checksum = bytearray(file.read(size)), file.read(CHECKSUM)
        if len(data) != size or zlib.crc32(data).to_bytes(CHECKSUM, "little") != checksum:
            raise ValueError(f"{path} is damaged: pass --overwrite to start again")
        return torch.frombuffer(data, dtype=self.dtype).view(*self.sizes[number], self.width)

    def advance(self, layer: int) -> None:
        """The layers before this one are done."""
        self.layer = layer
        about = {"kind": "states", "schema": SCHEMA, "layer": layer, "width": self.width}
        about |= {"dtype": str(self.dtype).removeprefix("torch."), "extras": self.extras}
        about["asked"] = self.asked
        write_json(self.folder / "states.json", about)
        for path in self.folder.glob("*.bin"):
            if path.stem.isdecimal() and int(path.stem) < layer - 1:
                path.unlink()
