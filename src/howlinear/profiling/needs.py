"""What a profile needs, before it starts: memory, disk and multiply-adds, from the model's shapes alone.

    needs = profile_needs(model, blocks(model), windows=320, length=512)
    needs.memory, needs.disk, needs.multiply_adds, needs.lines()

Weights need not be loaded: a model on the meta device will do (`models.loading.skeleton`). Counts of moments
and files are exact; activations and the work of solving are estimates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.gradients import LENGTH, WINDOWS
from howlinear.linear.moments import Moments
from howlinear.linear.rows import SAMPLE
from howlinear.linear.stores import MOST, SOLVERS, is_wide
from howlinear.models.families import Block, backbone, projection_shape
from howlinear.models.forward import token_embedding
from howlinear.models.layers import layers_of
from howlinear.models.offload import like
from howlinear.profiling.passes import Course
from howlinear.records.words import size
from howlinear.run import room


@dataclass(frozen=True)
class Needs:
    """Bytes and multiply-adds of a profile."""

    tokens: int
    parameters: int
    weights: int  # in memory at once
    moments: int  # of the blocks measured at once, with the memory to solve one of them
    activations: int  # of one batch, about
    kept: int  # disk: the run's moments and maps
    states: int  # disk: hidden states between layers, while it runs
    saves: int  # disk: the last save and the next of what is measured at once, while it runs
    passes: int  # over the text
    walks: int  # how often each window is run: passes, or layers one by one
    forward: int  # multiply-adds of the model, without its head
    sums: int
    solving: int  # about

    @property
    def memory(self) -> int:
        return self.weights + self.moments + self.activations

    @property
    def disk(self) -> int:
        return self.kept + self.states + self.saves

    @property
    def multiply_adds(self) -> int:
        return self.forward + self.sums + self.solving

    def lines(self) -> list[str]:
        """The same in words."""
        states = f", hidden states {size(self.states)}" if self.states else ""
        passes = f" in {self.passes} passes over the text" if self.passes > 1 else ""
        return [
            f"{self.tokens} tokens, {_count(self.parameters)} parameters",
            f"memory {size(self.memory)} beside that of Python and torch: weights {size(self.weights)}, moments "
            f"{size(self.moments)}, activations about {size(self.activations)}",
            f"disk {size(self.kept)} for moments and maps, {size(self.disk)} while it runs (saves "
            f"{size(self.saves)}{states})",
            f"work {self.multiply_adds:.1e} multiply-adds{passes}: model {self.forward:.1e}, sums "
            f"{self.sums:.1e}, solving about {self.solving:.1e}",
        ]

    def to_dict(self) -> dict[str, Any]:
        totals = {"memory": self.memory, "disk": self.disk, "multiply_adds": self.multiply_adds}
        return {"kind": "cost", **totals, **self.__dict__}

    def seconds(self, model: nn.Module) -> float:
        """About, by the speed of one matrix product."""
        return self.multiply_adds * seconds_each(model)


def seconds_each(model: nn.Module) -> float:
    """Of one multiply-add: from the time of a matrix product where the model runs, in its dtype."""
    a, b = (like(model).new_ones(n, 1024) for n in (256, 1024))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        float((a @ b.T)[0, 0])  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times) / (a.numel() * len(b))


def profile_needs(
    model: nn.Module,
    at: Sequence[Block],
    *,
    windows: int,
    length: int,
    batch_size: int = 8,
    folds: int = 5,
    solver: str = "moments",
    together: int | None = None,
    layerwise: bool = False,
) -> Needs:
    """What measuring these blocks on so many windows needs."""
    tokens, width = windows * length, max(b.d_in for b in at)
    if layerwise:
        layers, where = layers_of(model, at)
        groups = [[b for b in at if where[b] == i] for i in range(len(layers))]
        weights = max(_elements(layer) for layer in layers) + _embedding(model)
    else:
        groups, weights = _groups(at, together or len(at)), _elements(model)
    sampled = 0 if layerwise else gradient_rows(model, windows, length)
    sums = [moments_bytes(group, windows, folds, solver, sampled) for group in groups if group]
    item = next(model.parameters()).element_size()
    passes = 1 if layerwise else len(groups)
    return Needs(
        tokens=tokens,
        parameters=_elements(model),
        weights=item * weights,
        moments=max(memory for memory, _ in sums),
        activations=item * batch_size * length * (8 * width + 3 * _inner_width(model, width)),
        kept=moments_bytes(at, windows, folds, solver, sampled)[1],
        states=2 * item * tokens * width if layerwise else 0,
        saves=2 * max(disk for _, disk in sums),
        passes=passes,
        walks=1 + max(where[b] for b in at) if layerwise else passes,
        forward=passes * forward_work(model, tokens, length),
        sums=tokens * sum(_row(b) for b in at),
        solving=sum(_solving(b, folds) for b in at),
    )


def _groups(at: Sequence[Block], size: int) -> list[list[Block]]:
    return [list(at[i : i + size]) for i in range(0, len(at), size)]


def plan_profile(
    model: nn.Module, at: Sequence[Block], ids: Tensor, folds: int, course: Course
) -> tuple[Needs, int]:
    """What profiling these windows needs in each process, and how many blocks fit into memory at once.

    At least one block: whether it fits is for the caller to check. A course that is resumed measures
    as many at once as before.
    """
    windows = -(-len(ids) // (course.shard[1] * course.ranks.count))
    together, free = len(at), room.available_memory()
    if course.saves and course.saves.begun:
        together = course.saves.together or together
    elif free is not None and not course.layerwise:
        sampled = gradient_rows(model, windows, ids.shape[1])
        together = most_together(at, windows, folds, course.solver, free, sampled)
    together = min(course.ranks.gather(together))  # all ranks read the same groups
    needs = profile_needs(
        model,
        at,
        windows=windows,
        length=ids.shape[1],
        batch_size=course.batch_size,
        folds=folds,
        solver=course.solver,
        together=together,
        layerwise=course.layerwise,
    )
    return needs, together


def most_together(
    at: Sequence[Block], windows: int, folds: int, solver: str, memory: int, sampled: int
) -> int:
    """The number of blocks whose moments fit into memory at once; at least one."""
    for passes in range(1, len(at) + 1):
        count = -(-len(at) // passes)
        groups = _groups(at, count)
        needed = (moments_bytes(group, windows, folds, solver, sampled)[0] for group in groups)
        if max(needed) <= memory:
            return count
    return 1


def _count(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _embedding(model: nn.Module) -> int:
    table = token_embedding(model)
    return 0 if table is None else _elements(table)


def _inner_width(model: nn.Module, width: int) -> int:
    """The widest input of a projection; the language-model head is not run."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shapes = (projection_shape(module) for module in model.modules() if module is not head)
    return max([width, *(shape[1] for shape in shapes if shape)])


