"""Read blocks while a model runs (`tap`), or run it with blocks replaced (`swapped`).

    with tap(model, receive):               # receive(block, rows), once per block and forward
        model(input_ids, attention_mask=mask)
    with swapped(model, {3: linear}):       # block 3 computes linear(x), the rest stays
        model(input_ids)
    layer = as_module(model, block)         # the block alone: y = layer(x)

A model is touched only inside a `with` and is as it was afterwards, whatever happened inside. See
`families` for the notation (x, y, h) and for where the blocks are.

What this relies on, and the tests that fail when it changes (tests/test_hooks.py): torch calls pre
hooks with keyword arguments and calls hooks with `always_call` when a forward raises; a family's layer
calls its feed-forward modules by `__call__`, with x as first argument or as `hidden_states`; a module
is looked up in its parent's `_modules` each time it is called, so that another one can be put there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.models.families import (
    FAMILIES,
    Block,
    Replacement,
    StandIn,
    _find,
    _module,
    backbone,
    blocks,
    by_block,
    one_block,
    towers,
)
from howlinear.models.naming import BlockName, BlockNames


def as_module(model: nn.Module, block: BlockName) -> nn.Module:
    """The block as one module x -> y. It shares the model's weights and leaves out dropout."""
    block = one_block(model, block)
    try:
        return Chain([attrgetter(path)(model) for path in block.steps])
    except AttributeError as error:
        raise ValueError(f"{block} does not run alone: {error}") from None


Receive = Callable[[Block, Rows], None]


@contextmanager
def tap(
    model: nn.Module,
    receive: Receive,
    *,
    at: BlockNames = None,
    units: Mapping[int, Tensor | None] | None = None,
) -> Iterator[None]:
    """Call `receive(block, rows)` once per block and forward of `model` or its backbone.

    `at` names the blocks to read, as in `blocks` (default: all). `units` adds hidden units to the rows: block index ->
    unit numbers, or None for all units of that block; it may change between forwards. Rows leave
    out padding, the zeros of the call's 2-D attention mask; a mask of another length than a block's
    rows (image patches, audio frames, one decoding step) is ignored for that block.

    Layers that a backward pass runs again (gradient checkpointing) are not received again. A block
    that runs twice in one forward (shared layers, chunked feed-forward) raises a RuntimeError. A
    block that did not run in some forward raises a ValueError when the `with` ends.
    """
    hooks = _TapHooks(model, receive, blocks(model, at), {} if units is None else units)
    try:
        hooks.attach()
        yield
        hooks.verify()
    finally:
        hooks.remove()


class _TapHooks:
    """The hooks of one `tap`, and what they have received."""

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        at: Sequence[Block],
        units: Mapping[int, Tensor | None],
    ) -> None:
        self.model, self.receive, self.units = model, receive, units
        self.at = at
        self.handles: list[Any] = []
        self.running: nn.Module | None = None  # the model or its backbone, whichever was called
        self.parts: dict[Block, dict[str, Tensor]] = {}  # of blocks not complete in this forward
        self.complete: set[Block] = set()  # in this forward
        self.missing: set[Block] = set()  # not run in some forward
        self.forwards = self.strays = 0
        for block in self.at:
            if block.index in units and (
                block.down is None or isinstance(_find(model, block.entry), StandIn)
            ):
                raise ValueError(f"{block} has no hidden units to tap")

    def attach(self) -> None:
        net = backbone(self.model)
        for module in dict.fromkeys((self.model, net, *towers(net).values())):
            self.handles += [
                module.register_forward_pre_hook(self.start, with_kwargs=True),
                module.register_forward_hook(self.finish, always_call=True),
            ]
        for block in self.at:
            self.hook(block, "x", "input", block.entry)
            if block.index in self.units and block.down is not None:
                self.hook(block, "hidden", "input", block.down)
            self.hook(block, "y", "output", block.exit)
            if block.stream is not None:
                self.hook(block, "h", *block.stream)

    def hook(self, block: Block, part: str, side: str, path: str) -> None:
        """Take `part` of the block's rows from the input or the output of a module."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.take(block, part, _first_input(args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.take(block, part, _first(output))

        module = _module(self.model, path)
        self.handles.append(
            module.register_forward_pre_hook(before, with_kwargs=True)
            if side == "input"
            else module.register_forward_hook(after)
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.parts.clear()

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model or its backbone begins: read its masks."""
        if self.running is not None and module is not self.model:
            return  # the backbone, inside the model
        self.running = module
        self.parts.clear()
        self.complete.clear()
        names = inspect.signature(module.forward).parameters
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        kept = _unpadded(arguments.get("attention_mask"))
        self.kept = {"": kept, "encoder": kept, "decoder": kept}  # stack -> rows that are real
        if "decoder_attention_mask" in names:
            self.kept["decoder"] = _unpadded(arguments.get("decoder_attention_mask"))
        tensors = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
        self.leads = [(t.shape[0], t.shape[1]) for t in tensors if t is not None and t.ndim > 1]

    def finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is not self.running:
            return
        self.running = None
        self.parts.clear()
        if output is not None:  # None: the forward raised an exception
            self.forwards += 1
            self.missing.update(block for block in self.at if block not in self.complete)

    def take(self, block: Block, part: str, value: Tensor) -> None:
        """Keep a part of a block's rows; hand the rows over when they are complete."""
        if self.running is None:  # a backward pass that recomputes, or a part of the model alone
            self.strays += 1
            return
        parts = self.parts.setdefault(block, {})
        if part in parts or block in self.complete:
            raise RuntimeError(
                f"{block} ran twice in one forward: layers that share "
                "weights and chunked feed-forward (chunk_size_feed_forward) cannot be tapped"
            )
        if part == "hidden" and (chosen := self.units[block.index]) is not None:
            value = value[..., chosen.to(value.device)]
        parts[part] = (value.clone() if part == "y" and block.copies else value).detach()
        if part == ("y" if block.stream is None else "h") and {"x", "y"} <= parts.keys():
            self.complete.add(block)
            # `receive` may run blocks itself, and may end the forward by an exception
            forward, strays, self.running = self.running, self.strays, None
            try:
                self.receive(block, self.rows(block, self.parts.pop(block)))
            finally:
                self.running, self.strays = forward, strays

    def rows(self, block: Block, parts: dict[str, Tensor]) -> Rows:
        lead, keep = parts["x"].shape[:-1], None
        size = (lead[0], math.prod(lead[1:]))
        if len(lead) == 1:  # a layer that flattens its batch, such as opt's
            size = next((s for s in self.leads if math.prod(s) == lead[0]), (1, lead[0]))
        kept = self.kept[block.stack]
        if kept is not None and kept[0] == size:
            keep = kept[1].to(parts["x"].device)
        flat = {name: part.reshape(-1, part.shape[-1]) for name, part in parts.items()}
        h = flat.pop("h", None)
        if keep is not None:
            flat = {name: part[keep] for name, part in flat.items()}
        shape = size if keep is None else None
        hidden, scale = flat.get("hidden"), block.scale
        return Rows(flat["x"], flat["y"], hidden, shape, size, keep, h, _scale=scale)

    def verify(self) -> None:
        """RuntimeError where rows are missing that the caller expects."""
        if self.strays and not self.forwards:
            raise RuntimeError(
                f"only a part of {type(self.model).__name__} ran: under tap, run the model itself "
                "or backbone(model), where the attention mask is seen"
            )
        names = [f"{block.index} ({block.path})" for block in self.at if block in self.missing]
        if names:
            raise ValueError(
                f"a forward ran without these blocks: {', '.join(names)}: do the inputs reach them?"
            )


