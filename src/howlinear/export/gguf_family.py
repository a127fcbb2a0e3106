"""A model of one width -> a GGUF file of its family's own architecture: a copy of the source with narrower blocks.

    check_family(model, source)                           # before hours of work
    small = with_one_width(model, maps)
    write_family(small, folder / "model.gguf", "q8_0", source)
    read_family(folder / "model.gguf")                    # by transformers

llama.cpp's architectures have one width for all layers, except `deci` (`gguf_write`). So a family that `deci` does
not describe (qwen2, qwen3, gemma3, a Llama with scaled rotary positions) keeps its architecture. Metadata and all
tensors are the source's, but for the width and the projections of the blocks. Names are those of the `gguf`
package; that a tensor of the source is the model's projection, neither permuted nor scaled, is checked by value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from howlinear.export.gguf_write import Field, Source, encoded, file_type, stored_type
from howlinear.export.stock import check_exportable, projections
from howlinear.models import ggufs
from howlinear.models.families import Block, blocks
from howlinear.models.units import weight_of

INSTEAD = 'use `kind="stock"`'


def check_family(model: nn.Module, source: Source) -> None:
    """Refuse a model whose file cannot be written again with narrower blocks."""
    check_exportable(model)
    every = blocks(model)
    for block in {every[0], every[-1]}:
        for there, tensor in _projections(model, block, source).items():
            stored = torch.from_numpy(_values(source.tensors[there])).to(tensor)
            if stored.shape != tensor.shape or not torch.equal(stored, tensor):
                raise ValueError(
                    f"{source.path.name}: {there} is not the projection of {block} as it is: {INSTEAD}"
                )


def write_family(small: nn.Module, path: Path, kind: str, source: Source) -> None:
    """Write the file. O(parameters), one tensor at a time."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, source.architecture, use_temp_file=True)
    for key, entry in _metadata(small, kind, source).items():
        writer.add_key_value(key, entry.value, entry.kind, entry.inner)
    changed = _changed(small, source)
    for there, original in source.tensors.items():
        raw = None if there in changed else there
        tensor = changed[there] if raw is None else torch.from_numpy(_values(original))
        data, stored = encoded(tensor, there, kind, source, raw)
        writer.add_tensor(there, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def source_bytes(kind: str, source: Source) -> int:
    """Bytes of all tensors of the source in this type."""
    from gguf import GGML_QUANT_SIZES

    total = 0
    for there, original in source.tensors.items():
        shape = tuple(int(n) for n in reversed(original.shape))
        block, size = GGML_QUANT_SIZES[
            stored_type(torch.empty(shape, device="meta"), there, kind, source)
        ]
        total += int(original.n_elements) // block * size
    return total


def read_family(path: Path) -> nn.Module:
    """The model in float32, read from the file by transformers."""
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer transformers may keep weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with ggufs.parsed_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
    ggufs.forget_quantization(model)
    read: nn.Module = model.requires_grad_(False).eval()
    return read


def check_family_file(path: Path, small: nn.Module, source: Source) -> None:
    """Compare a file with the model that was written: projections bit for bit, the rest with the source.

    Types round by at most 1/127 of a tensor's largest value (q8_0).
    """
    from gguf import quantize

    file, changed = Source.of(path), _changed(small, source)
    if file.tensors.keys() != source.tensors.keys():
        raise ValueError(f"{path} has other tensors than {source.path.name}")
    for there, entry in file.tensors.items():
        got = _values(entry)
        if there in changed:
            values = changed[there].float().cpu().contiguous().numpy()
            same = np.array_equal(np.array(entry.data), quantize(values, entry.tensor_type))
        else:
            want = _values(source.tensors[there])
            same = got.shape == want.shape and bool(
                np.abs(got - want).max(initial=0) <= np.abs(want).max(initial=0) / 127
            )
        if not same:
            raise ValueError(f"{path}: {there} is not what the model has")
        if not np.isfinite(got).all():
            stored = entry.tensor_type.name
            raise ValueError(f'{there} does not fit in {stored}: use `gguf_type="bf16"`')


def _changed(small: nn.Module, source: Source) -> dict[str, Tensor]:
    """All projections of the blocks by their names in the file."""
    tensors: dict[str, Tensor] = {}
    for block in blocks(small):
        tensors |= _projections(small, block, source)
    return tensors


def _projections(model: nn.Module, block: Block, source: Source) -> dict[str, Tensor]:
    """Weights (outputs, inputs) and biases of a block by their names in the file."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == source.architecture)
    names = get_tensor_name_map(arch, len(blocks(model)))
    tensors = {}
    for path in (*(p for p, _ in projections(model, block)), str(block.down)):
        module = model.get_submodule(path)
        there = names.get_name(path)
        if f"{there}.weight" not in source.tensors:
            raise ValueError(f"{source.path.name} has no tensor for {path}: {INSTEAD}")
        tensors[f"{there}.weight"] = weight_of(module).detach()
        bias: Any = getattr(module, "bias", None)
        if bias is not None:
            tensors[f"{there}.bias"] = bias.detach()
    return tensors


def _values(entry: Any) -> Any:
    """A tensor of a file as an array of float32."""
    from gguf import dequantize

    return np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32)


def _metadata(small: nn.Module, kind: str, source: Source) -> dict[str, Field]:
    """The source's, with the new width."""
    from gguf import GGUFValueType

    fields = {key: entry for key, entry in source.fields.items() if key != "general.architecture"}
    key = f"{source.architecture}.feed_forward_length"
    (width,) = {weight_of(small.get_submodule(str(b.down))).shape[1] for b in blocks(small)}
    entry = fields[key]
    value = [width] * len(entry.value) if entry.kind == GGUFValueType.ARRAY else width
    fields[key] = entry._replace(value=value)
    return fields | file_type(kind)
