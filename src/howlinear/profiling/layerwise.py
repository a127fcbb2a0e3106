"""A model larger than memory, layer by layer: one layer's weights and its blocks' moments at a time.

    for stores in layer_by_layer(model, windows, at, make, split, batch_size=8, course=course):
        ...                     # stores of one layer's blocks that have seen every row

All windows go through one layer before the next one is loaded. Between layers their hidden states are
in a file, which the system keeps in memory while there is room. The model's own forward runs, so that
masks, positions and whatever else a family does stay its own: layers before the one at hand return
at once what is in the file, and the forward ends after it. So peak memory does not grow with depth.
A family that passes more than hidden states from layer to layer is refused.
"""

from __future__ import annotations

import inspect
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import Split
from howlinear.linear.stores import BlockStore
from howlinear.models.families import FAMILIES, Block, backbone, call_options
from howlinear.models.offload import device_of, resident
from howlinear.models.recording import answering
from howlinear.profiling.passes import (
    Advance,
    Course,
    Hearing,
    Make,
    Piece,
    Windows,
    pieces,
    primer,
)
from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.tensors import read_store

CHECKSUM = 4  # bytes
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64)}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}


class _Done(Exception):  # noqa: N818
    """The layer at hand has run."""


def layer_by_layer(
    model: nn.Module,
    windows: Windows,
    at: Sequence[Block],
    make: Make,
    split: Split,
    *,
    batch_size: int,
    course: Course,
    all_tokens: bool = False,
    progress: Advance | None = None,
) -> Iterator[list[BlockStore]]:
    """As `passes.collected`, a layer at a time."""
    layers, where = stack_of(model, at)
    mine = [p for p in pieces(windows, batch_size) if course.mine(p.number)]
    start = next(pieces(windows, batch_size))
    if any("input_ids" not in p.inputs for p in (start, *mine)):
        raise ValueError("pictures and sound do not go layer by layer: run without --layerwise")
    walk = _Walk(model, layers)
    last = max(where.values())
    if not all(b.family in FAMILIES for b in at):
        walk.check(primer(windows, start), last)
    with _folder(course) as folder:
        asked = course.saves.asked if course.saves else {}
        beginning = Piece(-1, primer(windows, start), [], 0)
        states = States(folder, [beginning, *mine], asked)
        first = min(course.ranks.gather(states.layer))  # after a kill, ranks may differ by one
        states.layer, walk.extras = first, states.extras
        for i in range(last + 1):
            own = [b for b in at if where[b] == i]
            if i < first:
                yield _from_files(course, own)
                if progress is not None:
                    progress(sum(p.tokens for p in mine))
                continue
            stores: list[BlockStore] = []
            with resident([layers[i]]):
                if own:
                    run = partial(walk.run, i, states.pieces[0].inputs)
                    stores = make(own, lambda run=run: run(states.before(0)))  # type: ignore[misc]
                walk.layer(i, states, Hearing(model, stores, split, all_tokens), course, progress)
            yield course.ranks.collect_all(stores)
            course.ranks.share(None)  # the first one has written what this layer gave
            states.extras = walk.extras
            states.advance(i + 1)


