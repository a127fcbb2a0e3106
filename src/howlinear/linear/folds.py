"""Which rows are held out: blocked folds, or the paper's split.

    split = Folds.over(5, offsets, tokens, documents)       # of a text whose length is known
    for group, windows, positions in split.pieces(offsets, length): ...
    split.held(sizes)                   # groups to score, each by a map fitted on the others

A **group** is a fold, or one side of the paper's split. A **cell** is a stretch of text that stays
in one fold: rows of one document are alike, and an article that lies in several folds makes folds
agree more than new text would. Cells hold at least `CELL` tokens (a fold's share of a shorter text)
and begin with a document where documents are known. Cells of a stream, whose length is not known,
grow from `FIRST` tokens to `CELL`. The group of a row follows from its token offset alone, so that
ranks, shards and merges agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CELL = 8192  # tokens
FIRST = 1024  # tokens of the first cells of a stream: one for each fold, then one of twice the size


@dataclass(frozen=True)
class Folds:
    """Blocked folds: cells in turn."""

    groups: int
    cells: tuple[int, ...] = ()  # token offsets where they begin; (): those of a stream

    def __post_init__(self) -> None:
        if self.groups < 2:
            raise ValueError(
                f"cross-validation needs at least 2 folds, got {self.groups} (`folds`)"
            )

    @classmethod
    def over(
        cls,
        groups: int,
        offsets: Sequence[int],
        tokens: int,
        documents: Sequence[int] | None = None,
    ) -> Folds:
        """Cells of about equal size for windows at these offsets of a text of so many tokens.

        `documents` numbers the document in which each window begins. A cell begins at the nearest
        window that begins another document, if one is within half a cell. Fewer windows than folds
        give a fold each.
        """
        cls(groups)  # refused if there are fewer than 2
        count = len(offsets)
        if count < 2:
            raise ValueError(
                f"{count} window cannot be both fitted and held out: give more text (`tokens`) or "
                "shorter windows (`length`)"
            )
        groups = min(groups, count)
        cells = min(count, groups * max(1, tokens // (groups * CELL)))
        begins = [i for i in range(1, count) if documents and documents[i] != documents[i - 1]]
        starts = [0]
        for k in range(1, cells):
            place = k * count / cells
            i = bisect_right(begins, place)
            near = min(begins[max(i - 1, 0) : i + 1], key=lambda b: abs(b - place), default=place)
            start = near if abs(near - place) < count / cells / 2 else place
            starts.append(max(round(start), starts[-1] + 1))
        return cls(groups, tuple(offsets[i] for i in starts))

    def group(self, offset: int) -> int:
        """The fold of the window at this token offset."""
        if self.cells:
            return (bisect_right(self.cells, offset) - 1) % self.groups
        size = FIRST
        while size < CELL and offset >= self.groups * size:
            offset, size = offset - self.groups * size, 2 * size
        return offset // size % self.groups

    def pieces(self, offsets: Sequence[int], length: int) -> Iterator[tuple[int, slice, slice]]:
        """(group, windows, positions): rectangles that cover the rows of a batch."""
        folds = [self.group(offset) for offset in offsets]
        start = 0
        for i in range(1, len(folds) + 1):
            if i == len(folds) or folds[i] != folds[start]:
                yield folds[start], slice(start, i), slice(0, length)
                start = i

    def held(self, sizes: Sequence[int]) -> list[int]:
        """The groups that have rows; ValueError if there is only one."""
        filled = [g for g, size in enumerate(sizes) if size]
        if len(filled) < 2:
            raise ValueError(
                f"all rows fall into one of {self.groups} folds: give more text (`tokens`) or shorter "
                "windows (`length`)"
            )
        return filled


@dataclass(frozen=True)
class RowSplit:
    """The paper's split: the first 80 % of the rows to fit, the rest held out, cutting a window."""

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
    """Refuse a text of `count` windows that is too short to fit; name a sufficient number of tokens."""
    if _fit_rows(count, length, split) > columns:
        return
    needed = columns // max(length - 1, 1) + 1  # windows to fit on
    enough = max(2, needed + -(-needed // (split.groups - 1 if isinstance(split, Folds) else 4)))
    while _fit_rows(enough, length, _resized(split, enough, length)) <= columns:
        enough += 1
    raise ValueError(
        f"too little text: {count * length} tokens cannot determine {columns} columns held out; "
        f"{enough * length} tokens would do, about {max(30_000, 40 * columns)} to trust the result "
        f"(`tokens`)"
    )


def _fit_rows(count: int, length: int, split: Split) -> int:
    """The fewest rows that any fit would have, without first positions of longer windows; 0 if none
    is possible."""
    sizes = [0] * split.groups
    for g, w, p in split.pieces([i * length for i in range(count)], length):
        sizes[g] += (w.stop - w.start) * (p.stop - max(p.start, int(length > 1)))
    try:
        held = split.held(sizes)
    except ValueError:
        return 0
    return min(sum(sizes) - sizes[f] for f in held)


def _resized(split: Split, count: int, length: int) -> Split:
    """The same kind of split for a text of `count` windows."""
    if isinstance(split, RowSplit):
        return RowSplit(count * length)
    return Folds.over(split.groups, range(0, count * length, length), count * length)
