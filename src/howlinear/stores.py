"""Which rows are held out, and what is kept of them: one block's accumulators, in bounded memory.

    split = Folds(5)
    store = BlockStore.make(block, split.groups, "moments", seed=0, device=torch.device("cpu"))
    store.update(rows, offsets, split)      # rows as `tap` hands them, offsets of their windows

A **group** is a fold, or one side of the paper's split. For each group a store has one accumulator
for first positions and one for the rest, so that scores with and without them share the sums. Where
hidden units of the block are given too, the few that write the first position (**sink units**) are
found in the first rows and join x as its last columns: maps with and without them share the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howlinear.families import Block, Rows
from howlinear.moments import TSQR, Accumulator, Moments
from howlinear.units import MOST, sinks

CELL = 2048  # tokens that stay together in a fold
SAMPLE = 512  # rows kept for stream_error
SOLVERS: dict[str, type[Accumulator]] = {"moments": Moments, "tsqr": TSQR}
PARTS = ("body", "first")


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
    """A uniform sample of rows of fixed size, the same for the same seed and row order."""

    def __init__(self, d_in: int, d_out: int, seed: int, size: int = SAMPLE) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = torch.full((size,), torch.inf)
        self.group = torch.full((size,), -1)
        self.x = torch.zeros(size, d_in)
        self.y = torch.zeros(size, d_out)
        self.stream = torch.zeros(size)

    def update(self, x: Tensor, rows: Rows, group: Tensor) -> None:
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
        at = new.to(x.device)
        self.x[slots] = x[at].float().cpu()
        self.y[slots] = rows.y[at].float().cpu()
        self.stream[slots] = rows.h[at].float().square().sum(-1).cpu()


class BlockStore:
    """One block's accumulators: for each group, rows past the first position, and first ones.

    `norms` (m,) are what each hidden unit writes, squared (`units.writes`). With them, sink units
    are chosen when the first rows come, and `units` holds their numbers, `shares` their shares.
    """

    def __init__(
        self,
        block: Block,
        groups: int,
        solver: str,
        seed: int,
        device: torch.device,
        norms: Tensor | None = None,
    ) -> None:
        self.block, self.norms = block, norms
        self.units: list[int] | None = None
        self.shares: list[float] | None = None
        self._make = lambda width: [
            SOLVERS[solver](width, block.d_out, device=device) for _ in range(groups)
        ]
        self._seed = seed
        self._begin(0)

    def _begin(self, extra: int) -> None:
        width = self.block.d_in + extra
        self.body: list[Accumulator] = self._make(width)
        self.first: list[Accumulator] = self._make(width)
        self.sample = RowSample(width, self.block.d_out, self._seed)

    def update(self, rows: Rows, offsets: Sequence[int], split: Split) -> None:
        x, y = self._columns(rows), rows.y
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
        flat = group.flatten()
        if not rows.shape:  # padding was left out: rows stand one by one
            window, position = rows.window.cpu(), rows.position.cpu()
            flat = group[window, position]
            self._share_shift(x, y)
            for g in flat.unique().tolist():
                for store, which in ((self.first, position == 0), (self.body, position > 0)):
                    at = ((flat == g) & which).nonzero().flatten().to(x.device)
                    store[g].update(x[at], y[at])
        self.sample.update(x, rows, flat)

    def _columns(self, rows: Rows) -> Tensor:
        """x, and beside it the sink units, which the first rows tell."""
        if self.norms is None or rows.hidden is None:
            return rows.x
        hidden = rows.hidden
        if self.units is None:
            first = hidden[(rows.position == 0).nonzero().flatten()]
            chosen, shares = sinks(first, self.norms)
            self.units, self.shares = chosen.tolist(), shares.tolist()
            self._begin(len(self.units))
            hidden = hidden[:, chosen.to(hidden.device)]
        return torch.cat([rows.x, hidden.to(rows.x)], 1)

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
        d = block.d_in + (MOST if block.down else 0)
        width = d + block.d_out
        each = 8 * SOLVERS[solver](d, block.d_out).size
        rows = min(4 * windows * width, folds * each)  # first positions
        memory += folds * each + rows + 4 * SAMPLE * width + 8 * d * block.d_out
        disk += folds * each + rows + 8 * d * block.d_out
        work = max(work, 2 * each + 80 * width * width)  # factoring one block
    return Needs(memory + work * (1 if is_wide(at) else torch.get_num_threads()), disk)


def is_wide(at: Sequence[Block]) -> bool:
    """So wide that one factorisation keeps all cores busy, and two would take too much room."""
    return max(block.d_in for block in at) >= 2048
