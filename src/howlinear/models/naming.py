"""Names of blocks: depth indices, paths, patterns, and whatever carries a path.

    depth_indices("3,5,9-12", range(30))            # [3, 5, 9, 10, 11, 12]
    indices_of(["mlp$", 4, block], {0: "h.0.mlp", 4: "h.4.mlp"})    # {0, 4}

`families.blocks` finds the blocks of a model by these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

from howlinear.records.words import ranges


class HasPath(Protocol):
    """A `Block`, or the record of one in a result."""

    @property
    def path(self) -> str: ...


BlockName = SupportsIndex | str | HasPath  # a depth index; a path or pattern; a block
BlockNames = BlockName | Iterable[BlockName] | None  # None: all blocks


def indices_of(at: BlockNames, paths: Mapping[int, str]) -> set[int]:
    """The indices that `at` names among measured blocks, given by index and path."""
    if at is None:
        return set(paths)
    if isinstance(at, SupportsIndex):
        return {depth_of(at, list(paths))}
    if not isinstance(at, str):
        names = one_by_one(at)
        texts = [n if isinstance(n, str | SupportsIndex) else path_of(n) for n in names]
        return {index for name in texts for index in indices_of(name, paths)}
    if exact := {index for index, path in paths.items() if path == at}:
        return exact
    if re.fullmatch(r"[\d,\-\s]*", at):
        return set(depth_indices(at, list(paths)))
    try:
        wanted = {index for index, path in paths.items() if re.search(at, path)}
    except re.error as err:
        raise ValueError(f"`at` {at!r} is not a regular expression: {err}") from None
    if not wanted:
        raise ValueError(f"`at` {at!r} chooses no block that the run has measured")
    return wanted


def one_by_one(at: BlockName | Iterable[BlockName]) -> list[BlockName]:
    """Names of blocks, of which one may come without a list."""
    return list(at) if isinstance(at, Iterable) and not isinstance(at, str) else [at]


def path_of(name: Any) -> str:
    """The path that something carries; ValueError if it names no block."""
    path = getattr(name, "path", None)
    if not isinstance(path, str):
        kind = type(name).__name__
        raise ValueError(f"expected a block's index, path, pattern or Block; got {kind}")
    return path


def depth_of(number: SupportsIndex, there: Sequence[int]) -> int:
    """A depth index, which counts from the end if it is negative."""
    depth = number.__index__()
    index = depth if depth >= 0 else max(there) + 1 + depth
    if index not in there:
        raise ValueError(f"block {depth} is not among the blocks, which are {ranges(there)}")
    return index


def depth_indices(text: str, there: Sequence[int], argument: str = "at") -> list[int]:
    """Depth indices in order: "3,5,9-12" means 3, 5, 9, 10, 11 and 12; all must be `there`."""
    chosen: set[int] = set()
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(
                f"`{argument}` {text!r}: {part!r} is no index and no range such as 9-12"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"`{argument}` {text!r}: {part!r} ends before it begins")
        if last > max(there) or not set(there).issuperset(range(first, last + 1)):
            raise ValueError(
                f"`{argument}` {text!r}: {part!r} is not among the blocks, which are {ranges(there)}"
            )
        chosen.update(range(first, last + 1))
    if not chosen:
        raise ValueError(f"`{argument}` {text!r} names no block; write indices such as 3,5,9-12")
    return sorted(chosen)
