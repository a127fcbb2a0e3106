"""Where the feed-forward blocks of each model family live, how to listen to them, how to swap them.

    for block in blocks(model):             # one Block per feed-forward network, in depth order
        print(block.index, block.path)
    with tap(model, receive):               # receive(block, rows), once per block and forward
        model(input_ids, attention_mask=mask)
    with swapped(model, {block: linear}):   # the block computes linear(x), the rest stays
        model(input_ids)

A model is touched only inside a `with` and is as it was afterwards, whatever happened inside.

Notation, for one token: x enters the block (after the norm before it), y leaves it (before dropout,
before an output norm, before the residual add), h is the residual stream after the add and before
any norm that follows. A batch has B windows of L positions; n rows remain without the padding.

A family is one row, sometimes two, of the table FAMILIES, and one line in the tests. Families that
the table does not know are searched by the shape of their modules, in which case h is not known.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FAMILIES",
    "Block",
    "Chain",
    "Family",
    "Rows",
    "as_module",
    "backbone",
    "blocks",
    "call_options",
    "depth_indices",
    "projection_shape",
    "swapped",
    "tap",
]


@dataclass(frozen=True)
class Block:
    """One feed-forward block: a value. Every path is relative to the model it was found in."""

    index: int  # from 0, in depth order; the encoder's blocks come before the decoder's
    path: str  # shown to users: "model.layers.3.mlp", or "model.decoder.layers.3.fc1+fc2"
    steps: tuple[str, ...]  # modules that lead from x to y when run in turn; often only one
    stream: tuple[str, str] | None  # ("output" | "input", path): h is this module's output or input
    out_norm: str | None  # the norm between the block and the residual add
    down: str | None  # the last projection, whose input are the hidden units; None for experts
    stack: str  # "encoder" | "decoder" | "": whose attention mask applies
    d_in: int
    d_out: int
    family: str  # a key of FAMILIES, "structural" or "pattern"
    copies: bool = False  # the layer changes y in place, or may: keep a copy of it
    expert: str = ""  # of a mixture's experts, which one: see `experts`

    @property
    def entry(self) -> str:
        """The module whose first input is x."""
        return self.steps[0]

    @property
    def exit(self) -> str:
        """The module whose output, or first output, is y."""
        return self.steps[-1]


# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Family:
    """Where the blocks of one kind of layer are. Paths are relative to the layer."""

    layers: str  # how the path of a layer ends; # stands for a number
    path: str  # the block as shown to users
    steps: tuple[str, ...] = ()  # see Block; by default the module at `path`
    down: str | None = None  # by default the last step, if that is a projection
    after: str | None = None  # the norm after the add: h is its input. None: h leaves the layer
    out_norm: str | None = None
    stack: str = ""
    when: tuple[str, Any] | None = None  # the row holds only if the config says this
    copies: bool = False


# Blocks that hold their dropout (gpt2) or the residual add (bloom), or that are not one module
# (opt, bert), are described by their steps, so that y is what the last projection gives.
GATED = Family("layers.#", "mlp", down="mlp.down_proj")  # experts too: they have no down
NORMED = replace(GATED, out_norm="post_feedforward_layernorm")
GPT2 = Family("h.#", "mlp", ("mlp.c_fc", "mlp.act", "mlp.c_proj"))
FC = Family("layers.#", "fc1+fc2", ("fc1", "activation_fn", "fc2"))
SPLIT = Family("encoder.layer.#", "intermediate+output", ("intermediate", "output.dense"))
BERT = replace(SPLIT, after="output.LayerNorm")
LIN = Family("layer.#", "ffn", ("ffn.lin1", "ffn.activation", "ffn.lin2"))
T5 = Family("encoder.block.#.layer.#", "DenseReluDense", down="DenseReluDense.wo", stack="encoder")

FAMILIES: dict[str, tuple[Family, ...]] = {
    "gpt2": (GPT2,),
    "gpt_neo": (GPT2,),
    "gptj": (Family("h.#", "mlp", ("mlp.fc_in", "mlp.act", "mlp.fc_out")),),
    "gpt_neox": (Family("layers.#", "mlp", down="mlp.dense_4h_to_h"),),
    "bloom": (Family("h.#", "mlp", ("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h")),),
    "mpt": (Family("blocks.#", "ffn", ("ffn.up_proj", "ffn.act", "ffn.down_proj")),),
    "falcon": (Family("h.#", "mlp", down="mlp.dense_4h_to_h", copies=True),),
    "phi": (Family("layers.#", "mlp", down="mlp.fc2"),),
    "opt": (
        replace(FC, when=("do_layer_norm_before", True)),
        replace(FC, when=("do_layer_norm_before", False), after="final_layer_norm"),  # opt-350m
    ),
    "whisper": (
        replace(FC, layers="encoder.layers.#", stack="encoder"),
        replace(FC, layers="decoder.layers.#", stack="decoder"),
    ),
    **dict.fromkeys(
        ("t5", "mt5"), (T5, replace(T5, layers="decoder.block.#.layer.#", stack="decoder"))
    ),
    "starcoder2": (Family("layers.#", "mlp", ("mlp.c_fc", "mlp.act", "mlp.c_proj")),),
    "vit": (Family("layers.#", "mlp", down="mlp.fc2"), SPLIT),  # new and old names in transformers
    "distilbert": (replace(LIN, after="output_layer_norm"),),
    **dict.fromkeys(("bert", "roberta", "mpnet", "xlm-roberta", "electra"), (BERT,)),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "stablelm"), (GATED,)),
    **dict.fromkeys(("olmo", "smollm3", "cohere"), (GATED,)),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"), (GATED,)),
    "granitemoe": (Family("layers.#", "block_sparse_moe"),),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3"), (NORMED,)),
}

# What a layer of a family that is not in the table may call its parts.
WHOLE = ("mlp", "ffn", "feed_forward", "feedforward", "DenseReluDense", "block_sparse_moe", "moe")
PAIRS = (("fc1", "fc2"), ("linear1", "linear2"), ("lin1", "lin2"), ("ffn", "ffn_output"))
ACTIVATIONS = ("activation_fn", "activation", "act", "act_fn")
DOWNS = ("down_proj", "c_proj", "fc2", "w2", "wo", "dense_4h_to_h", "fc_out", "lin2", "linear2")


# -------------------------------------------------------------------------- finding blocks


def blocks(model: nn.Module, pattern: str | None = None) -> list[Block]:
    """Every block in depth order, or those that `pattern` chooses.

    A pattern of digits, commas, dashes and blanks means depth indices ("3,5,9-12"); anything else
    is a regular expression, searched in the blocks' paths. One that fits no block makes a block of
    each outermost module whose whole path it matches. Chosen blocks keep their depth index.
    """
    name = type(model).__name__
    known = _from_table(model) or _from_structure(model)
    if pattern is None or re.fullmatch(r"[\d,\-\s]*", pattern):
        if not known:
            raise ValueError(
                f"no feed-forward blocks in {name}: not a known family, and no list of layers has "
                f"children named {', '.join(WHOLE)} or fc1 and fc2; name them: --blocks REGEX"
            )
        return known if pattern is None else [known[i] for i in depth_indices(pattern, len(known))]
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--blocks {pattern!r} is not a regular expression: {error}") from None
    found = [b for b in known if wanted.search(b.path)] or _from_pattern(model, wanted)
    if not found:
        like = known[0].path if known else [path for path, _ in model.named_modules()][-1]
        raise ValueError(
            f"--blocks {pattern!r} matches no block and no module's whole path in {name}, where "
            f"paths look like {like}"
        )
    return found


def backbone(model: nn.Module) -> nn.Module:
    """What to run to hear every block without paying for the language-model head."""
    return getattr(model, "base_model", model)


def call_options(net: nn.Module) -> dict[str, Any]:
    """What to pass beside the inputs: nobody here reads a key-value cache."""
    return {"use_cache": False} if "use_cache" in inspect.signature(net.forward).parameters else {}


def as_module(model: nn.Module, block: Block) -> nn.Module:
    """The block as one module x -> y. It shares the model's weights and leaves out dropout."""
    try:
        return Chain([attrgetter(path)(model) for path in block.steps])
    except AttributeError as error:
        raise ValueError(
            f"block {block.index} ({block.path}) does not run alone: {error}"
        ) from None


