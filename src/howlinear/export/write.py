"""A compression -> a checkpoint folder, measured as it is stored and checked by reloading it.

    check_free("out")                                   # before hours of work
    check_exportable(model, "hf")
    result = compress_model(model, ...)
    write_export(model, tokenizer, result, "out", "hf", "org/name", report)
    result.exported["perplexity"]

`hf` holds every map of every family and includes a file of code. `stock`, `nemotron-nas` and `gguf` are for engines
that run no code of a checkpoint: there maps are hidden units of stock blocks. The folder has the weights in the
dtype of their source (a GGUF file in the type asked for), the tokenizer, a model card, `plan.json` and
`compress.json`. The model in memory is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.compression.compress import Compression
from howlinear.compression.targets import GGUF, NEMOTRON, STOCK
from howlinear.export import gguf_family, gguf_write, hf, nemotron_nas, stock
from howlinear.export.card import card, measured_table
from howlinear.export.engines import engine_notes
from howlinear.export.folder import add_files, check_free, new_folder, origin
from howlinear.export.gguf_read import check_file
from howlinear.export.install import install_maps
from howlinear.export.reload import verify
from howlinear.export.weights import dtype_name, file_bytes, round_weights, stored_as, tensor_bytes
from howlinear.export.widths import widen
from howlinear.linear.affine import Map
from howlinear.losses.perplexity import Comparison, text_loss
from howlinear.models.families import Block, blocks, parameter_count
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.loading import quiet
from howlinear.models.offload import is_offloaded
from howlinear.records import files

__all__ = ["check_exportable", "check_free", "plan_target", "write_export"]

VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32
WINDOWS, LENGTH = 2, 32  # of the text on which the reloaded model is compared
FROM_DISK = "weights on disk: tensors and outputs were compared, generated text was not"


def check_exportable(model: nn.Module, kind: str, source: str | Path | None = None) -> None:
    """Refuse, before any work, a model that this kind of export cannot hold."""
    if kind != "hf" and is_offloaded(model):
        raise ValueError(
            f'{kind} needs all weights in memory: use `kind="hf"`, or drop `layerwise` and `device_map`'
        )
    if kind == "stock":
        stock.check_exportable(model)
    elif kind == "gguf":
        file = gguf_write.source_of(source)
        if gguf_write.why_not_deci(model, file):
            gguf_family.check_family(model, file)
    elif kind == "nemotron-nas":
        nemotron_nas.check_exportable(model)
    else:
        hf.check_exportable(model)


def engine_limits(model: Any, kind: str) -> list[str]:
    """What an engine that this kind is for cannot run of the model, and what to use there."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if kind not in ("stock", "nemotron-nas") or not heads:
        return []
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size in VLLM_CPU_HEADS:
        return []
    return [f"vLLM on CPUs has no attention for heads of {size}; llama.cpp runs a gguf export"]


def plan_target(model: nn.Module, kind: str, source: str | Path | None = None) -> str:
    """What a plan counts for (`CompressSettings.target`): GGUF files of most families have one width."""
    if kind == "gguf" and gguf_write.why_not_deci(model, gguf_write.source_of(source)):
        return STOCK
    return kind


def write_export(
    model: Any,
    tokenizer: Any,
    result: Compression,
    out: str | Path,
    kind: str,
    source: str | Path | None,
    report: WindowsLike,
    gguf_type: str = "f16",
) -> None:
    """Write the compressed model to `out`, or nothing at all; fill `result.exported`.

    `source` is the argument of `models.loading.load`, `report` the windows (n, length) on which
    `result.change` was measured. The rounded model is measured on them again.
    """
    total = len(blocks(model))
    with quiet(), new_folder(out) as folder:
        if kind == "gguf":
            written, stored = _gguf(model, result.maps, folder, gguf_type, source)
        else:
            written, stored = _checkpoint(kind, model, result, folder)
        change = _measured(written, result.change, report)
        stored["notes"] += _checked(folder, written, _inputs(written, report), kind, source)
        exported = {"kind": kind, "folder": Path(out).name, "bytes": file_bytes(folder), **stored}
        exported |= {"parameters": parameter_count(written), **_perplexity(change)}
        facts, tokenizer = origin(source), None if kind == "gguf" else tokenizer
        readme = card(
            kind,
            facts,
            auto=hf.auto_class(written),
            count=len(result.maps),
            total=total,
            table=measured_table(result, exported, change),
            command=str(result.about.get("command", "howlinear compress")),
            has_tokenizer=tokenizer is not None,
        )
        add_files(folder, facts, tokenizer, {"README.md": readme, **_records(result, exported)})
    result.exported.update(exported)


