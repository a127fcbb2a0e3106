"""Models like Llama as `nemotron-nas` checkpoints, a format with a width for each block.

    widen(model, maps, NEMOTRON)        # maps as hidden units, and biases in all blocks
    save(model, folder)                 # config.json, weights, the config's class
    read_back(folder)                   # a Llama built from that folder alone

The format describes each layer (`block_configs`). A block states its width m twice: as
`intermediate_size`, and as a multiple `ffn_mult`, from which readers compute int(2 ffn_mult d / 3), rounded up
to 256. So m must be a multiple of 256. `mlp_bias` gives all blocks biases, which linear hidden units need.
Heads are d / number of heads wide, and rotary settings have their old names, `rope_theta` and
`rope_scaling`. Attention and activation must be Llama's.

vLLM reads widths and biases (its DeciLM layer is a Llama's) and takes the config's class from the folder
(`--trust-remote-code`). TensorRT-LLM and mlx-lm read widths; TensorRT-LLM reads no biases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.compression.targets import NO_LLAMA
from howlinear.export.folder import write_generation, write_json
from howlinear.export.weights import dtype_name, write_weights
from howlinear.export.widths import check_llama, feed_forward
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


def save(model: nn.Module, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the checkpoint of a model after `widen`, without a tokenizer, into a folder."""
    dtype = dtype or next(model.parameters()).dtype
    config: Any = model.config
    widths = [_width(model, block) for block in blocks(model)]
    described = {name: getattr(config, name) for name in KEPT} | {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "dtype": dtype_name(dtype),
        "attention_bias": False,
        "mlp_bias": True,
        "intermediate_size": None,  # these two are in block_configs
        "num_key_value_heads": None,
        "block_configs": [_block_config(config, width) for width in widths],
        **_rotary(config),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(_tensors(model, config.tie_word_embeddings), folder, dtype)
    (folder / "configuration_decilm.py").write_text(CONFIGURATION)
    write_json(folder / "config.json", described, sort_keys=True)
    write_generation(model, folder)


def ffn_mult(width: int, d: int) -> float:
    """The multiple of 2 d / 3 from which all readers compute this width; some keep six decimals."""
    multiple = round(3 * width / (2 * d), 6)
    if (got := width_of(multiple, d)) != width:
        raise ValueError(
            f"a block of {width} hidden units cannot be written as nemotron-nas: readers round up "
            f"to a multiple of {MULTIPLE} and would make it {got}; {NO_LLAMA}"
        )
    return multiple


def width_of(multiple: float, d: int) -> int:
    """The width that readers of the format compute from `ffn_mult`."""
    return -(-int(2 * multiple * d / 3) // MULTIPLE) * MULTIPLE


def check_exportable(model: nn.Module) -> None:
    """Refuse a model that `save` would refuse with any maps, before hours of work."""
    check_llama(model, "nemotron-nas")
    config: Any = model.config
    ffn_mult(config.intermediate_size, config.hidden_size)


def _width(model: nn.Module, block: Block) -> int:
    weight: Any = model.get_submodule(str(block.down)).weight
    return int(weight.shape[1])


def _block_config(config: Any, width: int) -> dict[str, Any]:
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
        "replace_with_linear": False,
        "sparsify": None,
        "intermediate_size": width,
        "ffn_mult": ffn_mult(width, config.hidden_size),
    }
    return {"attention": attention, "ffn": ffn}


def _rotary(config: Any) -> dict[str, Any]:
    """Rotary settings under their old names, the only ones that readers of this format know."""
    settings = dict(config.rope_parameters)
    theta = settings.pop("rope_theta")
    plain = settings.get("rope_type") == "default"
    return {"rope_theta": theta, "rope_scaling": None if plain else settings}


def _tensors(model: nn.Module, tied: bool) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    if tied:
        del state["lm_head.weight"]
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
        width = width_of(layer["ffn"]["ffn_mult"], d)
        if width != layer["ffn"]["intermediate_size"]:
            raise ValueError(f"{folder} states two widths of one block: {layer['ffn']}")
        place.mlp = feed_forward(model, width, biases=stored["mlp_bias"])
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
