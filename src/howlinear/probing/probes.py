"""What is the rest made of? One block after the other, every kind of probe that was asked for.

    how = Settings(kinds=("bilinear", "units"))
    result = probe(model, "runs/demo", fit=..., choose=..., report=..., settings=how)
    result.blocks[0].bilinear["gain"], result.blocks[0].units["steps"]

Layers are fitted on rows of the run's own text, stopped and chosen by a second, scored on a third.
Whatever is fitted is then put in the block's place, and its cost in perplexity stands beside that of
the affine map, on the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.perplexity import Loss
from howlinear.losses.protocols import Batches, EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import sweep
from howlinear.models import corpus
from howlinear.models.families import Block, projection_shape
from howlinear.models.hooks import as_module
from howlinear.probing.bilinear import (
    RANKS,
    Bilinear,
    rank_sweep,
    recruitment,
    solve_products,
    train_products,
)
from howlinear.probing.healing import Healing, heal
from howlinear.probing.ladder import ROWS_A_COLUMN, climb
from howlinear.probing.polynomials import degrees
from howlinear.probing.reading import Decode, directions, where
from howlinear.probing.rounding import rounding_errors
from howlinear.probing.samples import (
    Cast,
    Layer,
    Sample,
    bytes_of,
    conjunction,
    gather,
    outcome,
    size_of,
)
from howlinear.probing.training import baselines, dense, poly, seeded, train
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProbe, BlockSwap
from howlinear.records.files import read_json, write_json
from howlinear.records.statistics import pearson, spearman
from howlinear.report.results import Result
from howlinear.run.work import Work
from howlinear.swapping.maps import RunMaps, match

QUICK = ("bilinear", "degree", "units", "where", "quantised")
SLOW = ("dense", "poly", "seeded", "trained", "healing")
KINDS = QUICK + SLOW
SOLVERS = ("ours", "paper")

Layers = dict[str, Layer]
Found = tuple[dict[str, Any], Layers]  # what goes into the record, layers by name
Progress = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True)
class Settings:
    """How probes are made; all of it is written into what they find."""

    kinds: tuple[str, ...] = QUICK
    rank: int = 16
    solver: str = "ours"
    seeds: int = 3
    seed: int = 0
    train_steps: int = 3000  # of the trained baselines
    heal_steps: int = 200

    def __post_init__(self) -> None:
        if unknown := [k for k in self.kinds if k not in KINDS]:
            known = ", ".join(KINDS)
            raise ValueError(f"there is no probe {unknown[0]!r}: choose of {known} (--kind)")
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {self.solver!r}: ours or paper (--solver)")
        if self.rank < 1 or self.seeds < 1:
            raise ValueError("rank and seeds must be 1 at least (--rank, --seeds)")


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Result):
    """What was found; `layers[i][kind]` are layers by name that can be swapped in for block i."""

    blocks: list[BlockProbe]
    layers: dict[int, dict[str, Layers]]
    base: Loss | None
    settings: dict[str, Any]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`probe.json`, field by field."""
        return "probe", {
            "settings": self.settings,
            "base": None if self.base is None else self.base.to_dict(),
            "summary": self.summary,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def _line(self) -> str:
        made = [kind for kind in KINDS if any(getattr(b, kind) is not None for b in self.blocks)]
        return f"{len(self.blocks)} blocks; {', '.join(made)}"

    def save(self, folder: str | Path) -> None:
        """Write probe.json. Probes of other kinds or blocks on the same rows stay in it."""
        path = Path(folder) / "probe.json"
        known, base = _read(path, self.settings)
        for block in self.blocks:
            old = known.get(block.index)
            kept = {} if old is None else {k: v for k in KINDS if (v := getattr(old, k))}
            new = {k: v for k in KINDS if (v := getattr(block, k)) is not None}
            linear = block.linear if old is None else old.linear | block.linear
            known[block.index] = replace(block, linear=linear, **(kept | new))
        data = replace(self, blocks=[known[i] for i in sorted(known)]).to_dict()
        write_json(path, data | {"base": data["base"] or base})


def _read(path: Path, settings: dict[str, Any]) -> tuple[dict[int, BlockProbe], Any]:
    """The probes of a file by block, and its base, as far as they are of the same rows.

    What swaps cost on other tokens is left behind. A file that cannot be read has nothing.
    """
    try:
        data = read_json(path, "probe")
        before, listed = data["settings"], [BlockProbe.from_dict(b) for b in data["blocks"]]
        if any(before[name] != settings.get(name) for name in ("rows", "seed")):
            return {}, None
        base = data["base"]
        if any(before[name] != settings.get(name) for name in ("predicted", "protocol")):
            listed, base = [_without_costs(b) for b in listed], None
    except (ValueError, KeyError, TypeError):
        return {}, None
    return {b.index: b for b in listed}, base


def _without_costs(block: BlockProbe) -> BlockProbe:
    def bare(found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name != "swap"}

    kinds: dict[str, Any] = {
        k: bare(v) for k in ("linear", *KINDS) if (v := getattr(block, k)) is not None
    }
    return replace(block, **kinds)


def probe(
    model: nn.Module,
    folder: str | Path,
    *,
    fit: Batches,
    choose: Batches,
    report: Batches,
    settings: Settings | None = None,
    at: str | None = None,
    predict: Batches | None = None,
    protocol: EvalProtocol | str | None = None,
    heal_on: Tensor | None = None,
    decode: Decode | None = None,
    memory: int | None = None,
    keep_layers: bool = True,
    about: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Probes:
    """Probe a run's blocks (or those `at`) and write probe.json as they are done.

    `fit` are windows of the run's text, `choose` and `report` of text that it never read; `predict`
    are the tokens that swaps are costed on (none: no costs), `heal_on` windows to fine-tune on. Rows
    of as many blocks as `memory` bytes hold, with the layers fitted to them, are gathered in one
    pass; without `keep_layers` the layers are then forgotten.
    """
    how = settings or Settings()
    run = Profile.load(folder)
    pairs = match(model, run, at)
    like = torch.zeros((), dtype=torch.float32)
    fit, choose, report = (w if isinstance(w, Tensor) else list(w) for w in (fit, choose, report))
    sizes = {name: count(w) for name, w in (("fit", fit), ("choose", choose), ("report", report))}
    said: dict[str, Any] = {"rows": sizes, "seed": how.seed, "predicted": 0, "protocol": None}
    costed, notes = _costed(model, predict)
    if costed is not None:
        said |= {"predicted": count(costed), "protocol": protocol_of(costed, protocol).name}
    result = Probes([], {}, None, said, notes, about or {})
    for group in _groups(model, [b for b, _ in pairs], sum(sizes.values()), memory):
        rows = [gather(model, group, windows) for windows in (fit, choose, report)]
        for block in group:
            fit_rows, choose_rows, report_rows = (samples.pop(block.index) for samples in rows)
            subject = Subject(
                model=model,
                block=block,
                affine=run.maps[block.index].to(like),
                fit=fit_rows,
                choose=choose_rows,
                report=report_rows,
                how=how,
                decode=decode,
                swap_map=partial(_swap_map, model, Path(folder), run, block),
                heal_on=heal_on,
            )
            record, layers = _probed(subject, progress)
            result.blocks.append(record)
            result.layers[block.index] = layers
            result.save(folder)
        if costed is not None:
            result = _with_costs(model, result, group, costed, protocol, progress)
        if not keep_layers:
            result.layers.clear()
    result.save(folder)
    return result


@dataclass(frozen=True, eq=False)
class Subject:
    """All that a probe of one block may ask for."""

    model: nn.Module
    block: Block
    affine: Affine
    fit: Sample
    choose: Sample
    report: Sample
    how: Settings
    decode: Decode | None
    swap_map: Callable[[], Affine | UnitMap]  # what `howlinear swap` chose, or the affine map
    heal_on: Tensor | None


def _probed(
    subject: Subject, progress: Progress | None = None
) -> tuple[BlockProbe, dict[str, Layers]]:
    linear = outcome(subject.affine, subject.affine, subject.report)
    found: dict[str, Any] = {}
    layers: dict[str, Layers] = {"linear": {"linear": subject.affine}}
    constant = not float(subject.report.spread.sum()) > 0 or not float(subject.fit.spread.sum()) > 0
    for kind in subject.how.kinds:
        began = time.perf_counter()
        if progress is not None:
            progress(f"block {subject.block.index}: {kind}", 0)
        try:
            if constant:
                raise ValueError("the block's output does not vary")
            found[kind], layers[kind] = PROBES[kind](subject)
        except ValueError as why:  # experts have no hidden units of their own, and the like
            found[kind] = {"skipped": str(why)}
        found[kind]["seconds"] = time.perf_counter() - began
    block = subject.block
    return BlockProbe(
        index=block.index,
        path=block.path,
        r2=linear.r2,
        r2_body=linear.r2_body,
        linear={
            "cosine": linear.cosine,
            "conjunction": linear.conjunction,
            "conjunction_block": _own_conjunction(subject),
            "parameters": subject.affine.parameters,
        },
        **found,
    ), layers


def _own_conjunction(subject: Subject) -> float | None:
    """The block's; None for a module that does not run on x alone."""
    try:
        block = Cast(as_module(subject.model, subject.block))
        return conjunction(block, subject.report.spaced)
    except (ValueError, TypeError):
        return None


# -- the kinds ------------------------------------------------------------------------------------


def _bilinear(s: Subject) -> Found:
    """Of all seeds the one that does best on the rows kept for choosing; every seed is listed."""
    how = s.how
    search = solve_products if how.solver == "ours" else train_products
    tried = [
        search(s.fit, s.choose, s.affine, rank=how.rank, seed=how.seed + i)
        for i in range(how.seeds)
    ]
    best = max(tried, key=lambda solved: max(gain for _, gain in solved.curve))

    def scored(layer: Bilinear) -> dict[str, Any]:
        done = outcome(layer, s.affine, s.report).to_dict()
        return done | {"recruitment": recruitment(layer, s.affine, s.report)}

    seeds = [solved.to_dict() | scored(solved.layer) for solved in tried]
    found = {
        **seeds[tried.index(best)],
        "parameters": size_of(best.layer),
        "beyond_map": size_of(best.layer) - s.affine.parameters,
        "seeds": seeds,
        "ranks": None,
    }
    found.pop("curve")
    if how.solver == "ours":
        found["ranks"] = [
            {"rank": solved.rank, "converged": solved.converged, "seconds": solved.seconds}
            | scored(solved.layer)
            for solved in rank_sweep(s.fit, s.choose, s.affine, RANKS, how.seed)
        ]
    return found, {"bilinear": best.layer}


def _degree(s: Subject) -> Found:
    return degrees(s.fit, s.choose, s.report, s.affine)


def _units(s: Subject) -> Found:
    steps, maps = climb(s.model, s.block, s.fit, s.report, s.affine)
    limit = 2 * s.affine.parameters
    k = max((step["k"] for step in steps if step["parameters"] <= limit), default=0)
    found = {"steps": steps, "at_two_matrices": k}
    top = max((step["k"] for step in steps[:-1]), default=0)
    if 2 * top < steps[-1]["k"]:
        columns = s.block.d_in + (steps[-1]["k"] + 1) // 2 + 1
        found["note"] = f"more than {top} units need more rows: {ROWS_A_COLUMN * columns} (--rows)"
    return found, {f"{k} units": maps[k]} if k else {}


def _network(
    name: str, make: Callable[[Subject, int], nn.Module], **options: Any
) -> Callable[[Subject], Found]:
    """A probe that trains what `make` makes, once a seed."""

    def run(s: Subject) -> Found:
        tried = []
        for i in range(s.how.seeds):
            seed = s.how.seed + 42 + i  # the paper's 42, 43, 44
            tried.append(train(make(s, seed), s.fit, s.choose, seed=seed, **options))
        best = max(tried, key=lambda t: max(r2 for _, r2 in t.curve))
        seeds = [t.to_dict() | outcome(t.layer, s.affine, s.report).to_dict() for t in tried]
        found = {**seeds[tried.index(best)], "seeds": seeds}
        found.pop("curve")
        return found | ({} if name == "dense" else {"rank": s.how.rank}), {name: best.layer}

    return run


def _trained(s: Subject) -> Found:
    return baselines(s.fit, s.report, steps=s.how.train_steps, seed=s.how.seed)


def _where(s: Subject) -> Found:
    found = where(s.affine, s.report, s.decode)
    return found | {"directions": directions(s.model, s.affine, s.fit, s.decode)}, {}


def _quantised(s: Subject) -> Found:
    return rounding_errors(s.model, s.block, s.report)


def _healing(s: Subject) -> Found:
    if s.heal_on is None:
        raise ValueError("no windows to fine-tune on")
    Readout(s.model)  # a ValueError where there is no next-token loss
    swap_map = s.swap_map()
    start = Healing(swap_map)
    mended, control = (
        heal(s.model, s.block, layer, s.heal_on, steps=s.how.heal_steps, seed=s.how.seed)
        for layer in (start, as_module(s.model, s.block))
    )
    layers: dict[str, Layer] = {"swapped": start.requires_grad_(False)}
    layers |= {"healed": mended.layer, "control": control.layer}
    found = {"healed": mended.to_dict(), "control": control.to_dict()}
    return found | {"units": list(getattr(swap_map, "units", ()))}, layers


PROBES: dict[str, Callable[[Subject], Found]] = {
    "bilinear": _bilinear,
    "degree": _degree,
    "units": _units,
    "dense": _network("dense", lambda s, seed: dense(s.fit, seed)),
    "poly": _network("poly", lambda s, seed: poly(s.fit, seed, s.how.rank)),
    "seeded": _network(
        "seeded", lambda s, seed: seeded(s.affine, seed, s.how.rank), steps=12000, lr=1e-4
    ),
    "trained": _trained,
    "where": _where,
    "quantised": _quantised,
    "healing": _healing,
}


# -- around them ----------------------------------------------------------------------------------


def needs(model: nn.Module, at: Sequence[Block], rows: int, memory: int | None) -> tuple[int, int]:
    """(blocks whose rows are held at once, bytes that they and the work on one of them take)."""
    group = _groups(model, at, rows, memory)[0]
    held = sum(_bytes(model, b, rows) for b in group)
    work = 0
    for b in at:
        down = model.get_submodule(b.down) if b.down else None
        shape = projection_shape(down)
        columns = b.d_in + (shape[0] if shape else 0)  # of the ladder's regression
        work = max(work, 8 * rows * (b.d_in + b.d_out), 40 * columns**2)
    return len(group), held + work


def _bytes(model: nn.Module, block: Block, rows: int) -> int:
    """Of a block's rows, and of layers about twice its size that are fitted to it."""
    own = as_module(model, block).parameters()
    return bytes_of(block, rows) + 2 * sum(p.numel() * p.element_size() for p in own)


def _groups(
    model: nn.Module, at: Sequence[Block], rows: int, memory: int | None
) -> list[list[Block]]:
    groups: list[list[Block]] = [[]]
    for block in at:
        held = sum(_bytes(model, b, rows) for b in [*groups[-1], block])
        if groups[-1] and memory is not None and held > memory:
            groups.append([])
        groups[-1].append(block)
    return groups


def windows_of(
    text: Any, tokenizer: Any, length: int, rows: int, run: dict[str, Any], seed: int
) -> list[Tensor]:
    """Windows to fit on, to choose by and to report on, cut as the run's own were.

    Where fewer rows are wanted than the run read, whole windows are drawn at random.
    """
    bos = run.get("bos", "auto")
    read = corpus.windows(text.fit, tokenizer, length, tokens=run["tokens"], bos=bos)
    kept = max(1, rows // length)
    if kept < len(read):
        chosen = torch.randperm(len(read), generator=torch.Generator().manual_seed(seed))[:kept]
        read = read[chosen.sort().values]
    held = [
        corpus.windows(part(), tokenizer, length, tokens=max(length, rows // share), bos=bos)
        for part, share in ((text.choose, 4), (text.report, 3))
    ]
    return [read, *held]


def count(windows: Batches) -> int:
    """Tokens."""
    parts = [windows] if isinstance(windows, Tensor) else windows
    first = (w if isinstance(w, Tensor) else next(iter(w.values())) for w in parts)
    return sum(tokens.numel() for tokens in first)


def _costed(model: nn.Module, predict: Batches | None) -> tuple[Batches | None, list[str]]:
    if predict is None:
        return None, []
    try:
        Readout(model)
    except ValueError as why:
        return None, [f"no perplexity: {why}"]
    return predict, []


def _swap_map(model: nn.Module, folder: Path, run: Profile, block: Block) -> Affine | UnitMap:
    """Least squares with the hidden units that `howlinear swap` chose to keep, where it was run."""
    try:
        listed = read_json(folder / "swap.json", "swap")["blocks"]
        chosen = {b.index: b.units for b in map(BlockSwap.from_dict, listed)}
    except (ValueError, KeyError, TypeError):
        chosen = {}
    maps = RunMaps(model, folder, run)
    k = len(chosen.get(block.index, ()))
    return maps.map(block, k if k in maps.ladder(block) else 0)


def _with_costs(
    model: nn.Module,
    result: Probes,
    group: Sequence[Block],
    windows: Batches,
    protocol: EvalProtocol | str | None,
    progress: Progress | None,
) -> Probes:
    """Every layer of these blocks put in its block's place, one at a time."""
    named = [
        (b, kind, name, layer)
        for b in group
        for kind, layers in result.layers[b.index].items()
        for name, layer in layers.items()
    ]
    variants = [(b, Cast(layer)) for b, _, _, layer in named]
    swept = sweep(model, variants, windows, protocol=protocol, work=Work(progress=progress))
    costs: dict[int, dict[str, dict[str, Any]]] = {b.index: {} for b in group}
    for (b, kind, name, _), cost in zip(named, swept.costs, strict=True):
        assert cost.change is not None
        costs[b.index].setdefault(kind, {})[name] = {
            what: getattr(cost.change, what)
            for what in ("delta_nll", "delta_nll_se", "delta_ppl", "delta_ppl_se")
        }
    blocks = [
        replace(
            r, **{k: getattr(r, k) | {"swap": own} for k, own in costs.get(r.index, {}).items()}
        )
        for r in result.blocks
    ]
    return replace(result, blocks=blocks, base=swept.base)


def _way(block: BlockProbe) -> tuple[Any, Any]:
    found = block.bilinear or {}
    return found.get("rank"), found.get("solver")


def summarise(blocks: Sequence[BlockProbe]) -> dict[str, Any]:
    """Over blocks: does what a probe recovers go with how nonlinear the block is?"""
    ways = [_way(b) for b in blocks if b.bilinear and "gain" in b.bilinear]
    usual = max(ways, key=ways.count, default=None)  # ranks and solvers are not mixed
    gains = [(b.bilinear["gain"], b.r2) for b in blocks if b.bilinear and _way(b) == usual]
    rounded = [
        (b.quantised["int4"].get("error"), b.r2)
        for b in blocks
        if b.quantised and isinstance(b.quantised.get("int4"), dict)
    ]
    found: dict[str, Any] = {}
    for name, pairs in (("bilinear_gain", gains), ("int4_error", rounded)):
        finite = [p for p in pairs if all(isinstance(v, float) and v == v for v in p)]
        values = [(v, 1 - r2) for v, r2 in finite]
        if not values:
            continue
        ours, rest = [v for v, _ in values], [r for _, r in values]
        enough = len(values) >= 3
        found[name] = {
            "blocks": len(values),
            "median": median(ours),
            "max": max(ours),
            "pearson_with_1_minus_r2": pearson(ours, rest) if enough else None,
            "spearman_with_1_minus_r2": spearman(ours, rest) if enough else None,
        }
    return found
