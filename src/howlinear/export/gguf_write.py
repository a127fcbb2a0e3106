"""A Llama with widths of its own per block -> one GGUF file of architecture `deci`, for llama.cpp.

    widen(model, maps, GGUF)
    write_gguf(model, folder / "model.gguf", "q8_0", Source.of("model.gguf"), changed={"model.layers.3.mlp"})

llama.cpp's `deci` has a width and biases per layer, where its `llama` has one width. Matrices are stored in
the type asked for, vectors in float32. With the type `source`, tensors that did not change keep the bytes of
the source file; others get the type of the tensor that they replace, or q8_0 where it cannot be made here.
Metadata, tokenizer and chat template are copied from the source file. After writing, the model in memory has
the values that are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from howlinear.export.widths import check_llama
from howlinear.models import ggufs, loading
from howlinear.models.families import blocks
from howlinear.models.units import weight_of

ARCHITECTURE = "deci"
TYPES = ("f16", "bf16", "q8_0", "source")
FILE = "model.gguf"


class Field(NamedTuple):
    """One value of the metadata; `inner` is the type of an array's items."""

    value: Any
    kind: Any
    inner: Any = None


@dataclass(frozen=True)
class Source:
    """What the GGUF file of the original has: metadata by key, tensors by name."""

    path: Path
    fields: dict[str, Field] = field(repr=False)
    tensors: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, path: Path) -> Source:
        """Read a file; its header is checked first."""
        from gguf import GGUFReader

        ggufs.read_header(path)
        with ggufs.parsed_once():  # with plain arrays instead of numpy's slow memory maps
            import gguf

            reader = gguf.GGUFReader(path)
        assert isinstance(reader, GGUFReader)
        fields = {
            key: Field(entry.contents(), entry.types[0], entry.types[-1])
            for key, entry in reader.fields.items()
            if not key.startswith(("GGUF.", "split."))
            and key != "general.alignment"  # the writer's own
        }
        return cls(path, fields, {tensor.name: tensor for tensor in reader.tensors})

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"].value)


def source_file(name: str | Path | None) -> Path | None:
    """The GGUF file of a model that `loading.load` takes; None for a folder or a hub id."""
    path = loading.builtin_path() if name is None else Path(name).expanduser()
    return path if path.suffix == ".gguf" else None


def source_of(name: str | Path | None) -> Source:
    """The GGUF file of a model; refused where it comes from something else."""
    path = source_file(name)
    if path is None:
        raise ValueError(
            f'{name} is no .gguf file, from which `kind="gguf"` copies tokenizer and metadata: convert it '
            '(convert_hf_to_gguf.py of llama.cpp) and profile the file, or use `kind="stock"` and convert that'
        )
    return Source.of(path)


def why_not_deci(model: nn.Module, source: Source) -> str:
    """Why `deci`, which has a width for each layer, does not describe a model; empty if it does."""
    try:
        check_llama(model, "gguf")
    except ValueError as refusal:
        return str(refusal)
    config: Any = model.config
    scaled = config.rope_parameters.get("rope_type", "default") != "default"
    return (
        "its rotary positions are scaled" if scaled or "rope_freqs.weight" in source.tensors else ""
    )


# ---------------------------------------------------------------------------------- tensors


def write_gguf(
    model: Any, path: Path, kind: str, source: Source, changed: Collection[str] = ()
) -> None:
    """Write the file; the model then has the values that are stored.

    `changed` are the paths of the replaced blocks. O(parameters), one tensor at a time.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE, use_temp_file=True)
    for key, entry in metadata(model, kind, source).items():
        writer.add_key_value(key, entry.value, entry.kind, entry.inner)
    for name, tensor in stored_tensors(model):
        there, rows = gguf_name(name, len(blocks(model))), row_order(model, name)
        raw = None if name.startswith(tuple(f"{p}." for p in changed)) else there
        data, stored = encoded(tensor, there, kind, source, raw, rows)
        _keep_stored(name, tensor, data, stored, rows)
        writer.add_tensor(there, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_bytes(model: Any, kind: str, source: Source) -> int:
    """Bytes of all tensors of a model of which no block changed, in this type."""
    from gguf import GGML_QUANT_SIZES

    total = 0
    for name, tensor in stored_tensors(model):
        there = gguf_name(name, len(blocks(model)))
        block, size = GGML_QUANT_SIZES[stored_type(tensor, there, kind, source)]
        total += tensor.numel() // block * size
    return total


def stored_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint, tied ones once."""
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield name, tensor