def _from_table(model: nn.Module) -> list[Block]:
    config, modules = _text_part(model)
    family = _family(config)
    found: list[Block] = []
    for row in FAMILIES.get(family, ()):
        if row.when and getattr(config, row.when[0]) != row.when[1]:
            continue
        ending = re.compile(r"(?:.*\.)?" + re.escape(row.layers).replace(r"\#", r"\d+"))
        for path, layer in modules:
            if ending.fullmatch(path) and _find(layer, (row.steps or (row.path,))[0]):
                found.append(_block(model, config, path, row, len(found), family))
    return found


def _from_structure(model: nn.Module) -> list[Block]:
    """Every layer in a list of layers with a child that looks like a feed-forward network."""
    config, modules = _text_part(model)
    stacks = ("encoder", "decoder") if getattr(config, "is_encoder_decoder", False) else ()
    found: list[Block] = []
    for path, layer in modules:
        listed = isinstance(_find(model, path.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
        row = _look(layer) if listed else None
        if row is None or any(path.startswith(f"{b.entry}.") for b in found):
            continue
        row = replace(row, stack=next((part for part in path.split(".") if part in stacks), ""))
        block = _block(model, config, path, row, len(found), "structural")
        found.append(replace(block, stream=None))  # is the add followed by a norm? Who knows
    return found


def _from_pattern(model: nn.Module, wanted: re.Pattern[str]) -> list[Block]:
    config, _ = _text_part(model)
    found: list[Block] = []
    for path, module in model.named_modules():
        if not wanted.fullmatch(path) or any(path.startswith(f"{b.path}.") for b in found):
            continue
        shapes = [shape for part in module.modules() if (shape := projection_shape(part))]
        if shapes and not isinstance(module, _StandIn):
            d_in, d_out = shapes[0][0], shapes[-1][1]
        else:
            d_in, d_out, _ = _sizes(model, config, path, path)
        block = Block(
            len(found), path, (path,), None, None, None, "", d_in, d_out, "pattern", copies=True
        )
        found.append(block)
    return found


def _text_part(model: nn.Module) -> tuple[Any, list[tuple[str, nn.Module]]]:
    """The config and the named modules of the text stack, which composite models hold inside."""
    config: Any = getattr(model, "config", None)
    modules = list(model.named_modules())
    if not hasattr(config, "get_text_config") or _family(config) in FAMILIES:
        return config, modules
    text = config if config.is_encoder_decoder else config.get_text_config()
    for prefix, module in modules if text is not config else ():
        if getattr(getattr(module, "config", None), "model_type", None) == text.model_type:
            return text, [(p, m) for p, m in modules if f"{p}.".startswith(f"{prefix}.")]
    return config, modules


def _family(config: Any) -> str:
    """The key in FAMILIES; a compressed model is of the family that it was made from."""
    return str(getattr(config, "model_type", "")).removeprefix("howlinear_")


def _block(
    model: nn.Module, config: Any, layer: str, row: Family, index: int, family: str
) -> Block:
    steps = tuple(f"{layer}.{step}" for step in row.steps or (row.path,))
    down = f"{layer}.{row.down}" if row.down else steps[-1]
    d_in, d_out, has_down = _sizes(model, config, steps[0], down)
    return Block(
        index=index,
        path=f"{layer}.{row.path}",
        steps=steps,
        stream=("input", f"{layer}.{row.after}") if row.after else ("output", layer),
        out_norm=f"{layer}.{row.out_norm}" if row.out_norm else None,
        down=down if has_down else None,
        stack=row.stack,
        d_in=d_in,
        d_out=d_out,
        family=family,
        copies=row.copies,
    )


def _sizes(model: nn.Module, config: Any, entry: str, down: str) -> tuple[int, int, bool]:
    """(d_in, d_out, is there a last projection?), from the weights where they tell."""
    first, last = _find(model, entry), _find(model, down)
    if isinstance(first, _StandIn):  # swapped out at the moment
        return first.block.d_in, first.block.d_out, first.block.down is not None
    inside = (
        [shape for part in first.modules() if (shape := projection_shape(part))] if first else []
    )
    shape = projection_shape(last) or projection_shape(first)
    if inside and shape:
        return inside[0][0], shape[1], projection_shape(last) is not None
    names = ("hidden_size", "d_model", "n_embd", "dim")  # experts are as wide as the model
    widths = [int(w) for name in names if (w := getattr(config, name, None))]
    widths += [d_in for d_in, _ in inside]
    if not widths:
        raise ValueError(f"neither the weights of {entry} nor the config tell its width")
    return widths[0], widths[0], False


def _look(layer: nn.Module) -> Family | None:
    """A row for this layer of a family that the table does not know, if it has a block."""
    for name in WHOLE:
        ffn = _find(layer, name)
        if isinstance(ffn, _StandIn):  # swapped out at the moment
            down = (ffn.block.down or "").removeprefix(ffn.block.entry)
            return Family("", name, down=name + down if down else None, copies=True)
        if ffn is not None and _is_network(ffn):
            order = [n for n, _ in ffn.named_children()] if isinstance(ffn, nn.Sequential) else []
            downs = (
                f"{name}.{d}" for d in (*DOWNS, *order[::-1]) if projection_shape(_find(ffn, d))
            )
            return Family("", name, down=next(downs, None), copies=True)
    for pair in PAIRS:
        first, last = (_find(layer, name) for name in pair)
        inner = (projection_shape(first) or (0, -1))[1], (projection_shape(last) or (-2, 0))[0]
        if isinstance(first, _StandIn) or _is_linear(first) or inner[0] == inner[1]:
            act = next((a for a in ACTIVATIONS if hasattr(layer, a)), ACTIVATIONS[0])
            return Family("", "+".join(pair), (pair[0], act, pair[1]), copies=True)
    return replace(SPLIT, copies=True) if all(_find(layer, s) for s in SPLIT.steps) else None


def _is_network(module: nn.Module) -> bool:
    """Has weights, is more than one projection, and needs nothing but x."""
    parameters = inspect.signature(module.forward).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return (
        projection_shape(module) is None
        and len(required) <= 1
        and any(True for _ in module.parameters())
    )


def _is_linear(module: nn.Module | None) -> bool:
    """Replaced for good, by a LinearMLP: still a block, now without hidden units of its own."""
    return hasattr(module, "linear_mlp")


def projection_shape(module: Any) -> tuple[int, int] | None:
    """(inputs, outputs) of a projection: Linear and its quantised kin, or the Conv1D of gpt2."""
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        if hasattr(module, inputs) and hasattr(module, outputs):
            return int(getattr(module, inputs)), int(getattr(module, outputs))
    return None


def _find(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _module(model: nn.Module, path: str) -> nn.Module:
    module = _find(model, path)
    if module is None:
        raise ValueError(f"{type(model).__name__} has no module {path}: blocks of another model?")
    return module


def depth_indices(text: str, count: int) -> list[int]:
    """Depth indices in order: "3,5,9-12" means 3, 5, 9, 10, 11 and 12."""
    chosen: set[int] = set()
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"--blocks {text!r}: {part!r} is no index and no range such as 9-12")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise ValueError(
                f"--blocks {text!r}: {part!r} is not among the model's {count} blocks, "
                f"which are 0-{count - 1}"
            )
        chosen.update(range(first, last + 1))
    if not chosen:
        raise ValueError(f"--blocks {text!r} names no block; write indices such as 3,5,9-12")
    return sorted(chosen)


# ------------------------------------------------------------------------------- listening


@dataclass(frozen=True, eq=False)
class Rows:
    """What one block saw and said in one forward, padding left out. Read it inside `receive`.

    Without padding x and y are views of the model's own tensors: do not write to them.
    """

    x: Tensor  # (n, d_in)
    y: Tensor  # (n, d_out)
    hidden: Tensor | None  # (n, k): the hidden units that were asked for
    shape: tuple[int, int] | None  # (B, L) when nothing was left out
    _lead: tuple[int, int]  # (B, L) in any case
    _keep: Tensor | None  # (n,) which of the B L positions are rows, ascending; None: all
    _h: Tensor | None  # (B L, d)
    _starts: Tensor | None = None  # (B,) as `starts`, where the rows are only some of a block's

    def only(self, at: Tensor, y: Tensor) -> Rows:
        """The rows `at` (m,), with another y (m, d_out): what one expert was given, and said."""
        kept, hidden = self.kept[at], None if self.hidden is None else self.hidden[at]
        return Rows(self.x[at], y, hidden, None, self._lead, kept, self._h, self.starts)

    @cached_property
    def h(self) -> Tensor | None:
        """(n, d), the residual stream after the add; None where the family is not known."""
        return self._h if self._h is None or self._keep is None else self._h[self._keep]

    @cached_property
    def stream(self) -> Tensor | None:
        """(n,), |h|^2 in float32 or better."""
        if self.h is None:
            return None
        return self.h.to(torch.promote_types(self.h.dtype, torch.float32)).square().sum(-1)

    @cached_property
    def kept(self) -> Tensor:
        """(n,), which of the B L positions the rows are, ascending."""
        every = torch.arange(math.prod(self._lead), device=self.x.device)
        return every if self._keep is None else self._keep

    @cached_property
    def window(self) -> Tensor:
        """(n,), which window of the batch a row is from."""
        return self.kept // self._lead[1]

    @cached_property
    def starts(self) -> Tensor:
        """(B,), how far each window's first real token is from its left end."""
        if self._starts is not None:
            return self._starts
        batch, length = self._lead
        first = torch.full((batch,), length, device=self.kept.device)
        return first.scatter_reduce(0, self.window, self.kept % length, "amin")

    @cached_property
    def position(self) -> Tensor:
        """(n,), position in the window, 0 at its first real token: left padding does not count."""
        return self.kept % self._lead[1] - self.starts[self.window]


Receive = Callable[[Block, Rows], None]


@contextmanager
def tap(
    model: nn.Module,
    receive: Receive,
    *,
    at: Sequence[Block] | None = None,
    units: Mapping[int, Tensor | None] | None = None,
) -> Iterator[None]:
    """Call `receive(block, rows)` once per block and forward of `model` or its backbone.

    `at` are the blocks to hear (default: all). `units` asks for hidden units, block index -> unit
    numbers, or None for all of them; it may change between forwards. Padding is what the 2-D
    attention mask of the call says; a mask of another length than a block's rows (image patches,
    audio frames, one decoding step) leaves that block's rows alone.

    Layers that a backward pass runs again (gradient checkpointing) are not heard again. A block
    that runs twice in one forward (shared layers, chunked feed-forward) raises a RuntimeError; so
    does, when the `with` ends without another error, a block that a forward left out.
    """
    listener = _Listener(
        model, receive, blocks(model) if at is None else at, {} if units is None else units
    )
    try:
        listener.attach()
        yield
        listener.verify()
    finally:
        listener.remove()


class _Listener:
    """The hooks of one `tap` and what they have heard."""

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        at: Sequence[Block],
        units: Mapping[int, Tensor | None],
    ) -> None:
        self.model, self.receive, self.units = model, receive, units
        self.at = list(dict.fromkeys(at))
        self.handles: list[Any] = []
        self.running: nn.Module | None = None  # the model or its backbone, whichever was called
        self.parts: dict[Block, dict[str, Tensor]] = {}  # heard so far in this forward
        self.heard: set[Block] = set()  # complete in this forward
        self.silent: set[Block] = set()  # left out by any forward
        self.forwards = self.strays = 0
        for block in self.at:
            if block.index in units and (
                block.down is None or isinstance(_find(model, block.entry), _StandIn)
            ):
                raise ValueError(f"block {block.index} ({block.path}) has no hidden units to tap")

    def attach(self) -> None:
        for module in dict.fromkeys((self.model, backbone(self.model))):
            self.handles += [
                module.register_forward_pre_hook(self.start, with_kwargs=True),
                module.register_forward_hook(self.finish, always_call=True),
            ]
        for block in self.at:
            self.listen(block, "x", "input", block.entry)
            if block.index in self.units and block.down is not None:
                self.listen(block, "hidden", "input", block.down)
            self.listen(block, "y", "output", block.exit)
            if block.stream is not None:
                self.listen(block, "h", *block.stream)

    def listen(self, block: Block, part: str, side: str, path: str) -> None:
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
        if self.running is not None and module is not self.model:
            return  # the backbone, inside the model
        self.running = module
        self.parts.clear()
        self.heard.clear()
        given, names = _by_name(module, args, kwargs)
        kept = _unpadded(given.get("attention_mask"))
        self.kept = {"": kept, "encoder": kept, "decoder": kept}  # stack -> rows that are real
        if "decoder_attention_mask" in names:
            self.kept["decoder"] = _unpadded(given.get("decoder_attention_mask"))
        tensors = (given.get(name) for name in ("input_ids", "inputs_embeds"))
        self.leads = [(t.shape[0], t.shape[1]) for t in tensors if t is not None and t.ndim > 1]

    def finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is not self.running:
            return
        self.running = None
        self.parts.clear()
        if output is not None:  # None: the forward failed, and its exception is on its way
            self.forwards += 1
            self.silent.update(block for block in self.at if block not in self.heard)

    def take(self, block: Block, part: str, value: Tensor) -> None:
        if self.running is None:  # a backward pass that recomputes, or a part of the model alone
            self.strays += 1
            return
        parts = self.parts.setdefault(block, {})
        if part in parts or block in self.heard:
            raise RuntimeError(
                f"block {block.index} ({block.path}) ran twice in one forward: layers that share "
                "weights and chunked feed-forward (chunk_size_feed_forward) cannot be tapped"
            )
        if part == "hidden" and (chosen := self.units[block.index]) is not None:
            value = value[..., chosen.to(value.device)]
        parts[part] = (value.clone() if part == "y" and block.copies else value).detach()
        if part == ("y" if block.stream is None else "h") and {"x", "y"} <= parts.keys():
            self.heard.add(block)
            forward, self.running = self.running, None  # deaf to what `receive` may run
            self.receive(block, self.rows(block, self.parts.pop(block)))
            self.running = forward

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
        return Rows(flat["x"], flat["y"], flat.get("hidden"), shape, size, keep, h)

    def verify(self) -> None:
        if self.strays and not self.forwards:
            raise RuntimeError(
                f"only a part of {type(self.model).__name__} ran: under tap, run the model itself "
                "or backbone(model), where the attention mask is seen"
            )
        names = [f"{block.index} ({block.path})" for block in self.at if block in self.silent]
        if names:
            raise RuntimeError(f"a forward ran without these blocks: {', '.join(names)}")


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Arguments by name, however they were passed, and the names there are."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}, names


def _unpadded(mask: Any) -> tuple[tuple[int, int], Tensor] | None:
    """A mask's (B, L) and which of the B L positions are real; None when there is no padding."""
    if not torch.is_tensor(mask) or mask.ndim != 2 or bool((mask != 0).all()):
        return None
    return (mask.shape[0], mask.shape[1]), mask.reshape(-1).nonzero()[:, 0]


# -------------------------------------------------------------------------------- swapping

Replacement = Callable[[Tensor], Tensor]


@contextmanager
def swapped(model: nn.Module, replacements: Mapping[Block, Replacement]) -> Iterator[None]:
    """Run `model` with blocks replaced: inside the `with`, y = replacements[block](x).

    x comes as the layer passes it, (..., d_in). Residual, norms and dropout stay; the block's own
    weights do not run. Replacements that are modules are part of the model for the time being, so
    gradients, `parameters()` and `train()` reach them. May be nested.
    """
    plan = [
        (path, stand_in)
        for block, replacement in replacements.items()
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


class _StandIn(nn.Module):
    """Sits where a module of a swapped block was."""

    def __init__(self, block: Block, replacement: Replacement | None, *other: nn.Module) -> None:
        super().__init__()
        self.block, self.replacement = block, replacement
        self.other = other  # in a tuple, so that it is not a child

    def run(self, x: Tensor) -> Tensor:
        assert self.replacement is not None
        y = self.replacement(x)
        expected = (*x.shape[:-1], self.block.d_out)
        if tuple(y.shape) != expected:
            raise ValueError(
                f"the replacement of block {self.block.index} ({self.block.path}) returned shape "
                f"{tuple(y.shape)}, expected {expected}"
            )
        return y.clone() if self.block.copies else y


class _Whole(_StandIn):
    """In place of a block that is one module."""

    extras: int | None = None  # how many values the original returns beside y; -1: it is no tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self.run(_first_input(args, kwargs))
        if self.block.family in FAMILIES:
            return y
        if self.extras is None:  # a family we do not know: ask the original, once
            with torch.no_grad():
                output = self.other[0](*args, **kwargs)
            self.extras = len(output) - 1 if isinstance(output, tuple) else -1
        return y if self.extras < 0 else (y, *[None] * self.extras)


class _Catch(_StandIn):
    """In place of a split block's first module: keeps x, and lets the activation chew on it."""

    x: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.x = _first_input(args, kwargs)
        return self.x


class _Give(_StandIn):
    """In place of a split block's last module: the replacement of what _Catch kept."""

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