def forward_work(model: nn.Module, tokens: int, length: int) -> int:
    """Every weight of the backbone's matrices once a token, and attention over a window."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    net = backbone(model)
    table = token_embedding(net)
    total = 0
    for module in net.modules():
        if module is table or isinstance(module, nn.Embedding):
            continue
        for p in module.parameters(recurse=False):
            if p.dim() == 3:  # experts: a token is routed to a few
                total += p.numel() * int(getattr(config, "num_experts_per_tok", 1)) // p.shape[0]
            elif p.dim() == 2:
                total += p.numel()
    heads = getattr(config, "num_attention_heads", 0) or 0
    head = getattr(config, "head_dim", None) or (
        (getattr(config, "hidden_size", 0) or 0) // max(heads, 1)
    )
    layers = getattr(config, "num_hidden_layers", 0) or 0
    return int(tokens * (total + 2 * length * heads * head * layers))


def gradient_rows(model: nn.Module, windows: int, length: int) -> int:
    """Rows that are kept with their gradients, see `gradients`; 0 without a language-model head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return 0 if head is None else min(windows, WINDOWS) * (min(length, LENGTH) - 1)


def _row(block: Block) -> int:
    """Multiply-adds of one row's products."""
    return Moments(block.d_in + (MOST if block.down else 0), block.d_out).size


def _solving(block: Block, folds: int) -> int:
    """Two fits a fold, the learning curve and the saved map; eigenvectors twice."""
    d, fits = block.d_in, 3 * folds - 1
    return fits * (d**3 // 6 + d * d * block.d_out) + 20 * d**3


def moments_bytes(
    at: Sequence[Block], windows: int, folds: int, solver: str = "moments", sampled: int = 0
) -> tuple[int, int]:
    """Memory to hold and solve the moments of these blocks, and disk for moments and maps.

    `sampled` rows of each block are kept with their gradients.
    """
    size = work = 0
    for block in at:
        d = block.d_in + (MOST if block.down else 0)
        width = d + block.d_out
        each = 8 * SOLVERS[solver](d, block.d_out).size
        rows = min(4 * windows * width, folds * each)  # first positions
        sample = 4 * SAMPLE * width if block.stream else 0
        sample += 4 * sampled * (width + block.d_out)
        size += folds * each + rows + sample + 8 * d * block.d_out
        work = max(work, 2 * each + 80 * width * width)  # factoring one block
    return size + work * (1 if is_wide(at) else torch.get_num_threads()), size
