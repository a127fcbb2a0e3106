"""Errors of a block's output measured by what they cost, not by their squares.

    metric = Metric.of(products)                # (d_out, d_out), sum of g g'
    rows.update(x, metric.scaled(y))
    fitted = metric.restored(joint_map(rows, ...))

An error e of the output costs (g . e)^2 / 2, g a gradient of the predictions (`profiling.gradients`): on
average e' M e / 2 with M = E[g g']. With R = M^(1/2) this is |R e|^2 / 2, so that least squares on R y
counts each direction by its cost. With given inputs it finds the same map as on y. It finds other hidden units
to keep, and another matrix of low rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howlinear.linear.affine import Affine, Factored, Map, UnitMap

SHRINK = 0.1  # so much of M is replaced by its mean diagonal: it comes from few tokens


@dataclass(frozen=True, eq=False)
class Metric:
    """R = M^(1/2), M with a mean diagonal of 1."""

    root: Tensor  # R (d_out, d_out), symmetric
    inverse: Tensor

    @classmethod
    def of(cls, products: Tensor) -> Metric | None:
        """From the sum of g g' (d_out, d_out); None where there is no gradient."""
        mean = float(products.diagonal().mean())
        if not mean > 0:
            return None
        values, vectors = torch.linalg.eigh(products.double() / mean)
        values = (1 - SHRINK) * values.clamp_min(0) + SHRINK
        return cls(
            (vectors * values.sqrt()) @ vectors.t(), (vectors * values.rsqrt()) @ vectors.t()
        )

    def scaled(self, y: Tensor) -> Tensor:
        """R y of rows y (n, d_out)."""
        return y @ self.root.to(y)

    def restored(self, fitted: Map) -> Map:
        """The map to y, from one that was fitted to R y."""
        if not isinstance(fitted, UnitMap):
            return self._restored(fitted)
        write = self.inverse.to(fitted.write) @ fitted.write
        return replace(fitted, affine=self._restored(fitted.affine), write=write)

    def _restored(self, fitted: Affine | Factored) -> Affine | Factored:
        back = self.inverse.to(fitted.bias)
        if isinstance(fitted, Factored):
            return replace(fitted, out=back @ fitted.out, bias=back @ fitted.bias)
        return replace(fitted, weight=back @ fitted.weight, bias=back @ fitted.bias)
