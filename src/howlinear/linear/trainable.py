"""Maps whose weights can be trained by gradient descent.

    layer = TrainableMap(fitted, units=True)    # a module: layer(x) = fitted(x)
    ...                                         # train layer.parameters() that require gradients
    layer.as_map()                              # an Affine, a Factored or a UnitMap, as `fitted` was

Weights are trained in float32, whatever the map's dtype; `as_map` rounds to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, Map, UnitMap


class TrainableMap(nn.Module):
    """A copy of a map with trainable weights. With `units`, the kept hidden units' own are trained too.

    A bias of zeros is that of a map without intercept and stays as it is.
    """

    def __init__(self, fitted: Map, *, units: bool = False) -> None:
        super().__init__()
        tensors = tensors_of(fitted)
        self.dtype = tensors["bias"].dtype
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(_copied(value)) for name, value in tensors.items()}
        )
        self.weights["bias"].requires_grad_(bool(tensors["bias"].any()))
        self.hidden: nn.Module | None = None
        if isinstance(fitted, UnitMap):
            self.hidden_dtype = next(fitted.hidden.parameters()).dtype
            self.hidden = copy.deepcopy(fitted.hidden).float().requires_grad_(False)
            for projection in self.hidden.modules() if units else ():
                if isinstance(projection, nn.Linear):  # norms inside a block are the model's
                    projection.requires_grad_(True)
        # its tensors are the parameters: gradients reach them
        self.map = with_tensors(fitted, dict(self.weights.items()), self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.float()).to(x)

    def as_map(self) -> Map:
        """The map with the weights as they are now, in its own dtype."""
        tensors = {name: p.detach().to(self.dtype).clone() for name, p in self.weights.items()}
        hidden = copy.deepcopy(self.hidden)
        if hidden is not None:
            hidden.to(self.hidden_dtype).requires_grad_(False)
        return with_tensors(self.map, tensors, hidden)


def _copied(value: Tensor) -> Tensor:
    """In rows, as the states of an optimiser are saved."""
    return value.detach().float().clone(memory_format=torch.contiguous_format)


def tensors_of(fitted: Map) -> dict[str, Tensor]:
    """The tensors of a map by the names of their fields; without those of its hidden units."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    names = ("weight", "bias") if isinstance(affine, Affine) else ("into", "out", "bias")
    tensors = {name: getattr(affine, name) for name in names}
    return tensors | ({"write": fitted.write} if isinstance(fitted, UnitMap) else {})


def with_tensors(fitted: Map, tensors: Mapping[str, Tensor], hidden: nn.Module | None) -> Map:
    """The same kind of map with other tensors and, if it keeps hidden units, another module for them."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    named: dict[str, Any] = {n: value for n, value in tensors.items() if n != "write"}
    changed = replace(affine, **named)
    if not isinstance(fitted, UnitMap):
        return changed
    assert hidden is not None
    return replace(fitted, affine=changed, write=tensors["write"], hidden=hidden)