def _checked(
    folder: Path, written: Any, inputs: dict[str, Tensor], kind: str, source: str | Path | None
) -> list[str]:
    """Read what was written, and compare it with the model in memory; notes on engines that ran it."""
    path = folder / gguf_write.FILE
    if kind == "gguf" and gguf_write.Source.of(path).architecture == gguf_write.ARCHITECTURE:
        check_file(path, written, gguf_write.source_of(source), inputs)
    elif kind != "gguf":  # `_gguf` has checked a file of another architecture
        verify(folder, written, inputs, kind)
    return engine_notes(folder, kind, written, inputs["input_ids"])


def _gguf(
    model: Any, maps: Mapping[Block, Map], folder: Path, kind: str, name: str | Path | None
) -> tuple[Any, dict[str, Any]]:
    """Write the file; the model that it describes, and facts for `exported`."""
    model, source, path = model.float(), gguf_write.source_of(name), folder / gguf_write.FILE
    if gguf_write.why_not_deci(model, source):
        small = stock.with_one_width(model, maps)
        before = gguf_family.source_bytes(kind, source)
        gguf_family.write_family(small, path, kind, source)
        gguf_family.check_family_file(path, small, source)
        written: Any = gguf_family.read_family(path)
        notes = [f"architecture {source.architecture}, {_width_note(written)}"]
    else:
        before = gguf_write.tensor_bytes(model, kind, source)
        widen(model, maps, GGUF)
        gguf_write.write_gguf(model, path, kind, source, [block.entry for block in maps])
        written, notes = model, [f"architecture deci, {_widths_note(model)}"]
    stored = gguf_write.Source.of(path).tensors.values()
    return written, {
        "dtype": kind,
        "tensor_bytes": sum(int(tensor.n_bytes) for tensor in stored),
        "bytes_before": before,
        "notes": notes,
    }


def _checkpoint(
    kind: str, model: Any, result: Compression, folder: Path
) -> tuple[Any, dict[str, Any]]:
    """Write safetensors and their config; the model that they describe, and facts for `exported`."""
    dtype = getattr(model, "stored_dtype", torch.float32)
    limits = engine_limits(model, kind)
    written, notes = _fill(kind, model.float(), result.maps, folder, dtype)
    return written, {
        "dtype": dtype_name(dtype),
        "tensor_bytes": tensor_bytes(folder),
        "bytes_before": result.parameters * dtype.itemsize,
        "notes": notes + limits,
    }


def _fill(
    kind: str, model: Any, maps: Mapping[Block, Map], folder: Path, dtype: torch.dtype
) -> tuple[Any, list[str]]:
    """Write the weights, config and code; the model that they describe, in float32, and notes for its user."""
    if kind == "stock":
        small = stock.with_one_width(model, maps)
        round_weights(small, dtype)
        with stored_as(small, dtype):
            stock.save(small, folder)
        return small, [_width_note(small)]
    if kind == "hf":
        hf.check_exportable(model)
        install_maps(model, maps)
        round_weights(model, dtype)
        hf.write(model, folder, dtype)
        return model, [FROM_DISK] if is_offloaded(model) else []
    nemotron_nas.check_exportable(model)
    widen(model, maps, NEMOTRON)
    round_weights(model, dtype)
    nemotron_nas.save(model, folder, dtype)
    return model, [_widths_note(model)]


def _width_note(model: nn.Module) -> str:
    return f"hidden units of each block: {gguf_write.widths(model)[0]}"


def _widths_note(model: nn.Module) -> str:
    widths = sorted(gguf_write.widths(model))
    return (
        f"hidden units of blocks: from {widths[0]} to {widths[-1]}, one width for each block; linear maps "
        "are hidden units with a constant gate"
    )


def _measured(
    model: nn.Module, change: Comparison | None, report: WindowsLike
) -> Comparison | None:
    """The change with the loss of the rounded model; KL and agreement stay those before rounding."""
    if change is None:
        return None
    loss = text_loss(model, report, change.protocol)
    if not torch.equal(loss.counts, change.counts):
        raise ValueError("the windows to report on are not those that the change was measured on")
    return replace(change, nll_changed=loss.sums)


def _perplexity(change: Comparison | None) -> dict[str, float | None]:
    names = ("perplexity", "perplexity_se", "delta_ppl", "delta_ppl_se")
    if change is None:
        return dict.fromkeys(names)
    after = change.changed
    values = (after.perplexity, after.perplexity_se, change.delta_ppl, change.delta_ppl_se)
    return dict(zip(names, values, strict=True))


def _records(result: Compression, exported: Mapping[str, Any]) -> dict[str, str]:
    compressed = replace(result, exported=dict(exported)).to_dict()
    records = {"plan.json": result.plan_dict(), "compress.json": compressed}
    return {name: files.dumps(data) + "\n" for name, data in records.items()}


def _inputs(model: Any, report: WindowsLike) -> dict[str, Tensor]:
    first = next(as_windows(report).batches(WINDOWS))
    ids = first.inputs["input_ids"][:WINDOWS, :LENGTH]
    inputs = {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inputs
