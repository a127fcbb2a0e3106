"""From a run to what replacing each block costs, and what its map should carry.

    result = measure_swaps(model, "runs/demo", choose=valid_windows, report=test_windows)
    result.blocks[11].delta_ppl, result.blocks[11].units, result.blocks[11].delta_ppl_plain

Maps are fitted on the run's moments. With `units="auto"` the number k of sink units that a block's
map keeps is chosen on one text, and the cost is measured on another: a block departs from k = 0 only
where the paired gain exceeds twice its standard error, and then takes the smallest k that is not
worse than the best by as much. Beside each map stand plain least squares, the block removed (zero),
and the block replaced by its mean output, on the same tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine, Map, UnitMap
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.solving import solve
from howlinear.losses.perplexity import Comparison, Loss
from howlinear.losses.protocols import Batches, EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import (
    Replacement,
    SwapCost,
    Sweep,
    Variant,
    map_errors,
    model_inputs,
    sweep,
)
from howlinear.models.families import Block, backbone, blocks, depth_indices
from howlinear.models.hooks import as_module, evaluating, tap
from howlinear.models.units import taken
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.statistics import spearman
from howlinear.records.words import signed
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder
from howlinear.run.ranks import ALONE, Ranks
from howlinear.run.tensors import read_moments
from howlinear.run.work import Work

UNITS = (0, 1, 2, 4)
SPARED = 0.03  # of the squared error; less, and two standard errors of a loss would not show it
# how rows are weighted in a fit: all alike; without first positions; by 1/|h|; by 1/|y|^2
WEIGHTINGS = ("none", "body", "stream", "output")


Pairs = Sequence[tuple[Block, BlockProfile]]
Progress = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True, eq=False, repr=False)
class Swaps(Result):
    """What swaps cost; `blocks` is what to read, `maps[i]` the map that block i was swapped for."""

    blocks: list[BlockSwap]
    maps: dict[int, Affine | UnitMap]
    costs: dict[int, SwapCost]  # window by window
    base: Loss | None  # None where the model predicts no tokens
    settings: dict[str, Any]
    signals: dict[str, float | None]  # Spearman correlation with the plain map's delta_nll
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

    def _line(self) -> str:
        alone = f"{len(self.blocks)} blocks, each replaced alone"
        if self.base is None:
            return f"{alone}, cosine {extremes((b.index, b.cosine) for b in self.blocks)}"
        rises = extremes(((b.index, b.delta_ppl) for b in self.blocks), signed)
        return f"{alone}, perplexity {rises}"

    def save(self, folder: str | Path) -> None:
        RunFolder(folder).write(self.to_dict())


def measure_swaps(
    model: nn.Module,
    folder: str | Path,
    *,
    choose: Batches,
    report: Batches,
    fit: Batches | None = None,
    at: str | None = None,
    units: str | int = "auto",
    weighting: str = "none",
    protocol: EvalProtocol | str | None = None,
    n_bytes: int | None = None,
    batch_size: int = 8,
    ranks: Ranks = ALONE,
    progress: Progress | None = None,
) -> Swaps:
    """Replace each block of a run (or those `at`) alone by its map, and measure.

    `choose` and `report` are tokens that the run never read, `fit` the tokens that it did: weighted
    fits read them again. `progress` is told what begins and how many tokens that takes, and gives a
    function to call with tokens done.
    """
    if weighting not in WEIGHTINGS:
        expected = ", ".join(WEIGHTINGS)
        raise ValueError(f"unknown weighting {weighting!r}, expected {expected} (--weighting)")
    if units != "auto" and units not in UNITS:
        raise ValueError(f"units is {units!r}, expected auto, 0, 1, 2 or 4 (--units)")
    run = Profile.load(folder)
    pairs = match(model, run, at)
    shelf = Shelf(model, Path(folder), run, weighting, fit, [b for b, _ in pairs], ranks)
    how = protocol_of(report, protocol)
    work = Work(ranks, batch_size, progress)

    def measured(what: str, variants: Sequence[Variant], windows: Batches) -> Sweep:
        return sweep(model, variants, windows, protocol=how, work=work, label=what)

    settings = {
        "protocol": how.name,
        "units": units,
        "weighting": weighting,
        "batch_size": batch_size,
    }
    chosen = {
        b.index: min(0 if units == "auto" else int(units), shelf.ladder(b)[-1]) for b, _ in pairs
    }
    try:
        Readout(model)
    except ValueError as why:
        maps = {b.index: shelf.map(b, chosen[b.index]) for b, _ in pairs}
        found = map_errors(model, [(b, maps[b.index]) for b, _ in pairs], report, work)
        return _without_perplexity(model, pairs, shelf, maps, found, settings, str(why))
    if units == "auto":
        chosen = _choose(pairs, shelf, partial(measured, "choosing units", windows=choose))
    swept, named = _reported(pairs, shelf, chosen, partial(measured, "swapping", windows=report))
    costs = {i: own.get("chosen", own["plain"]) for i, own in named.items()}
    maps = {b.index: shelf.map(b, chosen[b.index]) for b, _ in pairs}
    records = [
        _record(model, pair, shelf, maps[pair[0].index], named[pair[0].index]) for pair in pairs
    ]
    base = Loss(swept.base.protocol, swept.base.counts, swept.base.sums, n_bytes)
    settings |= {"tokens": base.tokens, "resumed": swept.resumed}
    notes = [swept.note] if swept.note else []
    return Swaps(records, maps, costs, base, settings, _signals(pairs, records), notes)


def _reported(
    pairs: Pairs,
    shelf: Shelf,
    chosen: dict[int, int],
    measured: Callable[[Sequence[Variant]], Sweep],
) -> tuple[Sweep, dict[int, dict[str, SwapCost]]]:
    """Every block's baselines and its chosen map in one sweep: the costs by block and name."""
    variants: dict[tuple[int, str], Variant] = {}
    for b, _ in pairs:
        variants |= {(b.index, name): (b, m) for name, m in shelf.baselines(b).items()}
        best = shelf.map(b, chosen[b.index])
        if best is not shelf.plain(b):
            variants[b.index, "chosen"] = (b, best)
    swept = measured(list(variants.values()))
    by_block: dict[int, dict[str, SwapCost]] = {b.index: {} for b, _ in pairs}
    for (index, name), cost in zip(variants, swept.costs, strict=True):
        by_block[index][name] = cost
    return swept, by_block


