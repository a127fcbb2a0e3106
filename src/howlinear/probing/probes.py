"""What is the residual of each map made of? One block after the other, every kind of probe requested.

    settings = ProbeSettings(kinds=("bilinear", "units"))
    result = probe(model, "runs/demo", fit=..., choose=..., report=..., settings=settings)
    result.blocks[0].bilinear["gain"], result.blocks[0].units["steps"]

Layers are fitted on rows of the run's own text, stopped and chosen by rows of a second text and scored
on a third. Each fitted layer is then swapped in for its block, and its cost in perplexity stands
beside that of the affine map, on the same tokens. `kinds` has the table of probes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.protocols import as_tokens, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import sweep
from howlinear.models import cutting
from howlinear.models.families import Block, projection_shape
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.hooks import as_module, evaluating
from howlinear.models.naming import BlockNames
from howlinear.probing.kinds import (
    COSTS,
    KINDS,
    PROBES,
    SECONDS,
    Layers,
    ProbeSettings,
    Subject,
)
from howlinear.probing.results import Probes
from howlinear.probing.samples import Cast, conjunction, gather, outcome, sample_bytes
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProbe, BlockSwap
from howlinear.run.folder import RunFolder
from howlinear.run.work import Progress, Steps, Work
from howlinear.swapping.maps import RunMaps, match

logger = logging.getLogger(__name__)

__all__ = ["KINDS", "ProbeSettings", "Probes", "count", "needs", "probe", "windows_of"]


def probe(
    model: nn.Module,
    folder: str | Path,
    *,
    fit: WindowsLike,
    choose: WindowsLike,
    report: WindowsLike,
    settings: ProbeSettings | None = None,
    at: BlockNames = None,
    predict: WindowsLike | None = None,
    heal_on: Tensor | None = None,
    progress: Progress | None = None,
) -> Probes:
    """Probe a run's blocks (or those `at`) and write probe.json after each.

    `fit` are windows of the run's text, `choose` and `report` of text that it never read; `predict`
    are the tokens on which costs of swaps are measured (None: no costs), `heal_on` windows to
    fine-tune on. As many blocks as `settings.memory` bytes hold are read in one pass. If a write
    fails on the way, a warning says so; the result has everything and can be saved elsewhere.
    """
    settings, work = settings or ProbeSettings(), Work(progress=progress)
    run = Profile.load(folder)
    RunFolder(folder).check_addable("probe")
    at_blocks = [b for b, _ in match(model, run, at)]
    texts = [as_windows(windows).read() for windows in (fit, choose, report)]
    sizes = dict(zip(("fit", "choose", "report"), map(count, texts), strict=True))
    predict, predicted, notes = _predicted(model, predict, settings)
    written = {"rows": sizes, "seed": settings.seed, **predicted}
    result = Probes([], {}, None, written, notes, settings.about)
    steps = _steps(settings.kinds, len(at_blocks), costs=predict is not None)
    for group in _groups(model, at_blocks, sum(sizes.values()), settings.memory):
        samples = [gather(model, group, windows) for windows in texts]
        for block in group:
            affine = run.maps[block.index].to(torch.zeros((), dtype=torch.float32))
            rows: Any = tuple(by_index.pop(block.index) for by_index in samples)
            swap_map = partial(_swap_map, model, Path(folder), run, block)
            subject = Subject(model, block, affine, rows, settings, swap_map, heal_on)
            with evaluating(model):
                record, result.layers[block.index] = _probe_block(subject, work, steps)
            result.blocks.append(record)
            _save(result, folder)
        if predict is not None:
            began = time.perf_counter()
            result = _with_costs(model, result, group, predict, settings, work)
            steps.done(COSTS, time.perf_counter() - began, len(group))
        if not settings.keep_layers:
            result.layers.clear()
    _save(result, folder)
    return result


def _save(result: Probes, folder: str | Path) -> None:
    try:
        result.save(folder)
    except OSError as err:
        logger.warning("%s", err)


def _steps(kinds: Sequence[str], blocks: int, costs: bool) -> Steps:
    """The probes of all blocks, and what the swaps of a block cost."""
    return Steps(dict.fromkeys(kinds, blocks) | {COSTS: blocks * costs}, SECONDS)


def _probe_block(
    subject: Subject, work: Work, steps: Steps
) -> tuple[BlockProbe, dict[str, Layers]]:
    """Short probes first: they tell soon how long the others will take."""
    linear = outcome(subject.affine, subject.affine, subject.report)
    records: dict[str, Any] = {}
    layers: dict[str, Layers] = {"linear": {"linear": subject.affine}}
    for kind in sorted(subject.settings.kinds, key=lambda kind: SECONDS[kind]):
        began = time.perf_counter()
        work.begin(f"block {subject.block.index}: {kind}{steps}")
        try:
            if subject.constant:
                raise ValueError("the block's output does not vary")
            records[kind], layers[kind] = PROBES[kind](subject)
        except ValueError as reason:  # for example, experts have no hidden units of their own
            records[kind] = {"skipped": str(reason)}
        records[kind]["seconds"] = time.perf_counter() - began
        steps.done(kind, records[kind]["seconds"])
    block = subject.block
    return BlockProbe(
        index=block.index,
        path=block.path,
        r2=linear.r2,
        r2_body=linear.r2_body,
        linear={
            "cosine": linear.cosine,
            "conjunction": linear.conjunction,
            "conjunction_block": _block_conjunction(subject),
            "parameters": subject.affine.parameters,
        },
        **records,
    ), layers


def _block_conjunction(subject: Subject) -> float | None:
    """Conjunction index of the block itself; None for a module that does not run on x alone."""
    try:
        block = Cast(as_module(subject.model, subject.block))
        return conjunction(block, subject.report.spaced)
    except (ValueError, TypeError):
        return None


def _predicted(
    model: nn.Module, predict: WindowsLike | None, settings: ProbeSettings
) -> tuple[WindowsLike | None, dict[str, Any], list[str]]:
    """The tokens to predict, their number and protocol; None and a note if the model predicts none."""
    none: dict[str, Any] = {"predicted": 0, "protocol": None}
    if predict is None:
        return None, none, []
    try:
        Readout(model)
    except ValueError as reason:
        return None, none, [f"no perplexity: {reason}"]
    predict = as_tokens(predict)
    name = protocol_of(predict, settings.protocol).name
    return predict, {"predicted": count(predict), "protocol": name}, []


def _swap_map(model: nn.Module, folder: Path, run: Profile, block: Block) -> Affine | UnitMap:
    """Least squares with the hidden units that `howlinear swap` kept, if it measured the block."""
    try:
        swaps = RunFolder(folder).newest("swap", BlockSwap)
    except (ValueError, KeyError, TypeError):
        swaps = {}
    maps = RunMaps(model, folder, run)
    k = len(swaps[block.index].units) if block.index in swaps else 0
    return maps.map(block, k if k in maps.ladder(block) else 0)


def _with_costs(
    model: nn.Module,
    result: Probes,
    group: Sequence[Block],
    windows: WindowsLike,
    settings: ProbeSettings,
    work: Work,
) -> Probes:
    """The result with the cost of every layer of these blocks, each swapped in alone."""
    named = [
        (b, kind, name, layer)
        for b in group
        for kind, layers in result.layers[b.index].items()
        for name, layer in layers.items()
    ]
    variants = [(b, Cast(layer)) for b, _, _, layer in named]
    swept = sweep(model, variants, windows, protocol=settings.protocol, work=work)
    names = ("delta_nll", "delta_nll_se", "delta_ppl", "delta_ppl_se")
    by_index = {b.index: b for b in result.blocks}
    for (b, kind, name, _), cost in zip(named, swept.costs, strict=True):
        costs = getattr(by_index[b.index], kind).setdefault("swap", {})
        costs[name] = {field: getattr(cost.change, field) for field in names}
    return replace(result, base=swept.base)


# -- memory and windows ---------------------------------------------------------------------------


def needs(model: nn.Module, at: Sequence[Block], rows: int, memory: int | None) -> tuple[int, int]:
    """(blocks whose rows are held at once, bytes that they and the work on one of them take)."""
    group = _groups(model, at, rows, memory)[0]
    held = sum(_bytes(model, b, rows) for b in group)
    work = 0
    for b in at:
        shape = projection_shape(model.get_submodule(b.down) if b.down else None)
        columns = b.d_in + (shape[0] if shape else 0)  # of the regression on hidden units
        work = max(work, 8 * rows * (b.d_in + b.d_out), 40 * columns**2)
    return len(group), held + work


def _bytes(model: nn.Module, block: Block, rows: int) -> int:
    """Bytes of a block's rows, and of fitted layers of about twice its size."""
    parameters = as_module(model, block).parameters()
    return sample_bytes(block, rows) + 2 * sum(p.numel() * p.element_size() for p in parameters)


