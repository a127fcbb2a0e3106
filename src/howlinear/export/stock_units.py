"""Maps as hidden units of a stock block: what `nemotron-nas` and `gguf` write (`stock` takes kept units alone).

    gated_units(UnitMap(...), like)          # r + k units of a gated block y = D (act(Gx + g) * (Ux + u)) + b

A unit whose gate is constant is linear: gate weight 0, gate bias 32, and act(32) = 32 in every float
format. So a map of rank r beside k hidden units is a gated block of r + k units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from howlinear.linear.affine import Affine, Factored, Map, UnitMap

OPEN = 32.0  # the constant value of a gate


@dataclass(frozen=True, eq=False)
class Units:
    """k hidden units: the rows of their projections (one, or gate and up), and the columns they write."""

    reads: tuple[tuple[Tensor, Tensor], ...]  # weight (k, d_in) and bias (k,), which may be zero
    writes: Tensor  # (d_out, k)
    bias: Tensor  # (d_out,)

    def __len__(self) -> int:
        return self.writes.shape[1]

    def beside(self, other: Units) -> Units:
        """Both; the bias of `other` is dropped."""
        pairs = zip(self.reads, other.reads, strict=True)
        reads = tuple((torch.cat([V, W]), torch.cat([v, w])) for (V, v), (W, w) in pairs)
        return Units(reads, torch.cat([self.writes, other.writes], 1), self.bias)

    def padded(self, width: int) -> Units:
        """With zero units up to `width`."""
        more = width - len(self)
        reads = tuple((pad(W, (0, 0, 0, more)), pad(b, (0, more))) for W, b in self.reads)
        return Units(reads, pad(self.writes, (0, more)), self.bias)


def kept_units(fitted: UnitMap, like: Tensor) -> Units:
    """The hidden units that a map keeps, by its own weights of them."""
    reads: list[tuple[Tensor, Tensor]] = []
    for projection in fitted.hidden.modules():
        if isinstance(projection, nn.Linear):
            weight, own = projection.weight.detach().to(like), projection.bias
            parts = len(weight) // len(fitted.units)
            bias = weight.new_zeros(len(weight)) if own is None else own.detach().to(like)
            reads += zip(weight.chunk(parts), bias.chunk(parts), strict=True)
    return Units(tuple(reads), fitted.write.to(like), like)


def factors(affine: Affine | Factored) -> tuple[Tensor, Tensor]:
    """(A, B) in float64. At full rank one is the identity, so that W is rounded only once."""
    d_in, d_out = affine.d_in, affine.d_out
    if isinstance(affine, Factored):
        A, B = affine.into.double(), affine.out.double()
        if affine.rank <= min(d_in, d_out):
            return A, B
        W = B @ A
    else:
        W = affine.weight.double()
    one = torch.eye(min(d_in, d_out)).to(W)
    return (one, W) if d_in <= d_out else (W, one)


def gated_units(fitted: Map, like: Tensor) -> Units:
    """The map as units of a block with a gate and silu: the linear ones first, then those it keeps."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    A, B = _balanced(*factors(affine))
    zero, none = torch.zeros_like(A).to(like), like.new_zeros(len(A))
    gate, up = (zero, none + OPEN), ((A / OPEN).to(like), none)
    linear = Units((gate, up), B.to(like), affine.bias.to(like))
    return linear.beside(kept_units(fitted, like)) if isinstance(fitted, UnitMap) else linear


def _balanced(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, with rows of A / 32 about as large as columns of B.

    Factors are powers of two and lose nothing. Without them small rows would be subnormal in float16.
    """
    tiny = torch.finfo(torch.float32).tiny
    rows, columns = A.abs().amax(1).clamp_min(tiny), B.abs().amax(0).clamp_min(tiny)
    factor = ((OPEN * columns / rows).log2() / 2).round().exp2()
    return A * factor[:, None], B / factor
