"""Where the feed-forward blocks of each model family are.

    for block in blocks(model):             # one Block per feed-forward network, in depth order
        print(block.index, block.path, block.d_in, block.d_out)
    blocks(model, "3,5,9-12")               # or a regular expression on module paths
    blocks(model, [3, -1])                  # or a list of indices, paths, patterns and blocks

`hooks` reads and replaces them. Notation, for one token: x enters the block (after the norm before
it), y leaves it (before dropout, before an output norm, before the residual add), h is the residual
stream after the add and before any norm that follows. A batch has B windows of L positions; n rows
remain without the padding.

A family is one or two rows of the table FAMILIES and one line in the tests. In other families,
blocks are found by the names and shapes of their modules; h is not known there.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeVar

from torch import Tensor, nn

from howlinear.models.naming import (
    BlockName,
    BlockNames,
    depth_indices,
    depth_of,
    one_by_one,
    path_of,
)
from howlinear.models.offload import tied_copies
from howlinear.models.twins import impurity


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
    scale: float = 1.0  # the layer multiplies y by it before the residual add

    def __str__(self) -> str:
        return f"block {self.index} ({self.path})"

    @property
    def entry(self) -> str:
        """The module whose first input is x."""
        return self.steps[0]

    @property
    def exit(self) -> str:
        """The module whose output, or first output, is y."""
        return self.steps[-1]


Replacement = Callable[[Tensor], Tensor]
T = TypeVar("T")


class StandIn(nn.Module):
    """In the place of a module of a swapped block."""

    def __init__(self, block: Block, replacement: Replacement | None, *other: nn.Module) -> None:
        super().__init__()
        self.block, self.replacement = block, replacement
        self.other = other  # in a tuple, so that it is not a child

    def run(self, x: Tensor) -> Tensor:
        assert self.replacement is not None
        name = f"the replacement of {self.block}"
        y = of_width(self.block.d_out, x, self.replacement(x), name)
        return y.clone() if self.block.copies else y


def of_width(d_out: int, x: Tensor, y: Tensor, name: str) -> Tensor:
    """y, the output for x, or ValueError where it is not (..., d_out)."""
    if tuple(y.shape) != (expected := (*x.shape[:-1], d_out)):
        raise ValueError(f"{name} returned shape {tuple(y.shape)}, expected {expected}")
    return y


# -- the table ------------------------------------------------------------------------------------


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
    scale: str | None = None  # what the config calls the factor of y before the residual add


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
    "granitemoe": (Family("layers.#", "block_sparse_moe", scale="residual_multiplier"),),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3"), (NORMED,)),
}

# Names of feed-forward modules in families that are not in the table.
WHOLE = ("mlp", "ffn", "feed_forward", "feedforward", "DenseReluDense", "block_sparse_moe", "moe")
PAIRS = (
    ("fc1", "fc2"), ("linear1", "linear2"), ("linear_1", "linear_2"), ("lin1", "lin2"),
    ("ffn", "ffn_output"),
)  # fmt: skip
ACTIVATIONS = ("activation_fn", "activation", "act", "act_fn", "activation_function")
DOWNS = ("down_proj", "c_proj", "fc2", "w2", "wo", "dense_4h_to_h", "fc_out", "lin2", "linear2")


# -- finding blocks -------------------------------------------------------------------------------


def blocks(model: nn.Module, at: BlockNames = None) -> list[Block]:
    """Every block in depth order, or those that `at` names.

    A whole number is a depth index, from the end if negative. A text is a block's path; or digits,
    commas, dashes and blanks for depth indices ("3,5,9-12"); or a regular expression, searched in the
    blocks' paths, then in those of other stacks (`left_out`). One that matches no block makes a block
    of each outermost module whose whole path it matches. A `Block` is itself, and a list may mix all
    of these. Chosen blocks keep their depth index.
    """
    if at is not None and not isinstance(at, str):
        return list(dict.fromkeys(b for name in one_by_one(at) for b in _named(model, name)))
    name = type(model).__name__
    known, why = _known(model)
    if at is None or re.fullmatch(r"[\d,\-\s]*", at):
        if not known:
            raise ValueError(
                f"no feed-forward blocks in {name}: {why}; name them by a pattern of paths (`at`)"
            )
        chosen = range(len(known)) if at is None else depth_indices(at, range(len(known)))
        return [known[i] for i in chosen]
    return _matching(model, at, known)


def _known(model: nn.Module) -> tuple[list[Block], str]:
    """Blocks of the text stack; why there are none."""
    listed = _from_table(model)
    return (listed, "") if listed else _from_structure(model, *_text_part(model))


def by_block(model: nn.Module, values: Mapping[Any, T]) -> dict[Block, T]:
    """Values by block, of values by any name of a block; a pattern gives its value to all it matches."""
    found: dict[Block, T] = {}
    for name, value in values.items():
        for block in blocks(model, name):
            if block in found:
                raise ValueError(f"{block} is named twice")
            found[block] = value
    return found


def one_block(model: nn.Module, name: BlockName) -> Block:
    """The block of this name; ValueError where it names several."""
    found = blocks(model, name)
    if len(found) > 1:
        raise ValueError(f"{name!r} names {len(found)} blocks, expected one: {found[0]}, ...")
    return found[0]


def _named(model: nn.Module, name: BlockName) -> list[Block]:
    if isinstance(name, Block):
        return [name]
    if isinstance(name, str):
        return blocks(model, name)
    if not isinstance(name, SupportsIndex):
        return blocks(model, path_of(name))
    every = blocks(model)
    return [every[depth_of(name, range(len(every)))]]


def _matching(model: nn.Module, pattern: str, known: list[Block]) -> list[Block]:
    """The block with this path, or those that a regular expression finds."""
    if exact := [b for b in known if b.path == pattern]:
        return exact
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`at` {pattern!r} is not a regular expression: {error}") from None
    chosen = [b for b in known if wanted.search(b.path)]
    chosen = chosen or [b for b in left_out(model) if b.path == pattern or wanted.search(b.path)]
    chosen = chosen or _from_pattern(model, wanted)
    if not chosen:
        like = known[0].path if known else [path for path, _ in model.named_modules()][-1]
        raise ValueError(
            f"`at` {pattern!r} matches no block and no module's whole path in "
            f"{type(model).__name__}, where paths look like {like}"
        )
    return chosen


def left_out(model: nn.Module) -> list[Block]:
    """Blocks of a composite model outside its text stack, such as those of a vision tower.

    Their indices follow those of the text stack, so that both can be measured at once.
    """
    config, modules = _text_part(model)
    inside = {path for path, _ in modules}
    others = [(path, module) for path, module in model.named_modules() if path not in inside]
    found = _from_structure(model, config, others)[0] if others else []
    first = len(_known(model)[0]) if found else 0
    return [replace(block, index=first + block.index) for block in found]


def block_at(model: nn.Module, path: str) -> Block | None:
    """The block, or the module as a block, at this path; None where there is none."""
    try:  # known blocks come first
        return next((b for b in blocks(model, f"^{re.escape(path)}$") if b.path == path), None)
    except ValueError:
        return None


def backbone(model: nn.Module) -> nn.Module:
    """The model without its language-model head: runs every block."""
    return getattr(model, "base_model", model)


def towers(net: nn.Module) -> dict[str, nn.Module]:
    """The parts of a contrastive model, such as CLIP, that run alone, by the input that each reads."""
    names = {"input_ids": "text_model", "pixel_values": "vision_model"}
    contrastive = hasattr(net, "logit_scale")
    return {key: part for key, name in names.items() if contrastive and (part := _find(net, name))}


def call_options(net: nn.Module) -> dict[str, Any]:
    """Arguments beside the inputs: no key-value cache, which no measurement reads."""
    return {"use_cache": False} if "use_cache" in inspect.signature(net.forward).parameters else {}


def _from_table(model: nn.Module) -> list[Block]:
    config, modules = _text_part(model)
    family = _family(config)
    listed: list[Block] = []
    for row in FAMILIES.get(family, ()):
        if row.when and getattr(config, row.when[0]) != row.when[1]:
            continue
        ending = re.compile(r"(?:.*\.)?" + re.escape(row.layers).replace(r"\#", r"\d+"))
        for path, layer in modules:
            if ending.fullmatch(path) and _find(layer, (row.steps or (row.path,))[0]):
                listed.append(_block(model, config, path, row, len(listed), family))
    return listed


def _from_structure(
    model: nn.Module, config: Any, modules: Sequence[tuple[str, nn.Module]]
) -> tuple[list[Block], str]:
    """Every layer in a list of layers with a child that is a feed-forward network; or why none is."""
    stacks = ("encoder", "decoder") if getattr(config, "is_encoder_decoder", False) else ()
    listed: list[Block] = []
    names = f"{', '.join(WHOLE)} or fc1 and fc2"
    why = f"not a known family, and no list of layers has children named {names}"
    for path, layer in modules:
        in_list = isinstance(_find(model, path.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
        row = _look(layer) if in_list else None
        if row is None or any(path.startswith(f"{b.entry}.") for b in listed):
            continue
        row = replace(row, stack=next((part for part in path.split(".") if part in stacks), ""))
        block: Block | None = _block(model, config, path, row, len(listed), "structural")
        while block is not None and (problem := _impurity(model, block)):
            why = f"{block.path} {problem}"
            block = _inside(model, config, block)
        if block is not None:
            listed.append(replace(block, stream=None))  # a norm may follow the add or not
    return listed, why


def _impurity(model: nn.Module, block: Block) -> str:
    """What the module does beside a feed-forward block's work; "" if nothing."""
    module = _module(model, block.entry)
    if len(block.steps) > 1 or isinstance(module, StandIn):
        return ""
    inner = (part.block for part in module.modules() if isinstance(part, StandIn))
    if any(swap.family == "structural" for swap in inner):  # the block inside is swapped out
        return "holds a block"
    shapes = {part: shape for part in module.modules() if (shape := projection_shape(part))}
    return impurity(module, block.d_in, {part: shape[1] for part, shape in shapes.items()})


