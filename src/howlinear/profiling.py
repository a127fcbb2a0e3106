"""The one pass: text through the model, moments out, and what they say about every block.

    model, tokenizer = load()
    ids = windows(text, tokenizer, 512)
    result = profile(model, ids)
    result.blocks[11].r2, result.blocks[11].r2_body, result.maps[11](x)

Rows go into one accumulator for each block and fold, first positions into another; both are small
or bounded, so memory does not grow with the text. Afterwards each fold is scored with the map
fitted on the others. Nothing is read twice and no activations are stored, but for a bounded,
seeded sample of rows that `stream_error` needs.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.affine import Affine, Score, effective_rank, input_stats, score, solve
from howlinear.families import Block, Rows, backbone, blocks, tap
from howlinear.moments import TSQR, Accumulator, Moments
from howlinear.records import (
    SCHEMA,
    BlockProfile,
    atomic,
    kind_of,
    read_json,
    summarise,
    write_json,
)

CELL = 2048  # tokens that stay together in a fold
SAMPLE = 512  # rows kept for stream_error
SOLVERS: dict[str, type[Accumulator]] = {"moments": Moments, "tsqr": TSQR}
PROTOCOLS = ("default", "paper")
PARTS = ("body", "first")

Batch = Tensor | dict[str, Tensor]


# -- which rows are held out ----------------------------------------------------------------------


@dataclass(frozen=True)
class Folds:
    """Blocked folds: a window's fold follows from its token offset alone, whatever comes later."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 2:
            raise ValueError(
                f"cross-validation needs at least 2 folds, got {self.groups} (--folds)"
            )

    def pieces(self, offsets: Sequence[int], length: int) -> Iterator[tuple[int, slice, slice]]:
        """(group, windows, positions): which rows of a batch belong where, in few rectangles."""
        of = [offset // CELL % self.groups for offset in offsets]
        start = 0
        for i in range(1, len(of) + 1):
            if i == len(of) or of[i] != of[start]:
                yield of[start], slice(start, i), slice(0, length)
                start = i

    def held(self, sizes: Sequence[int]) -> list[int]:
        filled = [g for g, size in enumerate(sizes) if size]
        if len(filled) < 2:
            raise ValueError(
                f"all rows fall into one of {self.groups} folds, which change every {CELL} tokens: "
                f"give more text (--tokens) or shorter windows (--max-length)"
            )
        return filled


@dataclass(frozen=True)
class RowSplit:
    """The paper's split: the first 80 % of the rows to fit, the rest held out, windows cut or not."""

    rows: int
    groups: int = 2

    def pieces(self, offsets: Sequence[int], length: int) -> Iterator[tuple[int, slice, slice]]:
        cut = int(0.8 * self.rows)
        for i, offset in enumerate(offsets):
            inside = min(max(cut - offset, 0), length)
            if inside:
                yield 0, slice(i, i + 1), slice(0, inside)
            if inside < length:
                yield 1, slice(i, i + 1), slice(inside, length)

    def held(self, sizes: Sequence[int]) -> list[int]:
        return [1]


# -- what is kept of one block --------------------------------------------------------------------


class RowSample:
    """A uniform sample of rows of fixed size, the same for the same seed and row order."""

    def __init__(self, block: Block, seed: int, size: int = SAMPLE) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = torch.full((size,), torch.inf)
        self.group = torch.full((size,), -1)
        self.x = torch.zeros(size, block.d_in)
        self.y = torch.zeros(size, block.d_out)
        self.stream = torch.zeros(size)

    def update(self, rows: Rows, group: Tensor) -> None:
        """Rows with the smallest random keys stay. `group` (n,) is each row's fold."""
        if rows.h is None:
            return
        size, keys = len(self.keys), torch.rand(len(group), generator=self.generator)
        kept = torch.cat([self.keys, keys]).topk(size, largest=False).indices
        new = kept[kept >= size] - size
        stays = torch.zeros(size, dtype=torch.bool)
        stays[kept[kept < size]] = True
        slots = (~stays).nonzero().flatten()
        self.keys[slots], self.group[slots] = keys[new], group[new]
        at = new.to(rows.x.device)
        self.x[slots] = rows.x[at].float().cpu()
        self.y[slots] = rows.y[at].float().cpu()
        self.stream[slots] = rows.h[at].float().square().sum(-1).cpu()


@dataclass
class BlockStore:
    """One block's accumulators: for each group, rows past the first position, and first ones."""

    block: Block
    body: list[Accumulator]
    first: list[Accumulator]
    sample: RowSample

    @classmethod
    def make(
        cls, block: Block, groups: int, solver: str, seed: int, device: torch.device
    ) -> BlockStore:
        new = SOLVERS[solver]
        body = [new(block.d_in, block.d_out, device=device) for _ in range(groups)]
        first = [new(block.d_in, block.d_out, device=device) for _ in range(groups)]
        return cls(block, body, first, RowSample(block, seed))

    def update(self, rows: Rows, offsets: Sequence[int], split: Folds | RowSplit) -> None:
        length = rows.shape[1] if rows.shape else 1 + int(rows.position.max())
        group = torch.empty(len(offsets), length, dtype=torch.long)
        for g, w, p in split.pieces(offsets, length):
            group[w, p] = g
            if rows.shape:
                x, y = (t.view(*rows.shape, -1)[w, p] for t in (rows.x, rows.y))
                self._share_shift(x, y)
                if p.start == 0:
                    self.first[g].update(x[:, 0], y[:, 0])
                    x, y = x[:, 1:], y[:, 1:]
                self.body[g].update(x, y)
        flat = group.flatten()
        if not rows.shape:  # padding was left out: rows stand one by one
            window, position = rows.window.cpu(), rows.position.cpu()
            flat = group[window, position]
            self._share_shift(rows.x, rows.y)
            for g in flat.unique().tolist():
                for store, which in ((self.first, position == 0), (self.body, position > 0)):
                    at = ((flat == g) & which).nonzero().flatten().to(rows.x.device)
                    store[g].update(rows.x[at], rows.y[at])
        self.sample.update(rows, flat)

    def _share_shift(self, x: Tensor, y: Tensor) -> None:
        """All accumulators of a block shift by the same mean, so that they add up fast."""
        if self.body[0].shift is None:
            means = [t.reshape(-1, t.shape[-1]).mean(0, dtype=torch.float64) for t in (x, y)]
            shift = torch.cat(means).to(self.body[0].device)
            if bool(shift.isfinite().all()):  # else update says which feature is not
                for accumulator in (*self.body, *self.first):
                    accumulator.shift = shift

    @property
    def sizes(self) -> list[int]:
        return [b.n + f.n for b, f in zip(self.body, self.first, strict=True)]


@dataclass(frozen=True)
class Needs:
    """Bytes that a profile takes beside the model and its activations."""

    memory: int
    disk: int


def needs(at: Sequence[Block], windows: int, folds: int, solver: str = "moments") -> Needs:
    """What a profile of `windows` windows will take, before it starts."""
    memory = disk = work = 0
    for block in at:
        d, width = block.d_in, block.d_in + block.d_out
        each = 8 * SOLVERS[solver](block.d_in, block.d_out).size
        rows = min(4 * windows * width, folds * each)  # first positions
        memory += folds * each + rows + 4 * SAMPLE * width + 8 * d * block.d_out
        disk += folds * each + rows + 8 * d * block.d_out
        work = max(work, 2 * each + 80 * width * width)  # factoring one block
    return Needs(memory + work * (1 if _wide(at) else torch.get_num_threads()), disk)


# -- moments -> scores of one block ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """One block's results before they become a record."""

    record: BlockProfile
    affine: Affine
    r2_by_feature: Tensor


def measure(store: BlockStore, split: Folds | RowSplit, out_norm: nn.Module | None) -> Measured:
    """Score every held-out group with the map fitted on the others; fit the saved map on all."""
    block, held = store.block, split.held(store.sizes)
    groups = [g for g, size in enumerate(store.sizes) if size]
    scores: list[Score] = []
    body_scores: list[Score] = []
    maps: dict[int, Affine] = {}
    rank_k: int | None = None
    curve: list[float] = []
    for f in held:
        rest = [g for g in groups if g != f]
        train, test = _added(store.body, rest), store.body[f].copy()
        if train.n > block.d_in and test.n:
            body_scores.append(score(_fitted(train)[0], test))
        for g in rest:
            train.merge(store.first[g])
        test.merge(store.first[f])
        maps[f], Z = _fitted(train)
        scores.append(score(maps[f], test))
        if f == held[-1]:
            rank_k = effective_rank(maps[f], Z, train.mean_x, test)
            curve = _curve(store, rest, test, scores[-1])
    total, pooled_body = _pooled(scores), _pooled(body_scores) if body_scores else None
    full = _added([*store.body, *store.first], range(2 * len(store.body)))
    affine, _ = _fitted(full)
    crossed = isinstance(split, Folds)
    first_share = _first_share(store, held)
    stream, stream_se = _stream_error(store.sample, maps, out_norm)
    n_fit = min(sum(store.sizes) - store.sizes[f] for f in held)
    r2_body = pooled_body.r2 if pooled_body else math.nan
    record = BlockProfile(
        index=block.index,
        path=block.path,
        d_in=block.d_in,
        d_out=block.d_out,
        kind=kind_of(
            total.r2,
            r2_body,
            total.r2_feature["median"],
            first_share,
            math.inf if rank_k is None else rank_k / block.d_out,
        ),
        r2=total.r2,
        r2_se=_standard_error(scores, total.r2) if crossed else None,
        r2_body=r2_body,
        r2_body_se=_standard_error(body_scores, r2_body) if crossed and body_scores else None,
        r2_scalar=total.r2_scalar,
        r2_feature=total.r2_feature,
        r2_curve=[total.r2 + gain for gain in curve] + [total.r2] if crossed else None,
        first_share=first_share,
        sink_units=None,
        effective_rank=rank_k,
        **input_stats(full, affine.rank),
        stream_error=stream,
        stream_error_se=stream_se,
        rmse=total.rmse,
        residual_norm=total.residual_norm,
        output_norm=total.output_norm,
        n_fit=n_fit,
        n_heldout=total.n,
        rows_per_column=n_fit / block.d_in,
    )
    return Measured(record, affine, total.r2_by_feature)


def _added(accumulators: Sequence[Accumulator], which: Iterable[int]) -> Accumulator:
    first, *others = which
    total = accumulators[first].copy()
    for g in others:
        total.merge(accumulators[g])
    return total


def _fitted(moments: Accumulator) -> tuple[Affine, Tensor]:
    """The map and the factor that `effective_rank` needs; rank is reported, rows were checked."""
    W, rank, Z = solve(moments)
    return Affine(W, moments.mean_y - W @ moments.mean_x, rank), Z


def _pooled(scores: list[Score]) -> Score:
    total = scores[0]
    for one in scores[1:]:
        total = total + one
    return total


def _standard_error(scores: list[Score], r2: float) -> float:
    """Of a ratio of sums over K folds. Folds share fit rows, so this is an approximation."""
    K = len(scores)
    parts = [(float(s.ss_res.sum()), float(s.ss_tot.sum())) for s in scores]
    spread = sum((res - (1 - r2) * tot) ** 2 for res, tot in parts)
    whole = sum(tot for _, tot in parts)
    return math.sqrt(K / (K - 1) * spread) / whole if whole > 0 and K > 1 else math.nan


def _curve(store: BlockStore, rest: list[int], test: Accumulator, full: Score) -> list[float]:
    """What fitting on 1, 2, ... groups fewer than all of `rest` changes, on one held-out group.

    One group is enough: all points share its rows, so its own difficulty cancels.
    """
    gains = []
    train = None
    for g in rest[:-1]:
        train = store.body[g].copy() if train is None else train.merge(store.body[g])
        train.merge(store.first[g])
        enough = train.n > store.block.d_in
        gains.append(score(_fitted(train)[0], test).r2 - full.r2 if enough else math.nan)
    return gains


def _first_share(store: BlockStore, held: list[int]) -> float:
    """Share of the held-out variance of y that first positions carry."""
    part = whole = 0.0
    for f in held:
        if not store.first[f].n:
            continue
        first = store.first[f].copy()
        both = _added([store.body[f], first], (0, 1)) if store.body[f].n else first
        away = (first.mean_y - both.mean_y).square()
        part += float((first.S_yy + first.weight * away).sum())
        whole += float(both.S_yy.sum())
    return part / whole if whole > 0 else math.nan


def _stream_error(
    sample: RowSample, maps: dict[int, Affine], out_norm: nn.Module | None
) -> tuple[float, float]:
    """Mean of |y - Wx - b|^2 / |h|^2 over sampled rows, each by a map that did not see it."""
    ratios = []
    for f, affine in maps.items():
        at = sample.group == f
        x, y, size = sample.x[at].double(), sample.y[at].double(), sample.stream[at].double()
        guess = affine(x.to(affine.weight.device)).cpu()
        if out_norm is not None:
            y, guess = _through(out_norm, y), _through(out_norm, guess)
        ratios.append((y - guess).square().sum(1) / size)
    r = torch.cat(ratios)
    if not len(r):
        return math.nan, math.nan
    return float(r.mean()), float(r.std() / math.sqrt(len(r))) if len(r) > 1 else math.nan


def _through(module: nn.Module, rows: Tensor) -> Tensor:
    parameter = next(module.parameters(), rows)
    with torch.no_grad():
        return module(rows.to(parameter)).to(rows)


# -- the pass -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Profile:
    """What one pass measured. `blocks` is what to read; `maps[i]` is block i's fitted map."""

    blocks: list[BlockProfile]
    maps: dict[int, Affine]
    r2_by_feature: dict[int, Tensor]
    stores: list[BlockStore] = field(repr=False)
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        notes = []
        lacking = [b.index for b in self.blocks if b.input_rank < b.d_in]
        if lacking:
            which = "all blocks" if len(lacking) == len(self.blocks) else f"blocks {lacking}"
            notes.append(f"inputs lack rank in {which}: the maps of least norm are given")
        unsure = [b for b in self.blocks if b.r2_body_se is not None and b.r2_body_se > 0.1]
        if unsure:
            listed = ", ".join(f"{b.index} (±{b.r2_body_se:.2f})" for b in unsure)
            notes.append(
                f"body R2 of blocks {listed} rests on a few rows: sinks beyond the first position"
            )
        thin = min(b.rows_per_column for b in self.blocks)
        if thin < 20:
            notes.append(
                f"only {thin:.1f} rows a column: held-out R2 is low by about (1 - R2) / {thin:.0f}, "
                "give more tokens (--tokens)"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """`profile.json`, field by field."""
        return {
            "kind": "profile",
            "schema": SCHEMA,
            **self.about,
            "settings": self.settings,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def save(self, folder: str | Path) -> None:
        """Write the run folder; `profile.json` comes last, so that it stands for the whole."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        moments = {
            f"{store.block.index}.{g}.{part}.{name}": value
            for store in self.stores
            for part in PARTS
            for g, accumulator in enumerate(getattr(store, part))
            for name, value in accumulator.state_dict().items()
        }
        maps: dict[str, Tensor] = {}
        for i, affine in self.maps.items():
            maps[f"{i}.weight"], maps[f"{i}.bias"] = affine.weight, affine.bias
            maps[f"{i}.rank"] = torch.tensor(affine.rank)
            maps[f"{i}.r2_by_feature"] = self.r2_by_feature[i]
        for name, tensors in (("moments", moments), ("maps", maps)):
            with atomic(folder / f"{name}.safetensors") as temporary:
                save_file(_unshared(tensors), str(temporary))
        write_json(folder / "profile.json", self.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read a run folder back, without its moments (`read_moments` has those)."""
        folder = Path(folder)
        data = read_json(folder / "profile.json", "profile")
        listed = data.pop("blocks", None)
        if not isinstance(listed, list) or not all(isinstance(b, dict) for b in listed):
            raise ValueError(f"{folder / 'profile.json'} lists no blocks")
        try:
            records = [BlockProfile.from_dict(b) for b in listed]
        except ValueError as err:
            raise ValueError(f"{folder / 'profile.json'}: {err}") from None
        tensors = _read_tensors(folder / "maps.safetensors")
        maps, features = {}, {}
        for b in records:
            shapes = {
                "weight": (b.d_out, b.d_in),
                "bias": (b.d_out,),
                "rank": (),
                "r2_by_feature": (b.d_out,),
            }
            for name, shape in shapes.items():
                value = tensors.get(f"{b.index}.{name}")
                if value is None or value.shape != shape or value.is_complex():
                    raise ValueError(
                        f"{folder / 'maps.safetensors'}: block {b.index} has no {name} {shape}"
                    )
            part = {name: tensors[f"{b.index}.{name}"] for name in shapes}
            if not bool(part["weight"].isfinite().all() and part["bias"].isfinite().all()):
                raise ValueError(f"{folder / 'maps.safetensors'}: block {b.index} is not finite")
            maps[b.index] = Affine(
                part["weight"].double(), part["bias"].double(), int(part["rank"])
            )
            features[b.index] = part["r2_by_feature"]
        settings = data.pop("settings", {})
        about = {k: v for k, v in data.items() if k not in ("kind", "schema", "summary", "notes")}
        return cls(records, maps, features, [], settings, about)


def read_moments(folder: str | Path, block: BlockProfile) -> dict[str, list[Accumulator]]:
    """One block's accumulators from a run folder: {"body": one a fold, "first": one a fold}."""
    path = Path(folder) / "moments.safetensors"
    state = _read_tensors(path, prefix=f"{block.index}.")
    parts: dict[str, list[Accumulator]] = {}
    for part in PARTS:
        groups = {key.split(".")[0] for key in state if key.split(".")[1:2] == [part]}
        if groups != {str(g) for g in range(len(groups))} or not groups:
            raise ValueError(f"{path}: block {block.index} has no complete {part} moments")
        parts[part] = []
        for g in range(len(groups)):
            own = f"{g}.{part}."
            mine = {k.removeprefix(own): v for k, v in state.items() if k.startswith(own)}
            kind = bytes(mine["kind"].flatten().tolist()) if "kind" in mine else b""
            new = TSQR if kind == b"TSQR" else Moments
            try:
                accumulator = new(block.d_in, block.d_out)
                accumulator.load_state_dict(mine)
            except ValueError as err:
                raise ValueError(f"{path}: block {block.index}, fold {g}, {part}: {err}") from None
            parts[part].append(accumulator)
    return parts


def _read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a safetensors file whose names begin with `prefix`, which is taken off."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} does not exist: is {path.parent} a complete run folder?")
    try:
        with safe_open(str(path), "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, RuntimeError, ValueError) as err:
        line = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ValueError(f"{path} is not a readable safetensors file: {line}") from None


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that own their memory: accumulators of a block share one shift."""
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.contiguous()
        tensors[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return tensors


def profile(
    model: nn.Module,
    windows: Tensor | Iterable[Batch],
    *,
    at: Sequence[Block] | str | None = None,
    folds: int = 5,
    protocol: str = "default",
    solver: str = "moments",
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Measure every block (or those `at`) on windows: a LongTensor (n, length), or batches of them.

    Batches may also be dicts of model inputs with masks, pixels or audio features; padding is left
    out. `progress` is called with the number of tokens of each batch done.
    """
    at = blocks(model, at) if at is None or isinstance(at, str) else list(at)
    split = _split(protocol, folds, windows)
    if solver not in SOLVERS:
        raise ValueError(
            f"unknown solver {solver!r}, expected one of {', '.join(SOLVERS)} (--solver)"
        )
    if isinstance(windows, Tensor):
        check_rows(len(windows), windows.shape[1], max(b.d_in for b in at), split)
    device = next(model.parameters()).device
    where = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    stores = [BlockStore.make(b, split.groups, solver, seed, where) for b in at]
    tokens = _pass(model, _batches(windows, batch_size), stores, split, progress)
    for store in stores:
        _check_store(store, split)
    norms = [model.get_submodule(b.out_norm) if b.out_norm else None for b in at]
    results = _spread(
        lambda pair: measure(pair[0], split, pair[1]), list(zip(stores, norms, strict=True))
    )
    settings = {
        "protocol": protocol,
        "folds": folds if isinstance(split, Folds) else None,
        "solver": solver,
        "seed": seed,
        "tokens": tokens,
        "window": windows.shape[1] if isinstance(windows, Tensor) else None,
    }
    return Profile(
        blocks=[m.record for m in results],
        maps={m.record.index: m.affine for m in results},
        r2_by_feature={m.record.index: m.r2_by_feature for m in results},
        stores=stores,
        settings=settings,
    )


def _split(protocol: str, folds: int, windows: Tensor | Iterable[Batch]) -> Folds | RowSplit:
    if protocol == "default":
        return Folds(folds)
    if protocol != "paper":
        raise ValueError(f"unknown protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
    if not isinstance(windows, Tensor):
        raise ValueError("the paper protocol needs all windows at once: a LongTensor (n, length)")
    return RowSplit(windows.numel())


class _Enough(Exception):  # noqa: N818
    """Every block wanted has been heard in this forward."""


def _pass(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Tensor], int, int]],
    stores: list[BlockStore],
    split: Folds | RowSplit,
    progress: Callable[[int], None] | None,
) -> int:
    """Run every batch through the model and its rows into the stores; the number of tokens."""
    net = backbone(model)
    device = next(model.parameters()).device
    extra = {"use_cache": False} if "use_cache" in inspect.signature(net.forward).parameters else {}
    by_index = {store.block.index: store for store in stores}
    number, tokens, offsets = 0, 0, [0]

    heard = 0

    def receive(block: Block, rows: Rows) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                by_index[block.index].update(rows, offsets, split)
        except ValueError as err:
            raise ValueError(f"block {block.index} ({block.path}), batch {number}: {err}") from None
        nonlocal heard
        heard += 1
        if heard == len(stores):
            raise _Enough  # what the model would do from here on, nobody needs

    with torch.inference_mode(), tap(model, receive, at=[store.block for store in stores]):
        for number, (inputs, count, length) in enumerate(batches):  # noqa: B007
            offsets = [tokens + i * length for i in range(count)]
            heard = 0
            with contextlib.suppress(_Enough):
                net(**{name: value.to(device) for name, value in inputs.items()}, **extra)
            tokens += count * length
            if progress is not None:
                progress(count * length)
    return tokens


def _batches(
    windows: Tensor | Iterable[Batch], batch_size: int
) -> Iterator[tuple[dict[str, Tensor], int, int]]:
    """(model inputs, number of windows, tokens a window counts for)."""
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size} (--batch-size)")
    for batch in windows.split(batch_size) if isinstance(windows, Tensor) else windows:
        inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
        main = inputs.get("input_ids", next(iter(inputs.values())))
        # pictures and sounds have no tokens to count: each is a cell of its own
        length = main.shape[1] if "input_ids" in inputs else CELL
        yield inputs, len(main), length


