"""Experts one by one: find them, read the inputs and outputs of each, replace some of them.

    for mixture in mixtures(model):                 # the blocks that are mixtures of experts
        print(mixture.block.index, mixture.path, mixture.count, mixture.shared)
    with tap_experts(model, receive):               # receive(mixture, expert, rows, weights)
        model(input_ids, attention_mask=mask)
    with swapped(model, {mixture.block: replaced(model, mixture, {17: linear})}):
        model(input_ids)                            # tokens sent to expert 17 get linear(x)

transformers keeps all experts of a layer in one **fused** module, called with x (n, d_in), the
chosen experts (n, k) and their weights (n, k). Expert e computes f_e(x), and the module returns
sum_e w_e f_e(x). No expert is a module that a hook can be attached to. So f_e(x) is computed by the
fused module itself, called with a **pair**: a row, one expert for it and the weight 1. That works for
every experts implementation and needs no name of a weight. This relies on the fused module's forward
taking exactly (x, experts, weights); in every forward, the weighted sum of all pairs is compared with
the layer's output, and a RuntimeError raised where they differ.

A **shared** expert, where a layer has one, reads every token; its key is "shared".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.models.families import Block, blocks, of_width
from howlinear.models.hooks import Replacement, tap

SHARED = "shared"
SHARED_NAMES = ("shared_expert", "shared_experts")  # names in transformers
SLACK = 8  # roundings that the sum over experts may be off by; a third of one is usual

Expert = int | str  # a number from 0, or SHARED


# -- finding experts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """A block that is a mixture of experts: a value. Paths are relative to the model."""

    block: Block  # the whole layer: router, experts and shared expert
    path: str  # the fused module: "model.layers.3.mlp.experts"
    count: int  # experts that the router chooses from
    shared: str | None  # the shared expert: "model.layers.3.mlp.shared_expert"

    @property
    def keys(self) -> list[Expert]:
        return [*range(self.count), *([SHARED] if self.shared else [])]

    def expert(self, key: Expert) -> Block:
        """One expert as a Block, which results are kept by. Numbered experts are no modules."""
        if key not in self.keys:
            raise ValueError(
                f"{self.block} has no expert {key!r}: it has "
                f"0-{self.count - 1}{' and shared' if self.shared else ', none shared'}"
            )
        path = self.shared if key == SHARED and self.shared else f"{self.path}.{key}"
        return replace(self._part(path), expert=str(key))

    @property
    def fused(self) -> Block:
        return self._part(self.path)

    def _part(self, path: str) -> Block:
        bare: dict[str, Any] = {"stream": None, "out_norm": None, "down": None}
        return replace(self.block, path=path, steps=(path,), **bare)


def mixtures(model: nn.Module, at: Sequence[Block] | None = None) -> list[Mixture]:
    """The blocks (of `at`, default: all) that hold a fused module of experts, in depth order."""
    every = (_mixture(model, block) for block in (blocks(model) if at is None else at))
    return [mixture for mixture in every if mixture is not None]


def _mixture(model: nn.Module, block: Block) -> Mixture | None:
    layer = model.get_submodule(block.entry)
    for name, module in layer.named_children():
        if count := _count(module):
            shared = next((s for s in SHARED_NAMES if getattr(layer, s, None) is not None), None)
            prefix = f"{block.entry}."
            return Mixture(block, prefix + name, count, prefix + shared if shared else None)
    return None


def _count(module: nn.Module) -> int:
    """How many experts a fused module has; 0 for other modules: it takes x, experts and weights."""
    sizes = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3}
    takes = len(inspect.signature(module.forward).parameters) if sizes else 0
    return sizes.pop() if len(sizes) == 1 and takes == 3 else 0


# -- running experts ------------------------------------------------------------------------------


def run_pairs(fused: nn.Module, x: Tensor, experts: Tensor) -> Tensor:
    """f_e(x), without its weight, of rows x (n, d_in) and one expert a row (n,): (n, d_out).

    Hooks on the module do not run. Costs as much as the module's own call with n / k rows.
    """
    return fused.forward(x, experts[:, None], x.new_ones(len(x), 1))


class Alone(nn.Module):
    """One expert as a module x (..., d_in) -> y (..., d_out). It shares the model's weights."""

    def __init__(self, fused: nn.Module, expert: int) -> None:
        super().__init__()
        self.fused, self.expert = fused, expert

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        experts = torch.full((len(rows),), self.expert, device=x.device)
        return run_pairs(self.fused, rows, experts).unflatten(0, x.shape[:-1])


