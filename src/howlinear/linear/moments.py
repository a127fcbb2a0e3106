"""What we remember of rows: sums that add up exactly, whoever saw the rows.

    moments = Moments(d_in, d_out)
    for x, y in stream:             # x (..., d_in), y (..., d_out)
        moments.update(x, y)
    moments.merge(other)            # another machine's, another text's
    affine = fit(moments)           # howlinear.fit, or read S_xx and friends directly

Notation. z = [x, y] is one row, D = d_in + d_out, w its weight (1 unless said), c the **shift**: the mean of the first
batch. Rows are shifted before anything is summed, and all sums are float64. What is kept is

    n, weight = sum w,  sums = sum w (z - c),  yy = sum w (y - c_y)^2,
    panels    = sum w (x - c_x)(z - c)'     upper triangle of the x part, and all of the y part

`Moments` costs d_in (d_in / 2 + d_out) multiply-adds a row and 8 bytes for each of them, once. `TSQR` keeps the
triangular factor R of [1, z] instead: more digits, more work, and two and a half times the room for square blocks. It
is the referee. Both keep their rows as they came while these take less room than the sums would, so that an accumulator
that meets few rows (first positions, rarely used experts) costs what it weighs.

`Moments(..., precision="mixed")` is for devices where float64 is slow or missing. Products of rows are made in float32,
`MIXED_TILE` rows at a time, on the device of the rows; everything else is as above, and in the same units. u = 2**-24:

- One rounding a number, u of z - c. Rows far from 1 are scaled by powers of two, column by column, tile by tile. That
  is exact, so it changes no digit: it keeps squares within float32's range, and nobody need remember it.
- A float32 sum of T squares is off by u T at worst and u sqrt(T / 3) by chance, even if it is made one by one (BLAS
  makes it in blocks, which is better). Tiles add in float64, so n rows are off by u T / sqrt(3 n), relative to
  the product of the columns' norms: T = 1024 gives 18 u for one tile and 3.4 u for 30000 rows, and the float64 addition
  costs 1 / T of the product.
- Singular values of the inputs below sqrt(8 u) = 7e-4 of the largest are lost in that, and `eps` says so to the rank
  threshold, d_in * eps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

PANEL = 96  # columns of x a matrix product takes at once: half the work for S_xx, at full speed
TILE = 2048  # rows converted to float64 at once
MIXED_TILE = 1024  # rows a float32 product takes at once: see above

_local = threading.local()


class _Kept:
    """Rows as they came, in buffers that double.

    One tensor for each addition would scatter small blocks over the heap between the model's large
    ones, which then never fit again: memory would grow by gigabytes for megabytes of rows.
    """

    def __init__(self) -> None:
        self.n = 0
        self.weighted = False
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None  # x, y, weight

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        old, n = self.buffers, self.n + len(x)
        types = [x.dtype, y.dtype, torch.float64]
        if old is not None:
            types = [torch.promote_types(a, b.dtype) for a, b in zip(types, old, strict=True)]
        if old is None or n > len(old[0]) or types != [b.dtype for b in old]:
            room = max(16, 2 * n if old is not None else n)
            widths = ((x.shape[1],), (y.shape[1],), ())
            new = [x.new_empty(room, *w, dtype=t) for w, t in zip(widths, types, strict=True)]
            for a, b in zip(new, old or (), strict=False):
                a[: self.n] = b[: self.n]
            self.buffers = (new[0], new[1], new[2])
        assert self.buffers is not None
        for buffer, rows in zip(
            self.buffers, (x, y, 1.0 if weight is None else weight), strict=True
        ):
            buffer[self.n : n] = rows
        self.n = n
        self.weighted |= weight is not None

    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.buffers is not None
        x, y, weight = (b[: self.n] for b in self.buffers)
        return x, y, weight if self.weighted else None


A = TypeVar("A", bound="Accumulator")


class Accumulator:
    """The part that `Moments` and `TSQR` share: checking rows, keeping few of them as they are, and state.

    Subclasses say how sums are made (`_allocate`), how rows enter (`_absorb`) and how two sums add (`_combine`).
    """

    #: names of the float64 tensors that make up the sums
    _sums: tuple[str, ...] = ()
    #: how products of rows can be made
    _precisions: tuple[str, ...] = ("float64",)

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        shift: Tensor | None = None,
        device: torch.device | str = "cpu",
        precision: str = "float64",
    ) -> None:
        if precision not in self._precisions:
            raise ValueError(
                f"{type(self).__name__} has no precision {precision!r}, only {', '.join(self._precisions)}"
            )
        if d_in < 1 or d_out < 1:
            raise ValueError(
                f"moments need at least one column on each side, got {d_in} and {d_out}"
            )
        self.d_in, self.d_out = d_in, d_out
        self.device = torch.device(device)
        #: of the products: "mixed" as soon as some of them were made in float32
        self.precision = precision
        self.n = 0
        self.weight = 0.0
        #: resolution of the rows, for the rank threshold: float64's, or float32's for everything narrower
        self.eps = float(torch.finfo(torch.float64).eps)
        self.shift: Tensor | None = None
        if shift is not None:
            if shift.shape != (d_in + d_out,):
                raise ValueError(
                    f"shift has shape {tuple(shift.shape)}, expected ({d_in + d_out},)"
                )
            self.shift = shift.to(self.device, torch.float64)
        self._kept = _Kept()  # few rows, as they came
        self._filled = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.n} rows, {self.d_in} to {self.d_out}>"

    # -- adding rows ------------------------------------------------------------------------------

    @property
    def kept_rows(self) -> int:
        """How many rows are still kept as rows."""
        return self._kept.n

    def update(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add rows: x (..., d_in), y (..., d_out), weight (...). Nothing changes if they are refused."""
        if x.shape[-1:] != (self.d_in,) or y.shape[-1:] != (self.d_out,):
            raise ValueError(
                f"rows have widths {tuple(x.shape[-1:])} and {tuple(y.shape[-1:])}, "
                f"expected ({self.d_in},) and ({self.d_out},)"
            )
        if x.shape[:-1] != y.shape[:-1]:
            raise ValueError(f"x has rows {tuple(x.shape[:-1])} but y has {tuple(y.shape[:-1])}")
        if not (x.is_floating_point() and y.is_floating_point()):
            raise ValueError(f"rows must be floating point, got {x.dtype} and {y.dtype}")
        if weight is not None:
            if weight.shape != x.shape[:-1]:
                raise ValueError(
                    f"weight has shape {tuple(weight.shape)}, expected {tuple(x.shape[:-1])}"
                )
            if not bool(((weight >= 0) & weight.isfinite()).all()):
                raise ValueError("weights must be finite and not negative")
            weight = weight.to(self.device, torch.float64)
        rows = x.shape[:-1].numel()
        if rows == 0:
            return
        x, y, few = (
            x.detach(),
            y.detach(),
            not self._filled and self._kept.n + rows <= self.d_in // 2,
        )
        if few or self.precision == "float64":  # else products are made where the rows are
            x, y = x.to(self.device), y.to(self.device)
        if rows > self._tile:  # one tile is checked as it enters; several must not enter by halves
            wide = _widest(x.device)
            _check_finite(*(t.sum(tuple(range(t.dim() - 1)), dtype=wide) for t in (x, y)))
        if few:
            x, y = x.reshape(rows, -1), y.reshape(rows, -1)
            _check_finite(x.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64))
            self._kept.add(x, y, None if weight is None else weight.reshape(rows))
        else:
            self._fill()
            self._absorb(x, y, weight)
        self.n += rows
        self.weight += float(rows if weight is None else weight.sum())
        self.eps = max(self.eps, _resolution(x.dtype), _resolution(y.dtype), self._blur())

    def merge(self, other: Self) -> Self:
        """Add another accumulator's rows to this one. Exact up to float64 rounding, in any order.

        Sums that hold products in float32 make these mixed too.
        """
        if type(other) is not type(self) or (other.d_in, other.d_out) != (self.d_in, self.d_out):
            raise ValueError(
                f"cannot merge {type(other).__name__}({other.d_in}, {other.d_out}) "
                f"into {type(self).__name__}({self.d_in}, {self.d_out})"
            )
        if other is self:
            other = self.copy()
        if other.n == 0:
            return self
        if not other._filled:
            self.update(*other._kept.rows())
            return self
        if self.shift is None and not self._kept.n:
            self.shift = other.shift
        self._fill()
        if other.precision == "mixed":
            self.precision = "mixed"
        self._combine(other)
        self.n += other.n
        self.weight += other.weight
        self.eps = max(self.eps, other.eps)
        return self

    def copy(self) -> Self:
        """An accumulator of its own with the same content."""
        twin = self._like(self.d_in, self.shift)
        twin.n, twin.weight, twin.eps = self.n, self.weight, self.eps
        twin._filled = self._filled
        if self._kept.n:
            twin._kept.add(*self._kept.rows())
        for name in self._sums if self._filled else ():
            setattr(twin, name, getattr(self, name).clone())
        return twin

    def narrow(self, d_in: int) -> Self:
        """An accumulator of its own that never heard of the columns of x from `d_in` on."""
        if not 1 <= d_in <= self.d_in:
            raise ValueError(f"cannot narrow {self.d_in} columns to {d_in}")
        if d_in == self.d_in:
            return self.copy()
        shift = None if self.shift is None else self._without(self.shift, d_in)
        twin = self._like(d_in, shift)
        twin.n, twin.weight, twin.eps = self.n, self.weight, max(self.eps, twin._blur())
        if self._kept.n:
            x, y, weight = self._kept.rows()
            twin._kept.add(x[:, :d_in], y, weight)
        if self._filled:
            twin._allocate()
            twin._filled = True
            self._narrow_sums(twin)
        return twin

    def _like(self, d_in: int, shift: Tensor | None) -> Self:
        return type(self)(
            d_in, self.d_out, shift=shift, device=self.device, precision=self.precision
        )

    def _blur(self) -> float:
        """The least `eps` that keeps what float32 products blur below the rank threshold."""
        return math.sqrt(8 * 2.0**-24) / self.d_in if self.precision == "mixed" else 0.0

    @property
    def _tile(self) -> int:
        return MIXED_TILE if self.precision == "mixed" else TILE

    def _without(self, row: Tensor, d_in: int, lead: int = 0) -> Tensor:
        """The last dimension [lead, x, y] of `row` without the columns of x from `d_in` on."""
        return torch.cat([row[..., : lead + d_in], row[..., lead + self.d_in :]], -1)

    def _fill(self) -> None:
        """Turn kept rows into sums; from here on rows go straight into them."""
        if self._filled:
            return
        self._allocate()
        self._filled = True
        kept, self._kept = self._kept, _Kept()
        if kept.n:
            self._absorb(*kept.rows())

    def _ensure_shift(self, x: Tensor, y: Tensor) -> Tensor:
        if self.shift is None:
            wide = _widest(x.device)
            means = [t.reshape(-1, t.shape[-1]).mean(0, dtype=wide) for t in (x, y)]
            _check_finite(*means)
            self.shift = torch.cat(means).to(self.device, torch.float64)
        return self.shift

    def _tiles(
        self, x: Tensor, y: Tensor, weight: Tensor | None, lead: int = 0
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Shifted float64 tiles [lead empty columns, x - c, y - c] of the rows, in one reused workspace.

        On the device of the rows, and in float32 where that has no float64.
        """
        shift = _parts(self._ensure_shift(x, y), x.device)
        most = self._tile
        width = self.d_in + self.d_out + lead
        if (
            x.dim() != 3
        ):  # one row of slices; (windows, positions, features) stays as it is, uncopied
            x, y = x.reshape(1, -1, self.d_in), y.reshape(1, -1, self.d_out)
            weight = None if weight is None else weight.reshape(1, -1)
        step = max(1, most // x.shape[1])
        for i in range(0, len(x), step):
            for j in range(0, x.shape[1], most):
                xs, ys = x[i : i + step, j : j + most], y[i : i + step, j : j + most]
                rows = xs.shape[0] * xs.shape[1]
                tile = _workspace(rows, width, x.device)
                z = tile.view(*xs.shape[:2], width)
                z[..., lead : lead + self.d_in].copy_(xs)
                z[..., lead + self.d_in :].copy_(ys)
                for part in shift:
                    tile[:, lead:].sub_(part)
                w = None if weight is None else weight[i : i + step, j : j + most].reshape(-1)
                yield tile, None if w is None else w.to(tile)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, enough to go on to the bit."""
        state = {
            "kind": torch.tensor(list(type(self).__name__.encode()), dtype=torch.uint8),
            "shape": torch.tensor([self.d_in, self.d_out, self.n]),
            "scalars": torch.tensor([self.weight, self.eps], dtype=torch.float64),
        }
        if self.shift is not None:
            state["shift"] = self.shift
        if self.precision != "float64":
            state["precision"] = torch.tensor(list(self.precision.encode()), dtype=torch.uint8)
        if self._filled and self.n:
            state |= {name.strip("_"): getattr(self, name) for name in self._sums}
        elif self._kept.n:
            x, y, weight = self._kept.rows()
            state |= {"rows_x": x, "rows_y": y}
            if weight is not None:
                state["rows_weight"] = weight
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state after checking every part of it; a file is somebody else's word.

        Its precision too: rows go on to the bit.
        """
        fresh = type(self)(self.d_in, self.d_out, device=self.device)
        fresh._read_state(dict(state))
        self.__dict__.update(fresh.__dict__)

    def _read_state(self, state: dict[str, Tensor]) -> None:
        name = type(self).__name__
        need = {"kind", "shape", "scalars"}
        if missing := need - state.keys():
            raise ValueError(f"{name} state lacks {', '.join(sorted(missing))}")
        kind = state.pop("kind")
        if kind.dtype != torch.uint8 or bytes(kind.flatten().tolist()) != name.encode():
            raise ValueError(f"the state is not that of {name}")
        precision = state.pop("precision", None)
        if precision is not None:
            self.precision = _checked_name(precision, self._precisions)
        shape, scalars = state.pop("shape"), state.pop("scalars")
        if shape.dtype != torch.int64 or shape.shape != (3,) or scalars.shape != (2,):
            raise ValueError(f"{name} state has a malformed header")
        d_in, d_out, n = shape.tolist()
        weight, eps = scalars.tolist()
        if (d_in, d_out) != (self.d_in, self.d_out):
            raise ValueError(
                f"{name} state is for ({d_in}, {d_out}), expected ({self.d_in}, {self.d_out})"
            )
        if not (n >= 0 and 0 <= weight < float("inf") and 0 < eps < 1):
            raise ValueError(f"{name} state counts {n} rows of weight {weight} at resolution {eps}")
        shift = state.pop("shift", None)
        if shift is not None:
            self.shift = _checked("shift", shift, (d_in + d_out,)).to(self.device)
        if "rows_x" in state:
            self._read_rows(state, n)
        elif n:
            if shift is None:
                raise ValueError(f"{name} state lacks shift")
            self._allocate()
            self._filled = True
            for key in self._sums:
                if key.strip("_") not in state:
                    raise ValueError(f"{name} state lacks {key.strip('_')}")
                mine = getattr(self, key)
                mine.copy_(_checked(key.strip("_"), state.pop(key.strip("_")), tuple(mine.shape)))
        if state:
            raise ValueError(f"{name} state has unknown entries {', '.join(sorted(state))}")
        self.n, self.weight = n, weight
        self.eps = max(eps, self._blur()) if n else eps

    def _read_rows(self, state: dict[str, Tensor], n: int) -> None:
        if "rows_y" not in state:
            raise ValueError("kept rows lack rows_y")
        x = _checked("rows_x", state.pop("rows_x"), (n, self.d_in), exact=False)
        y = _checked("rows_y", state.pop("rows_y"), (n, self.d_out), exact=False)
        weight = state.pop("rows_weight", None)
        if weight is not None:
            weight = _checked("rows_weight", weight, (n,)).to(self.device)
        self._kept.add(x.to(self.device), y.to(self.device), weight)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def mean_x(self) -> Tensor:
        """(d_in,)"""
        return self._mean()[: self.d_in]

    @property
    def mean_y(self) -> Tensor:
        """(d_out,)"""
        return self._mean()[self.d_in :]

    @property
    def S_xx(self) -> Tensor:
        """(d_in, d_in) centred sums of products."""
        return self.gram()[0]

    @property
    def S_xy(self) -> Tensor:
        """(d_in, d_out)"""
        return self.gram()[1]

    @property
    def S_yy(self) -> Tensor:
        """(d_out,) the diagonal alone: nothing we report needs more."""
        raise NotImplementedError

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), centred; about the origin without an intercept."""
        raise NotImplementedError

    def root(self, intercept: bool = True) -> tuple[Tensor, Tensor] | None:
        """(R_xx, R_xy) with R_xx' R_xx = S_xx and R_xx' R_xy = S_xy; None where only sums are kept."""
        return None

    def residual_squares(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(d_out,) sums of squared residuals of y - Wx - b. O(d_in^2 d_out)."""
        S_xx, S_xy = self.gram()
        centred = self.S_yy + ((weight @ S_xx) * weight).sum(1) - 2 * (weight * S_xy.t()).sum(1)
        offset = self.mean_y - weight @ self.mean_x - bias
        return centred.clamp_min_(0) + self.weight * offset.square()

    def _mean(self) -> Tensor:
        raise NotImplementedError

    def _require_rows(self) -> None:
        if self.weight <= 0:
            raise ValueError("these moments hold no rows")
        self._fill()

    # -- what subclasses are ----------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many float64 numbers the sums take."""
        raise NotImplementedError

    def _allocate(self) -> None:
        raise NotImplementedError

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        raise NotImplementedError

    def _combine(self, other: Self) -> None:
        raise NotImplementedError

    def _narrow_sums(self, twin: Self) -> None:
        raise NotImplementedError


def merged(accumulators: Iterable[A], d_in: int | None = None) -> A:
    """A new accumulator with the rows of all, without the columns of x from `d_in` on."""
    first, *others = accumulators
    width = first.d_in if d_in is None else d_in
    total = first.narrow(width)
    for other in others:
        total.merge(other if other.d_in == width else other.narrow(width))
    return total


class Moments(Accumulator):
    """Centred second moments of rows, in one pass and constant memory.

    `precision="mixed"` makes products of rows in float32 and adds them in float64, as the head of this file has it.
    """

    _sums = ("_total", "_panels", "_yy")
    _precisions = ("float64", "mixed")
    _total: Tensor  # (D,)
    _panels: Tensor  # flat; panel i is (rows of x it covers, D - i)
    _yy: Tensor  # (d_out,)

    @property
    def size(self) -> int:
        return sum(p * (self.d_in + self.d_out - i) for i, p in self._spans())

    def _allocate(self) -> None:
        width = self.d_in + self.d_out
        self._total = torch.zeros(width, dtype=torch.float64, device=self.device)
        self._panels = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self._yy = torch.zeros(self.d_out, dtype=torch.float64, device=self.device)

    def _spans(self) -> list[tuple[int, int]]:
        return [(i, min(PANEL, self.d_in - i)) for i in range(0, self.d_in, PANEL)]

    def _views(self) -> list[tuple[int, Tensor]]:
        """Each panel as (first column, matrix (columns, D - first)), sharing memory with the flat sums."""
        width, start, views = self.d_in + self.d_out, 0, []
        for i, p in self._spans():
            stop = start + p * (width - i)
            views.append((i, self._panels[start:stop].view(p, width - i)))
            start = stop
        return views

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        if self.precision == "mixed":
            return self._absorb_mixed(x, y, weight)
        for z, w in self._tiles(x, y, weight):
            zy = z[:, self.d_in :]
            total = z.sum(0) if w is None else w @ z
            _check_finite(total[: self.d_in], total[self.d_in :])
            left = z[:, : self.d_in] if w is None else z[:, : self.d_in] * w[:, None]
            self._total += total
            self._yy += zy.square().sum(0) if w is None else w @ zy.square()
            for i, panel in self._views():
                panel.addmm_(left[:, i : i + len(panel)].t(), z[:, i:])

    def _absorb_mixed(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Column sums and squares of y as ever, O(n D); products in float32, added in float64."""
        top = 1.0
        if weight is not None:
            top = 2.0 ** (math.frexp(float(weight.max()))[1] - 1)
            weight = weight / top
        with _full_float32(x.device):
            for z, w in self._tiles(x, y, weight):
                self._add_mixed(z, w, top)

    def _add_mixed(self, z: Tensor, w: Tensor | None, top: float) -> None:
        """One tile z (T, D); `top` is the power of two that the weights were divided by."""
        d = self.d_in
        total = z.sum(0) if w is None else w @ z
        _check_finite(total[:d], total[d:])
        scale = _power_of_two(torch.linalg.vector_norm(z, math.inf, 0).to(self._total))  # (D,)
        if plain := float(scale.min()) > 2.0**-40 and float(scale.max()) < 2.0**40:
            scale.fill_(1)  # nothing to gain
        else:
            z /= scale.to(z)
        squares = z[:, d:].square()
        yy = squares.sum(0) if w is None else w @ squares
        self._total += total.to(self._total) * top
        self._yy += yy.to(self._yy) * scale[d:].square() * top
        right = z.float()
        left = right[:, :d] if w is None else (z[:, :d] * w[:, None]).float()
        for i, panel in self._views():
            j = i + len(panel)
            product = left[:, i:j].t() @ right[:, i:]
            if plain:
                panel.add_(product.to(self.device), alpha=top)
            else:
                panel.addcmul_(product.to(panel) * (scale[i:j, None] * top), scale[i:])

    def _combine(self, other: Self) -> None:
        if self.shift is None:  # no rows of its own
            self.shift = other.shift
        assert self.shift is not None
        assert other.shift is not None
        total, yy = other._total, other._yy
        if not torch.equal(self.shift, other.shift):
            delta = other.shift - self.shift  # z - c = (z - c') + delta
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

    def _narrow_sums(self, twin: Self) -> None:
        twin._total.copy_(self._without(self._total, twin.d_in))
        twin._yy.copy_(self._yy)
        for (i, mine), (_, theirs) in zip(self._views(), twin._views(), strict=False):
            cut = twin.d_in - i
            theirs[:, :cut] = mine[: len(theirs), :cut]
            theirs[:, cut:] = mine[: len(theirs), self.d_in - i :]

    # -- reading ----------------------------------------------------------------------------------

    def _mean(self) -> Tensor:
        self._require_rows()
        assert self.shift is not None
        return self.shift + self._total / self.weight

    @property
    def S_yy(self) -> Tensor:
        self._require_rows()
        s = self._total[self.d_in :]
        return (self._yy - s * s / self.weight).clamp_min_(0)

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), centred; about the origin without an intercept. O(d_in (d_in + d_out))."""
        self._require_rows()
        assert self.shift is not None
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
        c = self.shift  # sum w z z' = sum w (z-c)(z-c)' + s c' + c s' + W c c'
        for S, right in ((S_xx, slice(None, d)), (S_xy, slice(d, None))):
            S.addr_(s[:d], c[right]).addr_(c[:d], (s + self.weight * c)[right])
        return S_xx, S_xy


class TSQR(Accumulator):
    """The triangular factor R of the rows [1, z - c]: R'R are the moments, at the square root of their condition."""

    _sums = ("_R",)
    _R: Tensor  # (1 + D, 1 + D), upper triangular

    @property
    def size(self) -> int:
        return (1 + self.d_in + self.d_out) ** 2

    def _allocate(self) -> None:
        size = 1 + self.d_in + self.d_out
        self._R = torch.zeros(size, size, dtype=torch.float64, device=self.device)

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        R = self._R
        for tile, w in self._tiles(x, y, weight, lead=1):
            tile[:, 0] = 1
            total = tile.sum(0)
            _check_finite(total[1 : 1 + self.d_in], total[1 + self.d_in :])
            if w is not None:
                tile *= w.sqrt()[:, None]
            R = torch.linalg.qr(torch.cat([R, tile]), mode="r").R
        self._R = R

    def _combine(self, other: Self) -> None:
        if self.shift is None:
            self.shift = other.shift
        assert self.shift is not None
        assert other.shift is not None
        R = other._R.clone()
        R[:, 1:] += torch.outer(R[:, 0], other.shift - self.shift)
        self._R = torch.linalg.qr(torch.cat([self._R, R]), mode="r").R

    def _narrow_sums(self, twin: Self) -> None:
        twin._R = torch.linalg.qr(self._without(self._R, twin.d_in, lead=1), mode="r").R

    def root(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(R_xx, R_xy) with R_xx' R_xx = S_xx and R_xx' R_xy = S_xy. R_xx is upper triangular."""
        self._require_rows()
        assert self.shift is not None
        d = self.d_in
        if intercept:
            return self._R[1 : 1 + d, 1 : 1 + d], self._R[1 : 1 + d, 1 + d :]
        raw = self._R[:, 1:] + torch.outer(self._R[:, 0], self.shift)
        R = torch.linalg.qr(raw, mode="r").R
        return R[:d, :d], R[:d, d:]

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), as of `Moments`."""
        R_xx, R_xy = self.root(intercept)
        return R_xx.t() @ R_xx, R_xx.t() @ R_xy

    def residual_squares(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(d_out,) sums of squared residuals of y - Wx - b, without subtracting large sums from one another."""
        self._require_rows()
        assert self.shift is not None
        d, c = self.d_in, self.shift
        offset = c[d:] - weight @ c[:d] - bias  # y - Wx - b = (y - c_y) - W (x - c_x) + offset
        E = (
            self._R[:, 1 + d :]
            - self._R[:, 1 : 1 + d] @ weight.t()
            + torch.outer(self._R[:, 0], offset)
        )
        return E.square().sum(0)

    def _mean(self) -> Tensor:
        self._require_rows()
        assert self.shift is not None
        return self.shift + self._R[0, 1:] / self._R[0, 0]

    @property
    def S_yy(self) -> Tensor:
        self._require_rows()
        return self._R[1:, 1 + self.d_in :].square().sum(0)


def _workspace(rows: int, width: int, device: torch.device) -> Tensor:
    """(rows, width) scratch, one a thread: a fresh one costs more than the copy into it."""
    cache, kind = _local.__dict__.setdefault("scratch", {}), (device, _widest(device))
    if kind not in cache or cache[kind].numel() < rows * width:
        cache[kind] = torch.empty(rows * width, dtype=kind[1], device=device)
    return cache[kind][: rows * width].view(rows, width)


def _widest(device: torch.device) -> torch.dtype:
    """Of the floating-point types that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _parts(shift: Tensor, device: torch.device) -> list[Tensor]:
    """The shift on a device: itself, or two float32 numbers that add up to it.

    Subtracting them one after the other rounds z - c, not c.
    """
    if _widest(device) == torch.float64:
        return [shift.to(device)]
    high = shift.float()
    return [high.to(device), (shift - high).float().to(device)]


def _power_of_two(size: Tensor) -> Tensor:
    """The power of two at or below each positive number; a half for zero, 2**-100 for anything smaller."""
    _, exponent = torch.frexp(size)
    return torch.ldexp(torch.ones_like(size), (exponent - 1).clamp_min(-100))


class _FullFloat32:
    """with _full_float32(device): products of float32 are float32's, whatever is set outside.

    No TF32, no bfloat16, no autocast. The setting is the whole process's: the first thread in changes it, the last
    one out puts it back.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.general: str | None = None  # what was set: None if full already
        self.backends: list[tuple[Any, str]] = []

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self._enter()
            self.inside += 1
        try:
            with torch.autocast(device.type, enabled=False):
                yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self._leave()

    def _enter(self) -> None:
        try:
            general = torch.get_float32_matmul_precision()
            if general == "highest":
                return
        except RuntimeError:  # backends were set one by one, and torch has no one word for it
            general = "highest"
        matmuls: list[Any] = [
            getattr(backend, "matmul", None)
            for backend in (torch.backends.cuda, torch.backends.mkldnn)
        ]
        self.backends = [(m, m.fp32_precision) for m in matmuls if hasattr(m, "fp32_precision")]
        self.general = general
        torch.set_float32_matmul_precision("highest")

    def _leave(self) -> None:
        if self.general is not None:
            torch.set_float32_matmul_precision(self.general)
            for matmul, precision in self.backends:
                if matmul.fp32_precision != precision:
                    matmul.fp32_precision = precision
        self.general, self.backends = None, []


_full_float32 = _FullFloat32()


def _resolution(dtype: torch.dtype) -> float:
    """What narrower types round away is part of what the block saw: they count as float32."""
    return float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)


def _check_finite(sum_x: Tensor, sum_y: Tensor) -> None:
    """One number that is not finite makes its column's sum not finite: D checks instead of n D."""
    for name, total in (("input x", sum_x), ("output y", sum_y)):
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            raise ValueError(
                f"not finite: {len(bad)} of {len(total)} features of {name}, feature {int(bad[0])} first"
            )


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], exact: bool = True) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if (tensor.dtype != torch.float64) if exact else not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds numbers that are not finite")
    return tensor


def _checked_name(name: Tensor, known: tuple[str, ...]) -> str:
    if name.dtype == torch.uint8 and name.dim() == 1:
        for word in known:
            if name.tolist() == list(word.encode()):
                return word
    raise ValueError(f"precision is none of {', '.join(known)}")
