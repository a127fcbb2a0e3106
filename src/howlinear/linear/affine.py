"""Maps that replace a block: one matrix, two factors of one, or a matrix beside hidden units.

    affine = fit(moments)
    affine(x)                           # W x + b
    affine.to_linear()                  # the same as a torch layer

Notation: W (d_out, d_in), b (d_out,). Every map is called with x (..., d_in) and knows its
`parameters`, its `multiply_adds` per row, `d_in` and `d_out`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from howlinear.linear.tiles import as_rows


@dataclass(frozen=True, eq=False, repr=False)
class Affine:
    """y ~ W x + b. `rank` is the numerical rank of the inputs of the fit.

    A profile's maps carry the module path of their block, so that they replace no other one.
    """

    weight: Tensor  # (d_out, d_in)
    bias: Tensor  # (d_out,)
    rank: int
    path: str = ""  # of the block that it was fitted on; "" where that is not known

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))

    def predict(self, x: Any) -> np.ndarray:
        """y of rows x (n, d_in), which may be a numpy array, a data frame or lists; in float64."""
        y: np.ndarray = self(as_rows(x).double()).cpu().numpy()
        return y

    def __repr__(self) -> str:
        return f"<Affine map of {self.d_in} to {self.d_out}, inputs of rank {self.rank}>"

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    @property
    def parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds per row."""
        return self.weight.numel()

    def to(self, like: Tensor) -> Affine:
        """The same map in the dtype and on the device of `like`, so that calls need not convert."""
        return replace(self, weight=self.weight.to(like), bias=self.bias.to(like))

    def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """The same map as a torch layer."""
        linear = torch.nn.Linear(self.d_in, self.d_out, device=self.weight.device, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight)
            linear.bias.copy_(self.bias)
        return linear


@dataclass(frozen=True, eq=False, repr=False)
class Factored:
    """y ~ B (A x) + b: an affine map of rank r in two factors. r = 0 is a constant."""

    into: Tensor  # A (r, d_in)
    out: Tensor  # B (d_out, r)
    bias: Tensor  # (d_out,)

    def __call__(self, x: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(x, self.into.to(x)), self.out.to(x), self.bias.to(x))

    def __repr__(self) -> str:
        return f"<Factored map of {self.d_in} to {self.d_out}, rank {self.rank}>"

    @property
    def rank(self) -> int:
        return len(self.into)

    @property
    def d_in(self) -> int:
        return self.into.shape[1]

    @property
    def d_out(self) -> int:
        return len(self.out)

    @property
    def parameters(self) -> int:
        return self.multiply_adds + self.bias.numel()

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds per row."""
        return self.into.numel() + self.out.numel()

    def to(self, like: Tensor) -> Factored:
        """The same map in the dtype and on the device of `like`, so that calls need not convert."""
        return Factored(self.into.to(like), self.out.to(like), self.bias.to(like))


@dataclass(frozen=True, eq=False, repr=False)
class UnitMap:
    """y ~ W x + b + D h_S: an affine map beside a few of the block's hidden units.

    One unit can write rows hundreds of times larger than the rest (the attention sink). As one
    more input of the regression, it leaves the matrix free to fit all other rows.
    """

    affine: Affine | Factored
    units: tuple[int, ...]  # S
    write: Tensor  # D (d_out, k)
    hidden: torch.nn.Module  # x (..., d_in) -> h_S (..., k)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.affine(x) + torch.nn.functional.linear(h, self.write.to(h))

    def __repr__(self) -> str:
        return f"<{self.affine!r} beside {len(self.units)} hidden units>"

    @classmethod
    def split(cls, joint: Affine, units: tuple[int, ...], hidden: torch.nn.Module) -> UnitMap:
        """From a map fitted on [x, h_S]."""
        d = joint.d_in - len(units)
        affine = Affine(joint.weight[:, :d], joint.bias, min(joint.rank, d))
        return cls(affine, units, joint.weight[:, d:], hidden)

    @property
    def d_in(self) -> int:
        return self.affine.d_in

    @property
    def d_out(self) -> int:
        return self.affine.d_out

    @property
    def parameters(self) -> int:
        """Of W, b, D, and the weights that compute the kept units."""
        hidden = sum(p.numel() for p in self.hidden.parameters())
        return self.affine.parameters + self.write.numel() + hidden

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds per row."""
        hidden = sum(p.numel() for p in self.hidden.parameters() if p.ndim == 2)
        return self.affine.multiply_adds + self.write.numel() + hidden

    def to(self, like: Tensor) -> UnitMap:
        """W, b and D in the dtype and on the device of `like`; the hidden units stay the block's."""
        return UnitMap(self.affine.to(like), self.units, self.write.to(like), self.hidden)


Map = Affine | Factored | UnitMap
