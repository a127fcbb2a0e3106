"""The interface of `Moments` and `TSQR`: rows in, sums that add up exactly out.

    total = Moments(d_in, d_out)
    total.update(x, y)                  # x (..., d_in), y (..., d_out)
    total.merge(other)                  # rows of another machine or another text
    merged([a, b, c])                   # a new accumulator with the rows of all

z = [x, y] is one row, D = d_in + d_out, w its weight (1 by default), c the **shift**: the mean of
the first batch. Rows are shifted before they are summed, and all sums are float64. Rows are kept
as they came while they take less memory than the sums would, so that an accumulator of few rows
(first positions, rarely used experts) stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from howlinear.linear.tiles import KeptRows, as_rows, check_all_finite, mean_row

TILE = 2048  # rows of one product
STRIP = 192  # columns of S_xx in one product: those below the diagonal are left out

A = TypeVar("A", bound="Accumulator")


class Accumulator:
    """Checking rows, keeping few of them as they are, merging and state.

    Subclasses define which sums there are (`_shapes`), how rows enter them (`_absorb`), how two
    sums add (`_combine`), how columns leave them (`_narrow_sums`) and how they are read.
    """

    #: precisions in which products of rows can be made
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
        self._check_precision(precision)
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
        #: resolution of the rows, for the rank threshold: float32's for everything narrower
        self.eps = float(torch.finfo(torch.float64).eps)
        if precision == "mixed":
            self.blur()
        self.shift: Tensor | None = None
        if shift is not None:
            given = {"shift": shift}
            self.shift = self._take(given, "shift", (d_in + d_out,), exact=False).double()
        self._kept = KeptRows()
        self._filled = False  # do the sums exist?

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.n} rows, {self.d_in} to {self.d_out}>"

    # -- adding rows ------------------------------------------------------------------------------

    @classmethod
    def from_arrays(cls, x: Any, y: Any, weight: Any = None, *, precision: str = "float64") -> Self:
        """Of rows in memory: x (n, d_in), y (n, d_out) or (n,), weight (n,), tensors or arrays."""
        x, y = as_rows(x), as_rows(y)
        if y.ndim == 1:
            y = y[:, None]
        if x.ndim < 2:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (rows, columns)")
        rows = cls(x.shape[-1], y.shape[-1], device=x.device, precision=precision)
        rows.update(x, y, weight)
        return rows

    def update(self, x: Any, y: Any, weight: Any = None) -> None:
        """Add rows: x (..., d_in), y (..., d_out), weight (...), as tensors, numpy arrays or lists.

        Nothing changes if they are refused.
        """
        x, y = as_rows(x), as_rows(y)
        weight = None if weight is None else as_rows(weight)
        self._check_rows(x, y, weight)
        self._enter(x, y, weight, self.precision)

    def _enter(self, x: Tensor, y: Tensor, weight: Tensor | None, precision: str) -> None:
        rows = x.shape[:-1].numel()
        if rows == 0:
            return
        x, y = x.detach(), y.detach()
        weight = None if weight is None else weight.to(self.device).double()
        few = not self._filled and self._kept.n + rows <= self.d_in // 2
        if few or precision == "float64":  # else products are made on the device of the rows
            x, y = x.to(self.device), y.to(self.device)
        if few or rows > TILE:  # one tile is checked on entry; of several, none may enter
            check_all_finite(x, y)
        if few:
            self._kept.add(x, y, weight)
        else:
            self._fill()
            self._absorb(x, y, weight, precision)
        self.n += rows
        self.weight += float(rows if weight is None else weight.sum())
        self.eps = max(self.eps, _resolution(x.dtype), _resolution(y.dtype))

    def _check_rows(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        if x.shape[-1:] != (self.d_in,) or y.shape[-1:] != (self.d_out,):
            raise ValueError(
                f"rows have widths {tuple(x.shape[-1:])} and {tuple(y.shape[-1:])}, "
                f"expected ({self.d_in},) and ({self.d_out},)"
            )
        if x.shape[:-1] != y.shape[:-1]:
            raise ValueError(f"x has rows {tuple(x.shape[:-1])} but y has {tuple(y.shape[:-1])}")
        if not (x.is_floating_point() and y.is_floating_point()):
            raise ValueError(f"rows must be floating point, got {x.dtype} and {y.dtype}")
        if weight is None:
            return
        if weight.shape != x.shape[:-1]:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, expected {tuple(x.shape[:-1])}"
            )
        if not bool(((weight >= 0) & weight.isfinite()).all()):
            raise ValueError("weights must be finite and not negative")

    def merge(self, other: Self) -> Self:
        """Add another accumulator's rows to this one. Exact up to float64 rounding, in any order.

        The result is mixed if one of the two is.
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
            self._enter(*other._kept.rows(), other.precision)
            return self
        if self.shift is None and not self._kept.n:
            self.shift = other.shift
        self._fill()
        if other.precision == "mixed":
            self.precision = "mixed"
        assert self.shift is not None
        assert other.shift is not None
        self._combine(other, other.shift - self.shift)  # z - c = (z - c') + (c' - c)
        self.n += other.n
        self.weight += other.weight
        self.eps = max(self.eps, other.eps)
        return self

    def kept(self) -> tuple[Tensor, Tensor] | None:
        """The rows x (n, d_in) and y while all are kept as they came, without weights; None otherwise."""
        if self._filled or self._kept.weighted or not self._kept.n:
            return None
        x, y, _ = self._kept.rows()
        return x, y

    def copy(self) -> Self:
        """A new accumulator with the same content."""
        return self.narrow(self.d_in)

    def narrow(self, d_in: int) -> Self:
        """A new accumulator of the same rows without the columns of x from `d_in` on."""
        if not 1 <= d_in <= self.d_in:
            raise ValueError(f"cannot narrow {self.d_in} columns to {d_in}")
        shift = None if self.shift is None else self._without(self.shift, d_in)
        narrow = type(self)(
            d_in, self.d_out, shift=shift, device=self.device, precision=self.precision
        )
        narrow.n, narrow.weight = self.n, self.weight
        narrow.eps = self.eps * (self.d_in / d_in if self.eps == self._blurred else 1)
        if self._kept.n:
            x, y, weight = self._kept.rows()
            narrow._kept.add(x[:, :d_in], y, weight)
        if self._filled:
            narrow._fill()
            self._narrow_sums(narrow)
        return narrow

    def _without(self, row: Tensor, d_in: int, lead: int = 0) -> Tensor:
        """The last dimension [lead, x, y] of `row` without the columns of x from `d_in` on."""
        return torch.cat([row[..., : lead + d_in], row[..., lead + self.d_in :]], -1)

    @property
    def _blurred(self) -> float:
        return math.sqrt(8 * 2.0**-24) / self.d_in

    def blur(self) -> None:
        """Raise `eps` until the rounding of float32 products is below the rank threshold."""
        self.eps = max(self.eps, self._blurred)

    def _fill(self) -> None:
        """Turn kept rows into sums; later rows go straight into them."""
        if self._filled:
            return
        for name, shape in self._shapes().items():
            setattr(self, name, torch.zeros(shape, dtype=torch.float64, device=self.device))
        self._filled = True
        kept, self._kept = self._kept, KeptRows()
        if kept.n:
            self._absorb(*kept.rows(), self.precision)

    def shift_for(self, x: Tensor, y: Tensor) -> Tensor:
        """The shift, set to the mean of these rows if there is none yet."""
        if self.shift is None:
            self.shift = mean_row(x, y, self.device)
        return self.shift

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, enough to continue to the bit."""
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
            state |= {name.strip("_"): getattr(self, name) for name in self._shapes()}
        elif self._kept.n:
            x, y, weight = self._kept.rows()
            state |= {"rows_x": x, "rows_y": y}
            if weight is not None:
                state["rows_weight"] = weight
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state, precision included, after checking every part of it."""
        name, rest = type(self).__name__, dict(state)
        fresh = type(self)(self.d_in, self.d_out, device=self.device)
        fresh._read_header(rest)
        n = fresh.n
        if "rows_x" in rest:
            widths = {"rows_x": self.d_in, "rows_y": self.d_out}
            x, y = (fresh._take(rest, key, (n, d), exact=False) for key, d in widths.items())
            weighted = "rows_weight" in rest
            fresh._kept.add(x, y, fresh._take(rest, "rows_weight", (n,)) if weighted else None)
        elif n:
            if fresh.shift is None:
                raise ValueError(f"{name} state lacks shift")
            for attribute, shape in fresh._shapes().items():
                setattr(fresh, attribute, fresh._take(rest, attribute.strip("_"), shape).clone())
            fresh._filled = True
        if rest:
            raise ValueError(f"{name} state has unknown entries {', '.join(sorted(rest))}")
        self.__dict__.update(fresh.__dict__)

    def _read_header(self, state: dict[str, Tensor]) -> None:
        name = type(self).__name__
        if _text(state.pop("kind", None)) != name:
            raise ValueError(f"the state is not that of {name}")
        if "precision" in state:
            self.precision = _text(state.pop("precision"))
            self._check_precision(self.precision)
        shape, scalars = state.pop("shape", None), self._take(state, "scalars", (2,))
        if shape is None or shape.dtype != torch.int64 or shape.shape != (3,):
            raise ValueError(f"{name} state has no shape")
        (d_in, d_out, n), (weight, eps) = shape.tolist(), scalars.tolist()
        if (d_in, d_out) != (self.d_in, self.d_out):
            raise ValueError(
                f"{name} state is for ({d_in}, {d_out}), expected ({self.d_in}, {self.d_out})"
            )
        if not (n >= 0 and weight >= 0 and 0 < eps < 1):
            raise ValueError(f"{name} state counts {n} rows of weight {weight} at resolution {eps}")
        if "shift" in state:
            self.shift = self._take(state, "shift", (d_in + d_out,))
        self.n, self.weight = n, weight
        self.eps = eps

    def _take(
        self, state: dict[str, Tensor], key: str, shape: tuple[int, ...], exact: bool = True
    ) -> Tensor:
        """Remove a tensor of this shape from a state: float64, or any float unless `exact`."""
        if key not in state:
            raise ValueError(f"{type(self).__name__} state lacks {key}")
        tensor = state.pop(key)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, expected {shape}")
        if (tensor.dtype != torch.float64) if exact else not tensor.is_floating_point():
            raise ValueError(f"{key} has dtype {tensor.dtype}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{key} holds numbers that are not finite")
        return tensor.to(self.device)

    def _check_precision(self, precision: str) -> None:
        if precision not in self._precisions:
            name, known = type(self).__name__, ", ".join(self._precisions)
            raise ValueError(f"{name} has no precision {precision!r}, only {known}")

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
        """(d_out,) the diagonal: no score needs more."""
        raise NotImplementedError

    def gram(self, intercept: bool = True) -> tuple[Tensor, Tensor]:
        """(S_xx, S_xy), centred; about the origin without an intercept."""
        raise NotImplementedError

    def root(self, intercept: bool = True) -> tuple[Tensor, Tensor] | None:
        """(R_xx, R_xy) with R_xx' R_xx = S_xx and R_xx' R_xy = S_xy; None where only sums are kept."""
        return None

    def residual_squares(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(d_out,) sums of squared residuals of y - Wx - b. O(d_in^2 d_out / 2)."""
        S_xx, S_xy = self.gram()
        half = -(weight * S_xy.t()).sum(1)  # of what is added to S_yy: S_xx is symmetric
        for i in range(0, self.d_in, STRIP):
            strip = weight[:, i : i + STRIP] @ S_xx[i : i + STRIP, i:]
            strip[:, :STRIP] /= 2
            half += torch.linalg.vecdot(strip, weight[:, i:])
        offset = self.mean_y - weight @ self.mean_x - bias
        return (self.S_yy + 2 * half).clamp_min_(0) + self.weight * offset.square()

    def _require_rows(self) -> Tensor:
        """The shift, with all rows in the sums."""
        if self.weight <= 0:
            raise ValueError("these moments hold no rows")
        self._fill()
        assert self.shift is not None
        return self.shift

    @property
    def size(self) -> int:
        """How many float64 numbers the largest of the sums takes: nearly all of the memory."""
        return max(math.prod(shape) for shape in self._shapes().values())

    # -- what subclasses define -------------------------------------------------------------------

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Attributes that hold the sums, each a float64 tensor of this shape."""
        raise NotImplementedError

    def _mean(self) -> Tensor:
        raise NotImplementedError

    def _absorb(self, x: Tensor, y: Tensor, weight: Tensor | None, precision: str) -> None:
        raise NotImplementedError

    def _combine(self, other: Self, delta: Tensor) -> None:
        raise NotImplementedError

    def _narrow_sums(self, narrow: Self) -> None:
        raise NotImplementedError


def merged(accumulators: Iterable[A], d_in: int | None = None) -> A:
    """A new accumulator with the rows of all, without the columns of x from `d_in` on."""
    first, *others = accumulators
    width = first.d_in if d_in is None else d_in
    total = first.narrow(width)
    for other in others:
        total.merge(other if other.d_in == width else other.narrow(width))
    return total


def _resolution(dtype: torch.dtype) -> float:
    """Narrower dtypes count as float32: a block computed with the rounded values."""
    return float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)


def _text(name: Tensor | None) -> str:
    """A short text that was saved as bytes; empty if it is none."""
    if name is None or name.dtype != torch.uint8 or name.dim() != 1 or len(name) > 16:
        return ""
    return bytes(name.tolist()).decode("ascii", errors="replace")
