"""A Llama whose blocks have widths of their own: what `gguf` and `nemotron-nas` store.

    check_llama(model, "gguf")                        # before hours of work
    widen(model, {block: unit_map}, GGUF)             # in place: each map as r + k gated units

A replaced block becomes a stock gated block with biases (`stock_units`). Its width r + k is rounded up with
zero units to a multiple that the format's readers need.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from howlinear.compression.targets import NO_LLAMA, Format
from howlinear.export.stock_units import Units, gated_units
from howlinear.linear.affine import Map
from howlinear.models.families import Block, blocks


def widen(model: nn.Module, maps: Mapping[Block, Map], form: Format) -> None:
    """Replace blocks by stock blocks of the format, in place; they compute the same as the maps."""
    _check_maps(model, maps)
    for block in blocks(model):
        place = model.get_submodule(block.entry)
        if block in maps:
            units = gated_units(maps[block], next(place.parameters()))
            _install(model, block, units.padded(form.width(len(units), 0)))
        elif form.every_bias:
            for linear in place.children():
                if isinstance(linear, nn.Linear):
                    none = linear.weight.new_zeros(linear.out_features)
                    linear.bias = nn.Parameter(none, requires_grad=False)
    if not form.every_bias:
        _drop_zero_biases(model, maps)


def feed_forward(model: Any, width: int, biases: bool) -> nn.Module:
    """An empty feed-forward block of a Llama with another width."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = copy.copy(model.config)
    config.intermediate_size, config.mlp_bias = width, biases
    made: nn.Module = LlamaMLP(config)
    return made.requires_grad_(False).eval()


def _install(model: nn.Module, block: Block, units: Units) -> None:
    made: Any = feed_forward(model, len(units), biases=True).to(units.writes)
    gate, up = units.reads
    stored = {"gate_proj": gate, "up_proj": up, "down_proj": (units.writes, units.bias)}
    with torch.no_grad():
        for name, (weight, bias) in stored.items():
            made.get_submodule(name).weight.copy_(weight)
            made.get_submodule(name).bias.copy_(bias)
    owner, _, name = block.entry.rpartition(".")
    setattr(model.get_submodule(owner), name, made)


def _drop_zero_biases(model: nn.Module, maps: Mapping[Block, Map]) -> None:
    for block in maps:
        for linear in model.get_submodule(block.entry).children():
            if isinstance(linear, nn.Linear) and not bool(linear.bias.any()):
                linear.bias = None  # type: ignore[assignment]


# -------------------------------------------------------------------------------- refusals


def check_llama(model: nn.Module, kind: str) -> None:
    """Refuse a model that differs from Llama in something that these formats do not describe."""
    config: Any = model.config
    family = config.model_type
    if type(model).__name__ not in ("LlamaForCausalLM", "MistralForCausalLM"):
        raise ValueError(
            f"{family} cannot be written as {kind}: it is no llama and no mistral that "
            f"predicts text; {NO_LLAMA}"
        )
    d, heads = config.hidden_size, config.num_attention_heads
    wrong = {
        "it is quantised": bool(getattr(config, "quantization_config", None)),
        "its attention has a sliding window": getattr(config, "sliding_window", None) is not None,
        "it rotates a part of each head only": (
            config.rope_parameters.get("partial_rotary_factor", 1) != 1
        ),
        "its attention has biases": getattr(config, "attention_bias", False),
        "its feed-forward blocks have biases": getattr(config, "mlp_bias", False),
        f"its activation is {config.hidden_act}, not silu": config.hidden_act != "silu",
        f"its {heads} heads are not {d} / {heads} wide": (
            (getattr(config, "head_dim", None) or d // heads) * heads != d
        ),
    }
    for reason, holds in wrong.items():
        if holds:
            raise ValueError(f"{family} cannot be written as {kind}: {reason}; {NO_LLAMA}")


def _check_maps(model: Any, maps: Mapping[Block, Map]) -> None:
    known = blocks(model)
    for block, fitted in maps.items():
        if block not in known:
            raise ValueError(f"{block} is no block of this {model.config.model_type}")
        if (fitted.d_in, fitted.d_out) != (block.d_in, block.d_out):
            raise ValueError(
                f"{block} goes from {block.d_in} to {block.d_out} features, its map from "
                f"{fitted.d_in} to {fitted.d_out}"
            )
