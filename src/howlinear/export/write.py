"""A compression -> a folder that loads, measured as it is stored and checked by loading it.

    check_free("out")                                   # before hours of work
    check_exportable(model, "hf")
    result = compress_model(model, ...)
    write_export(model, tokenizer, result, "out", "hf", "org/name", report)
    result.exported["perplexity"]

`hf` holds every map of every family and brings a file of code; `narrow` and `nemotron-nas` load
where no code may be brought, and hold less: see `export`. The folder has the weights in the dtype
of their source, the tokenizer, a card, `plan.json` and `compress.json`. The model given is used up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.compression.compress import Compression
from howlinear.export import hf, narrow, nemotron_nas
from howlinear.export.folder import add_files, card, check_free, markdown, new_folder, origin
from howlinear.export.install import install_maps
from howlinear.export.linear_blocks import LinearMLP
from howlinear.export.reload import round_weights, stored_as, verify, weight_files
from howlinear.linear.affine import Map
from howlinear.losses.perplexity import Comparison, text_loss
from howlinear.models.families import Block, blocks
from howlinear.models.loading import quiet
from howlinear.records import files

__all__ = ["KINDS", "check_exportable", "check_free", "write_export"]

WINDOWS, LENGTH = 2, 32  # of text that the loaded model is tried on


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
    report: Tensor,
    add_biases: bool = False,
) -> None:
    """Write the compressed model to `out`, or nothing at all; `result.exported` then tells of it.

    `source` is what `models.load` was given, `report` the windows (n, length) that `result.change`
    was measured on. On them the model is measured again, rounded as it is stored.
    """
    dtype = getattr(model, "stored_dtype", torch.float32)
    total = len(blocks(model))
    with quiet(), new_folder(out) as folder:
        made, notes = KINDS[kind](model.float(), result.maps, folder, dtype, add_biases)
        change = _measured(made, result.change, report)
        exported = {
            "kind": kind,
            "folder": Path(out).name,
            "dtype": _name(dtype),
            "parameters": sum(p.numel() for p in made.parameters()),
            "bytes": sum(path.stat().st_size for path in weight_files(folder)),
            "perplexity": change and change.changed.perplexity,
            "perplexity_se": change and change.changed.perplexity_se,
            "delta_ppl": change and change.delta_ppl,
            "delta_ppl_se": change and change.delta_ppl_se,
            "notes": notes,
        }
        found = origin(source)
        readme = card(
            kind,
            found,
            auto=hf.auto_class(made),
            count=len(result.maps),
            total=total,
            table=_tables(result, exported, change),
            command=str(result.about.get("command", "howlinear compress")),
            has_tokenizer=tokenizer is not None,
        )
        texts = {
            "README.md": readme,
            "plan.json": files.dumps(result.plan_dict()) + "\n",
            "compress.json": files.dumps(result.to_dict() | {"exported": exported}) + "\n",
        }
        add_files(folder, found, tokenizer, texts)
        verify(folder, made, _inputs(made, report), kind)
    result.exported.update(exported)


# ------------------------------------------------------------------------------ three ways to write
# Each fills the folder and returns the model that is in it, in float32, and what to tell of it.


def _as_hf(
    model: Any, maps: Mapping[Block, Map], folder: Path, dtype: torch.dtype, add_biases: bool
) -> tuple[Any, list[str]]:
    hf.check_exportable(model)
    install_maps(model, maps)
    round_weights(model, dtype)
    hf.write(model, folder, dtype)
    return model, []


def _as_narrow(
    model: Any, maps: Mapping[Block, Map], folder: Path, dtype: torch.dtype, add_biases: bool
) -> tuple[Any, list[str]]:
    small, notes = narrow.narrowed(model, maps, add_biases=add_biases)
    round_weights(small, dtype)
    with stored_as(small, dtype):
        narrow.save(small, folder)
    return small, notes


def _as_nemotron_nas(
    model: Any, maps: Mapping[Block, Map], folder: Path, dtype: torch.dtype, add_biases: bool
) -> tuple[Any, list[str]]:
    nemotron_nas.checkpoint(model, maps)  # every refusal comes from here
    like = next(model.parameters()).detach().new_empty(0, dtype=dtype)
    rounded = {block: fitted.to(like) for block, fitted in maps.items()}
    round_weights(model, dtype)
    with stored_as(model, dtype):
        notes = nemotron_nas.save(model, rounded, folder)
    install_maps(model, rounded)
    for layer in model.modules():
        if isinstance(layer, LinearMLP):
            layer.linear_mlp.bias = None  # zero, and not in the folder
    return model, notes


Write = Callable[[Any, Mapping[Block, Map], Path, torch.dtype, bool], tuple[Any, list[str]]]
KINDS: dict[str, Write] = {"hf": _as_hf, "narrow": _as_narrow, "nemotron-nas": _as_nemotron_nas}


# ------------------------------------------------------------------------------------- measuring


def _measured(made: nn.Module, change: Comparison | None, report: Tensor) -> Comparison | None:
    """The change with the loss of what was written; KL and agreement stay those of the maps."""
    if change is None:
        return None
    loss = text_loss(made, report, change.protocol)
    if not torch.equal(loss.counts, change.counts):
        raise ValueError("the windows to report on are not those that the change was measured on")
    return replace(change, nll_changed=loss.sums)


def _inputs(model: Any, report: Tensor) -> dict[str, Tensor]:
    ids = report[:WINDOWS, :LENGTH]
    given = {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        given["attention_mask"] = torch.ones_like(ids)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return given


# ------------------------------------------------------------------------------------- the card


def _tables(result: Compression, exported: dict[str, Any], change: Comparison | None) -> str:
    """What was measured, and what became of the blocks, in markdown."""
    before, after, dtype = result.parameters, exported["parameters"], exported["dtype"]
    rest = result.feed_forward - (before - after)
    size = getattr(torch, dtype).itemsize / 1e6
    rows = [
        _row("parameters", f"{before:,}", f"{after:,}", f"{after / before - 1:+.1%}"),
        _row(
            "in feed-forward blocks",
            f"{result.feed_forward:,}",
            f"{rest:,}",
            f"{rest / result.feed_forward - 1:+.1%}",
        ),
        _row(f"MB in {dtype}", f"{before * size:,.1f}", f"{after * size:,.1f}", ""),
    ]
    told = []
    if change is not None:
        a, b = change.original, change.changed
        rows.insert(
            0,
            _row(
                "perplexity",
                f"{a.perplexity:.3f} ± {a.perplexity_se:.3f}",
                f"{b.perplexity:.3f} ± {b.perplexity_se:.3f}",
                f"{change.delta_ppl:+.3f} ± {change.delta_ppl_se:.3f}",
            ),
        )
        corpus = result.about.get("corpus") or {}
        text = " ".join(str(corpus[key]) for key in ("name", "report") if corpus.get(key))
        told = [
            f"Perplexity: {change.protocol}; {change.tokens:,} tokens"
            f"{f' of {markdown(text)}' if text else ''}, of weights in {dtype}; ± is one standard "
            "error over windows, and the change is paired by window. Before rounding, KL(original, "
            f"compressed) was {change.kl:.4f} ± {change.kl_se:.4f} nats a token, and the likeliest "
            f"token the same for {change.top1:.1%}.",
        ]
    head = [_row("", "original", "compressed", "change"), "|---|---:|---:|---:|"]
    notes = [f"- {markdown(note)}" for note in (*result.notes, *exported["notes"])]
    parts = [[*head, *rows], told, notes, _blocks(result)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _blocks(result: Compression) -> list[str]:
    rows = [_row("block", "became", "its parameters", "instead of"), "|---|---|---:|---:|"]
    for b in result.blocks:
        if b.replaced:
            matrix = {None: "a matrix", 0: ""}.get(b.rank, f"a matrix of rank {b.rank}")
            units = f"{len(b.units)} of its hidden units" if b.units else ""
            became = " and ".join(part for part in (matrix, units) if part) or "a constant"
            name = f"{b.index} {markdown(b.path)}"
            rows.append(_row(name, became, f"{b.parameters_left:,}", f"{b.parameters:,}"))
    return rows


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
