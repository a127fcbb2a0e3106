"""Tiny random models of every family, and inputs for them.

    model = tiny.model("llama")                 # seeded, eval mode, float32, a second at most
    model(**tiny.inputs("llama"))               # two windows of 7 tokens, nothing padded
    model(**tiny.inputs("llama", "left"))       # the first window has its last 4 tokens only

One row of TINY per family or variant of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, SHORT = 50, 2, 7, 4


@dataclass(frozen=True)
class Tiny:
    """What to build: a model type, what its config says, the class, and how many blocks it has."""

    model_type: str
    settings: dict[str, Any]
    blocks: int = 2
    auto: str = "AutoModelForCausalLM"
    kind: str = "text"  # or "text-to-text", "image", "audio": which inputs it takes
    sides: tuple[str, ...] = ("right", "left")  # where padding may be
    positions: str = "position_ids"  # what must say where left-padded tokens are, if anything
    experts: tuple[int, ...] = ()  # blocks that are mixtures of experts


HF = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = HF | {"num_key_value_heads": 2}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4}
MOE = GQA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = HF | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
DEEPSEEK |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2}
DEEPSEEK |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
DEEPSEEK |= {"v_head_dim": 4}
MASKED = {"auto": "AutoModelForMaskedLM"}
GEMMA = GQA | {"head_dim": 8, "sliding_window": 4}
FALCON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = {"hidden_size": 16, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": 16, "max_position_embeddings": 32}
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
}
T5 |= {"decoder_start_token_id": 0}
SEQ2SEQ = {"blocks": 5, "auto": "AutoModelForSeq2SeqLM", "kind": "text-to-text", "positions": ""}
WHISPER = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40}
WHISPER |= {"decoder_ffn_dim": 32, "max_source_positions": 10, "max_target_positions": 16}
SIGLIP = HF | {"image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"}

TINY: dict[str, Tiny] = {
    "gpt2": Tiny("gpt2", GPT),
    "gpt_neo": Tiny(
        "gpt_neo",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gptj": Tiny("gptj", GPT | {"rotary_dim": 4}),
    "gpt_neox": Tiny("gpt_neox", HF | {"use_parallel_residual": True}),
    "gpt_neox-sequential": Tiny("gpt_neox", HF | {"use_parallel_residual": False}),
    "llama": Tiny("llama", GQA | {"num_hidden_layers": 3}, blocks=3),
    "llama-bias": Tiny("llama", GQA | {"mlp_bias": True}),
    "mistral": Tiny("mistral", GQA),
    "qwen2": Tiny("qwen2", GQA),
    "qwen3": Tiny("qwen3", GQA | {"head_dim": 8}),
    "gemma": Tiny("gemma", GQA | {"head_dim": 8}),
    "gemma2": Tiny("gemma2", GEMMA),
    "gemma3_text": Tiny("gemma3_text", GEMMA),
    "gemma3": Tiny(
        "gemma3",
        {
            "text_config": GEMMA | {"vocab_size": VOCABULARY, "model_type": "gemma3_text"},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
        },
        auto="AutoModelForImageTextToText",
    ),
    "phi": Tiny("phi", HF),
    "phi3": Tiny("phi3", GQA),
    "olmo2": Tiny("olmo2", GQA),
    "olmo": Tiny("olmo", GQA),
    "olmo3": Tiny("olmo3", GQA | {"sliding_window": 4}),
    "smollm3": Tiny("smollm3", GQA),
    "cohere": Tiny("cohere", GQA),
    "starcoder2": Tiny("starcoder2", GQA),
    "stablelm": Tiny("stablelm", GQA),
    "stablelm-parallel": Tiny("stablelm", GQA | {"use_parallel_residual": True}),
    "falcon": Tiny("falcon", FALCON),
    "falcon-sequential": Tiny("falcon", FALCON | {"parallel_attn": False, "alibi": True}),
    "falcon-new": Tiny("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": Tiny("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 4}, positions=""),
    "mpt": Tiny(
        "mpt", {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}, positions=""
    ),
    "opt": Tiny("opt", OPT, positions=""),
    "opt-350m": Tiny(
        "opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 8}, positions=""
    ),
    "bert": Tiny("bert", HF, **MASKED),
    "roberta": Tiny("roberta", HF | {"max_position_embeddings": 32}, positions="", **MASKED),
    "xlm-roberta": Tiny(
        "xlm-roberta", HF | {"max_position_embeddings": 32}, positions="", **MASKED
    ),
    "electra": Tiny("electra", HF | {"embedding_size": 16}, **MASKED),
    "distilbert": Tiny(
        "distilbert", {"dim": 16, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}, **MASKED
    ),
    "mpnet": Tiny(
        "mpnet",
        HF | {"max_position_embeddings": 32},
        auto="AutoModelForMaskedLM",
        sides=("right",),  # its positions skip tokens numbered 1, whatever the config says
    ),
    "t5": Tiny("t5", T5, **SEQ2SEQ),
    "mt5": Tiny("mt5", T5, **SEQ2SEQ),
    "t5-gated": Tiny("t5", T5 | {"feed_forward_proj": "gated-gelu"}, **SEQ2SEQ),
    "vit": Tiny(
        "vit",
        HF | {"image_size": 8, "patch_size": 4},
        auto="AutoModelForImageClassification",
        kind="image",
        sides=(),
    ),
    "whisper": Tiny(
        "whisper",
        WHISPER,
        blocks=5,
        auto="AutoModelForSpeechSeq2Seq",
        kind="audio",
        positions="decoder_position_ids",
    ),
    "mixtral": Tiny("mixtral", GQA | {"num_local_experts": 4}, experts=(0, 1)),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        MOE | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
        experts=(1,),
    ),
    "qwen3_moe": Tiny("qwen3_moe", MOE | {"head_dim": 8}, experts=(0, 1)),
    "granitemoe": Tiny(
        "granitemoe", GQA | {"num_local_experts": 4, "residual_multiplier": 0.22}, experts=(0, 1)
    ),
    "deepseek_v3": Tiny("deepseek_v3", DEEPSEEK, blocks=3, experts=(1, 2)),
    "olmoe": Tiny("olmoe", GQA | {"num_experts": 4, "num_experts_per_tok": 2}, experts=(0, 1)),
}


def model(name: str, seed: int = 0, **settings: Any) -> nn.Module:
    """The model of that row, weights large enough that every block and every norm matters."""
    import transformers

    row = TINY[name]
    special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    special = {} if row.kind == "image" or row.model_type == "gemma3" else special
    config = transformers.AutoConfig.for_model(row.model_type, **special | row.settings | settings)
    torch.manual_seed(seed)
    made: nn.Module = getattr(transformers, row.auto).from_config(config).eval()
    with torch.no_grad():
        for path, parameter in made.named_parameters():
            scale = 0.2 if "norm" in path.lower() or "ln_" in path else 0.3
            parameter.add_(scale * torch.randn(parameter.shape))
    return made


def inputs(name: str, padding: str = "", seed: int = 1) -> dict[str, Tensor]:
    """A batch of two windows; `padding` is "", "right" or "left", and shortens the first window."""
    row, generator = TINY[name], torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY - 1, (2, BATCH, LENGTH), generator=generator)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if padding:
        mask[0] = torch.arange(LENGTH) < SHORT
        mask = mask if padding == "right" else mask.flip(1)
    ids = ids * mask
    prompt = {"input_ids": ids[0], "attention_mask": mask}
    answer = {"decoder_input_ids": ids[1], "decoder_attention_mask": mask}
    image = {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator)}
    audio = {"input_features": torch.randn(BATCH, 8, 20, generator=generator)}
    if padding == "left" and row.positions:
        where = {row.positions: (mask.cumsum(1) - 1).clamp(min=0)}
        prompt, answer = prompt | where, answer | where
    return {
        "text": prompt,
        "text-to-text": prompt | answer,
        "image": image,
        "audio": audio | answer,
    }[row.kind]


def alone(batch: dict[str, Tensor], window: int) -> dict[str, Tensor]:
    """One window of a batch by itself, its padding cut off: what a padded run should agree with."""
    masks = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
    one = {key: value[window : window + 1] for key, value in batch.items()}
    cut = {key: value[:, one[masks[key]][0] != 0] for key, value in one.items() if key in masks}
    rest = {key: value for key, value in one.items() if "mask" not in key and "pos" not in key}
    return rest | cut


def change_weights(folder):
    """Other weights under the same path."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: 2 * t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
