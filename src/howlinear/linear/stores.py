"""One block's accumulators, in bounded memory.

    store = BlockStore(block, split.groups, "moments", seed=0, device=torch.device("cpu"))
    store.update(rows, offsets, split)      # rows as `tap` passes them, offsets of their windows
    store.merge(other)                      # of the same block, by another machine

For each group of rows (see `folds`) a store has one accumulator for first positions and one for the
rest (the **body**), so that scores with and without first positions share the sums. Where the
hidden units of a block can be read, the few that write the first position (**sink units**) are the
last columns of x, so that maps with and without them share the sums.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from howlinear.linear.accumulators import TILE, Accumulator
from howlinear.linear.folds import Split
from howlinear.linear.gradients import GradientSample
from howlinear.linear.moments import TSQR, Moments
from howlinear.linear.precision import HARMLESS, NARROW, float32_shift
from howlinear.linear.rows import Rows, RowSample
from howlinear.linear.tiles import workspace

MOST = 4  # sink units that a map may keep
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


def name_of(block: Place) -> str:
    """The name of a block's files: 3, or 3.17 for an expert."""
    expert = str(getattr(block, "expert", ""))
    if not re.fullmatch(r"\w*", expert, re.ASCII):  # it may come from a file
        raise ValueError(f"block {block.index}: {expert[:40]!r} is no expert")
    return f"{block.index}.{expert}" if expert else f"{block.index}"


def is_wide(at: Sequence[Place]) -> bool:
    """Is one factorisation enough to keep all cores busy, and two at once too large for memory?"""
    return max(block.d_in for block in at) >= 2048