def _without_perplexity(
    model: nn.Module,
    pairs: Pairs,
    shelf: Shelf,
    maps: dict[int, Affine | UnitMap],
    found: list[SwapCost],
    settings: dict[str, Any],
    why: str,
) -> Swaps:
    """How far the maps are from their blocks, for models that predict no next token."""
    costs = {cost.block.index: cost for cost in found}
    records = [
        _record(model, pair, shelf, maps[pair[0].index], {"chosen": costs[pair[0].index]})
        for pair in pairs
    ]
    return Swaps(records, maps, costs, None, settings, {}, [f"no perplexity: {why}"])


def match(model: nn.Module, run: Profile, at: str | None) -> list[tuple[Block, BlockProfile]]:
    """The model's blocks beside the run's, or those `at`; a run of another model is refused."""
    wanted = {p.index for p in run.blocks}
    if at is not None and re.fullmatch(r"[\d,\-\s]*", at):
        wanted = set(depth_indices(at, 1 + max(wanted)))
    elif at is not None:
        try:
            wanted = {p.index for p in run.blocks if re.search(at, p.path)}
        except re.error as err:
            raise ValueError(f"--blocks {at!r} is not a regular expression: {err}") from None
    pairs = []
    for p in run.blocks:
        b = _block_at(model, p.path)
        if b is None or (b.d_in, b.d_out) != (p.d_in, p.d_out):
            here = f"{b.d_in} to {b.d_out}" if b else "missing"
            raise ValueError(
                f"the run was made with another model: its block {p.index} ({p.path}) is "
                f"{p.d_in} to {p.d_out}, this model's is {here}"
            )
        if p.index in wanted:
            pairs.append((replace(b, index=p.index), p))
    if not pairs:
        raise ValueError(f"--blocks {at!r} chooses no block that the run has measured")
    return pairs


def _block_at(model: nn.Module, path: str) -> Block | None:
    try:  # known blocks come first; a run may also be of modules that somebody named
        return next((b for b in blocks(model, f"^{re.escape(path)}$") if b.path == path), None)
    except ValueError:
        return None


# -- maps -----------------------------------------------------------------------------------------