def gguf_name(name: str, layers: int) -> str:
    """The name of a tensor in a GGUF file."""
    there = _names(layers).get_name(name, try_suffixes=(".weight", ".bias"))
    if there is None:
        raise ValueError(f"{name} has no name in a GGUF file")
    return str(there)


@functools.cache
def _names(layers: int) -> Any:
    from gguf import MODEL_ARCH, get_tensor_name_map

    return get_tensor_name_map(MODEL_ARCH.LLAMA, layers)


def row_order(model: Any, name: str) -> Tensor | None:
    """The order of the rows of queries and keys: llama.cpp rotates neighbours, transformers halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    setting = heads.get(name.split(".")[-2])
    if setting is None:
        return None
    rows = model.get_parameter(name).shape[0]
    return torch.arange(rows).view(getattr(model.config, setting), 2, -1).mT.flatten()


def stored_type(tensor: Tensor, there: str, kind: str, source: Source) -> Any:
    """The type that a tensor is stored in."""
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Type

    if tensor.ndim == 1:
        return Type.F32
    if kind != "source":
        wanted = Type[kind.upper()]
    elif there in source.tensors:
        wanted = source.tensors[there].tensor_type
    else:
        wanted = Type.Q8_0
    return Type.F16 if tensor.shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


def encoded(
    tensor: Tensor,
    there: str,
    kind: str,
    source: Source,
    raw: str | None,
    rows: Tensor | None = None,
) -> tuple[Any, Any]:
    """The bytes of a tensor and their type; those of the source for `raw`, a name there."""
    from gguf import GGMLQuantizationType as Type
    from gguf import quantize

    if kind == "source" and raw in source.tensors:
        original = source.tensors[raw]
        return np.array(original.data), original.tensor_type
    ordered = tensor.detach().float().cpu()
    values = (ordered if rows is None else ordered[rows]).contiguous().numpy()
    stored = stored_type(tensor, there, kind, source)
    try:
        return quantize(values, stored), stored
    except NotImplementedError:  # gguf reads more types than it makes
        return quantize(values, Type.Q8_0), Type.Q8_0


def _keep_stored(name: str, tensor: Tensor, data: Any, stored: Any, rows: Tensor | None) -> None:
    """Give the tensor in memory the values that the file has."""
    from gguf import dequantize

    values = torch.from_numpy(np.array(dequantize(data, stored), dtype=np.float32))
    if not bool(values.isfinite().all()):
        raise ValueError(f'{name} does not fit in {stored.name}: use `gguf_type="bf16"`')
    tensor.copy_(values if rows is None else values[rows.argsort()])


# --------------------------------------------------------------------------------- metadata


def metadata(model: Any, kind: str, source: Source) -> dict[str, Field]:
    """Those of the source under the new architecture's name; widths and heads as arrays."""
    from gguf import GGUFValueType

    before = f"{source.architecture}."
    fields = {}
    for key, entry in source.fields.items():
        key = f"{ARCHITECTURE}.{key.removeprefix(before)}" if key.startswith(before) else key
        fields[key] = entry
    del fields["general.architecture"]  # the writer's own
    layers = len(blocks(model))
    per_layer = {
        "feed_forward_length": widths(model),
        "attention.head_count": [model.config.num_attention_heads] * layers,
        "attention.head_count_kv": [model.config.num_key_value_heads] * layers,
    }
    for name, values in per_layer.items():
        array = GGUFValueType.ARRAY, GGUFValueType.UINT32
        fields[f"{ARCHITECTURE}.{name}"] = Field(values, *array)
    return fields | file_type(kind)


def file_type(kind: str) -> dict[str, Field]:
    """The field that names the type of most matrices; the source's own with `source`."""
    from gguf import GGUFValueType, LlamaFileType

    if kind == "source":
        return {}
    number = LlamaFileType[f"MOSTLY_{kind.upper()}"]
    return {"general.file_type": Field(int(number), GGUFValueType.UINT32)}


def widths(model: nn.Module) -> list[int]:
    """Hidden units of each block, in order."""
    return [weight_of(model.get_submodule(str(block.down))).shape[1] for block in blocks(model)]