def _inside(model: nn.Module, config: Any, block: Block) -> Block | None:
    """The block inside a module that does more than one, such as cpmant's with norm and residual."""
    row = _look(_module(model, block.entry))
    if row is None:
        return None
    row = replace(row, stack=block.stack)
    return _block(model, config, block.entry, row, block.index, "structural")


def _from_pattern(model: nn.Module, wanted: re.Pattern[str]) -> list[Block]:
    config, _ = _text_part(model)
    listed: list[Block] = []
    for path, module in model.named_modules():
        if not wanted.fullmatch(path) or any(path.startswith(f"{b.path}.") for b in listed):
            continue
        shapes = _projections(module)
        if shapes and not isinstance(module, StandIn):
            d_in, d_out = shapes[0][0], shapes[-1][1]
        else:
            d_in, d_out, _ = _sizes(model, config, path, path)
        block = Block(
            len(listed), path, (path,), None, None, None, "", d_in, d_out, "pattern", copies=True
        )
        listed.append(block)
    return listed


def _text_part(model: nn.Module) -> tuple[Any, list[tuple[str, nn.Module]]]:
    """The config and the named modules of the text stack: a part of a composite model."""
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
        scale=float(getattr(config, row.scale)) if row.scale else 1.0,
    )


def _sizes(model: nn.Module, config: Any, entry: str, down: str) -> tuple[int, int, bool]:
    """(d_in, d_out, is there a last projection?), from the weights if possible, else from the config."""
    first, last = _find(model, entry), _find(model, down)
    if isinstance(first, StandIn):  # swapped out at the moment
        return first.block.d_in, first.block.d_out, first.block.down is not None
    inside = _projections(first) if first else []
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
    """A row of the table for a layer of an unknown family, if it has a block."""
    for name in WHOLE:
        ffn = _find(layer, name)
        if isinstance(ffn, StandIn):  # swapped out at the moment
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
        linear = hasattr(first, "linear_mlp")  # an export's LinearMLP: no hidden units
        if isinstance(first, StandIn) or linear or inner[0] == inner[1]:
            act = next((a for a in ACTIVATIONS if hasattr(layer, a)), ACTIVATIONS[0])
            return Family("", "+".join(pair), (pair[0], act, pair[1]), copies=True)
    return replace(SPLIT, copies=True) if all(_find(layer, s) for s in SPLIT.steps) else None


