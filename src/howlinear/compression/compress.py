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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from howlinear.compression.plan import Option, Step, after, descent, expected, saving, within
from howlinear.compression.plan import to_dict as plan_file
from howlinear.compression.refitting import TARGETS, Shape, Workshop
from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.unit_selection import GROUP
from howlinear.losses.perplexity import Comparison, compare_all
from howlinear.losses.protocols import Batches, EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import Replacement, Variant, sweep
from howlinear.models.families import Block
from howlinear.models.hooks import as_module, swapped
from howlinear.models.units import hidden_count, taken
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockCompression, BlockPlan
from howlinear.records.files import read_json
from howlinear.records.words import signed
from howlinear.report.results import Result
from howlinear.run.work import Work
from howlinear.swapping.swaps import match

# What is measured of each block: one matrix beside SINKS hidden units, and these shares of the hidden
# units alone. What other ways cost is told from what they leave unexplained.
ALONE = (0.5, 0.75)
RANKS = (1 / 16, 1 / 8, 1 / 4)  # of the width, beside these shares of the hidden units:
BESIDE = (0.0, 0.25, 0.5)
OPTION_TOKENS = 1024  # that an option's cost is measured on
SINKS = 4  # hidden units beside a matrix, at least: attention sinks need a few, and few suffice
ROUNDS = 4  # of refitting in search of the budget
CLOSE = 0.97  # of the budget: near enough
BASELINES = ("swap", "r2", "zero")  # ranked by swap cost, by R2; removed outright

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


