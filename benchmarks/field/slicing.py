"""SliceGPT (arXiv 2401.15024): a narrower residual stream.

RMSNorm commutes with rotations once its weights are folded into the matrices that read it. So the stream
before each norm is rotated to the principal components of the normalised signal there, and the last ones
are cut off. Matrices that read or write the stream get narrower; streams with different rotations are joined
by a matrix (k, k) on each residual connection, which counts.

The embedding is tied here and two rotations differ, so slicing both copies would store it twice. It is
kept whole instead, with one matrix (d, k) behind it and one in front of the head: fewer parameters
for k > d / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.llama import Calibration, Made, Walk, clone, inputs_of, linear, through
from howlinear.models.families import parameter_count


def slicegpt(calibration: Calibration, target: int) -> Made:
    """SliceGPT: principal components of the normalised stream, on the inputs that the sliced model gives."""
    if target <= 0:
        return Made(clone(calibration.model))
    width = calibration.width
    while saved(calibration, width) < target:
        width -= 1
    return Made(sliced(calibration, width), f"width {width} of {calibration.width}")


def saved(calibration: Calibration, k: int) -> int:
    """Parameters that a stream of width k saves."""
    d, layer = calibration.width, calibration.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    before = len(calibration.layers) * parameter_count(layer) + d
    return before - len(calibration.layers) * (matrices * k // d + 2 * k * k) - 2 * d * k


class Norm(nn.Module):
    """RMSNorm without weights of a sliced stream: the mean is over the original width."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.width + self.eps)


class SlicedLayer(nn.Module):
    """A layer between rotated streams; the first one rotates the embedding, too."""

    def __init__(self, layer: Any, norm: Norm) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = norm, layer.self_attn, layer.mlp
        self.enter: nn.Module = nn.Identity()
        self.around_attention: nn.Module = nn.Identity()
        self.around_mlp: nn.Module = nn.Identity()

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        x = self.enter(hidden_states)
        y = self.self_attn(hidden_states=self.norm(x), **options)[0]
        x = self.around_attention(x) + y
        return self.around_mlp(x) + self.mlp(self.norm(x))


def fold_norms(layer: Any) -> None:
    """Norms' weights go into the matrices that read them."""
    readers = {
        layer.input_layernorm: (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
        layer.post_attention_layernorm: (layer.mlp, ("gate_proj", "up_proj")),
    }
    for norm, (parent, names) in readers.items():
        for name in names:
            setattr(parent, name, linear(getattr(parent, name).weight * norm.weight))


def components(walk: Walk, norm: Norm, i: int | None, k: int) -> Tensor:
    """(d, k) principal components of the normalised stream: of the walk's states (None), or of what
    enters the feed-forward block of layer i while its attention writes the original basis."""
    S: Any = 0.0
    for state, options in walk.batches:
        rows = (
            norm(state) if i is None else stream_inside(walk.model.model.layers[i], state, options)
        )
        rows = rows.reshape(-1, rows.shape[-1])
        S = S + (rows.t() @ rows).double()
    return torch.linalg.eigh(S)[1][:, -k:].flip(1)


def stream_inside(layer: SlicedLayer, state: Tensor, options: dict[str, Any]) -> Tensor:
    with inputs_of({"x": layer.mlp}) as rows:
        through(layer, state, options)
    return rows["x"]


class Skip(nn.Module):
    """In place of a block that is not needed for its output."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def sliced(calibration: Calibration, k: int) -> Any:
    """The model with a stream of width k. Between layers the walk's states are in the original basis."""
    small, d = clone(calibration.model), calibration.width
    norm = Norm(d, small.model.norm.variance_epsilon)
    walk, like = Walk(small, calibration.ids), small.lm_head.weight
    into = components(walk, norm, None, k)  # (d, k)
    for i, layer in enumerate(small.model.layers):
        fold_norms(layer)
        small.model.layers[i] = layer = SlicedLayer(layer, norm)
        attention, mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(
                attention, name, linear(getattr(attention, name).weight.double() @ into, like=like)
            )
        layer.enter = linear(into.t(), like=like)
        layer.around_attention = linear(into, like=like)  # back to the original basis
        layer.mlp = Skip()
        inside = components(walk, norm, i, k)
        layer.mlp = mlp
        attention.o_proj = linear(inside.t() @ attention.o_proj.weight.double(), like=like)
        layer.around_attention = linear(inside.t() @ into, like=like)
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, linear(getattr(mlp, name).weight.double() @ inside, like=like))
        layer.around_mlp = linear(inside, like=like)
        walk.step(i)  # writes the original basis
        out = components(walk, norm, None, k)
        mlp.down_proj = linear(out.t() @ mlp.down_proj.weight.double(), like=like)
        layer.around_mlp = linear(out.t() @ inside, like=like)
        if i:
            layer.enter = nn.Identity()
        into = out
    weight = small.model.norm.weight.double()[:, None] * into
    small.model.norm = nn.Sequential(norm, linear(weight, like=like))
    return small
