"""A model larger than memory, layer by layer: one layer's weights and its blocks' moments at a time.

    for stores in layer_by_layer(Pass(model, text, at, split, course)):
        ...                     # stores of one layer's blocks that have seen every row

All windows go through one layer before the next one is loaded. Between layers their hidden states are
in files, which the system caches in memory while there is room (`models.layers`). Peak memory does not
grow with depth.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from howlinear.linear.stores import BlockStore
from howlinear.models.families import FAMILIES
from howlinear.models.forward import Batch
from howlinear.models.layers import Stack
from howlinear.models.offload import resident
from howlinear.profiling.passes import Pass
from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.tensors import read_tensors, write_tensors


def layer_by_layer(reading: Pass) -> Iterator[list[BlockStore]]:
    """As `passes.whole_model`, a layer at a time."""
    saves, ranks = reading.course.saves, reading.course.ranks
    stack = Stack(reading.model, reading.at)
    every = list(reading.text.batches(reading.course.batch_size))  # once: it may be a stream
    if not every:
        raise ValueError("the text is empty: there is no window to read")
    mine = [batch for batch in every if reading.course.mine(batch.number)]
    if any("input_ids" not in batch.inputs for batch in every):
        raise ValueError("images and audio do not go layer by layer: run without `layerwise`")
    where, last = stack.where, max(stack.where.values())
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
            i = states.layer
            states.write(batch, stack.run(i, i + 1, batch.inputs, states.before(batch)))

        for i in range(last + 1):
            group = [block for block in reading.at if where[block] == i]
            if i < done:
                yield reading.finished(group)
                advance(sum(batch.tokens for batch in mine))
                continue
            with resident([stack.layers[i]]):
                run(beginning)
                stores = reading.make(group, lambda: run(beginning)) if group else []
                reading.read(mine, stores, run, advance)
            yield ranks.collect_all(stores)
            ranks.share(None)  # wait until rank 0 has written this layer's blocks
            states.advance(i + 1, stack.extras)


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
                raise ValueError(f"{path} is damaged: pass `overwrite=True` to start again")
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
            raise ValueError(f"{path} is damaged: pass `overwrite=True` to start again") from None

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
