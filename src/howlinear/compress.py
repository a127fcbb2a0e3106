"""From a budget to a smaller model: what each block may become, which it becomes, and what that costs.

    result = compress_model(model, "runs/demo", Budget(perplexity=0.05), fit=..., choose=..., report=...)
    result.change.delta_ppl, result.removed, result.maps
    install_maps(model, result.maps)

Three texts: maps are fitted on one; another one tells what every option costs, where on the path of
options the budget lies and which target the maps are fitted to; the third is read once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.families import Block, as_module, swapped
from howlinear.perplexity import Batches, Comparison, Loss, Protocol, Readout, compare_all, protocol_of
from howlinear.plan import Option, Step, after, descent, saving, within
from howlinear.profiling import Profile
from howlinear.records import SCHEMA, BlockCompression, BlockPlan
from howlinear.refitting import TARGETS, Map, Shape, Workshop
from howlinear.sweeps import Replacement, sweep
from howlinear.swap import match
from howlinear.units import taken

# Ways to replace a block, as (rank of the matrix, share of the hidden units kept).
WAYS: tuple[tuple[int | None, float], ...] = (
    (None, 0.0),
    (None, 0.125),
    (None, 0.375),
    (0, 0.4),
    (0, 0.6),
    (0, 0.75),
    (0, 0.875),
)
SINKS = 4  # hidden units beside a matrix that is asked for by name: attention sinks need few
ROUNDS = 4  # of refitting in search of the budget
CLOSE = 0.97  # of the budget: near enough
METHODS = {
    "ours": "refitted along the plan",
    "swap": "one matrix each, by swap cost, not refitted",
    "r2": "one matrix each, by R2, not refitted",
    "zero": "blocks removed, by the cost of removing them",
}

Progress = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True)
class Budget:
    """How much perplexity may rise, or how many of the feed-forward parameters go; as shares."""

    perplexity: float | None = None
    parameters: float | None = None

    @property
    def nats(self) -> float:
        return math.log1p(self.perplexity or 0.0)


@dataclass(frozen=True)
class Point:
    """One method at one size."""

    method: str
    removed: int
    change: Comparison
    chosen: dict[int, Shape] = field(repr=False, default_factory=dict)


@dataclass(frozen=True, eq=False)
class Compression:
    """What became of each block and what that costs. `maps` go into the model with `install_maps`."""

    blocks: list[BlockCompression]
    maps: dict[Block, Map] = field(repr=False)
    change: Comparison | None  # on text that nothing else has read; None: it predicts no tokens
    removed: int
    feed_forward: int  # parameters of all measured blocks
    parameters: int  # of the whole model, before
    target: str
    curve: list[Point]
    options: list[Option]
    settings: dict[str, Any]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """`compress.json`, field by field."""
        return {
            "kind": "compress",
            "schema": SCHEMA,
            **self.about,
            "settings": self.settings,
            "parameters": self.parameters,
            "feed_forward": self.feed_forward,
            "removed": self.removed,
            "target": self.target,
            "change": None if self.change is None else self.change.to_dict(),
            "curve": [_point(p, self.feed_forward) for p in self.curve],
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    @property
    def plan(self) -> list[BlockPlan]:
        return [
            BlockPlan(b.index, b.path, b.rank, len(b.units)) for b in self.blocks if b.replaced
        ]


def _point(point: Point, feed_forward: int) -> dict[str, Any]:
    change = point.change
    return {
        "method": point.method,
        "removed": point.removed,
        "share": point.removed / feed_forward,
        "blocks": len(point.chosen),
        "perplexity": change.changed.perplexity,
        "delta_nll": change.delta_nll,
        "delta_nll_se": change.delta_nll_se,
        "delta_ppl": change.delta_ppl,
        "delta_ppl_se": change.delta_ppl_se,
        "kl": change.kl,
    }


# -- the whole way ---------------------------------------------------------------------------------


def compress_model(
    model: nn.Module,
    folder: str | Path,
    budget: Budget | None = None,
    *,
    fit: Tensor,
    choose: Batches,
    report: Batches,
    plan: Sequence[BlockPlan] | None = None,
    at: str | None = None,
    rank: int | str = "auto",
    units: int | str = "auto",
    protocol: Protocol | str | None = None,
    curve: Sequence[float] = (),
    baselines: bool = True,
    bias: bool = True,
    progress: Progress | None = None,
) -> Compression:
    """Choose what becomes of each block of a run, fit it, and measure it; the model stays as it is.

    With a `plan` or with blocks named (`at`) nothing is searched for. `curve` asks for shares of the
    feed-forward parameters at which ours and the baselines are measured too.
    """
    run = Profile.load(folder)
    every = match(model, run, None)
    work = _Work(model, run, [b for b, _ in every], fit, choose, report, protocol, progress)
    options: list[Option] = []
    path: list[Step] = []
    visited: list[_Try] = []
    if plan is not None:
        shapes = work.planned(plan)
    elif at is not None:
        shapes = work.named([b for b, _ in match(model, run, at)], rank, units)
    else:
        work.require_predictions("--max-ppl-increase and --remove-params measure costs")
        options = work.measure(rank, units)
        path = descent(options)
        visited = work.search(path, budget or Budget(perplexity=0.05))
        shapes = visited[-1].shapes
    best = visited[-1] if visited else work.best_target(shapes)
    points, change, notes = work.reported(best, path, curve, baselines)
    return Compression(
        blocks=work.records(best.maps, options),
        maps=best.maps,
        change=change,
        removed=work.removed(best.maps),
        feed_forward=sum(work.sizes.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        target=best.target,
        curve=points,
        options=options,
        settings={},
        notes=notes,
    )


@dataclass(frozen=True, eq=False)
class _Try:
    """Maps fitted together, and what they cost on the text kept for choosing."""

    shapes: dict[Block, Shape]
    maps: dict[Block, Map]
    target: str
    change: Comparison | None

    @property
    def nats(self) -> float:
        return math.nan if self.change is None else self.change.delta_nll


class _Work:
    """What all steps of one compression share."""

    def __init__(
        self,
        model: nn.Module,
        run: Profile,
        at: list[Block],
        fit: Tensor,
        choose: Batches,
        report: Batches,
        protocol: Protocol | str | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.run, self.at = model, run, at
        self.choose, self.report = choose, report
        self.how = protocol_of(report, protocol)
        self.progress = progress or (lambda what, tokens: lambda done: None)
        self.shop = Workshop(model, at, fit)
        self.by_index = {b.index: b for b in at}
        modules = {b: as_module(model, b) for b in at}
        self.sizes = {b: sum(p.numel() for p in m.parameters()) for b, m in modules.items()}
        self.single: dict[tuple[int, str], Comparison] = {}  # cost of one block's baselines
        self.why_not = ""
        try:
            Readout(model)
        except ValueError as why:
            self.why_not = str(why)

    def require_predictions(self, what: str) -> None:
        if self.why_not:
            raise ValueError(f"{what}, but {self.why_not}: name blocks (--blocks) or give a --plan")

    # -- options

    def shapes_of(self, block: Block, rank: int | str, units: int | str) -> list[Shape]:
        """Ways to replace a block that save something; a mixture of experts has but the matrix."""
        m = _hidden(self.model, block)
        ways = [(r, round(share * m)) for r, share in WAYS if m or not share]
        if rank != "auto":
            ways = [(int(rank), k) for _, k in ways]
        if units != "auto":
            ways = [(r, min(int(units), m)) for r, _ in ways]
        return list(dict.fromkeys(ways))

    def measure(self, rank: int | str, units: int | str) -> list[Option]:
        """What each way to replace each block alone costs, on the text kept for choosing."""
        asked = {b: self.shapes_of(b, rank, units) for b in self.at}
        begun = self.progress("fitting options", len(self.at) * self.shop.windows.numel())
        offers = self.shop.survey(asked, begun)
        keys: list[tuple[Block, Any]] = []
        variants: list[tuple[Block, Replacement]] = []
        for b in self.at:
            for shape, fitted in zip(asked[b], offers[b], strict=True):
                if fitted.parameters < self.sizes[b]:
                    keys.append((b, (shape, self.sizes[b] - fitted.parameters)))
                    variants.append((b, fitted))
            for name, fitted in self._baselines(b).items():
                keys.append((b, name))
                variants.append((b, fitted))
        costs = self._swept("measuring options", variants)
        options = []
        for (b, key), change in zip(keys, costs, strict=True):
            if isinstance(key, str):
                self.single[b.index, key] = change
            else:
                shape, saved = key
                options.append(Option(b.index, *shape, saved, change.kl))
        return options

    def _swept(self, what: str, variants: list[tuple[Block, Replacement]]) -> list[Comparison]:
        size = self.choose.numel() if isinstance(self.choose, Tensor) else 0
        done = self.progress(what, size * len(variants))
        swept = sweep(self.model, variants, self.choose, protocol=self.how, progress=done)
        return [c.change for c in swept.costs if c.change is not None]

    def _baselines(self, block: Block) -> dict[str, Replacement]:
        like = self.shop.like
        return {
            "swap": self.run.maps[block.index].to(like),
            "zero": lambda x: x.new_zeros(*x.shape[:-1], block.d_out),
        }

    # -- one set of blocks

    def planned(self, plan: Sequence[BlockPlan]) -> dict[Block, Shape]:
        shapes = {}
        for p in plan:
            block = self.by_index.get(p.index)
            if block is None or block.path != p.path:
                raise ValueError(f"the plan's block {p.index} ({p.path}) is not in the run")
            if p.units > (m := _hidden(self.model, block)):
                raise ValueError(f"the plan keeps {p.units} units of block {p.index}, which has {m}")
            shapes[block] = (p.rank, p.units)
        return shapes

    def named(self, at: list[Block], rank: int | str, units: int | str) -> dict[Block, Shape]:
        """One matrix each; a few hidden units beside it where they are worth it, if nobody said."""
        r = None if rank == "auto" else int(rank)
        if units != "auto":
            return {b: (r, min(int(units), _hidden(self.model, b))) for b in at}
        ways = {b: [(r, k) for k in dict.fromkeys((0, min(SINKS, _hidden(self.model, b))))] for b in at}
        if self.why_not:
            return {b: own[-1] for b, own in ways.items()}
        offers = self.shop.survey(ways)
        flat = [(b, fitted) for b in at for fitted in offers[b]]
        costs = iter(self._swept("choosing units", flat))
        chosen = {}
        for b, own in ways.items():
            found = [next(costs) for _ in own]
            gain, se = found[-1].gain_over(found[0])
            chosen[b] = own[-1] if gain > 2 * se else own[0]
        return chosen

    # -- many blocks

    def best_target(self, shapes: dict[Block, Shape]) -> _Try:
        """Fitted to either target; what measures better on the text kept for choosing."""
        if self.why_not:
            return self.tried(shapes, TARGETS[0])
        return min((self.tried(shapes, target) for target in TARGETS), key=lambda t: t.nats)

    def tried(self, shapes: dict[Block, Shape], target: str) -> _Try:
        rows = len(shapes) * self.shop.windows.numel()
        maps = self.shop.refit(shapes, target, self.progress(f"refitting ({target})", rows))
        change = None if self.why_not else self.compared([maps], self.choose)[0]
        return _Try(shapes, maps, target, change)

    def compared(
        self, maps: Sequence[Mapping[Block, Replacement]], windows: Batches
    ) -> list[Comparison]:
        changes = [partial(swapped, self.model, own) for own in maps]
        size = windows.numel() if isinstance(windows, Tensor) else 0
        done = self.progress("measuring", size)
        return compare_all(self.model, changes, windows, self.how, progress=done)

    def search(self, path: list[Step], budget: Budget) -> list[_Try]:
        """Tries along the path; the last one is what the budget buys."""
        if not path:
            raise ValueError("no way to replace a block saves parameters")
        if budget.parameters is not None:
            wanted = math.ceil(budget.parameters * sum(self.sizes.values()))
            most = sum(s.saved for s in path)
            if wanted > most:
                raise ValueError(
                    f"{budget.parameters:.0%} of the feed-forward parameters cannot go: replacing "
                    f"every block saves {most / sum(self.sizes.values()):.0%} (--remove-params)"
                )
            return [self.best_target(self._shapes(path, saving(path, wanted)))]
        return self._within(path, budget.nats)

    def _within(self, path: list[Step], nats: float) -> list[_Try]:
        """Costs do not quite add up: try, see how far off that was, and try again."""
        level, low, high = nats, (0.0, 0.0), None  # (expected, measured) below and above the budget
        best: _Try | None = None
        tries: dict[int, _Try] = {}
        target = None
        for _ in range(ROUNDS):
            steps = within(path, level)
            if steps == 0 or steps in tries:
                break
            shapes = self._shapes(path, steps)
            new = self.tried(shapes, target) if target else self.best_target(shapes)
            target, tries[steps] = new.target, new
            if new.nats <= nats:
                best, low = new, (level, new.nats)
                if new.nats >= CLOSE * nats or steps == len(path):
                    break
            else:
                high = (level, new.nats)
            level = _aim(low, high, nats)
        if best is None:
            raise ValueError(
                f"no block can be replaced for {math.expm1(nats):.1%} more perplexity: "
                "raise --max-ppl-increase"
            )
        return [*(t for t in tries.values() if t is not best), best]

    def _shapes(self, path: list[Step], steps: int) -> dict[Block, Shape]:
        chosen = after(path, steps)
        return {self.by_index[i]: (o.rank, o.units) for i, o in sorted(chosen.items())}

    # -- what it comes to

    def removed(self, maps: Mapping[Block, Map]) -> int:
        return sum(self.sizes[b] - m.parameters for b, m in maps.items())

    def reported(
        self, best: _Try, path: list[Step], curve: Sequence[float], baselines: bool
    ) -> tuple[list[Point], Comparison | None, list[str]]:
        """Ours and the baselines on the third text."""
        if self.why_not:
            return [], None, [f"no perplexity: {self.why_not}"]
        total, removed = sum(self.sizes.values()), self.removed(best.maps)
        points = [("ours", removed, best.maps)]
        (change,) = self.compared([best.maps], self.report)
        found = [Point("ours", removed, change, {b.index: s for b, s in best.shapes.items()})]
        for share in curve if path else ():
            shapes = self._shapes(path, saving(path, math.ceil(share * total)))
            maps = self.shop.refit(shapes, best.target, self.progress(f"refitting {share:.0%}", 0))
            (own,) = self.compared([maps], self.report)
            chosen = {b.index: s for b, s in shapes.items()}
            found.append(Point("ours", self.removed(maps), own, chosen))
        if baselines and self.single:
            most = max(removed, *(p.removed for p in found))
            points = [p for name in METHODS for p in self._ranked(name, most)]
            costs = self.compared([maps for _, _, maps in points], self.report)
            found += [
                Point(name, gone, cost, {b.index: (None, 0) for b in maps})
                for (name, gone, maps), cost in zip(points, costs, strict=True)
            ]
        return found, change, []

    def _ranked(self, name: str, most: int) -> list[tuple[str, int, dict[Block, Replacement]]]:
        """A baseline with one block replaced, two, and so on, until it removes as much as ours."""
        if name == "ours":
            return []
        r2 = {p.index: p.r2 for p in self.run.blocks}
        what = "zero" if name == "zero" else "swap"
        rank = {
            b: -r2[b.index] if name == "r2" else self.single[b.index, name].delta_nll
            for b in self.at
        }
        found: list[tuple[str, int, dict[Block, Replacement]]] = []
        gone, maps = 0, {}
        for b in sorted(self.at, key=rank.__getitem__):
            if gone >= most:
                break
            fitted: Any = self._baselines(b)[what]
            gone += self.sizes[b] - (0 if name == "zero" else fitted.parameters)
            maps = {**maps, b: fitted}
            found.append((name, gone, maps))
        return found

    def records(self, maps: Mapping[Block, Map], options: list[Option]) -> list[BlockCompression]:
        costs = {(o.index, o.rank, o.units): o.cost for o in options}
        found = []
        for b in self.at:
            fitted = maps.get(b)
            units = list(getattr(fitted, "units", ()))
            affine = getattr(fitted, "affine", fitted)
            rank = None if fitted is None or hasattr(affine, "weight") else affine.rank
            found.append(
                BlockCompression(
                    index=b.index,
                    path=b.path,
                    replaced=int(fitted is not None),
                    rank=rank,
                    units=units,
                    parameters=self.sizes[b],
                    parameters_left=self.sizes[b] if fitted is None else fitted.parameters,
                    kl_alone=costs.get((b.index, rank, len(units))) if fitted else None,
                )
            )
        return found


def _aim(low: tuple[float, float], high: tuple[float, float] | None, nats: float) -> float:
    """The expected cost at which the measured one may meet the budget, by the last two tries."""
    aim = (1 + CLOSE) / 2 * nats
    if high is None:
        return low[0] * aim / low[1] if low[1] > 0 else 2 * low[0]
    return low[0] + (high[0] - low[0]) * (aim - low[1]) / (high[1] - low[1])


def _hidden(model: nn.Module, block: Block) -> int:
    """How many hidden units can be kept; 0 where they do not come out alone."""
    try:
        taken(model, block, [0])
    except ValueError:
        return 0
    from howlinear.units import weight_of

    return int(weight_of(model.get_submodule(str(block.down))).shape[1])
