"""What all methods share: calibration text, sums of activations, and smaller parts of a Llama.

    calibration = Calibration(model, ids)               # ids (n, length)
    small = clone(model)                                # shares the embedding, which nothing changes
    keep_units(small.model.layers[3].mlp, units, down)  # a narrower block
    walk = Walk(small, ids)
    walk.watch(3, {"h": mlp.down_proj}, receive)        # inputs of modules of layer 3, batch by batch
    walk.step(3)                                        # all windows go through layer 3 as it is now

Notation: x enters a feed-forward block, h are its hidden units, W (d, m) is its down projection. Sums of
products are float32 within a batch and float64 over batches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.losses.perplexity import text_loss
from howlinear.models.families import parameter_count
from howlinear.models.forward import StopForward

BATCH = 4  # windows
PART = 4  # variants of a method are compared with one window in so many to fit on
JUDGED = 8  # windows on which variants are compared


@dataclass
class Made:
    """A smaller model, and which variant of the method it is."""

    model: Any
    note: str = ""


class Calibration:
    """A model and the windows that methods may read. What several methods need is computed once."""

    def __init__(self, model: Any, ids: Tensor, parent: Calibration | None = None) -> None:
        self.model, self.ids, self.parent = model, ids, parent
        self.layers = list(model.model.layers)
        self.width, self.hidden = self.layers[0].mlp.down_proj.weight.shape
        self.kept: dict[str, tuple[Any, float]] = {}  # by name: what was computed, in which time
        self.used: set[str] = set()
        self.new_seconds = 0.0

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, computed the first time. Its CPU seconds count for all that use it."""
        if self.parent is not None:
            return self.parent.once(f"part of {name}", make)
        self.used.add(name)
        if name not in self.kept:
            began, before = time.process_time(), self.new_seconds
            made = make()
            seconds = time.process_time() - began
            self.kept[name] = made, seconds - (self.new_seconds - before)
            self.new_seconds = before + seconds
        return self.kept[name][0]

    def timed(self, make: Callable[[], Any]) -> tuple[Any, float]:
        """What `make` returns, and its CPU seconds as if nothing had been computed before."""
        self.used, self.new_seconds, began = set(), 0.0, time.process_time()
        made = make()
        own = time.process_time() - began - self.new_seconds
        return made, own + sum(self.kept[name][1] for name in self.used)

    @property
    def sums(self) -> list[Sums]:
        return self.once("sums", lambda: original_sums(self.model, self.ids))

    @property
    def cosines(self) -> tuple[Tensor, Tensor]:
        return self.once("cosines", lambda: state_cosines(self.model, self.ids))

    @cached_property
    def part(self) -> Calibration:
        """The same model with fewer windows."""
        return Calibration(self.model, self.ids[::PART], parent=self)

    def best(self, ways: Mapping[str, Callable[[Calibration], Any]]) -> Made:
        """The variant with the lowest loss on windows that it was not fitted on, fitted on all.

        The CPU seconds of the comparison count as the method's own.
        """
        if len(ways) == 1:
            ((name, way),) = ways.items()
            return Made(way(self), name)
        others = torch.arange(len(self.ids)) % PART != 0 if len(self.ids) > PART else slice(None)
        judged = spread_rows(self.ids[others], JUDGED)
        losses = {name: text_loss(way(self.part), judged).nats for name, way in ways.items()}
        name = min(losses, key=losses.__getitem__)
        return Made(ways[name](self), name)


def spread_rows(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]


# -- parts of the model ---------------------------------------------------------------------------


def clone(model: Any) -> Any:
    """A copy to change. It shares the embedding with the original: no method changes that."""
    table = model.get_input_embeddings().weight
    return copy.deepcopy(model, {id(table): table})


def linear(weight: Tensor, bias: Tensor | None = None, like: Tensor | None = None) -> nn.Linear:
    """A layer with this weight (outputs, inputs), in the dtype of `like`."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    dtype = weight.dtype if like is None else like.dtype
    layer.weight = nn.Parameter(weight.detach().to(dtype).contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return layer


def keep_units(
    mlp: Any, units: Tensor, down: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Narrow a block to these units; `down` (d, units) is its new last projection."""
    W = mlp.down_proj.weight
    mlp.gate_proj = linear(mlp.gate_proj.weight[units])
    mlp.up_proj = linear(mlp.up_proj.weight[units])
    mlp.down_proj = linear(W[:, units] if down is None else down, bias, like=W)


def keep_layers(model: Any, kept: Sequence[int]) -> Any:
    """Drop all other layers of a clone, which is returned."""
    layers = [model.model.layers[i] for i in kept]
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i  # its place in the key-value cache
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    return model


def feed_forward_count(model: Any) -> int:
    return sum(parameter_count(layer.mlp) for layer in model.model.layers)


