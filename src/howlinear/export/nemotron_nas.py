"""Models like Llama as `nemotron-nas` checkpoints, a format that has blocks of one matrix.

    notes = save(model, {block: affine}, folder)   # config.json, weights, the config's class
    read_back(folder)                              # a Llama built from that folder alone

The format describes each layer (`block_configs`): a replaced block has `replace_with_linear` and
the tensor `model.layers.N.mlp.linear_mlp.weight`, d x d and without bias, so only maps that were
fitted without an intercept can be written. Any other block states its width m as a multiple,
`ffn_mult`; readers compute int(2 ffn_mult d / 3) and round it up to 256, so m must be a multiple of
256. Heads are d / number of heads wide, and rotary settings have their old names, `rope_theta` and
`rope_scaling`. Attention and activation must be Llama's.

TensorRT-LLM reads linear blocks and takes the config's class from the folder
(`--trust_remote_code`); mlx-lm reads them after the tensor is renamed to `mlp.linear.weight`. vLLM
and llama.cpp read the format but not its linear blocks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export.folder import write_generation, write_json
from howlinear.export.hf import INSTEAD
from howlinear.export.linear_blocks import LinearMLP
from howlinear.export.weights import dtype_name, write_weights
from howlinear.linear.affine import Affine, Map, UnitMap
from howlinear.models.families import Block, blocks

MULTIPLE = 256  # readers round a width up to a multiple of this
KEPT = (  # settings of a Llama that mean the same in both formats
    *("attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size"),
    *("initializer_range", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
    *("pad_token_id", "rms_norm_eps", "tie_word_embeddings", "use_cache", "vocab_size"),
)

# Engines read the settings of a layer as attributes (`.ffn.no_op`); transformers writes them as JSON.
CONFIGURATION = '''"""The config of a nemotron-nas checkpoint: one entry of block_configs per layer."""

from transformers import PretrainedConfig


class Settings(dict):
    """A dict whose values are attributes too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), max_position_embeddings=2048, **settings):
        self.block_configs = [
            Settings({part: Settings(values) for part, values in layer.items()})
            for layer in block_configs
        ]
        self.max_position_embeddings = max_position_embeddings  # scaled rotary positions read it
        super().__init__(**settings)