def stack_of(model: nn.Module, at: Sequence[Block]) -> tuple[list[nn.Module], dict[Block, int]]:
    """The model's layers, and in which of them each block is."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has two stacks of layers: run it without --layerwise"
        )
    found: dict[str, dict[Block, int]] = {}
    for block in at:
        parts = block.entry.split(".")
        for k in range(1, len(parts)):
            path = ".".join(parts[:k])
            if parts[k].isdecimal() and isinstance(model.get_submodule(path), nn.ModuleList):
                found.setdefault(path, {})[block] = int(parts[k])
                break
    if len(found) != 1 or sum(map(len, found.values())) != len(at):
        raise ValueError(
            f"the blocks of {type(model).__name__} are not in one list of layers: run it without "
            "--layerwise"
        )
    ((path, where),) = found.items()
    layers: Any = model.get_submodule(path)
    return list(layers), where


def _from_files(course: Course, own: Sequence[Block]) -> list[BlockStore]:
    """Blocks that were done before the last kill."""
    if course.saves is None or course.ranks.rank:
        return []
    return [read_store(course.saves.folder, b) for b in own]


@contextmanager
def _folder(course: Course) -> Iterator[Path]:
    if course.saves is not None:
        yield course.saves.partial / "states"
        return
    with tempfile.TemporaryDirectory(prefix="howlinear-") as name:
        yield Path(name)


class _Walk:
    """One layer after another, each over all windows."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        net: Any = backbone(model)
        self.model, self.net, self.layers = model, net, layers
        self.device, self.extra = device_of(model), call_options(net)
        takes = "inputs_embeds" in inspect.signature(net.forward).parameters
        table: Any = net.get_input_embeddings() if takes else None
        self.embedded = getattr(table, "embedding_dim", None)  # width of what may stand for tokens
        self.extras = -1  # values that a layer returns beside hidden states; -1: it is no tuple

    def layer(
        self,
        i: int,
        states: States,
        hearing: Hearing,
        course: Course,
        progress: Advance | None,
    ) -> None:
        """All windows through layer i, their rows into the stores."""
        saves, stores = course.saves, list(hearing.stores.values())
        begun = saves.resume(stores) if saves and stores else 0
        beginning = self.run(i, states.pieces[0].inputs, states.before(0))
        states.width, states.dtype = beginning.shape[-1], beginning.dtype
        with states.writing(begun + 1 if begun else 0) as write, hearing:
            if not begun:
                write(beginning)
            for number, piece in enumerate(states.pieces[1:], 1):
                if number > begun:
                    with hearing.of(piece, stop=False):
                        write(self.run(i, piece.inputs, states.before(number)))
                    if saves and stores and saves.due:
                        states.sync()
                        saves.tick(stores, number)
                if progress is not None:
                    progress(piece.tokens)

    def run(self, i: int, inputs: dict[str, Tensor], state: Tensor | None) -> Tensor:
        """What layer i makes of hidden states, or of tokens if there are none yet."""
        found: list[Any] = []

        def stop(_: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            raise _Done

        answers: dict[nn.Module, Any] = {}
        if state is not None:
            state = state.to(self.device)
            whole = state if self.extras < 0 else (state, *[None] * self.extras)
            answers = dict.fromkeys(self.layers[:i], whole)
            # what comes before the layers is thrown away: spare its weights
            if state.shape[-1] == self.embedded:
                inputs = {"inputs_embeds": state, **inputs}
                del inputs["input_ids"]
        handle = self.layers[i].register_forward_hook(stop)
        try:
            with torch.no_grad(), answering(answers), suppress(_Done):
                self.net(**{k: v.to(self.device) for k, v in inputs.items()}, **self.extra)
        finally:
            handle.remove()
        if len(found) != 1:
            raise RuntimeError(f"layer {i} ran {len(found)} times in one forward")
        return self._state(found[0])

    def _state(self, output: Any) -> Tensor:
        """The hidden states in what a layer returned; what else is in it (attention) nobody reads."""
        self.extras = len(output) - 1 if isinstance(output, tuple) else -1
        state: Tensor = output[0] if self.extras >= 0 else output
        return state

    def check(self, inputs: dict[str, Tensor], last: int) -> None:
        """Of a family that nobody has tried: do layers pass nothing else to one another?

        Two batches take turns, so that what one leaves behind somewhere meets the other.
        """
        ids = inputs["input_ids"]
        batches = [inputs, inputs | {"input_ids": ids[:, :1].expand_as(ids)}]
        want = [self._plain(batch, last) for batch in batches]
        states: list[Any] = [None, None]
        for i in range(last + 1):
            with resident([self.layers[i]]):
                states = [self.run(i, *pair) for pair in zip(batches, states, strict=True)]
        for state, plain in zip(states, want, strict=True):
            near = 1e-3 * float(plain.std())
            if not torch.allclose(state.float(), plain, rtol=1e-3, atol=near):
                raise ValueError(
                    f"layers of {type(self.model).__name__} pass more than hidden states to one "
                    "another: run it without --layerwise"
                )

    def _plain(self, inputs: dict[str, Tensor], last: int) -> Tensor:
        """What the last layer says when the whole model runs."""
        found: list[Any] = []
        handle = self.layers[last].register_forward_hook(lambda _, args, out: found.append(out))
        try:
            with torch.no_grad():
                self.net(**{k: v.to(self.device) for k, v in inputs.items()}, **self.extra)
        finally:
            handle.remove()
        return self._state(found[-1]).float()


class States:
    """Hidden states of all batches between two layers, in a file; batch 0 is the beginning's.

    The file of layer i holds what enters it, each batch with a checksum. It goes when layer i + 1 is
    done, so that a kill at any moment leaves the last complete one.
    """

    def __init__(self, folder: Path, batches: Sequence[Piece], asked: Mapping[str, Any]) -> None:
        self.folder, self.pieces, self.asked = folder, list(batches), clean(dict(asked))
        self.layer, self.width, self.dtype, self.extras = 0, 0, torch.float32, -1
        self.sizes = [tuple(p.inputs["input_ids"].shape) for p in self.pieces]
        self.starts = [0, *accumulate(math.prod(size) for size in self.sizes)]
        self.file: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "states.json").is_file():
            self._take_up(read_json(folder / "states.json", "states"))

    def _take_up(self, said: dict[str, Any]) -> None:
        if said.get("asked") != self.asked:  # of another text, say, which was killed here
            return
        found: list[Any] = [said.get(name) for name in ("layer", "width", "extras")]
        layer, width, extras = found
        dtype = DTYPES.get(str(said.get("dtype")))
        numbers = all(type(n) is int for n in found)
        if not numbers or dtype is None or min(layer, width) < 1:
            raise ValueError(f"{self.folder / 'states.json'} is damaged: pass --overwrite")
        self.layer, self.width, self.dtype, self.extras = layer, width, dtype, min(extras, 16)

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer}.bin"

    def _start(self, number: int) -> int:
        """The first byte of a batch."""
        return self.starts[number] * self.width * self.dtype.itemsize + CHECKSUM * number

    @contextmanager
    def writing(self, begun: int) -> Iterator[Callable[[Tensor], None]]:
        """Write what enters the next layer, after the first batches, which are there."""
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

    def before(self, number: int) -> Tensor | None:
        """What enters the layer at hand; None before the first."""
        if self.layer == 0:
            return None
        path, size = (
            self._path(self.layer),
            self._start(number + 1) - self._start(number) - CHECKSUM,
        )
        with path.open("rb") as file:
            file.seek(self._start(number))
            data, checksum = bytearray(file.read(size)), file.read(CHECKSUM)
        if len(data) != size or zlib.crc32(data).to_bytes(CHECKSUM, "little") != checksum:
            raise ValueError(f"{path} is damaged: pass --overwrite to start again")
        return torch.frombuffer(data, dtype=self.dtype).view(*self.sizes[number], self.width)

    def advance(self, layer: int) -> None:
        """The layer before this one is done with."""
        self.layer = layer
        about = {"kind": "states", "schema": SCHEMA, "layer": layer, "width": self.width}
        about |= {"dtype": str(self.dtype).removeprefix("torch."), "extras": self.extras}
        about["asked"] = self.asked
        write_json(self.folder / "states.json", about)
        for path in self.folder.glob("*.bin"):
            if path.stem.isdecimal() and int(path.stem) < layer - 1:
                path.unlink()
