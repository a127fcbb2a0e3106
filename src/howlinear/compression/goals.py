"""From a size in bytes or a speed to the share of the feed-forward parameters that must go.

Budget(parameters=share_for_bytes(model, at, 200_000_000))
Budget(parameters=share_for_speed(model, at, 1.2))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from howlinear.compression.prices import Sizes
from howlinear.losses.speed import prefill_multiply_adds
from howlinear.models.families import Block, parameter_count
from howlinear.models.hooks import swapped
from howlinear.records.words import size

HEADER = 128  # bytes of a file's header for each tensor, at most
LENGTH = 128  # tokens of the prefill whose multiply-adds are counted


def share_for_bytes(model: nn.Module, at: Sequence[Block], wanted: int) -> float:
    """The share that must go so that the weights, as the source stores them, take `wanted` bytes."""
    each = getattr(model, "stored_dtype", torch.float32).itemsize
    header = HEADER * (len(list(model.parameters())) + 6 * len(at))  # maps have up to 6 tensors
    total, blocks = each * parameter_count(model) + header, each * Sizes(model, at).total
    if wanted >= total:
        raise ValueError(f"the model takes {size(total)} already: ask for less (`target_size`)")
    if total - wanted >= blocks:
        raise ValueError(
            f"{size(wanted)} cannot be reached: without any feed-forward block the model takes "
            f"{size(total - blocks)} (`target_size`)"
        )
    return (total - wanted) / blocks


def share_for_speed(model: nn.Module, at: Sequence[Block], wanted: float) -> float:
    """The share that must go so that prefill has `wanted` times fewer multiply-adds.

    A share of the parameters takes the same share of the blocks' multiply-adds with it.
    """
    every = prefill_multiply_adds(model, LENGTH)
    nothing = {b: partial(_zeros, b.d_out) for b in at}
    with swapped(model, nothing):
        rest = prefill_multiply_adds(model, LENGTH)
    share = every * (1 - 1 / wanted) / max(every - rest, 1)
    if not 0 < share < 1:
        most = every / max(rest, 1)
        raise ValueError(
            f"a speed-up of {wanted:g} cannot be reached: without any feed-forward block prefill has "
            f"{most:.2f} times fewer multiply-adds (`speedup`, above 1)"
        )
    return share


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)
