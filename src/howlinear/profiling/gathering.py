"""What a profile measures, and the stores that hold it: one for each block and expert.

    for stores in gather(model, as_windows(ids), at, Scope(folds=5), Course()):
        ...                     # stores of some blocks at a time, with every row

Before the first row is read, sink units are chosen from the beginning of the text and the squared
gradients of the swap signal are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import Folds, RowSplit, Split
from howlinear.linear.stores import BlockStore, Known, OutNorm
from howlinear.models import bfloat16
from howlinear.models.experts import SHARED, mixtures
from howlinear.models.families import Block
from howlinear.models.forward import Windows
from howlinear.models.offload import device_of, is_offloaded, resident
from howlinear.models.units import sink_units
from howlinear.profiling.fisher import first_tokens, fisher
from howlinear.profiling.layerwise import layer_by_layer
from howlinear.profiling.passes import Course, Pass, whole_model

PROTOCOLS = ("default", "paper")


@dataclass(frozen=True)
class Scope:
    """What is measured."""

    folds: int = 5
    protocol: str = "default"
    experts: str | None = None  # each expert too: on the tokens "routed" to it, or on "all"
    signal: bool = True  # the swap signal, which takes a backward pass

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            expected = ", ".join(PROTOCOLS)
            raise ValueError(f"unknown protocol {self.protocol!r}, expected one of {expected}")
        if self.experts not in (None, "routed", "all"):
            raise ValueError(
                f"experts are measured on routed tokens or on all, not on {self.experts!r}"
            )

    def split(self, text: Windows) -> Split:
        """Which rows are held out."""
        if self.protocol == "default":
            return Folds(self.folds)
        if text.ids is None:
            raise ValueError(
                "the paper protocol needs all windows at once: a LongTensor (n, length)"
            )
        return RowSplit(text.ids.numel())

    def settings(
        self, course: Course, precision_difference: dict[int, float] | None = None
    ) -> dict[str, Any]:
        """Scope and course as profile.json has them."""
        return {
            "protocol": self.protocol,
            "folds": self.folds if self.protocol == "default" else None,
            "solver": course.solver,
            "precision": course.precision,
            "precision_difference": precision_difference or None,
            "experts": self.experts,
            "seed": course.seed,
        }


def with_experts(model: nn.Module, at: Sequence[Block], experts: str | None) -> list[Block]:
    """The blocks, and with `experts` after each mixture its experts."""
    if experts is None:
        return list(at)
    by_block = {m.block: [m.expert(key) for key in m.keys] for m in mixtures(model, at)}
    if not by_block:
        raise ValueError(f"{type(model).__name__} has no mixtures of experts: drop --experts")
    return [b for block in at for b in (block, *by_block.get(block, ()))]


def gather(
    model: nn.Module, text: Windows, at: Sequence[Block], scope: Scope, course: Course
) -> Iterator[list[BlockStore]]:
    """Stores of some blocks at a time that have seen every row of this course's part of the text."""
    parameter = next(model.parameters())
    bfloat16.check(parameter.dtype, parameter.device)
    every = with_experts(model, at, scope.experts)
    gradients = {}
    if scope.signal and not course.layerwise and not is_offloaded(model):
        ids = first_tokens(text)
        gradients = {} if ids is None else fisher(model, list(at), ids, course.seed) or {}
    split = scope.split(text)
    make = _Maker(model, list(at), split, course, gradients)
    reading = Pass(model, text, every, split, course, make, scope.experts == "all")
    yield from (layer_by_layer if course.layerwise else whole_model)(reading)


@dataclass(frozen=True, eq=False)
class _Maker:
    """Makes stores without rows."""

    model: nn.Module
    at: list[Block]  # whole blocks, no experts
    split: Split
    course: Course
    gradients: dict[int, Tensor]  # squared, by block; see `fisher`

    def __call__(self, group: Sequence[Block], run: Callable[[], Any]) -> list[BlockStore]:
        """`run` runs the model on the beginning of the text."""
        whole = [block for block in group if not block.expert]
        # machines of different kinds may break ties differently: rank 0 decides
        sinks = self.course.ranks.share(sink_units(self.model, whole, run))
        return [self._store(block, sinks.get(block.index)) for block in group]

    def _store(self, block: Block, sinks: tuple[list[int], list[float]] | None) -> BlockStore:
        course = self.course
        known = Known(has_stream=False) if block.expert else self._known(block, sinks)
        like = (block, self.split.groups, course.solver, course.seed, self._device(block), known)
        store = BlockStore(*like, course.precision)
        checked = (self.at[0], self.at[len(self.at) // 2], self.at[-1])
        if course.precision != "float64" and block in checked:
            store.twin = BlockStore(*like)
        return store

    def _known(self, block: Block, sinks: tuple[list[int], list[float]] | None) -> Known:
        units, shares = sinks or (None, None)
        norm = None
        if block.out_norm:
            module = self.model.get_submodule(block.out_norm)
            with resident([module]):
                norm = OutNorm.of(module, block.d_out)
        known = norm is not None or block.out_norm is None
        return Known(units, shares, norm, self.gradients.get(block.index), has_stream=known)

    def _device(self, block: Block) -> torch.device:
        path = block.entry if block.expert in ("", SHARED) else block.entry.rpartition(".")[0]
        device = device_of(self.model.get_submodule(path))
        return torch.device("cpu") if device.type == "mps" else device  # mps has no float64