def check_rows(count: int, length: int, columns: int, split: Folds | RowSplit) -> None:
    """Refuse before the pass what could not be fitted after it, and say how many tokens would do."""
    if _fit_rows(count, length, split) > columns:
        return
    enough = max(count, 1)
    while _fit_rows(enough, length, _resized(split, enough * length)) <= columns:
        enough += 1
    raise ValueError(
        f"too little text: {count * length} tokens cannot determine {columns} columns held out; "
        f"{enough * length} tokens would do, about {max(30_000, 40 * columns)} to trust the result "
        f"(--tokens, --text-file)"
    )


def _fit_rows(count: int, length: int, split: Folds | RowSplit) -> int:
    """The fewest rows that any fit would have, first positions left out."""
    sizes = [0] * split.groups
    for g, w, p in split.pieces([i * length for i in range(count)], length):
        sizes[g] += (w.stop - w.start) * (p.stop - max(p.start, 1))
    held = [1] if isinstance(split, RowSplit) else [g for g, size in enumerate(sizes) if size]
    if isinstance(split, Folds) and len(held) < 2:
        return 0
    return min(sum(sizes) - sizes[f] for f in held)


def _resized(split: Folds | RowSplit, rows: int) -> Folds | RowSplit:
    return split if isinstance(split, Folds) else RowSplit(rows)


def _check_store(store: BlockStore, split: Folds | RowSplit) -> None:
    """The same check for streams, whose length is known only afterwards."""
    sizes = store.sizes
    fewest = min(sum(sizes) - sizes[f] for f in split.held(sizes))
    if fewest <= store.block.d_in:
        raise ValueError(
            f"too little text: block {store.block.index} ({store.block.path}) has {fewest} rows to "
            f"fit {store.block.d_in} columns; about {40 * store.block.d_in} tokens are needed (--tokens)"
        )


def _wide(at: Sequence[Block]) -> bool:
    """So wide that one factorisation keeps all cores busy, and two would take too much room."""
    return max(block.d_in for block in at) >= 2048


def _spread(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Blocks in parallel, a core each: small factorisations do not use two cores well."""
    threads = torch.get_num_threads()
    wide = _wide([store.block for store, _ in items])
    if threads == 1 or wide or len(items) == 1 or items[0][0].body[0].device.type != "cpu":
        return [work(item) for item in items]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
