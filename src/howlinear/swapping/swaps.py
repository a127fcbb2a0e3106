"""What replacing each block of a run by its map costs, and which sink units the map should keep.

    result = measure_swaps(model, "runs/demo", choose=valid_windows, report=test_windows)
    result.blocks[11].kl, result.blocks[11].verdict, result.blocks[11].units, result.blocks[11].kl_plain
    result.save("runs/demo")                # into swap.json, beside what it holds

Maps are fitted on the run's moments. With `units="auto"` the number of sink units that a block's map
keeps is chosen on one text (`swapping.choosing`), and the cost is measured on another, in rounds
(`swapping.rounds`): a block gets windows until its verdict is decided or there are none left. What
swap.json holds of the same windows and settings is not measured again: further windows add to it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.perplexity import Comparison, Loss
from howlinear.losses.protocols import EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import SwapCost, Sweeper, Together, Variant, map_errors
from howlinear.models.families import Block
from howlinear.models.forward import Windows, WindowsLike, as_windows
from howlinear.models.hooks import as_module
from howlinear.models.loading import weights_fingerprint
from howlinear.models.naming import BlockNames
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile, BlockSwap
from howlinear.records.statistics import over_blocks, spearman
from howlinear.records.verdicts import SAFE, UNDECIDED, verdict_of
from howlinear.records.words import number, plural
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder, records_of, with_blocks
from howlinear.run.work import Work
from howlinear.swapping.choosing import chosen_units
from howlinear.swapping.maps import UNITS, RunMaps, match
from howlinear.swapping.rounds import FIRST_LOOK, Rounds, Tally
from howlinear.swapping.together import JOINT, additivity

Key = tuple[int | str, str]  # block and "chosen", "plain", "zero" or "mean"; JOINT and its blocks
Tallies = dict[Key, Tally]
Maps = dict[int, Affine | UnitMap]


@dataclass(frozen=True)
class SwapOptions:
    """What is measured, and for how long."""

    units: str | int = "auto"  # sink units that each map keeps: auto, 0, 1, 2 or 4
    weighting: str = "none"  # of rows in the fit
    protocol: EvalProtocol | str | None = None  # by default that of the windows
    positions: int | None = None  # to score in each window; None: all
    safe: float = SAFE  # nats of KL per token below which a swap is called safe
    baselines: bool = False  # also remove each block, and put its mean output in its place
    together: tuple[int, ...] = ()  # blocks that are also replaced at once
    all_tokens: bool = False  # of every block, also where fewer decide
    overwrite: bool = False  # measure again what swap.json holds

    def __post_init__(self) -> None:
        if self.units != "auto" and self.units not in UNITS:
            raise ValueError(f"units is {self.units!r}, expected auto, 0, 1, 2 or 4 (`units`)")
        if len(self.together) == 1:
            raise ValueError(f"one block alone, {self.together[0]}: name several (`together`)")


DEFAULTS = SwapOptions()


@dataclass(frozen=True, eq=False, repr=False)
class Swaps(Result):
    """Costs of swaps: `blocks` are records, `maps[i]` is the map that replaced block i."""

    blocks: list[BlockSwap]
    maps: Maps
    costs: dict[int, SwapCost]  # cluster by cluster
    base: Loss | None  # None where the model predicts no tokens
    settings: dict[str, Any]
    signals: dict[str, dict[str, float | None]]  # rank correlation with the plain map's KL
    notes: list[str]
    together: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)  # by block, then by variant
    windows: int = 0  # that `base` is measured on
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`swap.json`, field by field, without the sums."""
        return "swap", {
            "settings": self.settings,
            "base": None if self.base is None else self.base.to_dict(),
            "signals": self.signals,
            "notes": self.notes,
            "together": self.together,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def save(self, folder: str | Path) -> None:
        """Write swap.json. Blocks that were measured with the same settings stay beside these."""
        run, data = RunFolder(folder), self.to_dict() | {"sums": self.sums}
        if before := run.alike(data):
            _add(data, before)
            records = records_of(run.path("swap"), data, BlockSwap)
            safe = self.settings["safe"]
            data["blocks"] = [_judged(record, safe).to_dict() for record in records.values()]
            if self.base is not None and run.has("profile"):
                profiles = run.blocks("profile", BlockProfile)
                data["signals"] = _signals(list(records.values()), profiles)
        run.add(data, before)

    def _line(self) -> str:
        alone = f"{plural(len(self.blocks), 'block')}, each replaced alone"
        if self.base is None:
            return f"{alone}, cosine {extremes((b.index, b.cosine) for b in self.blocks)}"
        costs = ((b.index, b.kl) for b in self.blocks)
        return f"{alone}, KL {extremes(costs, lambda kl: number(kl, 4))} nats"


def _add(data: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Put into a result what an earlier one of the same settings has beside it."""
    data["blocks"] = with_blocks(before, data)
    data["notes"] = list(dict.fromkeys([*before.get("notes", []), *data["notes"]]))
    data["sums"] = {**before.get("sums", {}), **data["sums"]}
    now = [each["blocks"] for each in data["together"]]
    others = [each for each in before.get("together", []) if each["blocks"] not in now]
    data["together"] = [*others, *data["together"]]
    base, earlier = data["base"], before.get("base")
    if base and earlier and earlier["tokens"] > base["tokens"]:
        data["base"] = earlier


def measure_swaps(
    model: nn.Module,
    folder: str | Path,
    *,
    choose: WindowsLike,
    report: WindowsLike,
    fit: WindowsLike | None = None,
    at: BlockNames = None,
    options: SwapOptions = DEFAULTS,
    work: Work | None = None,
    about: Mapping[str, Any] | None = None,
    after_round: Callable[[Swaps], None] = lambda _: None,
) -> Swaps:
    """Replace each block of a run (or those `at`) alone by its map, and measure.

    The run never read the tokens `choose` and `report`; weighted fits read its own, `fit`, again.
    `about` is what the result records about its making. `after_round` gets the result so far.
    """
    run, work = Profile.load(folder), work or Work()
    blocks = [b for b, _ in match(model, run, at)]
    several = _several(model, run, options.together)
    blocks = sorted({b.index: b for b in [*blocks, *several]}.values(), key=lambda b: b.index)
    maps = RunMaps(model, Path(folder), run, options.weighting, fit, blocks, work)
    made = dict(about or {})
    made.setdefault("model", {"weights": weights_fingerprint(model)})  # others do not add up
    sweep = _Measurement(model, maps, blocks, as_windows(report), options, work, made)
    if problem := _problem(model):
        return sweep.errors(problem)
    return sweep.costs(as_windows(choose), several, after_round)


def _several(model: nn.Module, run: Profile, together: Sequence[int]) -> list[Block]:
    """The blocks to replace at once."""
    return [b for b, _ in match(model, run, ",".join(map(str, together)))] if together else []


def _problem(model: nn.Module) -> str:
    """Why the model has no perplexity; empty if it has."""
    try:
        Readout(model)
    except ValueError as problem:
        return f"no perplexity: {problem}"
    return ""


class _Measurement:
    """One call of `measure_swaps`: what it was asked, and the result so far."""

    def __init__(
        self,
        model: nn.Module,
        maps: RunMaps,
        blocks: list[Block],
        windows: Windows,
        options: SwapOptions,
        work: Work,
        about: dict[str, Any],
    ) -> None:
        self.model, self.maps, self.blocks, self.windows = model, maps, blocks, windows
        self.options, self.work, self.about = options, work, about
        self.protocol = protocol_of(windows, options.protocol)
        self.settings: dict[str, Any] = {
            "protocol": self.protocol.name,
            "units": options.units,
            "weighting": options.weighting,
            "positions": options.positions,
            "windows": _fingerprint(windows),
            "safe": options.safe,
            "batch_size": work.batch_size,
        }

    def errors(self, problem: str) -> Swaps:
        """How far maps are from their blocks, for models that predict no next token."""
        most = 0 if self.options.units == "auto" else int(self.options.units)
        chosen = self._maps({b.index: most for b in self.blocks})
        variants = [(b, chosen[b.index]) for b in self.blocks]
        costs = {
            cost.block.index: cost
            for cost in map_errors(self.model, variants, self.windows, self.work)
        }
        self.settings["ceiling"] = self.windows.tokens
        records = [
            _record(b, self.maps, chosen[b.index], {"chosen": costs[b.index]}, None)
            for b in self.blocks
        ]
        result = Swaps(records, chosen, costs, None, self.settings, {}, [problem])
        result.about.update(self.about)
        return result

    def costs(
        self, choose: Windows, several: list[Block], after_round: Callable[[Swaps], None]
    ) -> Swaps:
        sweeper = Sweeper(self.model, self.blocks, work=self.work)
        kept, tallies = self._earlier()
        self.chosen = self._maps(self._units(sweeper, choose, kept))
        rounds = Rounds(sweeper, self.windows, self.protocol, self.options.positions)
        scored = min(self.protocol.counted, self.options.positions or self.protocol.counted)
        self.settings |= {"ceiling": len(rounds) * scored, "resumed": sweeper.resumed}
        self.notes = [sweeper.note] if sweeper.note else []
        self.joint = (JOINT, ",".join(str(b.index) for b in several)) if several else None
        self.paired = {b.index for b in several}
        variants = self._variants(several)
        tallies = rounds.measure(
            variants,
            tallies,
            self._decided,
            lambda now: after_round(self._result(now)) if self._whole(now) else None,
        )
        return self._result(tallies)

    def _earlier(self) -> tuple[dict[int, int], Tallies]:
        """Units kept and tallies of the same windows and settings, from swap.json."""
        run, kept, tallies = RunFolder(self.maps.folder), dict[int, int](), Tallies()
        asked = {"kind": "swap", "settings": self.settings, **self.about}
        before = None if self.options.overwrite else run.alike(asked)
        if before is None:
            return kept, tallies
        by_index = {b.index: b for b in self.blocks}
        for index, record in records_of(run.path("swap"), before, BlockSwap).items():
            if index in by_index and str(index) in before.get("sums", {}):
                kept[index] = len(record.units)
                for name, data in before["sums"][str(index)].items():
                    tally = Tally.from_dict(data, by_index[index], self.protocol)
                    tallies[index, name] = tally
        for name, data in before.get("sums", {}).get(JOINT, {}).items():
            tallies[JOINT, name] = Tally.from_dict(data, self.blocks[0], self.protocol)
        return kept, tallies

    def _units(self, sweeper: Sweeper, choose: Windows, kept: dict[int, int]) -> dict[int, int]:
        """How many units each block's map keeps; those of an earlier measurement stay."""
        left = [b for b in self.blocks if b.index not in kept]
        if self.options.units != "auto":
            return {b.index: int(self.options.units) for b in self.blocks}
        options = (self.protocol, self.options.positions, "choosing units")
        return kept | chosen_units(left, self.maps, Rounds(sweeper, choose, *options))

    def _maps(self, kept: Mapping[int, int]) -> Maps:
        return {
            b.index: self.maps.map(b, min(kept[b.index], self.maps.ladder(b)[-1]))
            for b in self.blocks
        }

    def _variants(self, several: list[Block]) -> dict[Key, Variant | Together]:
        """What is put in each block's place: the chosen map, plain least squares, baselines."""
        variants: dict[Key, Variant | Together] = {}
        for b in self.blocks:
            variants[b.index, "chosen"] = (b, self.chosen[b.index])
            if self.chosen[b.index] is not self.maps.plain(b):
                variants[b.index, "plain"] = (b, self.maps.plain(b))
            if self.options.baselines:
                others = self.maps.baselines(b).items()
                variants |= {(b.index, name): (b, constant) for name, constant in others}
        if self.joint is not None:
            variants[self.joint] = {b: self.chosen[b.index] for b in several}
        return variants

    def _decided(self, key: Key, tally: Tally) -> bool:
        """Is there a verdict? Blocks that are replaced together are compared on all windows."""
        if (
            self.options.all_tokens
            or key[0] == JOINT
            or (key[0] in self.paired and key[1] == "chosen")
        ):
            return False
        return _verdict(tally.change, tally.windows, self.options.safe) != UNDECIDED

    def _whole(self, tallies: Tallies) -> bool:
        return all((b.index, "chosen") in tallies for b in self.blocks)

    def _result(self, tallies: Tallies) -> Swaps:
        records, sums = [], dict[str, dict[str, Any]]()
        for (place, name), tally in tallies.items():
            sums.setdefault(str(place), {})[name] = tally.to_dict()
        for b in self.blocks:
            named = {name: t.cost for (place, name), t in tallies.items() if place == b.index}
            if self.chosen[b.index] is self.maps.plain(b):
                named["plain"] = named["chosen"]
            windows = tallies[b.index, "chosen"].windows
            record = _record(b, self.maps, self.chosen[b.index], named, windows)
            records.append(_judged(record, self.options.safe))
        longest = max(tallies.values(), key=lambda tally: tally.windows)
        together = []
        if self.joint is not None and self.joint in tallies:
            single = {i: tallies[i, "chosen"] for i in sorted(self.paired)}
            together = additivity(tallies[self.joint], single)
            if not together and tallies[self.joint].windows == len(self.windows):
                self.notes.append(
                    f"blocks {sorted(self.paired)} together have fewer windows than alone: the same "
                    "tokens as before compare them"
                )
        return Swaps(
            records,
            self.chosen,
            {b.index: tallies[b.index, "chosen"].cost for b in self.blocks},
            longest.change.original,
            self.settings,
            _signals(records, self.maps.records),
            self.notes,
            together,
            sums,
            longest.windows,
            self.about,
        )


def _fingerprint(windows: Windows) -> str:
    """Of the windows before the first look: results on other windows do not add up."""
    ids = None if windows.inputs is None else windows.inputs.get("input_ids")
    if ids is None or not len(ids):
        return ""
    return f"{zlib.crc32(ids[:FIRST_LOOK].cpu().contiguous().numpy().tobytes()):08x}"


# -- the record -----------------------------------------------------------------------------------


def _verdict(change: Comparison, windows: int, safe: float) -> str:
    return verdict_of(change.kl, change.kl_se, change.clusters, windows, safe)


def _judged(record: BlockSwap, safe: float) -> BlockSwap:
    """The record with its verdict; None where there is no KL."""
    if record.kl is None:
        return record
    se = math.nan if record.kl_se is None else record.kl_se
    word = verdict_of(record.kl, se, record.clusters, record.windows, safe)
    return replace(record, verdict=word)


def estimates(cost: SwapCost) -> dict[str, Any]:
    """Fields of a record that compare predictions; None for models that predict no next token."""
    return {
        f"{name}{end}": None if cost.change is None else getattr(cost.change, f"{name}{end}")
        for name in ("kl", "delta_nll", "delta_ppl", "top1")
        for end in ("", "_se")
    }


def _record(
    block: Block,
    maps: RunMaps,
    chosen: Affine | UnitMap,
    costs: Mapping[str, SwapCost],
    windows: int | None,
) -> BlockSwap:
    """Of costs by variant; the verdict is not yet in it."""
    module, cost = as_module(maps.model, block), costs["chosen"]
    parameters = sum(p.numel() for p in module.parameters())
    work = multiply_adds(module, block, maps.like)
    others = {
        f"{field}_{name}": getattr(c.change, field) if (c := costs.get(name)) and c.change else None
        for field in ("kl", "delta_nll", "delta_ppl")
        for name in ("plain", "zero", "mean")
    }
    return BlockSwap(
        index=block.index,
        path=block.path,
        units=list(chosen.units) if isinstance(chosen, UnitMap) else [],
        weighting=maps.weighting,
        verdict=None,
        **estimates(cost),
        tokens=0 if cost.change is None else cost.change.tokens,
        windows=windows or 0,
        clusters=0 if cost.change is None else cost.change.clusters,
        **others,
        cosine=cost.cosine,
        rmse=cost.rmse,
        stream_error=cost.stream_error,
        params_saved=parameters - chosen.parameters,
        multiply_adds_saved=None if work is None else work - chosen.multiply_adds,
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
    """Rank correlation of fields of the profile with the KL of the plain map, over blocks."""
    fields: dict[str, Callable[[BlockProfile], float | None]] = {
        "1 - r2": lambda p: 1 - p.r2,
        "1 - r2_body": lambda p: None if p.r2_body is None else 1 - p.r2_body,
        "residual_norm": lambda p: p.residual_norm,
        "stream_error": lambda p: p.stream_error,
        "expected_kl": lambda p: p.expected_kl,
    }
    costs = [r.kl_plain for r in records]
    return {
        name: over_blocks(spearman, [value(profiles[r.index]) for r in records], costs).to_dict()
        for name, value in fields.items()
    }
