"""Copies of modules that can be changed and run without touching the model.

    rebuilt(mlp, {down: nn.Identity()})     # the same module with its last projection replaced
    impurity(mlp, d_in)                     # "" for a feed-forward block, else what it does beside

A feed-forward block computes each row from that row alone and adds nothing to it. Modules of unknown
families that are named as one may also hold the residual add or mix positions. A twin with constant
weights tells: with zeros in its matrices, an output that still varies is the input passing by; with
equal weights, a row that changes with another row is mixed with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_known: dict[tuple[type, str, int], str] = {}  # answers of `impurity`: layers are alike


def rebuilt(step: Any, narrow: Mapping[nn.Module, nn.Module]) -> Any:
    """The same module tree with some modules replaced and no hooks; the other weights are shared.

    Relies on `nn.Module` keeping its state in `__dict__`: children in `_modules`, hooks in
    `_forward_hooks` and `_forward_pre_hooks`.
    """
    if not isinstance(step, nn.Module):  # an activation function
        return step
    if step in narrow:
        return narrow[step]
    twin = copy.copy(step)
    fresh: dict[str, Any] = {"_modules": {}, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    twin.__dict__ = {**step.__dict__, **fresh}
    twin.__dict__.pop("forward", None)  # a wrapper (accelerate's) is bound to the original
    for name, child in step._modules.items():
        twin._modules[name] = None if child is None else rebuilt(child, narrow)
    return twin


def impurity(module: nn.Module, d_in: int, projections: Mapping[nn.Module, int]) -> str:
    """What a module does beside a feed-forward block's work; "" if nothing, or if it does not run.

    `projections` are those inside it, with their numbers of outputs. Mixtures with fused experts
    are not run: they are large, and some have experts that return x.
    """
    others = (part for part in module.modules() if not isinstance(part, nn.Conv1d | nn.Conv2d))
    own = (p for part in others for p in part.parameters(recurse=False))
    if any(p.ndim > 2 and len(p) > 1 for p in own):
        return ""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    key = (type(module), f"{module!r} {plain}", d_in)
    if key not in _known:
        with torch.no_grad(), torch.device("cpu"):  # whatever device is the default
            _known[key] = _impurity(module, d_in, projections)
    return _known[key]


def _impurity(module: nn.Module, d_in: int, projections: Mapping[nn.Module, int]) -> str:
    x = torch.randn(2, 3, d_in, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 0] = x[1, 2]
    try:
        zero = _run(module, projections, 0.0, x)
        one, other = (_run(module, projections, 1.0, rows) for rows in (x, changed))
    except Exception:  # other shapes of input, more than constants: anything may be raised
        return ""
    if zero.shape[:-1] != x.shape[:-1]:
        return ""
    if not torch.allclose(zero, zero[:1, :1], rtol=1e-4, atol=1e-5):
        return "adds its input to its output"
    rest = torch.ones(2, 3, dtype=torch.bool)
    rest[0, 0] = False
    return "" if torch.allclose(one[rest], other[rest], rtol=1e-4) else "mixes positions"


def _run(
    module: nn.Module, projections: Mapping[nn.Module, int], value: float, x: Tensor
) -> Tensor:
    """The module's output where all weights of its matrices are `value` over the number of inputs."""
    equal = {part: _Equal(value, outputs) for part, outputs in projections.items()}
    twin = rebuilt(module, equal).eval()
    for part in twin.modules():
        part._parameters = {n: _constant(p, value) for n, p in part._parameters.items()}
        part._buffers = {
            n: b if b is None else torch.zeros_like(b, device="cpu") if b.is_meta else b.cpu()
            for n, b in part._buffers.items()
        }
    output = twin(x)
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


class _Equal(nn.Module):
    """A projection whose outputs are equal, with biases of 1, without the matrix.

    Weights rise with the input feature: those that are all equal would see nothing behind a
    LayerNorm, whose rows all have mean 0.
    """

    def __init__(self, value: float, outputs: int) -> None:
        super().__init__()
        self.value, self.outputs = value, outputs
        self.register_buffer("weight", torch.empty(0), persistent=False)  # T5 reads its dtype

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(0, 2, x.shape[-1], dtype=x.dtype)
        mean = (ramp * x).mean(-1, keepdim=True)
        return (1 + self.value * mean).expand(*x.shape[:-1], self.outputs)


def _constant(like: Tensor | None, value: float) -> Any:
    """Equal weights; biases and scales of norms are 1."""
    if like is None:
        return None
    return torch.full(like.shape, value / like.shape[-1] if like.ndim > 1 else 1.0)