@dataclass(frozen=True, eq=False)
class _Routing:
    """The arguments of a fused module."""

    x: Tensor  # (n, d_in)
    experts: Tensor  # (n, k)
    weights: Tensor  # (n, k)

    @classmethod
    def of(cls, fused: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Routing:
        return cls(*inspect.signature(fused.forward).bind(*args, **kwargs).arguments.values())

    def only(self, rows: Rows) -> _Routing:
        """Without padding."""
        return _Routing(rows.x, self.experts[rows.kept], self.weights[rows.kept])

    def to(self, expert: int) -> tuple[Tensor, Tensor]:
        """The rows that are routed to an expert (m,), and its weights (m,)."""
        row, slot = (self.experts == expert).nonzero(as_tuple=True)
        return row, self.weights[row, slot]


# -- reading rows ---------------------------------------------------------------------------------

Receive = Callable[[Mixture, Expert, Rows, Tensor | None], None]


@contextmanager
def tap_experts(
    model: nn.Module,
    receive: Receive,
    *,
    at: Sequence[Mixture] | None = None,
    all_tokens: bool = False,
) -> Iterator[None]:
    """Call `receive(mixture, expert, rows, weights)` in each forward, for each expert with a token.

    `rows` are the tokens routed to the expert, without padding, with its output as y; `weights` (n,)
    are the router's. With `all_tokens` each expert is run on every token, one expert at a time; the
    weight is 0 where the router did not choose it. A shared expert gets all tokens in any case, and
    its weights are None.

    The rules of `tap` apply, and both may read the same forward. A RuntimeError is raised where the
    experts do not add up to the layer's output. Costs one more run of the experts, and with
    `all_tokens` another of every expert on every token.
    """
    at = mixtures(model) if at is None else at
    fused = {mixture.fused: mixture for mixture in at}
    shared = {mixture.expert(SHARED): mixture for mixture in at if mixture.shared}
    routings: dict[nn.Module, _Routing] = {}

    def take(block: Block, rows: Rows) -> None:
        if not len(rows.x):
            return  # only padding
        if block in shared:
            receive(shared[block], SHARED, rows, None)
            return
        mixture, module = fused[block], model.get_submodule(block.path)
        with torch.no_grad():
            routing = routings.pop(module).only(rows)
            pairs = _pairs(module, routing)
            _check(mixture, module, rows, pairs)
            every = _everywhere(module, routing, mixture.count, rows)
            for expert, some, weights in every if all_tokens else pairs.by_expert(rows):
                receive(mixture, expert, some, weights)

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routings[module] = _Routing.of(module, args, kwargs)

    with tap(model, take, at=[*fused, *shared]), ExitStack() as stack:
        for block in fused:
            module = model.get_submodule(block.path)
            stack.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        yield


ByExpert = Iterator[tuple[int, Rows, Tensor]]  # expert, its rows, its weights


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Every row with every expert that it is routed to, sorted by expert."""

    row: Tensor  # (n k,)
    expert: Tensor  # (n k,)
    weight: Tensor  # (n k,)
    y: Tensor  # (n k, d_out)

    def by_expert(self, rows: Rows) -> ByExpert:
        """Each expert with a row, its rows and its weights."""
        chosen, sizes = self.expert.unique_consecutive(return_counts=True)
        parts = (part.split(sizes.tolist()) for part in (self.row, self.y, self.weight))
        for expert, row, y, weight in zip(chosen.tolist(), *parts, strict=True):
            yield expert, rows.only(row, y), weight


def _pairs(fused: nn.Module, routing: _Routing) -> _Pairs:
    """All pairs in one run, which is as large as the layer's own."""
    expert, order = routing.experts.flatten().sort(stable=True)
    row = order // routing.experts.shape[1]
    y = run_pairs(fused, routing.x[row], expert)
    return _Pairs(row, expert, routing.weights.flatten()[order], y)


def _everywhere(fused: nn.Module, routing: _Routing, count: int, rows: Rows) -> ByExpert:
    """Each expert on every row, one at a time."""
    for expert in range(count):
        row, routed = routing.to(expert)
        weights = routed.new_zeros(len(rows.x)).index_copy(0, row, routed)
        yield expert, replace(rows, y=Alone(fused, expert)(rows.x)), weights


def _check(mixture: Mixture, fused: nn.Module, rows: Rows, pairs: _Pairs) -> None:
    """Is sum_e w_e f_e(x) what the fused module returned, row by row, up to rounding?

    The scale is sum_e |w_e f_e(x)| of the row, or of the median row where that is larger: tiny
    values may have underflowed. Results are rounded to the rows' dtype a few times; sums over the
    width of a weight are in float32 or better.
    """
    kind = torch.promote_types(rows.y.dtype, torch.float32)
    parts = pairs.weight[:, None].to(kind) * pairs.y.to(kind)
    total = torch.zeros_like(rows.y, dtype=kind).index_add_(0, pairs.row, parts)
    size = total.new_zeros(len(total)).index_add_(0, pairs.row, parts.norm(dim=1))
    width = max(n for p in fused.parameters() if p.ndim == 3 for n in p.shape[1:])
    slack = torch.finfo(rows.y.dtype).eps + math.sqrt(width) * torch.finfo(kind).eps
    size = SLACK * slack * size.clamp(min=float(size.median()))
    off = (total - rows.y.to(kind)).norm(dim=1)
    if bool((off <= size).all()):
        return
    worst = float((off / size).nan_to_num(math.inf).max())
    raise RuntimeError(
        f"{mixture.fused}: its experts, asked one by one, do not add up "
        f"to what the layer computed, {worst:.2g} times further off than rounding explains; if this is "
        'the implementation of the experts, try model.set_experts_implementation("eager")'
    )


# -- swapping -------------------------------------------------------------------------------------


def replaced(model: nn.Module, mixture: Mixture, maps: Mapping[Expert, Replacement]) -> Replacement:
    """The layer x -> y with some experts replaced, for `swapped` and `sweep`.

    Router and weights stay: rows routed to expert e get w_e maps[e](x), x being rows (n, d_in).
    maps["shared"] replaces the shared expert, before its gate. Maps that are modules are part of
    the replacement. Replaced experts still run, with weight 0, so this saves no time.
    """
    return _Replaced(model, mixture, maps)


class _Replaced(nn.Module):
    """Runs the layer's own module with some of its children replaced."""

    def __init__(
        self, model: nn.Module, mixture: Mixture, maps: Mapping[Expert, Replacement]
    ) -> None:
        super().__init__()
        self.layer = model.get_submodule(mixture.block.entry)
        checked = {key: _Checked(mixture, key, run) for key, run in maps.items()}
        self.stand_ins = nn.ModuleDict()
        if SHARED in checked and mixture.shared:
            self.stand_ins[_name(mixture.shared)] = checked.pop(SHARED)
        self.stand_ins[_name(mixture.path)] = _Mixed(model.get_submodule(mixture.path), checked)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.layer._modules
        originals = {name: slots[name] for name in self.stand_ins}
        try:
            slots.update(self.stand_ins.items())
            y = self.layer(x)
        finally:
            slots.update(originals)
        return y[0] if isinstance(y, tuple) else y


class _Mixed(nn.Module):
    """In place of a fused module: replaced experts get weight 0, and their maps are added."""

    def __init__(self, fused: nn.Module, maps: Mapping[Expert, nn.Module]) -> None:
        super().__init__()
        self.fused, self.experts = fused, [int(key) for key in maps]
        self.maps = nn.ModuleList(maps.values())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        routing = _Routing.of(self.fused, args, kwargs)
        gone = torch.isin(routing.experts, routing.experts.new_tensor(self.experts))
        y = self.fused(routing.x, routing.experts, routing.weights.masked_fill(gone, 0))
        for expert, run in zip(self.experts, self.maps, strict=True):
            row, weights = routing.to(expert)
            if len(row):
                part = weights[:, None] * run(routing.x[row])
                y = y.index_add(0, row, part.to(y.dtype))
        return y


class _Checked(nn.Module):
    """A map whose output is checked to have an expert's shape."""

    def __init__(self, mixture: Mixture, key: Expert, run: Replacement) -> None:
        super().__init__()
        self.run, self.d_out = run, mixture.expert(key).d_out
        self.name = f"the map of expert {key} of {mixture.fused}"

    def forward(self, x: Tensor) -> Tensor:
        return of_width(self.d_out, x, self.run(x), self.name)


def _name(path: str) -> str:
    return path.rpartition(".")[2]
