"""Which rows are held out, and what is kept of them: one block's accumulators, in bounded memory.

    split = Folds(5)
    store = BlockStore(block, split.groups, "moments", seed=0, device=torch.device("cpu"))
    store.update(rows, offsets, split)      # rows as `tap` hands them, offsets of their windows
    store.merge(other)                      # of the same block, by another machine

A **group** is a fold, or one side of the paper's split. For each group a store has one accumulator
for first positions and one for the rest, so that scores with and without them share the sums. The
few hidden units that write the first position (**sink units**), where they come out of a block
alone, join x as its last columns: maps with and without them share the sums.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from howlinear.linear.moments import TSQR, Accumulator, Moments
from howlinear.linear.rows import Rows

CELL = 2048  # tokens that stay together in a fold
MOST = 4  # sink units offered to a map
SAMPLE = 512  # rows kept for stream_error
SOLVERS: dict[str, type[Accumulator]] = {"moments": Moments, "tsqr": TSQR}
PARTS = ("body", "first")


class Place(Protocol):
    """A block of a model, or the record of one."""

    @property
    def index(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def d_in(self) -> int: ...
    @property
    def d_out(self) -> int: ...


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


Split = Folds | RowSplit


def name_of(block: Place) -> str:
    """What a block's files are called: 3, or 3.17 for an expert."""
    expert = str(getattr(block, "expert", ""))
    if not re.fullmatch(r"\w*", expert, re.ASCII):  # it may come from a file
        raise ValueError(f"block {block.index}: {expert[:40]!r} is no expert")
    return f"{block.index}.{expert}" if expert else f"{block.index}"


def check_rows(count: int, length: int, columns: int, split: Split) -> None:
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


def _fit_rows(count: int, length: int, split: Split) -> int:
    """The fewest rows that any fit would have, first positions left out."""
    sizes = [0] * split.groups
    for g, w, p in split.pieces([i * length for i in range(count)], length):
        sizes[g] += (w.stop - w.start) * (p.stop - max(p.start, 1))
    held = [1] if isinstance(split, RowSplit) else [g for g, size in enumerate(sizes) if size]
    if isinstance(split, Folds) and len(held) < 2:
        return 0
    return min(sum(sizes) - sizes[f] for f in held)


def _resized(split: Split, rows: int) -> Split:
    return split if isinstance(split, Folds) else RowSplit(rows)


# -- what is kept of one block --------------------------------------------------------------------


class RowSample:
    """A uniform sample of rows of fixed size: those with the smallest keys.

    A row's key is a hash of the seed and of its place in the text, so that the sample is the same
    however the text was divided, and samples of parts add up to the sample of the whole.
    """

    _LAST = torch.iinfo(torch.int64).max

    def __init__(self, d_in: int, d_out: int, seed: int, size: int = SAMPLE) -> None:
        self.seed = seed
        self.keys = torch.full((size,), self._LAST)
        self.group = torch.full((size,), -1)
        self.x = torch.zeros(size, d_in)
        self.y = torch.zeros(size, d_out)
        self.stream = torch.zeros(size)

    def update(self, x: Tensor, rows: Rows, group: Tensor, place: Tensor) -> None:
        """`group` (n,) is each row's fold, `place` (n,) its token offset in the text."""
        if rows.h is None:
            return
        keys = _hashed(place, self.seed)
        slots, new = self._accept(keys)
        at = new.to(x.device)
        self.keys[slots], self.group[slots] = keys[new], group[new]
        self.x[slots] = x[at].float().cpu()
        self.y[slots] = rows.y[at].float().cpu()
        self.stream[slots] = rows.h[at].float().square().sum(-1).cpu()

    def merge(self, other: RowSample) -> None:
        slots, new = self._accept(other.keys)
        for name in ("keys", "group", "x", "y", "stream"):
            getattr(self, name)[slots] = getattr(other, name)[new]

    def _accept(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(slots to fill, which of the new rows to fill them with)"""
        size = len(self.keys)
        kept = torch.cat([self.keys, keys]).topk(size, largest=False).indices
        new = kept[kept >= size] - size
        new = new[keys[new] < self._LAST]
        stays = torch.zeros(size, dtype=torch.bool)
        stays[kept[kept < size]] = True
        return (~stays).nonzero().flatten()[: len(new)], new

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("keys", "group", "x", "y", "stream")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            given = state.get(name)
            if given is None or given.dtype != mine.dtype or given.shape[1:] != mine.shape[1:]:
                raise ValueError(f"the row sample has no {name} as expected")
            if len(given) != len(state["keys"]) or not bool(given.isfinite().all()):
                raise ValueError(f"{name} of the row sample is damaged")
            setattr(self, name, given.clone())


def _hashed(place: Tensor, seed: int) -> Tensor:
    """63 bits that look random, from the seed and a place (splitmix64's finaliser)."""
    start = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = place.numpy().astype(np.uint64) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))