class Shelf:
    """The maps of a run's blocks, each fitted from its moments when it is first asked for."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        run: Profile,
        weighting: str,
        fit: Batches | None,
        at: list[Block],
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.folder, self.run, self.weighting = model, folder, run, weighting
        self.like = next(model.parameters()).detach()
        self.records = {p.index: p for p in run.blocks}
        self.made: dict[tuple[int, int], Affine | UnitMap] = {}
        self.weighted: dict[int, Moments] = {}
        if weighting in ("stream", "output"):
            if fit is None:
                raise ValueError(f"weighting {weighting} needs the text that the run was fitted on")
            units = {b.index: self.records[b.index].sink_units or [] for b in at}
            self.weighted = weighted_moments(model, at, fit, weighting, units, ranks)

    def ladder(self, block: Block) -> list[int]:
        """How many units a map of this block may keep."""
        return [k for k in UNITS if k <= len(self.records[block.index].sink_units or ())]

    def map(self, block: Block, k: int) -> Affine | UnitMap:
        if k == 0 and self.weighting == "none":
            return self.plain(block)
        key = (block.index, k)
        if key not in self.made:
            joint, _ = _fitted(self._rows(block), block.d_in + k)
            units = tuple(self.records[block.index].sink_units or ())[:k]
            hidden = taken(self.model, block, units) if units else None
            fitted = UnitMap.split(joint, units, hidden) if hidden else joint
            self.made[key] = fitted.to(self.like)
        return self.made[key]

    def spared(self, block: Block) -> float:
        """Share of the fit's squared error that keeping the most units takes away."""
        rows = self._rows(block)
        rest, less = (_fitted(rows, block.d_in + k)[1] for k in (0, self.ladder(block)[-1]))
        return 1 - less / rest if rest > 0 else 0.0

    def plain(self, block: Block) -> Affine:
        """Least squares with nothing to it: the run's own map."""
        key = (block.index, -1)
        if key not in self.made:
            self.made[key] = self.run.maps[block.index].to(self.like)
        plain = self.made[key]
        assert isinstance(plain, Affine)
        return plain

    def baselines(self, block: Block) -> dict[str, Replacement]:
        """What a map has to beat: nothing at all, one constant, and plain least squares."""
        parts = read_moments(self.folder, self.records[block.index])
        mean = merged([*parts["body"], *parts["first"]]).mean_y.to(self.like)
        return {
            "plain": self.plain(block),
            "zero": lambda x: x.new_zeros(*x.shape[:-1], block.d_out),
            "mean": lambda x: mean.to(x).expand(*x.shape[:-1], block.d_out),
        }

    def _rows(self, block: Block) -> Accumulator:
        if block.index in self.weighted:
            return self.weighted[block.index]
        parts = read_moments(self.folder, self.records[block.index])
        return merged(
            parts["body"] if self.weighting == "body" else [*parts["body"], *parts["first"]]
        )


def _fitted(rows: Accumulator, columns: int) -> tuple[Affine, float]:
    """The map of the first columns, and the squares that it leaves unexplained."""
    narrow = rows.narrow(columns)
    affine, Z = solve(narrow)
    return affine, float(narrow.S_yy.sum() - Z.square().sum())


def weighted_moments(
    model: nn.Module,
    at: Sequence[Block],
    windows: Batches,
    weighting: str,
    units: dict[int, list[int]],
    ranks: Ranks = ALONE,
) -> dict[int, Moments]:
    """Moments of [x, sink units] and y with rows weighted by 1/|h| ("stream") or 1/|y|^2 ("output")."""
    found = {b.index: Moments(b.d_in + len(units[b.index]), b.d_out) for b in at}

    def receive(block: Block, rows: Rows) -> None:
        if weighting == "output":
            weight = rows.y.float().square().sum(1).reciprocal()
        elif rows.inverse_stream is None:
            raise ValueError(
                f"block {block.index} ({block.path}): the residual stream of this family is not "
                "known: use --weighting output or body"
            )
        else:
            weight = rows.inverse_stream
        x = rows.x if rows.hidden is None else torch.cat([rows.x, rows.hidden], 1)
        found[block.index].update(x, rows.y, weight)

    heard = {i: torch.tensor(u) for i, u in units.items() if u}
    with torch.no_grad(), evaluating(model), tap(model, receive, at=at, units=heard):
        for number, inputs in enumerate(model_inputs(model, windows)):
            if ranks.mine(number):
                backbone(model)(**inputs)
    return {index: ranks.added(sums) for index, sums in found.items()}


