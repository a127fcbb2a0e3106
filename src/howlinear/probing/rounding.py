"""The error of a block's output when its weights are rounded: is easy to quantise the same as linear?

    rounded(model, block, bits=4)       # the block as a module, weights rounded to nearest

Round to nearest, symmetric, scaled by the largest weight: int8 with one scale per output row, int4 with
one per group of 128 inputs. No calibration; activations are not rounded.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.families import Block, projection_shape
from howlinear.models.hooks import Chain
from howlinear.models.twins import rebuilt
from howlinear.models.units import weight_of
from howlinear.probing.samples import Cast, Layer, Sample, errors, ratio

GROUP = {8: None, 4: 128}


def nearest(weight: Tensor, bits: int, group: int | None = None) -> Tensor:
    """(out, in) rounded to 2^bits - 1 levels about zero, one scale per row and group of inputs."""
    most = 2 ** (bits - 1) - 1
    parts = weight.float().split(group or weight.shape[1], dim=1)
    rounded = []
    for part in parts:
        scale = part.abs().amax(1, keepdim=True) / most
        scale = torch.where(scale > 0, scale, 1.0)
        rounded.append((part / scale).round().clamp(-most, most) * scale)
    return torch.cat(rounded, 1).to(weight)


def rounded(model: nn.Module, block: Block, bits: int) -> nn.Module:
    """The block with all its projections rounded. ValueError if it has no plain ones."""
    new: dict[nn.Module, nn.Module] = {}
    steps = [attrgetter(path)(model) for path in block.steps]
    for step in steps:
        for module in step.modules() if isinstance(step, nn.Module) else ():
            if projection_shape(module) is None:
                continue
            weight, bias = weight_of(module).detach(), getattr(module, "bias", None)
            outputs, inputs = weight.shape
            linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(nearest(weight, bits, GROUP[bits]), requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
            new[module] = linear
    if not new or block.down is None:
        raise ValueError(f"{block} has no plain projections to round")
    return Chain([rebuilt(step, new) for step in steps])


def rounding_errors(
    model: nn.Module, block: Block, report: Sample
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """Squared error of the block's output over its variance, at int8 and int4."""
    record: dict[str, Any] = {}
    layers: dict[str, Layer] = {}
    for bits in GROUP:
        layer = layers[f"int{bits}"] = Cast(rounded(model, block, bits))
        error, cosine = errors(layer, report)
        share, se = ratio(error, report.spread, report.cluster)
        body = ratio(error * report.body, report.spread_body, report.cluster)[0]
        scores = {"error": share, "error_se": se, "error_body": body, "cosine": cosine}
        record[f"int{bits}"] = scores
    return record, layers