@dataclass(frozen=True, eq=False, repr=False)
class Compression(Result):
    """What became of each block and what that costs. `maps` go into the model with `install_maps`."""

    blocks: list[BlockCompression]
    maps: dict[Block, Map]
    change: Comparison | None  # on text that nothing was fitted to or chosen by; None: no tokens
    removed: int
    feed_forward: int  # parameters of all measured blocks
    parameters: int  # of the whole model, before
    target: str
    curve: list[Point]
    settings: dict[str, Any]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)  # what was written, if anything

    def plan_dict(self) -> dict[str, Any]:
        """`plan.json`: what became of the replaced blocks, for `--plan`."""
        return plan_file(self.plan, self.about)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`compress.json`, field by field."""
        return "compress", {
            "settings": self.settings,
            "parameters": self.parameters,
            "feed_forward": self.feed_forward,
            "removed": self.removed,
            "target": self.target,
            "change": None if self.change is None else self.change.to_dict(),
            "exported": self.exported or None,
            "curve": [_point(p, self.feed_forward) for p in self.curve],
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def _line(self) -> str:
        gone = (
            f"{len(self.plan)} of {len(self.blocks)} blocks replaced, {self.removed:,} parameters"
        )
        cost = "" if self.change is None else f", perplexity {signed(self.change.delta_ppl)}"
        return f"{gone} removed{cost}"

    @property
    def plan(self) -> list[BlockPlan]:
        return [BlockPlan(b.index, b.path, b.rank, len(b.units)) for b in self.blocks if b.replaced]


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
    protocol: EvalProtocol | str | None = None,
    curve: Sequence[float] = (),
    baselines: bool = True,
    intercept: bool = True,
    progress: Progress | None = None,
) -> Compression:
    """Choose what becomes of each block of a run, fit it, and measure it; the model stays as it is.

    With a `plan` or with blocks named (`at`) nothing is searched for. `curve` asks for shares of the
    feed-forward parameters at which ours and the baselines are measured too.
    """
    budget = budget or Budget(perplexity=0.05)
    run = Profile.load(folder)
    every = match(model, run, None)
    shop = Workshop(model, [b for b, _ in every], fit, intercept=intercept)
    work = _Work(Path(folder), run, shop, choose, report, protocol, progress)
    options: list[Option] = []
    path: list[Step] = []
    if plan is not None:
        best = work.best_target(work.planned(plan))
    elif at is not None:
        named = [b for b, _ in match(model, run, at)]
        best = work.best_target(work.named(named, rank, units))
    else:
        work.require_predictions("--max-ppl-increase and --remove-params measure costs")
        options = work.measure(rank, units)
        path = descent(options)
        best = work.search(path, budget)
    points, change, notes = work.reported(best, path, curve, baselines)
    if not intercept and not work.why_not:
        notes.append(work.price_of_no_bias(best))
    return Compression(
        blocks=work.records(best.maps, options),
        maps=best.maps,
        change=change,
        removed=work.removed(best.maps),
        feed_forward=sum(work.sizes.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        target=best.target,
        curve=points,
        settings={
            "protocol": work.how.name,
            "fit_tokens": fit.numel(),
            "budget": None if plan is not None or at is not None else asdict(budget),
            "rank": rank,
            "units": units,
            "intercept": intercept,
        },
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
        folder: Path,
        run: Profile,
        shop: Workshop,
        choose: Batches,
        report: Batches,
        protocol: EvalProtocol | str | None,
        progress: Progress | None,
    ) -> None:
        self.folder, self.run, self.shop = folder, run, shop
        self.model, self.at = shop.model, shop.at
        model, at = shop.model, shop.at
        self.choose, self.report = choose, report
        self.how = protocol_of(report, protocol)
        self.progress = progress or (lambda what, tokens: lambda done: None)
        self.by_index = {b.index: b for b in at}
        modules = {b: as_module(model, b) for b in at}
        self.sizes = {b: sum(p.numel() for p in m.parameters()) for b, m in modules.items()}
        self.hidden = {b: hidden_count(model, b) for b in at}
        self.unit = {b: _unit_size(model, b) for b in at if self.hidden[b]}
        self.why_not = ""
        try:
            Readout(model)
        except ValueError as why:
            self.why_not = str(why)

    def require_predictions(self, what: str) -> None:
        if self.why_not:
            raise ValueError(f"{what}, but {self.why_not}: name blocks (--blocks) or give a --plan")

    # -- options

    def rung(self, block: Block, share: float) -> int:
        """A number of hidden units near this share that the elimination passes by; SINKS at least."""
        m = self.hidden[block]
        return min(max(GROUP * round(share * m / GROUP), SINKS), m)

    def _to_measure(self, block: Block, rank: int | str, units: int | str) -> list[Shape]:
        if not self.hidden[block]:
            return [(_rank(rank), 0)]
        if units != "auto":
            k = min(int(units), self.hidden[block])
            return [(None, k), (0, k)] if rank == "auto" else [(_rank(rank), k)]
        matrix: list[Shape] = [(None, self.rung(block, 0.0))]
        return matrix + [(0, self.rung(block, share)) for share in ALONE]

    def _ranks(self, block: Block, rank: int | str) -> list[int]:
        d = min(block.d_in, block.d_out)
        if rank == "auto":
            return [max(round(part * d), 1) for part in RANKS]
        return [r] if (r := _rank(rank)) else []

    def measure(self, rank: int | str, units: int | str) -> list[Option]:
        """What each way to replace each block alone costs, on the text kept for choosing.

        A few are measured, and the others told from them by the share of variance that they leave.
        """
        asked = {b: self._to_measure(b, rank, units) for b in self.at}
        ranks = {
            b: {self.rung(b, share): self._ranks(b, rank) for share in BESIDE}
            for b in self.at
            if self.hidden[b]
        }
        begun = self.progress("fitting options", len(self.at) * self.shop.windows.numel())
        offers = self.shop.survey(asked, ranks, begun)
        singles = [(b, fitted) for b in self.at for fitted in offers[b]]
        costs = iter(self._swept("measuring options", singles))
        known = {b: {shape: next(costs).kl for shape in asked[b]} for b in self.at}
        return [o for b in self.at for o in self._options(b, known[b], rank, units)]

    def _options(
        self, block: Block, known: dict[Shape, float], rank: int | str, units: int | str
    ) -> list[Option]:
        rests = self.shop.rests[block]
        points = [(rests[shape], cost) for shape, cost in known.items() if shape in rests]
        costs = {shape: expected(points, rest) for shape, rest in rests.items()} | known
        found = []
        for (r, k), cost in costs.items():
            saved = self.sizes[block] - self.parameters(block, (r, k))
            wanted = r == _rank(rank) if rank != "auto" else True
            wanted &= k == min(int(units), self.hidden[block]) if units != "auto" else True
            bare = r != 0 and k < min(SINKS, self.hidden[block]) and units == "auto"
            if saved > 0 and wanted and not bare:
                found.append(Option(block.index, r, k, saved, cost))
        return found

    def parameters(self, block: Block, shape: Shape) -> int:
        """Of a map of this shape."""
        rank, k = shape
        matrix = block.d_in * block.d_out if rank is None else rank * (block.d_in + block.d_out)
        return matrix + block.d_out + k * self.unit.get(block, 0)

    def _swept(self, what: str, variants: Sequence[Variant]) -> list[Comparison]:
        windows = self.choose
        if isinstance(windows, Tensor):
            windows = windows[: max(2, OPTION_TOKENS // windows.shape[1])]
        work = Work(progress=self.progress)
        swept = sweep(self.model, variants, windows, protocol=self.how, work=work, label=what)
        return [c.change for c in swept.costs if c.change is not None]

    # -- one set of blocks

    def planned(self, plan: Sequence[BlockPlan]) -> dict[Block, Shape]:
        shapes = {}
        for p in plan:
            block = self.by_index.get(p.index)
            if block is None or block.path != p.path:
                raise ValueError(f"the plan's block {p.index} ({p.path}) is not in the run")
            if p.units > (m := self.hidden[block]):
                raise ValueError(
                    f"the plan keeps {p.units} units of block {p.index}, which has {m}"
                )
            shapes[block] = (p.rank, p.units)
        return shapes

    def named(self, at: list[Block], rank: int | str, units: int | str) -> dict[Block, Shape]:
        """One matrix each; a few hidden units beside it where they are worth it, if nobody said."""
        r = _rank(rank)
        if units != "auto":
            return {b: (r, min(int(units), self.hidden[b])) for b in at}
        ways = {b: [(r, k) for k in dict.fromkeys((0, min(SINKS, self.hidden[b])))] for b in at}
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

    def price_of_no_bias(self, best: _Try) -> str:
        """The same maps with biases, for comparison."""
        self.shop.intercept = True
        other = self.tried(best.shapes, best.target)
        self.shop.intercept = False
        assert best.change is not None
        assert other.change is not None
        gain, se = best.change.gain_over(other.change)
        return f"without biases {-gain:+.4f} ± {se:.4f} nats a token, on the text to choose by"

    def compared(
        self, maps: Sequence[Mapping[Block, Replacement]], windows: Batches
    ) -> list[Comparison]:
        changes = [partial(swapped, self.model, own) for own in maps]
        size = windows.numel() if isinstance(windows, Tensor) else 0
        done = self.progress("measuring", size)
        return compare_all(self.model, changes, windows, self.how, progress=done)

    def search(self, path: list[Step], budget: Budget) -> _Try:
        """What the budget buys."""
        if not path:
            raise ValueError("no way to replace a block saves parameters")
        if budget.parameters is not None:
            wanted = math.ceil(budget.parameters * sum(self.sizes.values()))
            most = sum(s.saved for s in path)
            if wanted > most:
                raise ValueError(
                    f"{budget.parameters:.1%} of the feed-forward parameters cannot go: replacing "
                    f"every block saves {most / sum(self.sizes.values()):.1%} (--remove-params)"
                )
            return self.best_target(self._shapes(path, saving(path, wanted)))
        return self._within(path, budget.nats)

    def _within(self, path: list[Step], nats: float) -> _Try:
        """Costs do not quite add up: try, see how far off that was, and try again."""
        level, low, high = nats, (0.0, 0.0), None  # (expected, measured) below and above the budget
        best: _Try | None = None
        tried: set[int] = set()
        target = None
        for _ in range(ROUNDS):
            steps = max(within(path, level), 1)
            if steps in tried:
                break
            tried.add(steps)
            shapes = self._shapes(path, steps)
            new = self.tried(shapes, target) if target else self.best_target(shapes)
            target = new.target
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
        return best

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
        (change,) = self.compared([best.maps], self.report)
        found = [Point("ours", removed, change, {b.index: s for b, s in best.shapes.items()})]
        for share in curve if path else ():
            shapes = self._shapes(path, saving(path, math.ceil(share * total)))
            maps = self.shop.refit(shapes, best.target, self.progress(f"refitting {share:.0%}", 0))
            (own,) = self.compared([maps], self.report)
            chosen = {b.index: s for b, s in shapes.items()}
            found.append(Point("ours", self.removed(maps), own, chosen))
        if baselines:
            ranked = self._ranked(max(p.removed for p in found))
            costs = self.compared([maps for _, _, maps in ranked], self.report)
            found += [
                Point(name, gone, cost, {b.index: (None, 0) for b in maps})
                for (name, gone, maps), cost in zip(ranked, costs, strict=True)
            ]
        return found, change, []

    def _ranked(self, most: int) -> list[tuple[str, int, dict[Block, Replacement]]]:
        """Each baseline with one block replaced, two, and so on, until it removes as much as ours."""
        r2 = {b: -p.r2 for b, p in zip(self.at, self.run.blocks, strict=True)}
        ranks = {"r2": r2} | self._swap_costs()
        found = []
        for name in BASELINES:
            gone = 0
            maps: dict[Block, Replacement] = {}
            for b in sorted(self.at, key=ranks[name].__getitem__):
                if gone >= most:
                    break
                fitted: Any = self._baseline(b, name)
                gone += self.sizes[b] - (0 if name == "zero" else fitted.parameters)
                maps = {**maps, b: fitted}
                found.append((name, gone, maps))
        return found

    def _swap_costs(self) -> dict[str, dict[Block, float]]:
        """What it costs to replace each block alone by plain least squares, or to remove it.

        As `howlinear swap` has measured, if it did for all blocks: that is on the text reported on,
        to the advantage of the baselines. Else KL, which needs fewer tokens, on the other text.
        """
        names = {"swap": "delta_nll_plain", "zero": "delta_nll_zero"}
        with suppress(ValueError):
            swaps = {b["index"]: b for b in read_json(self.folder / "swap.json", "swap")["blocks"]}
            if all(b.index in swaps for b in self.at):
                return {n: {b: float(swaps[b.index][k]) for b in self.at} for n, k in names.items()}
        variants = [(b, self._baseline(b, name)) for name in names for b in self.at]
        costs = iter(self._swept("measuring baselines", variants))
        return {name: {b: next(costs).kl for b in self.at} for name in names}

    def _baseline(self, block: Block, name: str) -> Replacement:
        if name == "zero":
            return lambda x: x.new_zeros(*x.shape[:-1], block.d_out)
        return self.run.maps[block.index].to(self.shop.like)

    def records(self, maps: Mapping[Block, Map], options: list[Option]) -> list[BlockCompression]:
        costs = {(o.index, o.rank, o.units): o.cost for o in options}
        found = []
        for b in self.at:
            fitted = maps.get(b)
            units = list(fitted.units) if isinstance(fitted, UnitMap) else []
            affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
            rank = affine.rank if isinstance(affine, Factored) else None
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


def _rank(rank: int | str) -> int | None:
    return None if rank in ("auto", "full") else int(rank)


def _unit_size(model: nn.Module, block: Block) -> int:
    """Parameters that one hidden unit takes."""
    return sum(p.numel() for p in taken(model, block, [0]).parameters()) + block.d_out
