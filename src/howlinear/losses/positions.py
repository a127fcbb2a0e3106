"""How many positions of a window to score: the head against the layers.

    positions = scored_positions(model, protocol)       # 76 of 127 for the built-in model

A sweep over L blocks runs half of the layers for each block on every token of a window, and the head on
the tokens that are scored. Tokens of one window are alike: with a correlation rho of their KLs within a
window, m scored tokens a window and n windows, the variance of a mean is (rho + (1 - rho) / m) / n in
units of a token's variance, and the work is n (layers of a window / 2 + m head). At a fixed amount of
work the variance is least at m = sqrt((1 - rho) / rho x layers of a window / 2 / head) (two-stage
sampling; Cochran 1977, 10.6).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from howlinear.losses.protocols import EvalProtocol
from howlinear.losses.readout import Readout
from howlinear.models.families import backbone

ALIKE = 0.04  # rho: 0.02 to 0.07 on the built-in model, as `benchmarks/swap.py` prints
FEWEST = 8


def scored_positions(model: nn.Module, protocol: EvalProtocol) -> int:
    """The number of tokens to score in each window; all where the head's work is not known."""
    try:
        readout = Readout(model)
    except ValueError:  # no next-token loss: nothing is scored
        return protocol.counted
    layers, head = _work(model, readout)
    if readout.whole or not head or not layers:
        return protocol.counted
    best = best_number(layers * protocol.length / 2 / head)
    return min(protocol.counted, max(FEWEST, best))


def best_number(ratio: float, alike: float = ALIKE) -> int:
    """m for a window whose layers take `ratio` times the work of the head on one token."""
    return round(math.sqrt((1 - alike) / alike * ratio))


def _work(model: nn.Module, readout: Readout, tokens: int = 8) -> tuple[float, float]:
    """Multiply-adds of one token in the layers and in the head."""
    device = next(model.parameters()).device
    ids = {"input_ids": torch.arange(10, 10 + tokens, device=device)[None] % readout.vocabulary}
    with torch.no_grad(), FlopCounterMode(display=False) as layers:
        backbone(model)(**ids)
    with torch.no_grad(), FlopCounterMode(display=False) as whole:
        model(**ids)
    both, below = (counter.get_total_flops() / 2 / tokens for counter in (whole, layers))
    return below, both - below