@dataclass(frozen=True, eq=False)
class OutNorm:
    """An output norm as numbers: y -> scale * y / sqrt(mean(y^2) + eps)."""

    scale: Tensor  # (d_out,)
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return (
            self.scale.to(rows) * rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        )

    @classmethod
    def of(cls, module: nn.Module, width: int) -> OutNorm | None:
        """None for a norm that does something else: tried on random rows."""
        eps = next(
            (e for name in ("variance_epsilon", "eps") if (e := getattr(module, name, 0))), 0
        )
        like = next(module.parameters()).detach()
        rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(like)
        with torch.no_grad():
            one, real = module(torch.ones_like(rows[:1]))[0].double().cpu(), module(rows)
        found = cls(one * (1 + float(eps)) ** 0.5, float(eps))
        close = 8 * float(torch.finfo(like.dtype).eps)
        same = torch.allclose(found(rows.double().cpu()), real.double().cpu(), close, close)
        return found if same else None


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a block before its rows come, and goes with its moments wherever they go."""

    units: list[int] | None = None  # sink units, columns of x beyond d_in; None: no units come out
    shares: list[float] | None = None  # of the first positions' energy
    norm: OutNorm | None = None
    care: Tensor | None = None  # (d_out,), see `fisher`
    seen: bool = True  # is the residual stream known, and what is done to y before it?


class BlockStore:
    """One block's accumulators: for each group, rows past the first position, and first ones."""

    def __init__(
        self,
        block: Place,
        groups: int,
        solver: str,
        seed: int,
        device: torch.device,
        known: Known | None = None,
        precision: str = "float64",
    ) -> None:
        self.block, self.known = block, known or Known()
        width = block.d_in + len(self.known.units or ())
        how: dict[str, Any] = {"device": device, "precision": precision}
        self.body, self.first = (
            [SOLVERS[solver](width, block.d_out, **how) for _ in range(groups)] for _ in PARTS
        )
        self.twin: BlockStore | None = None  # in float64, to tell what mixed precision does
        like = (width, block.d_out, seed)
        self.sample = RowSample(*like) if self.known.seen else RowSample(*like, size=0)

    def update(self, rows: Rows, offsets: Sequence[int], split: Split) -> None:
        """Add rows of windows that begin at these token offsets of the text."""
        if self.twin is not None:
            self.twin.update(rows, offsets, split)
        x, y = rows.x, rows.y
        if self.known.units and rows.hidden is not None:
            x = torch.cat([x, rows.hidden.to(x)], 1)
        length = rows.shape[1] if rows.shape else 1 + int(rows.position.max())
        group = torch.empty(len(offsets), length, dtype=torch.long)
        for g, w, p in split.pieces(offsets, length):
            group[w, p] = g
            if rows.shape:
                xs, ys = (t.view(*rows.shape, -1)[w, p] for t in (x, y))
                self._share_shift(xs, ys)
                if p.start == 0:
                    self.first[g].update(xs[:, 0], ys[:, 0])
                    xs, ys = xs[:, 1:], ys[:, 1:]
                self.body[g].update(xs, ys)
        window, position = rows.window.cpu(), rows.position.cpu()
        flat = group[window, position]
        if not rows.shape:  # padding was left out: rows stand one by one
            self._share_shift(x, y)
            for g in flat.unique().tolist():
                for store, which in ((self.first, position == 0), (self.body, position > 0)):
                    at = ((flat == g) & which).nonzero().flatten().to(x.device)
                    store[g].update(x[at], y[at])
        if self.known.seen:
            self.sample.update(x, rows, flat, torch.tensor(offsets)[window] + position)

    def _share_shift(self, x: Tensor, y: Tensor) -> None:
        """All accumulators of a block shift by the same mean, so that they add up fast."""
        if self.body[0].shift is None:
            widest = torch.float32 if x.device.type == "mps" else torch.float64
            means = [t.reshape(-1, t.shape[-1]).mean(0, dtype=widest) for t in (x, y)]
            shift = torch.cat(means).to(self.body[0].device).double()
            if bool(shift.isfinite().all()):  # else update says which feature is not
                for accumulator in (*self.body, *self.first):
                    accumulator.shift = shift

    @property
    def sizes(self) -> list[int]:
        return [b.n + f.n for b, f in zip(self.body, self.first, strict=True)]

    @property
    def n(self) -> int:
        return sum(self.sizes)

    def merge(self, other: BlockStore) -> BlockStore:
        """Add what another store of the same block, groups and sink units has seen."""
        if (self.known.units or []) != (other.known.units or []):
            raise ValueError(
                f"sink units differ: {self.known.units} here, {other.known.units} there"
            )
        if len(self.body) != len(other.body):
            raise ValueError(f"{len(self.body)} groups of rows here, {len(other.body)} there")
        for mine, theirs in zip(self._accumulators(), other._accumulators(), strict=True):
            mine.merge(theirs)
        self.sample.merge(other.sample)
        if self.twin is not None and other.twin is not None:
            self.twin.merge(other.twin)
        else:
            self.twin = None
        return self

    def narrow(self, units: int) -> BlockStore:
        """A store of its own that never heard of the sink units after the first few."""
        twin = copy.copy(self)
        own, shares = (self.known.units or [])[:units], (self.known.shares or [])[:units]
        twin.known = replace(self.known, units=own, shares=shares)
        twin.body, twin.first = (
            [a.narrow(self.block.d_in + units) for a in part] for part in (self.body, self.first)
        )
        twin.sample = copy.copy(self.sample)
        twin.sample.x = self.sample.x[:, : self.block.d_in + units].clone()
        twin.twin = None if self.twin is None else self.twin.narrow(units)
        return twin

    def _accumulators(self) -> list[Accumulator]:
        return [*self.body, *self.first]

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, enough to go on to the bit."""
        state = {
            f"{part}.{g}.{name}": value
            for part in PARTS
            for g, accumulator in enumerate(getattr(self, part))
            for name, value in accumulator.state_dict().items()
        }
        state |= {f"sample.{name}": value for name, value in self.sample.state_dict().items()}
        if self.known.units is not None:
            state["units"] = torch.tensor(self.known.units, dtype=torch.int64)
            state["shares"] = torch.tensor(self.known.shares, dtype=torch.float64)
        if self.known.norm is not None:
            state["norm.scale"] = self.known.norm.scale
            state["norm.eps"] = torch.tensor(self.known.norm.eps, dtype=torch.float64)
        if self.known.care is not None:
            state["care"] = self.known.care
        if self.twin is not None:
            state |= {f"twin.{name}": value for name, value in self.twin.state_dict().items()}
        return state

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, every part of it checked; for a store without rows."""
        parts = _by_group(state)
        if len(parts["body"]) != len(self.body):
            raise ValueError(f"{len(parts['body'])} groups of rows, expected {len(self.body)}")
        for part in PARTS:
            for g, accumulator in enumerate(getattr(self, part)):
                try:
                    accumulator.load_state_dict(parts[part][g])
                except ValueError as err:
                    raise ValueError(f"{part}, fold {g}: {err}") from None
        every = self._accumulators()
        shared = next((a.shift for a in every if a.shift is not None), None)
        for a in every:  # one tensor again, as before
            if a.shift is not None and shared is not None and torch.equal(a.shift, shared):
                a.shift = shared
        own = {k.removeprefix("sample."): v for k, v in state.items() if k.startswith("sample.")}
        self.sample.load_state_dict(own)
        twin = {k.removeprefix("twin."): v for k, v in state.items() if k.startswith("twin.")}
        if twin and not any(k.startswith("twin.") for k in twin):
            self.twin = BlockStore.from_state(self.block, twin, self.body[0].device)
            self.twin.sample.seed = self.sample.seed

    @classmethod
    def from_state(
        cls, block: Place, state: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> BlockStore:
        """A store made from what `state_dict` gave."""
        body = _by_group(state)["body"]
        kind = bytes(body[0].get("kind", torch.zeros(0, dtype=torch.uint8)).flatten().tolist()[:16])
        solver = "tsqr" if kind == b"TSQR" else "moments"
        known = _known(state, block.d_out)
        store = cls(block, len(body), solver, 0, torch.device(device), known)
        store.take(state)
        return store


def _by_group(state: Mapping[str, Tensor]) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Part -> group -> the state of one accumulator."""
    parts: dict[str, dict[int, dict[str, Tensor]]] = {part: {} for part in PARTS}
    for key, value in state.items():
        part, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        if part in parts and number.isdecimal() and len(number) < 5:
            parts[part].setdefault(int(number), {})[name] = value
    for part, found in parts.items():
        if not found or sorted(found) != list(range(len(parts["body"]))):
            raise ValueError(f"there are no complete {part} moments")
    return parts


def _known(state: Mapping[str, Tensor], d_out: int) -> Known:
    """The part of a state that was known before any row came."""
    units, shares = state.get("units"), state.get("shares")
    if (units is None) != (shares is None):
        raise ValueError("sink units without their shares")
    if units is not None and shares is not None:
        odd = units.dtype != torch.int64 or shares.dtype != torch.float64
        if odd or units.dim() != 1 or shares.shape != units.shape or len(units) > MOST:
            raise ValueError(f"sink units are not a list of {MOST} at most")
        if not bool(((units >= 0) & shares.isfinite()).all()):
            raise ValueError("sink units are not numbers of units")
    scale, eps, care = (state.get(name) for name in ("norm.scale", "norm.eps", "care"))
    for name, value, shape in (
        ("norm.scale", scale, (d_out,)),
        ("norm.eps", eps, ()),
        ("care", care, (d_out,)),
    ):
        if value is None:
            continue
        if value.dtype != torch.float64 or value.shape != shape or not value.isfinite().all():
            raise ValueError(f"{name} is not as expected")
    return Known(
        units=None if units is None else units.tolist(),
        shares=None if shares is None else shares.tolist(),
        norm=None if scale is None or eps is None else OutNorm(scale, float(eps)),
        care=care,
    )


def is_wide(at: Sequence[Place]) -> bool:
    """So wide that one factorisation keeps all cores busy, and two would take too much room."""
    return max(block.d_in for block in at) >= 2048