'''


def save(
    model: nn.Module,
    maps: Mapping[Block, Map],
    folder: str | Path,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write the checkpoint, without a tokenizer, into a folder; return notes on what reads it."""
    dtype = dtype or next(model.parameters()).dtype
    config: Any = model.config
    _check_family(model)
    _check_maps(model, maps)
    described = {name: getattr(config, name) for name in KEPT} | {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "dtype": dtype_name(dtype),
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": None,  # these two are in block_configs
        "num_key_value_heads": None,
        "block_configs": [_block_config(config, block in maps) for block in blocks(model)],
        **_rotary(config),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(_tensors(model, config.tie_word_embeddings, maps), folder, dtype)
    (folder / "configuration_decilm.py").write_text(CONFIGURATION)
    write_json(folder / "config.json", described, sort_keys=True)
    write_generation(model, folder)
    return [
        f"{len(maps)} of {config.num_hidden_layers} blocks are linear: TensorRT-LLM reads them as they "
        "are, mlx-lm after mlp.linear_mlp is renamed to mlp.linear; vLLM and llama.cpp cannot run them"
    ]


def ffn_mult(width: int, d: int) -> float:
    """The multiple of 2 d / 3 from which all readers compute this width; some keep six decimals."""
    multiple = round(3 * width / (2 * d), 6)
    if (got := width_of(multiple, d)) != width:
        raise ValueError(
            f"a block of {width} hidden units cannot be written as nemotron-nas: readers round up "
            f"to a multiple of {MULTIPLE} and would make it {got}; {INSTEAD}"
        )
    return multiple


def width_of(multiple: float, d: int) -> int:
    """The width that readers of the format compute from `ffn_mult`."""
    return -(-int(2 * multiple * d / 3) // MULTIPLE) * MULTIPLE


def check_exportable(model: nn.Module) -> None:
    """Refuse a model that `save` would refuse with any maps, before hours of work.

    Widths are checked too, although they would not matter if every block were replaced.
    """
    _check_family(model)
    config: Any = model.config
    ffn_mult(config.intermediate_size, config.hidden_size)


def _check_family(model: nn.Module) -> None:
    """Refuse a model that differs from Llama in something that the format does not describe."""
    config: Any = model.config
    kind = config.model_type
    if type(model).__name__ not in ("LlamaForCausalLM", "MistralForCausalLM"):
        raise ValueError(
            f"{kind} cannot be written as nemotron-nas: it is no llama and no mistral that "
            f"predicts text; {INSTEAD}"
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
            raise ValueError(f"{kind} cannot be written as nemotron-nas: {reason}; {INSTEAD}")


def _check_maps(model: Any, maps: Mapping[Block, Map]) -> None:
    known = blocks(model)
    for block, fitted in maps.items():
        if block not in known:
            raise ValueError(f"{block} is no block of this {model.config.model_type}")
        part = "hidden units beside it" if isinstance(fitted, UnitMap) else "two factors"
        if isinstance(fitted, Affine):
            part = "a bias" if fitted.bias.any() else ""
        if part:
            raise ValueError(
                f"{block}: a linear block of nemotron-nas is one matrix, and this map has "
                f"{part}; fit whole matrices without intercept, or {INSTEAD}"
            )


def _block_config(config: Any, linear: bool) -> dict[str, Any]:
    attention = {
        "no_op": False,
        "replace_with_linear": False,
        "sparsify": None,
        "n_heads_in_group": config.num_attention_heads // config.num_key_value_heads,
        "window_length": None,
        "num_sink_tokens": None,
        "use_prefill_window_in_sink_attention": False,
        "unshifted_sink": False,
    }
    ffn = {
        "no_op": False,
        "replace_with_linear": linear,
        "sparsify": None,
        "ffn_mult": None if linear else ffn_mult(config.intermediate_size, config.hidden_size),
    }
    return {"attention": attention, "ffn": ffn}


def _rotary(config: Any) -> dict[str, Any]:
    """Rotary settings under their old names, the only ones that readers of this format know."""
    settings = dict(config.rope_parameters)
    theta = settings.pop("rope_theta")
    plain = settings.get("rope_type") == "default"
    return {"rope_theta": theta, "rope_scaling": None if plain else settings}


def _tensors(model: nn.Module, tied: bool, maps: Mapping[Block, Map]) -> dict[str, Tensor]:
    replaced = tuple(f"{block.entry}." for block in maps)
    state = {n: t for n, t in model.state_dict().items() if not n.startswith(replaced)}
    if tied:
        del state["lm_head.weight"]
    like = next(model.parameters())
    for block, fitted in maps.items():
        assert isinstance(fitted, Affine)
        state[f"{block.entry}.linear_mlp.weight"] = fitted.weight.to(like).contiguous()
    return state


# ------------------------------------------------------------------------------ reading it back


def read_back(folder: str | Path) -> nn.Module:
    """A stock Llama built from the folder alone, as an engine would, to verify an export."""
    from safetensors.torch import load_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    stored = json.loads((Path(folder) / "config.json").read_text())
    d, heads, layers = (stored[k] for k in ("hidden_size", "num_attention_heads", "block_configs"))
    (group,) = {layer["attention"]["n_heads_in_group"] for layer in layers}
    settings = {name: stored[name] for name in (*KEPT, "rope_theta", "rope_scaling", "dtype")}
    config = LlamaConfig(**settings, num_key_value_heads=heads // group, intermediate_size=1)
    model = LlamaForCausalLM(config)
    for place, layer in zip(model.model.layers, layers, strict=True):
        place.mlp = _feed_forward(config, layer["ffn"], d)
    state: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        state |= load_file(file)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    # assign: model.to(dtype) would also round the frequencies of rotary positions
    model.load_state_dict(state, strict=True, assign=True)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def _feed_forward(config: Any, ffn: Mapping[str, Any], d: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaMLP

    if ffn["replace_with_linear"]:
        layer = LinearMLP(d, d)
        layer.linear_mlp.bias = None
        return layer
    config = copy.copy(config)
    config.intermediate_size = width_of(ffn["ffn_mult"], d)
    return LlamaMLP(config)