# -- choosing k -----------------------------------------------------------------------------------


def _choose(
    pairs: Pairs,
    shelf: Shelf,
    measured: Callable[[Sequence[Variant]], Sweep],
) -> dict[int, int]:
    """k for each block: 0 and the most units first, what lies between where the most gain.

    Where keeping units takes less than SPARED of the squared error away there is nothing to gain
    that two standard errors would show, and nothing is run.
    """

    def tried(what: list[tuple[Block, int]]) -> dict[tuple[Block, int], Comparison]:
        costs = measured([(b, shelf.map(b, k)) for b, k in what]).costs if what else []
        return {key: c.change for key, c in zip(what, costs, strict=True) if c.change is not None}

    at = [b for b, _ in pairs if shelf.spared(b) >= SPARED]
    ends = tried([(b, k) for b in at for k in dict.fromkeys((0, shelf.ladder(b)[-1]))])
    gaining = [b for b in at if _gains(ends[b, 0], ends[b, shelf.ladder(b)[-1]])]
    every = ends | tried([(b, k) for b in gaining for k in shelf.ladder(b)[1:-1]])
    chosen = {b.index: 0 for b, _ in pairs}
    for b in gaining:
        chosen[b.index] = smallest_good({k: every[b, k] for k in shelf.ladder(b)})
    return chosen


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


def _record(
    model: nn.Module,
    pair: tuple[Block, BlockProfile],
    shelf: Shelf,
    fitted: Map,
    costs: dict[str, SwapCost],
) -> BlockSwap:
    block, profile = pair
    cost = costs.get("chosen", costs.get("plain"))
    assert cost is not None
    module = as_module(model, block)
    parameters = sum(p.numel() for p in module.parameters())
    work = multiply_adds(module, block, shelf.like)
    estimates = {
        f"{name}{end}": None if cost.change is None else getattr(cost.change, f"{name}{end}")
        for name in ("delta_nll", "delta_ppl", "kl", "top1")
        for end in ("", "_se")
    }
    others = {
        f"{what}_{name}": getattr(c.change, what) if (c := costs.get(name)) and c.change else None
        for what in ("delta_nll", "delta_ppl")
        for name in ("plain", "zero", "mean")
    }
    return BlockSwap(
        index=block.index,
        path=block.path,
        units=list(fitted.units) if isinstance(fitted, UnitMap) else [],
        weighting=shelf.weighting,
        **estimates,
        **others,
        cosine=cost.cosine,
        rmse=cost.rmse,
        stream_error=cost.stream_error,
        params_saved=parameters - fitted.parameters,
        multiply_adds_saved=None if work is None else work - fitted.multiply_adds,
        swap_signal=profile.swap_signal,
    )


def multiply_adds(module: nn.Module, block: Block, like: Tensor, rows: int = 8) -> int | None:
    """A row's, counted while the block runs; None for experts, whose kernels nobody counts."""
    if block.down is None:
        return None
    x = torch.ones(1, rows, block.d_in, dtype=like.dtype, device=like.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return round(counter.get_total_flops() / 2 / rows)


def _signals(pairs: Pairs, records: list[BlockSwap]) -> dict[str, float | None]:
    """Rank correlation of what a profile knows with the measured cost of the plain map."""
    profiles, costs = [p for _, p in pairs], [r.delta_nll_plain for r in records]
    known: dict[str, list[float | None]] = {
        "1 - r2": [1 - p.r2 for p in profiles],
        "1 - r2_body": [None if p.r2_body is None else 1 - p.r2_body for p in profiles],
        "residual_norm": [p.residual_norm for p in profiles],
        "stream_error": [p.stream_error for p in profiles],
        "swap_signal": [p.swap_signal for p in profiles],
    }
    found: dict[str, float | None] = {}
    for name, values in known.items():
        both = [
            (v, c) for v, c in zip(values, costs, strict=True) if v is not None and c is not None
        ]
        enough = len(both) >= 3 and not any(math.isnan(v) for pair in both for v in pair)
        found[name] = spearman([v for v, _ in both], [c for _, c in both]) if enough else None
    return found