def _groups(
    model: nn.Module, at: Sequence[Block], rows: int, memory: int | None
) -> list[list[Block]]:
    """Blocks in groups whose rows and layers fit into `memory` bytes; one block at least."""
    groups: list[list[Block]] = [[]]
    for block in at:
        held = sum(_bytes(model, b, rows) for b in [*groups[-1], block])
        if groups[-1] and memory is not None and held > memory:
            groups.append([])
        groups[-1].append(block)
    return groups


def windows_of(
    read: Tensor, text: Any, tokenizer: Any, rows: int, bos: str = "auto", seed: int = 0
) -> list[WindowsLike]:
    """Windows to fit on, to choose by and to report on; `read` are those that the run was fitted on.

    For fewer rows than the run read, whole windows are drawn at random; those to choose by and to
    report on are spread over their texts.
    """
    length = read.shape[1]
    kept = max(1, rows // length)
    if kept < len(read):
        chosen = torch.randperm(len(read), generator=torch.Generator().manual_seed(seed))[:kept]
        read = read[chosen.sort().values]
    held_out = [
        cutting.spread_windows(
            part(), tokenizer, length, tokens=max(length, rows // share), bos=bos
        )
        for part, share in ((text.choose, 4), (text.report, 3))
    ]
    return [read, *held_out]


def count(windows: WindowsLike) -> int:
    """Number of tokens; of elements of the first input, for images and audio."""
    batches = as_windows(windows).batches()
    return sum(next(iter(batch.inputs.values())).numel() for batch in batches)
