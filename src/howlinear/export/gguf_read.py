"""Read a GGUF file of this package back, and check it against the model that was written.

model = read_back("out/model.gguf")               # a Llama built from the bytes of the file alone
check_file(path, written, source, inputs)         # ValueError if anything differs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from howlinear.export.gguf_family import read_family
from howlinear.export.gguf_write import ARCHITECTURE, Source, gguf_name, row_order, stored_tensors
from howlinear.export.widths import feed_forward


def read_back(path: str | Path) -> nn.Module:
    """A model in float32 built from the file alone: here for `deci`, by transformers for others."""
    from transformers import LlamaForCausalLM

    file = Source.of(Path(path))
    if file.architecture != ARCHITECTURE:
        return read_family(Path(path))
    settings = {key.removeprefix(f"{ARCHITECTURE}."): f.value for key, f in file.fields.items()}
    model: Any = LlamaForCausalLM(_config(settings, file))
    for i, width in enumerate(settings["feed_forward_length"]):
        if width != file.tensors[f"blk.{i}.ffn_up.weight"].shape[-1]:
            raise ValueError(f"{path} states a width of {width} that block {i} does not have")
        made = feed_forward(model, width, biases=True)
        for name, part in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
            if f"blk.{i}.ffn_{name}.bias" not in file.tensors:
                made.get_submodule(part).bias = None  # type: ignore[assignment]
        model.model.layers[i].mlp = made
    _fill(model, file)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def _config(settings: Mapping[str, Any], file: Source) -> Any:
    from transformers import LlamaConfig

    heads, groups = (settings[f"attention.head_count{end}"] for end in ("", "_kv"))
    if len({*heads}) > 1 or len({*groups}) > 1:
        raise ValueError(f"{file.path} has other heads in other layers")
    return LlamaConfig(
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=settings["embedding_length"],
        intermediate_size=32,  # each block has its own
        num_hidden_layers=settings["block_count"],
        num_attention_heads=heads[0],
        num_key_value_heads=groups[0],
        max_position_embeddings=settings["context_length"],
        rms_norm_eps=settings["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": settings.get("rope.freq_base", 1e4)},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=settings.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=settings.get("tokenizer.ggml.eos_token_id"),
    )


def _fill(model: Any, file: Source) -> None:
    from gguf import dequantize

    left = dict(file.tensors)
    with torch.no_grad():
        for name, tensor in stored_tensors(model):
            there, rows = gguf_name(name, model.config.num_hidden_layers), row_order(model, name)
            if there not in left:
                raise ValueError(f"{file.path} has no tensor {there}")
            entry = left.pop(there)
            values = np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32)
            read = torch.from_numpy(values)
            if read.shape != tensor.shape:
                raise ValueError(f"{file.path}: {there} is {tuple(read.shape)}, not {tensor.shape}")
            tensor.copy_(read if rows is None else read[rows.argsort()])
    if left:
        raise ValueError(f"{file.path} has the unknown tensor {next(iter(left))}")


def check_file(
    path: Path, written: nn.Module, source: Source, inputs: Mapping[str, Tensor]
) -> None:
    """Compare a file with the model that was written, after rounding: every bit, metadata, outputs."""
    read = read_back(path)
    want, got = dict(stored_tensors(written)), dict(stored_tensors(read))
    wrong = want.keys() ^ got.keys()
    wrong |= {n for n in want.keys() & got.keys() if not torch.equal(want[n].cpu(), got[n])}
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} weights are not what the model has, first {min(wrong)}"
        )
    _check_metadata(path, source)
    with torch.no_grad():
        outputs = [model(**inputs).logits for model in (written, read)]
    apart = float((outputs[0] - outputs[1]).abs().max())
    if not apart <= 1e-4 * float(outputs[0].abs().max()):
        raise ValueError(f"{path} gives other outputs when read: {apart:.3g} apart")


def _check_metadata(path: Path, source: Source) -> None:
    """Tokenizer, chat template and description must be those of the source."""
    fields = Source.of(path).fields
    for key, entry in source.fields.items():
        same = key.startswith(("tokenizer.", "general."))
        if key in ("general.architecture", "general.file_type") or not same:
            continue
        if key not in fields or fields[key] != entry:
            raise ValueError(f"{path} has another {key} than {source.path.name}")
