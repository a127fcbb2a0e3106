"""Which rows are held out: blocked folds, or the paper's split.

    split = Folds(5)
    for group, windows, positions in split.pieces(offsets, length): ...
    split.held(sizes)                   # groups to score, each by a map fitted on the others

A **group** is a fold, or one side of the paper's split. The group of a row follows from its token
offset in the text alone, so that streams, shards and merges agree without knowing the total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CELL = 2048  # tokens that stay together in a fold


@dataclass(frozen=True)
class Folds:
    """Blocked folds: fold = (token offset of the window // CELL) mod groups."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 2:
            raise ValueError(
                f"cross-validation needs at least 2 folds, got {self.groups} (--folds)"
            )

    def pieces(self, offsets: Sequence[int], length: int) -> Iterator[tuple[int, slice, slice]]:
        """(group, windows, positions): rectangles that cover the rows of a batch."""
        folds = [offset // CELL % self.groups for offset in offsets]
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
                f"all rows fall into one of {self.groups} folds, which change every {CELL} tokens: "
                f"give more text (--tokens) or shorter windows (--max-length)"
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
    enough = max(count, 1)
    while _fit_rows(enough, length, _resized(split, enough * length)) <= columns:
        enough += 1
    raise ValueError(
        f"too little text: {count * length} tokens cannot determine {columns} columns held out; "
        f"{enough * length} tokens would do, about {max(30_000, 40 * columns)} to trust the result "
        f"(--tokens, --text-file)"
    )


def _fit_rows(count: int, length: int, split: Split) -> int:
    """The fewest rows that any fit would have, first positions left out; 0 if none is possible."""
    sizes = [0] * split.groups
    for g, w, p in split.pieces([i * length for i in range(count)], length):
        sizes[g] += (w.stop - w.start) * (p.stop - max(p.start, 1))
    try:
        held = split.held(sizes)
    except ValueError:
        return 0
    return min(sum(sizes) - sizes[f] for f in held)


def _resized(split: Split, rows: int) -> Split:
    return split if isinstance(split, Folds) else RowSplit(rows)
