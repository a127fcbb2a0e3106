"""A compression -> a checkpoint folder, measured as it is stored and checked by reloading it.

    check_free("out")                                   # before hours of work
    check_exportable(model, "hf")
    result = compress_model(model, ...)
    write_export(model, tokenizer, result, "out", "hf", "org/name", report)
    result.exported["perplexity"]

`hf` holds every map of every family and includes a file of code; `narrow` and `nemotron-nas` need no
code and hold fewer kinds of maps. The folder has the weights in the dtype of their source, the
tokenizer, a model card, `plan.json` and `compress.json`. The model in memory is changed.
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
from howlinear.export import hf, narrow, nemotron_nas
from howlinear.export.card import card, measured_table
from howlinear.export.folder import add_files, check_free, new_folder, origin
from howlinear.export.install import install_maps
from howlinear.export.reload import verify
from howlinear.export.weights import dtype_name, round_weights, stored_as, weight_files
from howlinear.linear.affine import Map
from howlinear.losses.perplexity import Comparison, text_loss
from howlinear.models.families import Block, blocks
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.loading import quiet
from howlinear.records import files

__all__ = ["check_exportable", "check_free", "write_export"]

WINDOWS, LENGTH = 2, 32  # of the text on which the reloaded model is compared


def check_exportable(model: nn.Module, kind: str, add_biases: bool = False) -> None:
    """Refuse, before any work, a model that this kind of export cannot hold."""
    if kind == "narrow":
        narrow.check_exportable(model, add_biases=add_biases)
    elif kind == "nemotron-nas":
        nemotron_nas.check_exportable(model)
    else:
        hf.check_exportable(model)


def write_export(
    model: Any,
    tokenizer: Any,
    result: Compression,
    out: str | Path,
    kind: str,
    source: str | Path | None,
    report: WindowsLike,
    add_biases: bool = False,
) -> None:
    """Write the compressed model to `out`, or nothing at all; fill `result.exported`.

    `source` is the argument of `models.loading.load`, `report` the windows (n, length) on which
    `result.change` was measured. The rounded model is measured on them again.
    """
    dtype, total = getattr(model, "stored_dtype", torch.float32), len(blocks(model))
    with quiet(), new_folder(out) as folder:
        written, notes = _fill(kind, model.float(), result.maps, folder, dtype, add_biases)
        change = _measured(written, result.change, report)
        exported = {
            "kind": kind,
            "folder": Path(out).name,
            **_stored(written, folder, dtype),
            **_perplexity(change),
            "notes": notes,
        }
        facts = origin(source)
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
        verify(folder, written, _inputs(written, report), kind)
    result.exported.update(exported)


def _stored(model: nn.Module, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The dtype and number of parameters, and the bytes of the weights on disk."""
    return {
        "dtype": dtype_name(dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(path.stat().st_size for path in weight_files(folder)),
    }


def _fill(
    kind: str,
    model: Any,
    maps: Mapping[Block, Map],
    folder: Path,
    dtype: torch.dtype,
    add_biases: bool,
) -> tuple[Any, list[str]]:
    """Write the weights, config and code; the model that they describe, in float32, and notes for its user."""
    if kind == "narrow":
        small, notes = narrow.narrowed(model, maps, add_biases=add_biases)
        round_weights(small, dtype)
        with stored_as(small, dtype):
            narrow.save(small, folder)
        return small, notes
    if kind == "hf":
        hf.check_exportable(model)
        install_maps(model, maps)
        round_weights(model, dtype)
        hf.write(model, folder, dtype)
        return model, []
    like = next(model.parameters()).detach().new_empty(0, dtype=dtype)
    rounded = {block: fitted.to(like) for block, fitted in maps.items()}
    notes = nemotron_nas.save(model, rounded, folder, dtype)  # first: it refuses some maps
    round_weights(model, dtype)
    install_maps(model, rounded)
    for block in maps:
        model.get_submodule(block.entry).linear_mlp.bias = None  # zero, and not in the folder
    return model, notes


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
