"""All windows on their way through a model, block by block, while the blocks behind them are replaced.

    walk = Walk(model, at, windows, work)
    for block in at:                            # in depth order
        walk.read(block, receive)               # receive(batch, rows): the blocks before it are replaced
        walk.replace(block, fitted, outputs)    # or leave it as it is

The hidden states of all windows wait between layers, in memory where they take little of it, else in
files. Each layer runs once: where the residual stream after the block is the layer's output, a map
changes that output by the difference of its own output and the block's. Elsewhere (a norm follows) the
layer runs again with the map. Memory does not grow with the text, and the weights of one layer at a
time are needed.

A model whose layers are not one list (encoder-decoders) runs from its tokens for every block.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from howlinear.linear.affine import Map
from howlinear.linear.rows import Rows
from howlinear.models.families import FAMILIES, Block
from howlinear.models.forward import Batch, Forward, StopForward, WindowsLike, as_windows
from howlinear.models.hooks import swapped, tap
from howlinear.models.layers import Stack
from howlinear.models.offload import resident
from howlinear.run import room
from howlinear.run.tensors import read_tensors, write_tensors
from howlinear.run.work import Work

SHARE = 8  # of the free memory: what waits between layers takes one part, or goes to files

Receive = Callable[[Batch, Rows], None]


class Walk:
    """Windows between two layers of a model in which blocks are replaced one after another."""

    def __init__(
        self,
        model: nn.Module,
        at: Sequence[Block],
        windows: WindowsLike,
        work: Work,
        label: str = "",
        forks: bool = False,
    ) -> None:
        """With a label, progress is reported in tokens of each layer; `forks`: those of `fork`, too."""
        self.model = model
        every = list(as_windows(windows).batches(work.batch_size))
        if not sum(batch.tokens for batch in every):
            raise ValueError("the text is empty: there is no window to fit on")
        self.count = len(every)  # batches of all ranks
        self.batches = [batch for batch in every if work.ranks.mine(batch.number)]
        self.maps: dict[Block, Map] = {}  # of the blocks that are replaced
        self.stack = _stack(model, at, every[0].inputs)
        self.layer, self.has_run = 0, False  # the layer that states enter; did it run?
        tokens, runs = sum(batch.tokens for batch in self.batches), len(at)
        if self.stack is not None:
            first, last = (end(self.stack.where.values()) for end in (min, max))
            runs = last + 1 + forks * (last - first)
        self.advance = work.begin(label, tokens * runs) if label else None
        widths = max(2 * b.d_in + 6 * b.d_out for b in at)  # states, outputs, inputs of maps
        self.shelf = Shelf(4 * widths * tokens)

    def read(
        self, block: Block, receive: Receive, units: Tensor | None = None, *, every: bool = False
    ) -> None:
        """Run all windows to this block and hand over its rows, with some hidden units or `every` one."""
        wanted = {block.index: units} if every or units is not None else {}
        if self.stack is None:
            for batch in self.batches:
                self._from_tokens(block, batch, receive, wanted)
            return
        self._advance(self.stack.where[block])
        adds_up = self._adds_up(block)
        replaced = {b: m for b, m in self.maps.items() if self.stack.where[b] == self.layer}

        def take(_: Block, rows: Rows) -> None:
            if adds_up:
                self.shelf.put("output", batch, rows.y)
            receive(batch, rows)

        with (
            resident([self.stack.layers[self.layer]]),
            swapped(self.model, replaced),
            tap(self.model, take, at=[block], units=wanted),
        ):
            for batch in self.batches:
                self._run(batch)
        self.has_run = True

    def replace(self, block: Block, fitted: Map, outputs: Callable[[Batch], Tensor]) -> None:
        """Put a map in the place of the block just read; `outputs(batch)` is what it returns there."""
        self.maps[block] = fitted
        if self.stack is None:
            return
        if self._adds_up(block):
            for batch in self.batches:
                state, y = self.shelf.get("after", batch), self.shelf.get("output", batch)
                changed = (outputs(batch).to(y) - y).view_as(state)
                self.shelf.put("after", batch, state.add(changed, alpha=block.scale))
            return
        here = {b: m for b, m in self.maps.items() if self.stack.where[b] == self.layer}
        with resident([self.stack.layers[self.layer]]), swapped(self.model, here):
            for batch in self.batches:
                self._run(batch)

    def fork(self) -> Walk:
        """Another walk of the unchanged model, from after the block just read, before any is replaced."""
        twin = copy.copy(self)
        twin.maps, twin.shelf = {}, Shelf(self.shelf.size)
        if self.stack is not None:
            for batch in self.batches:
                for name in ("after", "state") if self.layer else ("after",):
                    twin.shelf.put(name, batch, self.shelf.get(name, batch))
        return twin

    def _from_tokens(
        self, block: Block, batch: Batch, receive: Receive, units: dict[int, Tensor | None]
    ) -> None:
        def take(_: Block, rows: Rows) -> None:
            receive(batch, rows)
            raise StopForward

        with swapped(self.model, self.maps), tap(self.model, take, at=[block], units=units):
            Forward(self.model)(batch.inputs)
        self._done(batch)

    def _adds_up(self, block: Block) -> bool:
        """Is the layer's output the stream before the block, and `scale` times its output?"""
        assert self.stack is not None
        if block.out_norm or block.stream is None or block.stream[0] != "output":
            return False
        last = self.model.get_submodule(block.stream[1])
        return last is self.stack.layers[self.stack.where[block]]

    def _run(self, batch: Batch) -> None:
        """One batch through the present layer."""
        assert self.stack is not None
        state = self.shelf.get("state", batch) if self.layer else None
        self.shelf.put(
            "after", batch, self.stack.run(self.layer, self.layer + 1, batch.inputs, state)
        )
        self._done(batch)

    def _done(self, batch: Batch) -> None:
        if self.advance is not None:
            self.advance(batch.tokens)

    def _advance(self, layer: int) -> None:
        """Bring all windows to this layer."""
        assert self.stack is not None
        while self.layer < layer:
            if not self.has_run:
                with resident([self.stack.layers[self.layer]]):
                    for batch in self.batches:
                        self._run(batch)
            for batch in self.batches:
                self.shelf.move("after", "state", batch)
            self.layer, self.has_run = self.layer + 1, False