def _is_network(module: nn.Module) -> bool:
    """Has weights, is more than one projection, and needs nothing but x."""
    if projection_shape(module) or next(module.parameters(), None) is None:
        return False
    if isinstance(module, nn.ModuleList):  # mobilebert's, which runs its parts one by one
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) <= 1


def projection_shape(module: Any) -> tuple[int, int] | None:
    """(inputs, outputs) of a projection: Linear and its quantised kin, or the Conv1D of gpt2."""
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        if hasattr(module, inputs) and hasattr(module, outputs):
            return int(getattr(module, inputs)), int(getattr(module, outputs))
    return None


def parameter_count(module: nn.Module, without: Iterable[int] = ()) -> int:
    """Numbers that a module's weights stand for: shared ones once, packed ones as many as they encode.

    Parameters whose `id` is in `without` are left out.
    """
    kept: dict[int, int] = {}
    without = {*without, *tied_copies(module)}
    for part in module.modules():
        numbers, shape = dict(part.named_parameters(recurse=False)), projection_shape(part)
        size = math.prod(shape) if shape and not list(part.children()) else 0
        if size and all(p.numel() != size for p in numbers.values()):  # 4 bits, several in one
            kept[id(part)] = size
            numbers = {name: p for name, p in numbers.items() if name == "bias"}
        kept |= {id(p): p.numel() for p in numbers.values() if id(p) not in without}
    return sum(kept.values())


def _projections(module: nn.Module) -> list[tuple[int, int]]:
    """The shapes of a module's projections, in order."""
    return [shape for part in module.modules() if (shape := projection_shape(part))]


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
