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
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from howlinear.families import FAMILIES, Block, backbone, call_options
from howlinear.offload import device_of, resident
from howlinear.passes import Advance, Course, Hearing, Make, Piece, Windows, pieces, primer
from howlinear.records import SCHEMA, read_json, write_json
from howlinear.resuming import answering
from howlinear.saving import read_store
from howlinear.stores import BlockStore, Split


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
    with _folder(course) as folder:
        states = States(folder, [_beginning(start), *mine])
        first = min(course.ranks.gather(states.layer))  # after a kill, ranks may differ by one
        states.layer = first
        walk = _Walk(model, layers, states)
        sure = all(b.family in FAMILIES for b in at)
        end = None if sure or first else walk.plain(states.pieces[0], max(where.values()))
        for i in range(max(where.values()) + 1):
            own = [b for b in at if where[b] == i]
            if i < first:
                yield _from_files(course, own)
                if progress is not None:
                    progress(sum(p.tokens for p in mine))
                continue
            stores: list[BlockStore] = []
            with resident([layers[i]]):
                if own:
                    stores = make(own, lambda i=i: walk.run(i, 0))  # type: ignore[misc]
                walk.layer(i, stores, split, course, all_tokens, progress)
            yield course.ranks.collect_all(stores)
            course.ranks.share(None)  # the first one has written what this layer gave
            states.advance(i + 1)
        if end is not None:
            walk.check(end)


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


def _beginning(first: Piece) -> Piece:
    """What sink units are chosen by, as a batch of its own."""
    inputs = primer(first)
    count = len(next(iter(inputs.values())))
    return Piece(-1, inputs, first.offsets[:count], 0)


def _from_files(course: Course, own: Sequence[Block]) -> list[BlockStore]:
    """Blocks that were done before the last kill."""
    if course.saves is None or course.ranks.rank:
        return []
    return [read_store(course.saves.folder, b) for b in own]


@contextmanager
def _folder(course: Course) -> Iterator[Path]:
    if course.saves is not None:
        yield course.saves.room / "states"
        return
    with tempfile.TemporaryDirectory(prefix="howlinear-") as name:
        yield Path(name)