def _unpadded(mask: Any) -> tuple[tuple[int, int], Tensor] | None:
    """A mask's (B, L) and which of the B L positions are real; None when there is no padding."""
    if not torch.is_tensor(mask) or mask.ndim != 2 or bool((mask != 0).all()):
        return None
    return (mask.shape[0], mask.shape[1]), mask.reshape(-1).nonzero()[:, 0]


# -- swapping -------------------------------------------------------------------------------------


@contextmanager
def swapped(model: nn.Module, replacements: Mapping[Any, Replacement]) -> Iterator[None]:
    """Run `model` with blocks replaced: inside the `with`, y = replacements[block](x).

    Blocks are named as in `blocks`; a pattern replaces every block that it matches.
    x has the layer's shape, (..., d_in). Residual, norms and dropout stay; the block's own weights
    do not run. Replacements that are modules are part of the model inside the `with`, so gradients,
    `parameters()` and `train()` reach them. May be nested.
    """
    plan = [
        (path, stand_in)
        for block, replacement in by_block(model, replacements).items()
        for path, stand_in in _stand_ins(model, block, replacement)
    ]
    slots: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name, original
    try:
        for path, stand_in in plan:
            parent, _, name = path.rpartition(".")
            slots.append((model.get_submodule(parent), name, model.get_submodule(path)))
            slots[-1][0]._modules[name] = stand_in
        yield
    finally:
        for place, name, original in reversed(slots):
            place._modules[name] = original


def _stand_ins(
    model: nn.Module, block: Block, replacement: Replacement
) -> list[tuple[str, nn.Module]]:
    entry, leave = _module(model, block.entry), _module(model, block.exit)
    if entry is leave:
        return [(block.entry, _Whole(block, replacement, entry))]
    catch = _Catch(block, replacement=None)
    return [(block.entry, catch), (block.exit, _Give(block, replacement, catch))]


class _Whole(StandIn):
    """In place of a block that is one module."""

    extras: int | None = None  # how many values the original returns beside y; -1: it is no tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self.run(_first_input(args, kwargs))
        if self.block.family in FAMILIES:
            return y
        if self.extras is None:  # an unknown family: run the original once to see what it returns
            with torch.no_grad():
                output = self.other[0](*args, **kwargs)
            self.extras = len(output) - 1 if isinstance(output, tuple) else -1
        return y if self.extras < 0 else (y, *[None] * self.extras)


class _Catch(StandIn):
    """In place of a split block's first module: keeps x and returns it, so the activation runs on x."""

    x: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.x = _first_input(args, kwargs)
        return self.x


class _Give(StandIn):
    """In place of a split block's last module: runs the replacement on the x that _Catch kept."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        catch: Any = self.other[0]
        x, catch.x = catch.x, None
        return self.run(x)


class Chain(nn.Module):
    """Modules and functions in turn, as one x -> y."""

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleList(s for s in steps if isinstance(s, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = _first(step(x))
        return x


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named = kwargs.get("hidden_states")
    return args[0] if args else named if named is not None else next(iter(kwargs.values()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside (no dropout); afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model is trained inside."""
    trained = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
