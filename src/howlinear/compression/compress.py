"""From a budget to a smaller model: what replaces each block, and what that costs.

    result = compress_model(model, "runs/demo", Budget(perplexity=0.05), fit=..., choose=..., report=...)
    result.change.delta_ppl, result.removed, result.maps
    install_maps(model, result.maps)

Three texts: maps are fitted on the first; the second decides what every option costs, how far along the
path of options the budget reaches; the third is read once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from howlinear.compression.baselines import baselines
from howlinear.compression.healing import Healed, Recipe, check_healable, heal
from howlinear.compression.plan import Budget, Option, check_blocks, check_units
from howlinear.compression.plan import to_dict as plan_file
from howlinear.compression.prices import Losses, Sizes, shape_of, shapes_of_named
from howlinear.compression.refitting import Refitter, Shape
from howlinear.compression.search import Search, Trial
from howlinear.compression.targets import INSTEAD
from howlinear.linear.affine import Map, UnitMap
from howlinear.losses.perplexity import Comparison
from howlinear.losses.protocols import EvalProtocol, as_tokens
from howlinear.models.families import Block, parameter_count
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.naming import BlockNames
from howlinear.models.offload import is_offloaded
from howlinear.profiling.gradients import why_no_gradients
from howlinear.profiling.passes import Course
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockCompression, BlockPlan
from howlinear.records.words import plural, signed
from howlinear.report.results import Result
from howlinear.run.folder import RunFolder
from howlinear.run.work import Work
from howlinear.swapping.maps import RunMaps, match


@dataclass(frozen=True)
class CompressSettings:
    """How blocks are replaced and compared."""

    rank: int | str = "auto"  # of the matrices: a number, "full", or "auto" to choose
    units: int | str = "auto"  # hidden units kept beside a matrix, or "auto" to choose
    intercept: bool = True  # may maps have biases?
    curve: Sequence[float] = ()  # shares of the feed-forward parameters to measure at, too
    baselines: bool = False  # measure the baselines beside ours
    target: str = (
        "hf"  # kind of export: a plan counts the parameters that it stores; "stock": one width
    )
    heal: int = 0  # steps of training all maps at once, after the plan
    heal_on: WindowsLike | None = None  # windows to train on; those of the fit without them
    protocol: EvalProtocol | str | None = None


@dataclass(frozen=True)
class Point:
    """One method at one size."""

    method: str
    removed: int
    change: Comparison
    chosen: dict[int, Shape] = field(repr=False, default_factory=dict)  # by block index

    def to_dict(self, feed_forward: int) -> dict[str, Any]:
        names = ("delta_nll", "delta_nll_se", "delta_ppl", "delta_ppl_se", "kl")
        return {
            "method": self.method,
            "removed": self.removed,
            "share": self.removed / feed_forward,
            "blocks": len(self.chosen),
            "perplexity": self.change.changed.perplexity,
        } | {name: getattr(self.change, name) for name in names}


@dataclass(frozen=True, eq=False, repr=False)
class Compression(Result):
    """What replaces each block and what that costs. `install_maps` puts `maps` into a model."""

    blocks: list[BlockCompression]
    maps: dict[Block, Map]
    change: Comparison | None  # on the text for reporting; None: the model predicts no tokens
    removed: int
    feed_forward: int  # parameters of all measured blocks
    parameters: int  # of the whole model, before
    curve: list[Point]
    settings: dict[str, Any]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)  # what `export` wrote, if anything
    texts: list[dict[str, Any]] = field(default_factory=list)  # if several were fitted on
    healed: dict[str, Any] = field(default_factory=dict)  # how the maps were trained, if asked for
    unmet: str = ""  # why the budget could not be met: the plan is the nearest to it

    def plan_dict(self) -> dict[str, Any]:
        """`plan.json`: the replaced blocks, for `--plan`."""
        return plan_file(self.plan, self.about)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """The fields of `compress.json`."""
        return "compress", {
            "settings": self.settings,
            "unmet": self.unmet or None,
            "parameters": self.parameters,
            "feed_forward": self.feed_forward,
            "removed": self.parameters - self.exported["parameters"]
            if self.exported
            else self.removed,
            "change": None if self.change is None else self.change.to_dict(),
            "texts": self.texts or None,
            "exported": self.exported or None,
            "healed": self.healed or None,
            "curve": [p.to_dict(self.feed_forward) for p in self.curve],
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def _line(self) -> str:
        replaced = f"{len(self.plan)} of {plural(len(self.blocks), 'block')} replaced"
        cost = "" if self.change is None else f", perplexity {signed(self.change.delta_ppl)}"
        return f"{replaced}, {self.removed:,} parameters removed{cost}"

    @property
    def plan(self) -> list[BlockPlan]:
        return [BlockPlan(b.index, b.path, b.rank, len(b.units)) for b in self.blocks if b.replaced]


def compress_model(
    model: nn.Module,
    folder: str | Path,
    budget: Budget | None = None,
    *,
    fit: WindowsLike,
    choose: WindowsLike,
    report: WindowsLike,
    plan: Sequence[BlockPlan] | None = None,
    at: BlockNames = None,
    settings: CompressSettings | None = None,
    work: Work | None = None,
) -> Compression:
    """Choose a replacement for each block of a run, fit them, and measure them; the model is unchanged.

    With a `plan`, or with blocks named (`at`), nothing is searched for. Without a budget perplexity may rise by
    5 %, before healing. Maps are fitted on the windows `fit`, chosen by `choose` and measured on `report`. Where no
    plan meets the budget, the result is the nearest one and `unmet` says why.
    """
    budget, settings = budget or Budget(perplexity=0.05), _allowed(settings, model)
    run, work = Profile.load(folder), work or Work()
    every = [b for b, _ in match(model, run, None)]
    sizes = Sizes(model, every, settings.target)
    settings = _even(settings, sizes) if sizes.even else settings
    ids, only = as_windows(fit).all_ids, {"intercept": settings.intercept, "units_only": sizes.even}
    fitter = Refitter(model, every, ids, **only, work=work)
    losses = Losses(model, as_tokens(choose), as_tokens(report), settings.protocol, work)
    trained_on = ids if settings.heal_on is None else as_windows(settings.heal_on).all_ids
    _check_healable(losses, trained_on, sizes.total, settings.heal)
    search, maps = Search(fitter, sizes, losses), RunMaps(model, Path(folder), run)
    named = None if at is None else [b for b, _ in match(model, run, at)]
    best = _choose(search, maps, budget, plan, named, settings)
    if search.unmet:
        settings = replace(settings, curve=(), baselines=False, heal=0)
    points = _ours(search, best, settings.curve)
    healed = _healed(losses, best.maps, trained_on, settings.heal, RunFolder(folder).healing)
    if healed.record.get("kept"):
        points = _compared(losses, [("healed", points[0].removed, healed.maps)]) + points
    if points and settings.baselines and not sizes.even:
        most = max(p.removed for p in points)
        points += _compared(losses, baselines(RunFolder(folder), run, sizes, losses, most))
    return Compression(
        blocks=_records(best, sizes, search.options),
        maps=healed.maps,
        change=points[0].change if points else None,
        removed=sizes.removed(best.maps),
        feed_forward=sizes.total,
        parameters=parameter_count(model),
        curve=points,
        settings={
            "protocol": losses.protocol.name,
            "fit_tokens": ids.numel(),
            "budget": asdict(budget) if plan is None and at is None else None,
            **_recorded(settings),
        },
        notes=_notes(search, best),
        healed=healed.record,
        unmet=search.unmet,
    )


def _allowed(settings: CompressSettings | None, model: nn.Module) -> CompressSettings:
    """The settings; refused, before offloaded weights are read, what needs all of them at once."""
    settings = settings or CompressSettings()
    if settings.heal and is_offloaded(model):
        raise ValueError(
            "`heal` needs all weights in memory: drop `heal`, or `layerwise` and `device_map`"
        )
    return settings


def _recorded(settings: CompressSettings) -> dict[str, Any]:
    """What `compress.json` records of the settings."""
    names = ("rank", "units", "intercept", *(("heal",) if settings.heal else ()))
    return {name: getattr(settings, name) for name in names}


def _even(settings: CompressSettings, sizes: Sizes) -> CompressSettings:
    """For one width: hidden units alone, and biases only where the family has them."""
    if sizes.others:
        raise ValueError(
            f"a stock model has one width, and the run has not measured {sizes.others[0]}: profile all "
            'blocks, or use `kind="hf"`'
        )
    if without := [b for b, hidden in sizes.hidden.items() if not hidden]:
        raise ValueError(f"{without[0]} has no plain hidden units that stock could keep: {INSTEAD}")
    if settings.rank not in ("auto", 0):
        raise ValueError(f"a stock block holds no matrix: leave out `rank`, or {INSTEAD}")
    return replace(settings, rank=0, intercept=settings.intercept and sizes.biases)


def change_on(
    model: nn.Module,
    maps: Mapping[Block, Map],
    windows: WindowsLike,
    protocol: EvalProtocol | str | None,
    work: Work,
) -> Comparison | None:
    """What maps cost on another text; None if the model predicts no tokens."""
    losses = Losses(model, windows, windows, protocol, work)
    return None if losses.reason else losses.together([maps], windows)[0]


def _check_healable(losses: Losses, windows: Tensor, parameters: int, steps: int) -> None:
    """Refuse, before the search, what cannot be healed, if it should be."""
    if not steps:
        return
    if reason := losses.reason or why_no_gradients(losses.model, as_windows(windows), Course()):
        raise ValueError(f"`heal` trains maps on predictions, but {reason}")
    check_healable(windows, as_windows(losses.choose).all_ids, parameters, losses.work)


def _healed(
    losses: Losses, maps: dict[Block, Map], windows: Tensor, steps: int, saves: Path
) -> Healed:
    """The maps, trained; the text for choosing ends the training. As they are without steps."""
    if not (steps and maps):
        return Healed(maps, {})
    held_out = as_windows(losses.choose).all_ids
    return heal(
        losses.model, maps, windows, held_out, Recipe(steps=steps), work=losses.work, folder=saves
    )


def _choose(
    search: Search,
    maps: RunMaps,
    budget: Budget,
    plan: Sequence[BlockPlan] | None,
    named: Sequence[Block] | None,
    settings: CompressSettings,
) -> Trial:
    """What replaces each block: by the plan, of the named blocks, or the best within the budget."""
    fitter, sizes, wanted = search.fitter, search.sizes, (settings.rank, settings.units)
    if plan is not None or named is not None:
        if plan is not None:
            shapes = _shapes_of_plan(plan, sizes)
        else:
            shapes = shapes_of_named(fitter, sizes, maps, named or (), *wanted)
        if sizes.even:
            sizes.check_even(shapes)
        return search.fitted(shapes)
    search.price(*wanted)
    return search.within(budget)


def _shapes_of_plan(plan: Sequence[BlockPlan], sizes: Sizes) -> dict[Block, Shape]:
    by_index = {b.index: b for b in sizes.parameters}
    check_blocks(plan, {i: b.path for i, b in by_index.items()})
    check_units(plan, {i: sizes.hidden[b] for i, b in by_index.items()})
    return {by_index[p.index]: (p.rank, p.units) for p in plan}


def _ours(search: Search, best: Trial, curve: Sequence[float]) -> list[Point]:
    """Our method on the third text: first at the budget, then along the curve."""
    losses = search.losses
    if losses.reason:
        return []
    sets = [(best.shapes, best.maps)]
    for share in curve if search.path else ():
        shapes = search.shapes_saving(share)
        sets.append((shapes, search.fitter.refit(shapes)))
    points = []
    for shapes, maps in sets:
        (change,) = losses.together([maps], losses.report)
        chosen = {b.index: shape for b, shape in shapes.items()}
        points.append(Point("ours", search.sizes.removed(maps), change, chosen))
    return points


def _compared(
    losses: Losses, others: Sequence[tuple[str, int, Mapping[Block, Any]]]
) -> list[Point]:
    """Other methods on the third text."""
    changes = losses.together([maps for _, _, maps in others], losses.report)
    return [
        Point(method, removed, change, {b.index: _shape(m) for b, m in maps.items()})
        for (method, removed, maps), change in zip(others, changes, strict=True)
    ]


def _shape(replacement: Any) -> Shape:
    """Of a map; a block that is removed is a matrix without anything beside it."""
    return shape_of(replacement) if isinstance(replacement, Map) else (None, 0)


def _notes(search: Search, best: Trial) -> list[str]:
    if search.losses.reason:
        return [f"no perplexity: {search.losses.reason}"]
    if search.fitter.intercept:
        return []
    if search.sizes.even:
        return ["fitted without intercepts: the last projections of this family have no biases"]
    # the same shapes fitted with biases, for comparison
    best, other = search.measured(best), search.trial(best.shapes, intercept=True)
    assert best.change is not None
    assert other.change is not None
    gain, se = best.change.gain_over(other.change)
    return [f"without biases {-gain:+.4f} ± {se:.4f} nats a token, on the text to choose by"]


def _records(best: Trial, sizes: Sizes, options: list[Option]) -> list[BlockCompression]:
    costs = {(o.index, o.rank, o.units): o.cost for o in options}
    maps, records = best.maps, []
    saved = sizes.saved_by(maps)
    for b, parameters in sizes.parameters.items():
        fitted = maps.get(b)
        units = list(fitted.units) if isinstance(fitted, UnitMap) else []
        rank = shape_of(fitted)[0] if fitted else None
        records.append(
            BlockCompression(
                index=b.index,
                path=b.path,
                replaced=int(fitted is not None),
                rank=rank,
                units=units,
                parameters=parameters,
                parameters_left=parameters - saved.get(b, 0),
                kl_alone=costs.get((b.index, rank, len(units))) if fitted else None,
                correction=best.corrections.get(b),
            )
        )
    return records
