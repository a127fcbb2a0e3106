"""What replacing each block of a run by its map costs, and which sink units the map should keep.

    result = measure_swaps(model, "runs/demo", choose=valid_windows, report=test_windows)
    result.blocks[11].delta_ppl, result.blocks[11].units, result.blocks[11].delta_ppl_plain

Maps are fitted on the run's moments. With `units="auto"` the number k of sink units that a block's
map keeps is chosen on one text, and the cost is measured on another: k > 0 is chosen only where the
paired gain exceeds twice its standard error, and then the smallest k that is not worse than the best
by as much. Each map is compared with plain least squares, with the block removed (zero), and with
the block's mean output, on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.perplexity import Comparison, Loss
from howlinear.losses.protocols import EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import SwapCost, Sweep, Variant, map_errors, sweep
from howlinear.models.families import Block
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.hooks import as_module
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.statistics import over_blocks, spearman
from howlinear.records.words import plural, signed
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder, records_of, with_blocks
from howlinear.run.work import Work
from howlinear.swapping.maps import UNITS, RunMaps, match

MIN_GAIN = 0.03  # share of the squared error; two standard errors of a loss would not show less

Costs = dict[int, dict[str, SwapCost]]  # by block, and by name: "chosen", "plain", "zero", "mean"
Measure = Callable[[Sequence[Variant]], Sweep]


@dataclass(frozen=True, eq=False, repr=False)
class Swaps(Result):
    """Costs of swaps: `blocks` are records, `maps[i]` is the map that replaced block i."""

    blocks: list[BlockSwap]
    maps: dict[int, Affine | UnitMap]
    costs: dict[int, SwapCost]  # window by window
    base: Loss | None  # None where the model predicts no tokens
    settings: dict[str, Any]
    signals: dict[str, dict[str, float | None]]  # rank correlation with the plain map's delta_nll
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`swap.json`, field by field."""
        return "swap", {
            "settings": self.settings,
            "base": None if self.base is None else self.base.to_dict(),
            "signals": self.signals,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def save(self, folder: str | Path) -> None:
        """Write swap.json. Blocks that were measured with the same settings stay beside these."""
        run, data = RunFolder(folder), self.to_dict()
        if before := run.alike(data):
            data["blocks"] = with_blocks(before, data)
            data["notes"] = list(dict.fromkeys([*before.get("notes", []), *self.notes]))
            records = records_of(run.path("swap"), data, BlockSwap)
            if self.base is not None and run.has("profile"):
                profiles = run.blocks("profile", BlockProfile)
                data["signals"] = _signals(list(records.values()), profiles)
        run.add(data, before)

    def _line(self) -> str:
        alone = f"{plural(len(self.blocks), 'block')}, each replaced alone"
        if self.base is None:
            return f"{alone}, cosine {extremes((b.index, b.cosine) for b in self.blocks)}"
        rises = extremes(((b.index, b.delta_ppl) for b in self.blocks), signed)
        return f"{alone}, perplexity {rises}"


def measure_swaps(
    model: nn.Module,
    folder: str | Path,
    *,
    choose: WindowsLike,
    report: WindowsLike,
    fit: WindowsLike | None = None,
    at: str | None = None,
    units: str | int = "auto",
    weighting: str = "none",
    protocol: EvalProtocol | str | None = None,
    work: Work | None = None,
) -> Swaps:
    """Replace each block of a run (or those `at`) alone by its map, and measure.

    The run never read the tokens `choose` and `report`; weighted fits read its own, `fit`, again.
    """
    if units != "auto" and units not in UNITS:
        raise ValueError(f"units is {units!r}, expected auto, 0, 1, 2 or 4 (--units)")
    run, work, evaluation = Profile.load(folder), work or Work(), protocol_of(report, protocol)
    blocks = [b for b, _ in match(model, run, at)]
    maps = RunMaps(model, Path(folder), run, weighting, fit, blocks, work)
    settings: dict[str, Any] = {"protocol": evaluation.name, "units": units}
    settings |= {"weighting": weighting, "batch_size": work.batch_size}
    measure = partial(sweep, model, protocol=evaluation, work=work)
    problem = _problem(model)
    choosing = partial(measure, windows=choose, label="choosing units")
    chosen = _chosen(units, blocks, maps, None if problem else choosing)
    if problem:
        errors = map_errors(model, [(b, chosen[b.index]) for b in blocks], report, work)
        costs: Costs = {cost.block.index: {"chosen": cost} for cost in errors}
        base, notes, settings["tokens"] = None, [problem], as_windows(report).tokens
    else:
        swept, costs = _reported(blocks, maps, chosen, partial(measure, windows=report))
        base, notes = swept.base, [swept.note] if swept.note else []
        settings |= {"tokens": base.tokens, "resumed": swept.resumed}
    records = [_record(b, maps, chosen[b.index], costs[b.index]) for b in blocks]
    by_block = {index: named["chosen"] for index, named in costs.items()}
    signals = {} if base is None else _signals(records, maps.records)
    return Swaps(records, chosen, by_block, base, settings, signals, notes)


def _problem(model: nn.Module) -> str:
    """Why the model has no perplexity; empty if it has."""
    try:
        Readout(model)
    except ValueError as problem:
        return f"no perplexity: {problem}"
    return ""


def _reported(
    blocks: Sequence[Block], maps: RunMaps, chosen: dict[int, Affine | UnitMap], measure: Measure
) -> tuple[Sweep, Costs]:
    """Every block's baselines and its chosen map in one sweep."""
    variants: dict[tuple[int, str], Variant] = {}
    for b in blocks:
        variants |= {(b.index, name): (b, m) for name, m in maps.baselines(b).items()}
        if chosen[b.index] is not maps.plain(b):
            variants[b.index, "chosen"] = (b, chosen[b.index])
    swept = measure(list(variants.values()))
    costs: Costs = {b.index: {} for b in blocks}
    for (index, name), cost in zip(variants, swept.costs, strict=True):
        costs[index][name] = cost
    for named in costs.values():
        named.setdefault("chosen", named["plain"])
    return swept, costs


# -- choosing k -----------------------------------------------------------------------------------


def _chosen(
    units: str | int, blocks: Sequence[Block], maps: RunMaps, measure: Measure | None
) -> dict[int, Affine | UnitMap]:
    """The map of each block; "auto" keeps no units where nothing can be measured."""
    if units == "auto" and measure is not None:
        kept = _choose(blocks, maps, measure)
    else:
        most = 0 if units == "auto" else int(units)
        kept = {b.index: min(most, maps.ladder(b)[-1]) for b in blocks}
    return {b.index: maps.map(b, kept[b.index]) for b in blocks}


def _choose(blocks: Sequence[Block], maps: RunMaps, measure: Measure) -> dict[int, int]:
    """k for each block: first 0 and the most units; where the most gain, what lies between.

    Where keeping units removes less than MIN_GAIN of the squared error, nothing is run.
    """

    def tried(options: list[tuple[Block, int]]) -> dict[tuple[Block, int], Comparison]:
        costs = measure([(b, maps.map(b, k)) for b, k in options]).costs if options else []
        changes = ((option, cost.change) for option, cost in zip(options, costs, strict=True))
        return {option: change for option, change in changes if change is not None}

    at = [b for b in blocks if maps.gain(b) >= MIN_GAIN]
    ends = tried([(b, k) for b in at for k in dict.fromkeys((0, maps.ladder(b)[-1]))])
    gaining = [b for b in at if _gains(ends[b, 0], ends[b, maps.ladder(b)[-1]])]
    every = ends | tried([(b, k) for b in gaining for k in maps.ladder(b)[1:-1]])
    kept = {b.index: 0 for b in blocks}
    for b in gaining:
        kept[b.index] = smallest_good({k: every[b, k] for k in maps.ladder(b)})
    return kept


def smallest_good(ladder: dict[int, Comparison]) -> int:
    """The smallest k that beats k = 0, and that the best of those does not beat, by 2 standard errors."""
    good = [k for k in ladder if k and _gains(ladder[0], ladder[k])]
    if not good:
        return 0
    best = min(good, key=lambda k: ladder[k].delta_nll)
    return next(k for k in good if k == best or not _gains(ladder[k], ladder[best]))


def _gains(worse: Comparison, better: Comparison) -> bool:
    gain, se = better.gain_over(worse)
    return gain > 2 * se


# -- the record -----------------------------------------------------------------------------------


def estimates(cost: SwapCost) -> dict[str, Any]:
    """Fields of a record that compare predictions; None for models that predict no next token."""
    return {
        f"{name}{end}": None if cost.change is None else getattr(cost.change, f"{name}{end}")
        for name in ("delta_nll", "delta_ppl", "kl", "top1")
        for end in ("", "_se")
    }


def _record(
    block: Block, maps: RunMaps, chosen: Affine | UnitMap, costs: dict[str, SwapCost]
) -> BlockSwap:
    module, cost = as_module(maps.model, block), costs["chosen"]
    parameters = sum(p.numel() for p in module.parameters())
    work = multiply_adds(module, block, maps.like)
    others = {
        f"{field}_{name}": getattr(c.change, field) if (c := costs.get(name)) and c.change else None
        for field in ("delta_nll", "delta_ppl")
        for name in ("plain", "zero", "mean")
    }
    return BlockSwap(
        index=block.index,
        path=block.path,
        units=list(chosen.units) if isinstance(chosen, UnitMap) else [],
        weighting=maps.weighting,
        **estimates(cost),
        **others,
        cosine=cost.cosine,
        rmse=cost.rmse,
        stream_error=cost.stream_error,
        params_saved=parameters - chosen.parameters,
        multiply_adds_saved=None if work is None else work - chosen.multiply_adds,
        expected_kl=maps.records[block.index].expected_kl,
    )


def multiply_adds(module: nn.Module, block: Block, like: Tensor, rows: int = 8) -> int | None:
    """Multiply-adds per row, counted while the block runs; None for experts, whose kernels are not counted."""
    if block.down is None:
        return None
    x = torch.ones(1, rows, block.d_in, dtype=like.dtype, device=like.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return round(counter.get_total_flops() / 2 / rows)


def _signals(
    records: list[BlockSwap], profiles: dict[int, BlockProfile]
) -> dict[str, dict[str, float | None]]:
    """Rank correlation of fields of the profile with the cost of the plain map, over blocks."""
    fields: dict[str, Callable[[BlockProfile], float | None]] = {
        "1 - r2": lambda p: 1 - p.r2,
        "1 - r2_body": lambda p: None if p.r2_body is None else 1 - p.r2_body,
        "residual_norm": lambda p: p.residual_norm,
        "stream_error": lambda p: p.stream_error,
        "expected_kl": lambda p: p.expected_kl,
    }
    costs = [r.delta_nll_plain for r in records]
    return {
        name: over_blocks(spearman, [value(profiles[r.index]) for r in records], costs).to_dict()
        for name, value in fields.items()
    }