class Shelf:
    """Named tensors of batches: in memory, or in files where they would take too much of it."""

    def __init__(self, size: int) -> None:
        free, self.size = room.available_memory(), size
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if free is not None and size > free // SHARE:
            self.folder = tempfile.TemporaryDirectory(prefix="howlinear-")
            room.check_disk(
                size, "hidden states need", Path(self.folder.name), "set TMPDIR to another place"
            )

    def put(self, name: str, batch: Batch, tensor: Tensor) -> None:
        if self.folder is None:
            self.kept[name, batch.number] = tensor.detach()
        else:
            write_tensors(self._path(name, batch), {"states": tensor}, kind="states")

    def get(self, name: str, batch: Batch) -> Tensor:
        if self.folder is None:
            return self.kept[name, batch.number]
        return read_tensors(self._path(name, batch), kind="states")["states"].clone()  # aligned

    def move(self, name: str, to: str, batch: Batch) -> None:
        if self.folder is None:
            self.kept[to, batch.number] = self.kept.pop((name, batch.number))
        else:
            self._path(name, batch).replace(self._path(to, batch))

    def _path(self, name: str, batch: Batch) -> Path:
        assert self.folder is not None
        return Path(self.folder.name) / f"{name}-{batch.number}.safetensors"


def _stack(model: nn.Module, at: Sequence[Block], inputs: dict[str, Tensor]) -> Stack | None:
    """The model's layers, if they run one at a time."""
    try:
        stack = Stack(model, at)
    except ValueError:
        return None
    if all(block.family in FAMILIES for block in at):
        return stack
    few = {name: value[:2, :16] for name, value in inputs.items()}
    try:
        stack.check(few, max(stack.where.values()))
    except Exception:  # whatever an unknown family's forward raises: it runs from its tokens
        return None
    return stack
