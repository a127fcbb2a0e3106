"""Rows on their way into sums: kept as they are, or shifted and converted a tile at a time.

    kept = KeptRows()
    kept.add(x, y, weight)                              # few rows, in the dtype of the model
    for tile, w in tiles(x, y, weight, shift, 2048):    # many rows
        ...                                             # tile (at most 2048, D) = [x, y] - shift

A tile is float64, or float32 on a device without float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_local = threading.local()


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
    """(D,) the mean of the rows [x, y] in float64; ValueError if it is not finite."""
    wide = widest(x.device)
    means = [t.reshape(-1, t.shape[-1]).mean(0, dtype=wide) for t in (x, y)]
    check_finite(*means)
    return torch.cat(means).to(device).double()  # in this order: mps has no float64


def tiles(
    x: Tensor, y: Tensor, weight: Tensor | None, shift: Tensor, most: int, lead: int = 0
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(tile, weight): rows [`lead` empty columns, x, y] - shift, at most `most` at a time.

    Float64 on the device of the rows, or float32 where that device has no float64. All tiles of a
    thread share one workspace: a tile is valid until the next one is made.
    """
    parts = _parts(shift, x.device)
    d_in, d_out = x.shape[-1], y.shape[-1]
    width = lead + d_in + d_out
    if x.dim() != 3:  # (windows, positions, features) stays as it is, uncopied
        x, y = x.reshape(1, -1, d_in), y.reshape(1, -1, d_out)
        weight = None if weight is None else weight.reshape(1, -1)
    step = max(1, most // x.shape[1])
    for i in range(0, len(x), step):
        for j in range(0, x.shape[1], most):
            at = (slice(i, i + step), slice(j, j + most))
            windows, positions = x[at].shape[:2]
            tile = _workspace(windows * positions, width, x.device)
            z = tile.view(windows, positions, width)
            z[..., lead : lead + d_in].copy_(x[at])
            z[..., lead + d_in :].copy_(y[at])
            for part in parts:
                tile[:, lead:].sub_(part)
            yield tile, None if weight is None else weight[at].reshape(-1).to(tile)


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def check_finite(sum_x: Tensor, sum_y: Tensor) -> None:
    """Refuse rows by their column sums: one value that is not finite makes its sum not finite."""
    for name, total in (("input x", sum_x), ("output y", sum_y)):
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            raise ValueError(
                f"not finite: {len(bad)} of {len(total)} features of {name}, feature {int(bad[0])} first"
            )


def _workspace(rows: int, width: int, device: torch.device) -> Tensor:
    """(rows, width) scratch, one for each thread: a new one costs more than the copy into it."""
    cache, key = _local.__dict__.setdefault("scratch", {}), (device, widest(device))
    if key not in cache or cache[key].numel() < rows * width:
        cache[key] = torch.empty(rows * width, dtype=key[1], device=device)
    return cache[key][: rows * width].view(rows, width)


def _parts(shift: Tensor, device: torch.device) -> list[Tensor]:
    """The shift on a device: itself, or two float32 vectors that add up to it.

    Subtracting them one after the other rounds z - c, not c.
    """
    if widest(device) == torch.float64:
        return [shift.to(device)]
    high = shift.float()
    return [high.to(device), (shift - high).float().to(device)]
