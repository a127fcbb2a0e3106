"""Rows on their way into sums: kept as they are, or shifted and converted a tile at a time.

    kept = KeptRows()
    kept.add(x, y, weight)                              # few rows, in the dtype of the model
    for x, y, w in pieces(x, y, weight, 2048):          # many rows: views of at most 2048
        tile = shifted(x, y, shift, torch.float64)      # (rows, D) = [x, y] - shift

A tile is on the device of its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_local = threading.local()


def as_rows(rows: Any) -> Tensor:
    """A tensor as it is; numpy arrays, data frames and lists as one, whole numbers as float64."""
    if isinstance(rows, Tensor):
        return rows
    array = np.asarray(rows)
    if array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float64, copy=False)
    if not array.flags.writeable:  # torch shares the memory, and warns
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array))


class KeptRows:
    """Rows in the dtype that they came in, in buffers that double.

    One tensor for each addition would scatter small blocks over the heap between the model's large
    ones, which then never fit again: memory would grow by gigabytes for megabytes of rows.
    """

    def __init__(self) -> None:
        self.n = 0
        self.weighted = False
        self.buffers: list[Tensor] = []  # x, y, weight

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Add x (..., d_in), y (..., d_out) and weight (...), float64."""
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        w = x.new_ones(len(x), dtype=torch.float64) if weight is None else weight.reshape(-1)
        n, room = self.n + len(x), max(16, 2 * self.n, self.n + len(x))
        before = self.buffers or [x[:0], y[:0], w[:0]]
        self.buffers = []
        for buffer, more in zip(before, (x, y, w), strict=True):
            dtype = torch.promote_types(buffer.dtype, more.dtype)
            if n > len(buffer) or dtype != buffer.dtype:
                old, buffer = buffer, more.new_empty(room, *more.shape[1:], dtype=dtype)
                buffer[: self.n] = old[: self.n]
            buffer[self.n : n] = more
            self.buffers.append(buffer)
        self.n = n
        self.weighted |= weight is not None

    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(x, y, weight); the weight is None if no addition had one."""
        x, y, weight = (buffer[: self.n] for buffer in self.buffers)
        return x, y, weight if self.weighted else None


def mean_row(x: Tensor, y: Tensor, device: torch.device) -> Tensor:
    """(D,) about the mean of the rows [x, y], in float64; ValueError if it is not finite.

    Rounded to float32, so that float32 rows are shifted by it exactly as they are in float64.
    """
    sums = torch.cat(column_sums(x, y)).to(device).double()  # in this order: mps has no float64
    mean = sums / x.shape[:-1].numel()
    return torch.where(mean.float().isfinite(), mean.float().double(), mean)


def pieces(
    x: Tensor, y: Tensor, weight: Tensor | None, most: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Views of at most `most` rows each: x (windows, positions, d_in), y, weight."""
    if x.dim() != 3:  # (windows, positions, features) stays as it is, uncopied
        x, y = (t.reshape(1, -1, t.shape[-1]) for t in (x, y))
        weight = None if weight is None else weight.reshape(1, -1)
    step = max(1, most // x.shape[1])
    for i in range(0, len(x), step):
        for j in range(0, x.shape[1], most):
            at = (slice(i, i + step), slice(j, j + most))
            yield x[at], y[at], None if weight is None else weight[at]


def shifted(x: Tensor, y: Tensor, shift: Tensor, dtype: torch.dtype, lead: int = 0) -> Tensor:
    """(rows, lead + D): `lead` empty columns, and [x, y] - shift, rounded once to this dtype.

    All tiles of a thread share one workspace: a tile is valid until the next one is made.
    """
    d_in, d_out = x.shape[-1], y.shape[-1]
    tile = workspace("tile", (x.shape[:-1].numel(), lead + d_in + d_out), x.device, dtype)
    z = tile.view(*x.shape[:-1], lead + d_in + d_out)[..., lead:]
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), dtype)
    for part, own in ((z[..., :d_in], x), (z[..., d_in:], y)):
        c = shift[:d_in] if own is x else shift[d_in:]
        torch.sub(own, c.to(wide).to(x.device), out=part)
    if wide == torch.float32 and bool((rest := shift - shift.float().double()).any()):
        z.sub_(rest.float().to(x.device))  # of a shift that is not a float32 number
    return tile


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def column_sums(x: Tensor, y: Tensor) -> list[Tensor]:
    """Sums of the columns of x and y; ValueError if rows are not finite."""
    sums = []
    for t in (x, y):
        over = tuple(range(t.dim() - 1))
        total = t.sum(over, dtype=torch.promote_types(t.dtype, torch.float32))
        if not bool(total.isfinite().all()):  # float32 may be too narrow for it
            total = t.sum(over, dtype=widest(t.device))
        sums.append(total)
    check_finite(*sums)
    return sums


def check_all_finite(x: Tensor, y: Tensor) -> None:
    """Refuse rows that are not finite. One sum of all is 20 times as fast as one for each column."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in (x, y)]
    if not all(bool(total.isfinite()) for total in sums):
        column_sums(x, y)


def check_finite(sum_x: Tensor, sum_y: Tensor) -> None:
    """Refuse rows by their column sums: one value that is not finite makes its sum not finite."""
    for name, total in (("input x", sum_x), ("output y", sum_y)):
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            raise ValueError(
                f"not finite: {len(bad)} of {len(total)} features of {name}, feature {int(bad[0])} first"
            )


def workspace(
    name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Scratch of this shape, one of each name for each thread: a new one costs more than the copy into it."""
    cache, key = _local.__dict__.setdefault("scratch", {}), (name, device, dtype)
    size = shape[0] * shape[1]
    if key not in cache or cache[key].numel() < size:
        cache[key] = torch.empty(size, dtype=dtype, device=device)
    return cache[key][:size].view(shape)