def spread(total: int, shares: Sequence[float], most: int) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total`, none above `most`."""
    shares, counts = torch.tensor(shares, dtype=torch.float64), torch.zeros(len(shares)).double()
    if total > most * len(shares):
        raise ValueError(
            f"{total} units cannot go: there are {most} in each of {len(shares)} blocks"
        )
    for _ in range(len(shares)):
        free = counts < most
        left = total - float(counts.sum())
        if left < 1e-9:
            break
        weights = shares * free
        weights = weights if float(weights.sum()) > 0 else free.double()
        counts = (counts + left * weights / weights.sum()).clamp(max=most)
    whole = counts.floor().long()
    rest = (counts - whole).masked_fill(whole >= most, -1)
    whole[rest.topk(total - int(whole.sum())).indices] += 1
    return whole.tolist()


def units_to_remove(
    calibration: Calibration, target: int, shares: Sequence[float] | None = None, added: int = 0
) -> list[int]:
    """How many units of each block go so that `target` parameters are saved; each changed block
    gets `added` new ones."""
    blocks = len(calibration.layers)
    if target <= 0:
        return [0] * blocks
    units = -(-(target + added * blocks) // (3 * calibration.width))
    return spread(units, shares or [1.0] * blocks, calibration.hidden - 16)


# -- activations ----------------------------------------------------------------------------------


@torch.no_grad()
def entry(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What enters the first layer: hidden states (B, L, d), and the options that all layers get."""
    caught: list[Any] = []

    def catch(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        state = args[0] if args else options.pop("hidden_states")
        caught.extend((state, dict(options)))
        raise StopForward

    handle = model.model.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model.model(input_ids=ids, use_cache=False)
    except StopForward:
        pass
    finally:
        handle.remove()
    return caught[0], caught[1]


def through(layer: Any, state: Tensor, options: dict[str, Any]) -> Tensor:
    """Hidden states after a layer."""
    with torch.no_grad():
        after = layer(state, **options)
    return after[0] if isinstance(after, tuple) else after


class Walk:
    """All windows on their way through the layers of a model that changes in between."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model = model
        self.batches = [entry(model, part) for part in ids.split(BATCH)]

    def watch(
        self,
        i: int,
        modules: Mapping[str, nn.Module],
        receive: Callable[[dict[str, Tensor]], None],
        *,
        step: bool = False,
    ) -> None:
        """Run layer i and hand over inputs of its modules, rows (n, width) by name, by batches.

        With `step` the windows stay behind the layer, where it will not change.
        """
        for number, (state, options) in enumerate(self.batches):
            with inputs_of(modules) as rows:
                after = through(self.model.model.layers[i], state, options)
            if step:
                self.batches[number] = after, options
            receive(rows)

    def step(self, i: int) -> None:
        """Take all windows through layer i."""
        layer = self.model.model.layers[i]
        self.batches = [(through(layer, s, options), options) for s, options in self.batches]


@contextmanager
def inputs_of(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The input of each module that runs inside, as rows."""
    rows: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def take(_: nn.Module, args: tuple[Any, ...]) -> None:
            rows[name] = args[0].reshape(-1, args[0].shape[-1])

        return take

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in modules.items()]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Sums:
    """Of one layer: sums and sums of products of x, h and of what attention's last projection reads."""

    n: int = 0
    x: Any = 0.0
    h: Any = 0.0
    a: Any = 0.0
    xx: Any = 0.0  # (d, d)
    xh: Any = 0.0  # (d, m)
    hh: Any = 0.0  # (m, m)
    aa: Any = 0.0  # (d,) squares

    def add(self, rows: dict[str, Tensor]) -> None:
        x, h, a = (rows[name] for name in "xha")
        self.n += len(x)
        for name, part in (("x", x), ("h", h), ("a", a)):
            setattr(self, name, getattr(self, name) + part.sum(0).double())
        self.xx = self.xx + (x.t() @ x).double()
        self.xh = self.xh + (x.t() @ h).double()
        self.hh = self.hh + (h.t() @ h).double()
        self.aa = self.aa + a.square().sum(0).double()


def original_sums(model: Any, ids: Tensor) -> list[Sums]:
    """Of every layer of an unchanged model."""
    walk, every = Walk(model, ids), []
    for i, layer in enumerate(model.model.layers):
        modules = {"x": layer.mlp, "h": layer.mlp.down_proj, "a": layer.self_attn.o_proj}
        every.append(Sums())
        walk.watch(i, modules, every[-1].add, step=True)
    return every


def state_cosines(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(states, states) mean cosines of all tokens, and mean angles of last tokens over pi.

    State i enters layer i; the last one leaves the last layer.
    """
    cosines, angles = 0.0, 0.0
    for part in ids.split(BATCH):
        state, options = entry(model, part)
        states = [state]
        for layer in model.model.layers:
            states.append(through(layer, states[-1], options))
        unit = torch.nn.functional.normalize(torch.stack(states, 2).float(), dim=-1)  # (B, L, i, d)
        pairs = (unit @ unit.transpose(-1, -2)).clamp(-1, 1).double()
        cosines = cosines + pairs.sum((0, 1)) / ids.numel()
        angles = angles + pairs[:, -1].arccos().sum(0) / torch.pi / len(ids)
    return cosines, angles