@dataclass(frozen=True, eq=False)
class OutNorm:
    """An output norm as numbers: y -> scale * y / sqrt(mean(y^2) + eps)."""

    scale: Tensor  # (d_out,)
    eps: float

    def __call__(self, y: Tensor) -> Tensor:
        return self.scale.to(y) * y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @classmethod
    def of(cls, module: nn.Module, width: int) -> OutNorm | None:
        """The numbers of a module; None if it computes something else on random rows."""
        names = ("variance_epsilon", "eps")
        eps = float(next((e for name in names if (e := getattr(module, name, 0))), 0))
        like = next(module.parameters()).detach()
        rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(like)
        with torch.no_grad():
            one, real = module(torch.ones_like(rows[:1]))[0].cpu().double(), module(rows)
        norm = cls(one * (1 + eps) ** 0.5, eps)
        close = 8 * float(torch.finfo(like.dtype).eps)
        same = torch.allclose(norm(rows.cpu().double()), real.cpu().double(), close, close)
        return norm if same else None


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a block before the pass. It is saved and merged with its moments."""

    units: list[int] | None = None  # sink units, columns of x beyond d_in; None: not readable
    shares: list[float] | None = None  # of the first positions' sum of squares, by sink unit
    norm: OutNorm | None = None
    has_stream: bool = True  # are |h| and every norm between y and the add known?

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        if self.units is not None:
            state["units"] = torch.tensor(self.units, dtype=torch.int64)
            state["shares"] = torch.tensor(self.shares, dtype=torch.float64)
        if self.norm is not None:
            state["norm.scale"] = self.norm.scale
            state["norm.eps"] = torch.tensor(self.norm.eps, dtype=torch.float64)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], d_out: int) -> Known:
        """The part of a store's state that was known before the pass, checked."""
        units, shares = state.get("units"), state.get("shares")
        if (units is None) != (shares is None):
            raise ValueError("sink units without their shares")
        count = 0 if units is None else units.numel()
        if count > MOST or (units is not None and bool((units < 0).any())):
            raise ValueError(f"sink units are not numbers of units, {MOST} at most")
        shapes = {"norm.scale": (d_out,), "norm.eps": ()}
        for name, shape in {"units": (count,), "shares": (count,), **shapes}.items():
            value, dtype = state.get(name), torch.int64 if name == "units" else torch.float64
            if value is None:
                continue
            if value.dtype != dtype or value.shape != shape or not bool(value.isfinite().all()):
                raise ValueError(f"{name} is not as expected")
        scale, eps = (state.get(name) for name in shapes)
        return cls(
            units=None if units is None else units.tolist(),
            shares=None if shares is None else shares.tolist(),
            norm=None if scale is None or eps is None else OutNorm(scale, float(eps)),
        )


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
        make = partial(SOLVERS[solver], width, block.d_out, device=device)
        forced = "float64" if precision == "auto" else precision
        self.body = [make(precision=forced) for _ in range(groups)]
        self.first = [make() for _ in range(groups)]  # few rows, large ones: in float64
        #: is it still open whether products are made in float32? Narrow blocks do not need it
        self.undecided = precision == "auto" and solver == "moments" and block.d_in >= NARROW
        self.float32_shift: float | None = None  # about how far that would move R2, once decided
        like = (width, block.d_out, seed)
        self.sample = RowSample(*like) if self.known.has_stream else RowSample(*like, size=0)
        self.gradients = GradientSample(width, block.d_out)  # no rows until `profiling.gradients`

    def update(self, rows: Rows, offsets: Sequence[int], split: Split) -> None:
        """Add rows of windows that begin at these token offsets of the text."""
        if self.undecided:
            self._decide(rows)
        x, y = rows.x, rows.y
        if self.known.units and rows.hidden is not None:
            scratch = workspace("x", (len(x), self.body[0].d_in), x.device, x.dtype)
            x = torch.cat([x, rows.hidden.to(x)], 1, out=scratch)
        length = rows.shape[1] if rows.shape else 1 + int(rows.position.max())
        groups = torch.empty(len(offsets), length, dtype=torch.long)
        for g, w, p in split.pieces(offsets, length):
            groups[w, p] = g
            if rows.shape:
                xs, ys = (t.view(*rows.shape, -1)[w, p] for t in (x, y))
                self._add_piece(g, xs, ys, first=p.start == 0)
        window, position = rows.window.cpu(), rows.position.cpu()
        group = groups[window, position]
        if not rows.shape:  # padding was left out: rows do not form a rectangle
            self._add_rows(x, y, group, position)
        if self.known.has_stream:
            self.sample.update(x, rows, group, torch.tensor(offsets)[window] + position)

    def _decide(self, rows: Rows) -> None:
        """Make products in float32 if that is harmless for the rows so far and these; once they are enough."""
        body = (rows.position > 0).nonzero().flatten()[:TILE]
        if sum(b.n for b in self.body) + len(body) <= 2 * self.block.d_in:
            return
        before = [cast(Moments, b.narrow(self.block.d_in)) for b in self.body if b.n]
        self.undecided = False
        x, y = (t[body].to(self.body[0].device) for t in (rows.x, rows.y))  # mps has no float64
        self.float32_shift = float32_shift(before, x, y)
        if self.float32_shift <= HARMLESS:
            for accumulator in self.body:
                accumulator.precision = "mixed"

    def _add_piece(self, g: int, x: Tensor, y: Tensor, first: bool) -> None:
        """Add x (windows, positions, d_in) and y to group g."""
        self._share_shift(x, y)
        if first:
            self.first[g].update(x[:, 0], y[:, 0])
            x, y = x[:, 1:], y[:, 1:]
        self.body[g].update(x, y)

    def _add_rows(self, x: Tensor, y: Tensor, group: Tensor, position: Tensor) -> None:
        """Add x (n, d_in) and y, each row to its own group."""
        self._share_shift(x, y)
        for g in group.unique().tolist():
            for part, chosen in ((self.first, position == 0), (self.body, position > 0)):
                at = ((group == g) & chosen).nonzero().flatten().to(x.device)
                part[g].update(x[at], y[at])

    def _share_shift(self, x: Tensor, y: Tensor) -> None:
        """All accumulators of a block use one shift: their sums then add without correction."""
        if self.body[0].shift is None:
            shift = self.body[0].shift_for(x, y)
            for accumulator in self._accumulators():
                accumulator.shift = shift

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [b.n + f.n for b, f in zip(self.body, self.first, strict=True)]

    @property
    def n(self) -> int:
        return sum(self.sizes)

    def merge(self, other: BlockStore) -> BlockStore:
        """Add the rows of another store of the same block, groups and sink units."""
        if (self.known.units or []) != (other.known.units or []):
            raise ValueError(
                f"sink units differ: {self.known.units} here, {other.known.units} there"
            )
        if len(self.body) != len(other.body):
            raise ValueError(f"{len(self.body)} groups of rows here, {len(other.body)} there")
        for mine, theirs in zip(self._accumulators(), other._accumulators(), strict=True):
            mine.merge(theirs)
        self.sample.merge(other.sample)
        self.gradients.merge(other.gradients)
        shifts = [s.float32_shift for s in (self, other) if s.float32_shift is not None]
        self.float32_shift = max(shifts, default=None)
        return self

    def narrow(self, units: int) -> BlockStore:
        """A new store of the same rows with the first sink units alone."""
        narrow, width = copy.copy(self), self.block.d_in + units
        sinks, shares = (self.known.units or [])[:units], (self.known.shares or [])[:units]
        narrow.known = replace(self.known, units=sinks, shares=shares)
        narrow.body, narrow.first = (
            [a.narrow(width) for a in part] for part in (self.body, self.first)
        )
        narrow.sample = copy.copy(self.sample)
        narrow.sample.x = self.sample.x[:, :width].clone()
        narrow.gradients = self.gradients.narrow(width)
        return narrow

    def _accumulators(self) -> list[Accumulator]:
        return [*self.body, *self.first]

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, enough to continue to the bit."""
        state = {
            f"{part}.{g}.{name}": value
            for part in PARTS
            for g, accumulator in enumerate(getattr(self, part))
            for name, value in accumulator.state_dict().items()
        }
        state |= {f"sample.{name}": value for name, value in self.sample.state_dict().items()}
        state |= {f"gradients.{name}": value for name, value in self.gradients.state_dict().items()}
        state |= self.known.state_dict()
        if self.float32_shift is not None:
            state["float32_shift"] = torch.tensor(self.float32_shift, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state, every part of it checked; for a store without rows."""
        for part in PARTS:
            if _groups(part, state) != len(self.body):
                raise ValueError(f"there are no complete {part} moments of {len(self.body)} groups")
            for g, accumulator in enumerate(getattr(self, part)):
                try:
                    accumulator.load_state_dict(_below(f"{part}.{g}.", state))
                except ValueError as err:
                    raise ValueError(f"{part}, fold {g}: {err}") from None
        every = self._accumulators()
        shared = next((a.shift for a in every if a.shift is not None), None)
        for a in every:  # one tensor again
            if a.shift is not None and shared is not None and torch.equal(a.shift, shared):
                a.shift = shared
        self.sample.load_state_dict(_below("sample.", state))
        self.gradients.load_state_dict(_below("gradients.", state))
        if (shift := state.get("float32_shift")) is not None:
            if shift.shape != () or shift.dtype != torch.float64 or not float(shift) >= 0:
                raise ValueError("float32_shift is not as expected")
            self.undecided, self.float32_shift = False, float(shift)

    @classmethod
    def from_state(
        cls, block: Place, state: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> BlockStore:
        """A store made from a saved state."""
        kind = state.get("body.0.kind")
        if kind is None:
            raise ValueError("there are no complete body moments")
        solver = "tsqr" if bytes(kind.flatten().tolist()[:16]) == b"TSQR" else "moments"
        known = Known.from_state(state, block.d_out)
        store = cls(block, _groups("body", state), solver, 0, torch.device(device), known)
        store.load_state_dict(state)
        return store


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose names start with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _groups(part: str, state: Mapping[str, Tensor]) -> int:
    """How many groups of a part a state has."""
    return len({name.partition(".")[0] for name in _below(f"{part}.", state)})