class _Walk:
    """One layer after another, each over all windows."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], states: States) -> None:
        self.model, self.layers, self.states = model, layers, states
        net: Any = backbone(model)
        self.net = net
        self.device, self.extra = device_of(model), call_options(net)
        takes = "inputs_embeds" in inspect.signature(self.net.forward).parameters
        table: Any = net.get_input_embeddings() if takes else None
        self.embedded = getattr(table, "embedding_dim", None)  # width of what may stand for tokens

    def layer(
        self,
        i: int,
        stores: list[BlockStore],
        split: Split,
        course: Course,
        all_tokens: bool,
        progress: Advance | None,
    ) -> None:
        """All windows through layer i, their rows into the stores."""
        saves = course.saves
        begun = saves.resume(stores) if saves and stores else 0
        beginning = self.run(i, 0)
        hearing = Hearing(self.model, stores, split, all_tokens)
        with self.states.writing(begun + 1 if begun else 0) as write, hearing:
            if not begun:
                write(beginning)
            for number, piece in enumerate(self.states.pieces[1:], 1):
                if number > begun:
                    with hearing.of(piece, stop=False):
                        write(self.run(i, number))
                    if saves and stores and saves.due:
                        self.states.sync()
                        saves.tick(stores, number)
                if progress is not None:
                    progress(piece.tokens)

    def run(self, i: int, number: int) -> Tensor:
        """What layer i makes of one batch."""
        found: list[Any] = []

        def stop(_: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            raise _Done

        inputs = dict(self.states.pieces[number].inputs)
        answers: dict[nn.Module, Any] = {}
        if i:
            state = self.states.read(number).to(self.device)
            answers = dict.fromkeys(self.layers[:i], self.states.shaped(state))
            # what comes before the layers is thrown away: spare its weights
            if state.shape[-1] == self.embedded and "input_ids" in inputs:
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
        return self.states.taken(found[0])

    def plain(self, piece: Piece, last: int) -> Tensor:
        """What the last layer makes of the beginning when the whole model runs."""
        found: list[Any] = []
        handle = self.layers[last].register_forward_hook(lambda _, args, out: found.append(out))
        try:
            with torch.no_grad():
                self.net(**{k: v.to(self.device) for k, v in piece.inputs.items()}, **self.extra)
        finally:
            handle.remove()
        return self.states.taken(found[-1]).cpu()

    def check(self, end: Tensor) -> None:
        """Of a family that nobody has tried: do layers pass nothing else to one another?"""
        found = self.states.read(0)
        if not torch.allclose(found.float(), end.float(), rtol=1e-3, atol=1e-3 * float(end.std())):
            raise ValueError(
                f"layers of {type(self.model).__name__} pass more than hidden states to one another: "
                "run it without --layerwise"
            )


class States:
    """Hidden states of all batches between two layers, in a file; batch 0 is the beginning's.

    The file of layer i holds what enters it. It goes when layer i + 1 is done, so that a kill at any
    moment leaves the last complete one.
    """

    def __init__(self, folder: Path, batches: Sequence[Piece]) -> None:
        self.folder, self.pieces = folder, list(batches)
        self.layer, self.width, self.dtype, self.extras = 0, 0, torch.float32, -1
        self.file: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "states.json").is_file():
            said = read_json(folder / "states.json", "states")
            self.layer, self.width, self.extras = said["layer"], said["width"], said["extras"]
            self.dtype = getattr(torch, said["dtype"])

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer}.bin"

    def _span(self, number: int) -> tuple[int, tuple[int, ...]]:
        """(first byte, shape) of a batch."""
        sizes = [next(iter(p.inputs.values())).shape[:2] for p in self.pieces[: number + 1]]
        rows = sum(b * n for b, n in sizes[:-1])
        return rows * self.width * self.dtype.itemsize, (*sizes[-1], self.width)

    def taken(self, output: Any) -> Tensor:
        """The hidden states in what a layer returned; what else is in it (attention) nobody reads."""
        extras = len(output) - 1 if isinstance(output, tuple) else -1
        state = output[0] if extras >= 0 else output
        self.extras, self.width, self.dtype = extras, state.shape[-1], state.dtype
        return state

    def shaped(self, state: Tensor) -> Any:
        """Hidden states as a layer would return them."""
        return state if self.extras < 0 else (state, *[None] * self.extras)

    @contextmanager
    def writing(self, begun: int) -> Iterator[Any]:
        """Write what enters the next layer, after the first batches, which are there."""
        path = self._path(self.layer + 1)
        with path.open("r+b" if begun and path.exists() else "wb") as self.file:
            if begun:
                start, _ = self._span(begun)
                self.file.truncate(start)
                self.file.seek(start)
            yield lambda state: self.file.write(
                state.cpu().contiguous().view(torch.uint8).numpy().data
            )
            self.sync()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def read(self, number: int) -> Tensor:
        """What enters the layer at hand."""
        start, shape = self._span(number)
        size = int(np.prod(shape)) * self.dtype.itemsize
        with self._path(self.layer).open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(size))
        if len(data) != size:
            raise ValueError(
                f"{self._path(self.layer)} is damaged: pass --overwrite to start again"
            )
        return torch.frombuffer(data, dtype=self.dtype).view(shape)

    def advance(self, layer: int) -> None:
        """The layer before this one is done with."""
        self.layer = layer
        about = {"kind": "states", "schema": SCHEMA, "layer": layer, "width": self.width}
        about |= {"dtype": str(self.dtype).removeprefix("torch."), "extras": self.extras}
        write_json(self.folder / "states.json", about)
        for path in self.folder.glob("*.bin"):
            if path.stem.isdecimal() and int(path.stem) < layer - 1:
                path.unlink()
