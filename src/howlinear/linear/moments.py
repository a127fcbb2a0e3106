"""Centred second moments of rows, in one pass and constant memory, and `TSQR`, their factor.

    moments = Moments(d_in, d_out)
    for x, y in stream:             # x (..., d_in), y (..., d_out)
        moments.update(x, y)
    affine = fit(moments)           # howlinear.fit, or read S_xx, S_xy, S_yy directly

In the notation of `accumulators`, what is kept is

    n, weight = sum w,  sums = sum w (z - c),  yy = sum w (y - c_y)^2,
    panels    = sum w (x - c_x)(z - c)'     upper triangle of the x part, and all of the y part

A row costs d_in (d_in / 2 + d_out) multiply-adds; the sums take 8 bytes for each of them.

With `precision="mixed"` products of rows are made in float32, `TILE` rows at a time, on the device of
the rows, and added in float64. With u = 2**-24:

- Each number is rounded once, by u of z - c. A tile whose squares leave float32's range is summed in
  float64.
- A float32 sum of T squares has an error of u T at worst and u sqrt(T / 3) typically, even if it is
  made one by one (BLAS sums in blocks, which is better). Tiles add in float64, so the error of n
  rows is u T / sqrt(3 n), relative to the product of the columns' norms: T = 2048 gives 26 u for
  one tile and 6.8 u for 30000 rows, and the float64 addition costs 1 / T of the product.
- Singular values of the inputs below sqrt(8 u) = 7e-4 of the largest are lost in that error; `eps`
  is raised so that the rank threshold, d_in * eps, excludes them. `precision.float32_shift` tells
  whether rows need none of this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from howlinear.linear.accumulators import TILE, Accumulator
from howlinear.linear.tiles import check_finite, pieces, shifted

PANEL = 96  # columns of x in one matrix product: half the work for S_xx, at full speed
WIDE = 3  # panels of one float32 product: narrow ones are a fifth slower
LEAST = 2.0**-80  # a column's sum of squares in a tile: smaller ones lose digits in float32


class Moments(Accumulator):
    """Centred second moments of rows, in one pass and constant memory.

    `precision="mixed"` makes products of rows in float32 and adds them in float64.
    """

    _precisions = ("float64", "mixed")
    _total: Tensor  # (D,)
    _panels: Tensor  # flat; panel i is (rows of x it covers, D - i)
    _yy: Tensor  # (d_out,)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.d_in + self.d_out
        flat = sum(p * (width - i) for i, p in self._spans())
        return {"_total": (width,), "_panels": (flat,), "_yy": (self.d_out,)}

    def _spans(self) -> list[tuple[int, int]]:
        return [(i, min(PANEL, self.d_in - i)) for i in range(0, self.d_in, PANEL)]

    def _views(self) -> list[tuple[int, Tensor]]:
        """Each panel as (first column, matrix (columns, D - first)), views of the flat sums."""
        width, start, views = self.d_in + self.d_out, 0, []
        for i, p in self._spans():
            stop = start + p * (width - i)
            views.append((i, self._panels[start:stop].view(p, width - i)))
            start = stop
        return views

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None, precision: str) -> None:
        shift = self.shift_for(x, y)
        for xs, ys, w in pieces(x, y, weight, TILE):
            w = None if w is None else w.flatten()
            if precision == "mixed":
                z = shifted(xs, ys, shift, torch.float32)
                with full_float32(z.device):
                    if self._add_float32(z, None if w is None else w.to(z)):
                        continue
            xs, ys = xs.to(self.device), ys.to(self.device)
            self._add(shifted(xs, ys, shift, torch.float64), w)

    def _add(self, z: Tensor, w: Tensor | None) -> None:
        """One tile z (T, D) with weights."""
        zy = z[:, self.d_in :]
        total = z.sum(0) if w is None else w @ z
        check_finite(total[: self.d_in], total[self.d_in :])
        left = z[:, : self.d_in] if w is None else z[:, : self.d_in] * w[:, None]
        self._total += total
        self._yy += zy.square().sum(0) if w is None else w @ zy.square()
        for i, panel in self._views():
            panel.addmm_(left[:, i : i + len(panel)].t(), z[:, i:])

    def _add_float32(self, z: Tensor, w: Tensor | None) -> bool:
        """One float32 tile; False, and nothing is added, where squares leave float32's range."""
        left = z if w is None else z * w[:, None]
        views = self._views()
        size = -(-len(views) // max(1, len(views) // WIDE))  # the rest joins: no narrow last one
        wide = [views[first : first + size] for first in range(0, len(views), size)]
        spans = [(part[0][0], part[-1][0] + len(part[-1][1])) for part in wide]
        products = [left[:, i:j].t() @ z[:, i:] for i, j in spans]
        yy = (left[:, self.d_in :] * z[:, self.d_in :]).sum(0)
        squares = torch.cat([*(product.diagonal() for product in products), yy])
        if not bool(squares.isfinite().all()) or bool(z[:, squares < LEAST].any()):
            return False
        self._total += left.sum(0).to(self.device)
        self._yy += yy.to(self.device)
        for part, (i, _), product in zip(wide, spans, products, strict=True):
            product = product.to(self.device)
            for k, panel in part:
                panel.add_(product[k - i : k - i + len(panel), k - i :])
        return True

    def _combine(self, other: Self, delta: Tensor) -> None:
        total, yy = other._total, other._yy
        if bool(delta.any()):
            s, dy = other._total, delta[self.d_in :]
            total = s + other.weight * delta
            yy = yy + 2 * dy * s[self.d_in :] + other.weight * dy.square()
            for i, panel in self._views():
                left = slice(i, i + len(panel))
                panel.add_(torch.outer(s[left], delta[i:]))
                panel.add_(torch.outer(delta[left], total[i:]))
        self._panels += other._panels
        self._total += total
        self._yy += yy

    def _narrow_sums(self, narrow: Self) -> None:
        narrow._total.copy_(self._without(self._total, narrow.d_in))
        narrow._yy.copy_(self._yy)
        for (i, wide), (_, panel) in zip(self._views(), narrow._views(), strict=False):
            cut = narrow.d_in - i
            panel[:, :cut] = wide[: len(panel), :cut]
            panel[:, cut:] = wide[: len(panel), self.d_in - i :]

    # -- reading ----------------------------------------------------------------------------------

    def _mean(self) -> Tensor:
        return self._require_rows() + self._total / self.weight

    @property
    def S_yy(self) -> Tensor:
        self._require_rows()
        s = self._total[self.d_in :]
        return (self._yy - s * s / self.weight).clamp_min_(0)

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), centred; about the origin without an intercept. O(d_in (d_in + d_out))."""
        c = self._require_rows()
        d, s = self.d_in, self._total
        S_xx = torch.empty(d, d, dtype=torch.float64, device=self.device)
        S_xy = torch.empty(d, self.d_out, dtype=torch.float64, device=self.device)
        for i, panel in self._views():
            j = i + len(panel)
            S_xx[i:j, i:] = panel[:, : d - i]
            S_xx[j:, i:j] = panel[:, j - i : d - i].t()
            S_xy[i:j] = panel[:, d - i :]
        if intercept:
            S_xx.addr_(s[:d], s[:d], alpha=-1 / self.weight)
            S_xy.addr_(s[:d], s[d:], alpha=-1 / self.weight)
            return S_xx, S_xy
        # sum w z z' = sum w (z-c)(z-c)' + s c' + c s' + W c c'
        for S, right in ((S_xx, slice(None, d)), (S_xy, slice(d, None))):
            S.addr_(s[:d], c[right]).addr_(c[:d], (s + self.weight * c)[right])
        return S_xx, S_xy


class TSQR(Accumulator):
    """The triangular factor R of the rows [1, z - c] (`--solver tsqr`): R'R are their moments.

    Factors lose half as many digits as sums of squares, and take more work and, for square blocks,
    two and a half times the memory. `Moments` is tested against it.
    """

    _R: Tensor  # (1 + D, 1 + D), upper triangular

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size = 1 + self.d_in + self.d_out
        return {"_R": (size, size)}

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None, precision: str) -> None:
        R = self._R
        shift = self.shift_for(x, y)
        for xs, ys, w in pieces(x, y, weight, TILE):
            tile = shifted(xs, ys, shift, torch.float64, lead=1)
            tile[:, 0] = 1
            total = tile.sum(0)
            check_finite(total[1 : 1 + self.d_in], total[1 + self.d_in :])
            if w is not None:
                tile *= w.flatten().sqrt()[:, None]
            R = torch.linalg.qr(torch.cat([R, tile]), mode="r").R
        self._R = R

    def _combine(self, other: Self, delta: Tensor) -> None:
        R = other._R.clone()
        R[:, 1:] += torch.outer(R[:, 0], delta)
        self._R = torch.linalg.qr(torch.cat([self._R, R]), mode="r").R

    def _narrow_sums(self, narrow: Self) -> None:
        if narrow.d_in == self.d_in:
            narrow._R.copy_(self._R)
        else:
            narrow._R = torch.linalg.qr(self._without(self._R, narrow.d_in, lead=1), mode="r").R

    def root(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(R_xx, R_xy), R_xx upper triangular."""
        shift, d = self._require_rows(), self.d_in
        if intercept:
            return self._R[1 : 1 + d, 1 : 1 + d], self._R[1 : 1 + d, 1 + d :]
        raw = self._R[:, 1:] + torch.outer(self._R[:, 0], shift)
        R = torch.linalg.qr(raw, mode="r").R
        return R[:d, :d], R[:d, d:]

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), as of `Moments`."""
        R_xx, R_xy = self.root(intercept)
        return R_xx.t() @ R_xx, R_xx.t() @ R_xy

    def residual_squares(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(d_out,), without subtracting large sums from one another."""
        c, d = self._require_rows(), self.d_in
        offset = c[d:] - weight @ c[:d] - bias  # y - Wx - b = (y - c_y) - W (x - c_x) + offset
        R_1, R_x, R_y = self._R[:, 0], self._R[:, 1 : 1 + d], self._R[:, 1 + d :]
        E = R_y - R_x @ weight.t() + torch.outer(R_1, offset)
        return E.square().sum(0)

    def _mean(self) -> Tensor:
        return self._require_rows() + self._R[0, 1:] / self._R[0, 0]

    @property
    def S_yy(self) -> Tensor:
        self._require_rows()
        return self._R[1:, 1 + self.d_in :].square().sum(0)


_lock = threading.Lock()
_restore = ExitStack()
_inside = 0  # threads in `full_float32`


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 keep all of float32's digits: no TF32, no bfloat16, no autocast.

    The setting belongs to the whole process: the first thread to enter changes it, the last to
    leave restores it.
    """
    global _inside
    with _lock:
        if not _inside:
            _change()
        _inside += 1
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore.close()


def _change() -> None:
    try:
        general = torch.get_float32_matmul_precision()
        if general == "highest":
            return
    except RuntimeError:  # the backends have different settings
        general = "highest"
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        matmul: Any = getattr(backend, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            _restore.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
    _restore.callback(torch.set_float32_matmul_precision, general)  # this runs first
    torch.set_float32_matmul_precision("highest")
