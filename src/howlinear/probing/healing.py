"""Fine-tune the layer in place of a block, and nothing else; and the block itself, as a control.

    healed = heal(model, block, layer, windows)

Training a swapped layer on text improves it for two reasons: it repairs the swap, and it learns the
text. The original block, trained in the same way, shows the second.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.readout import Readout
from howlinear.models.families import Block
from howlinear.models.hooks import as_module, evaluating, swapped
from howlinear.probing.samples import Cast, Layer

LEARNING_RATE = 1e-4
WINDOWS = 2  # per step


class TrainableMap(nn.Module):
    """A map with weights that can be trained; kept hidden units are frozen."""

    def __init__(self, layer: Affine | UnitMap) -> None:
        super().__init__()
        affine = layer.affine if isinstance(layer, UnitMap) else layer
        assert isinstance(affine, Affine)
        self.linear = affine.to_linear()
        self.hidden = Cast(layer.hidden) if isinstance(layer, UnitMap) else None
        self.write = (
            nn.Parameter(layer.write.float().clone()) if isinstance(layer, UnitMap) else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.hidden is not None and self.write is not None:
            y = y + nn.functional.linear(self.hidden(x), self.write)
        return y


@dataclass(frozen=True, eq=False)
class Healed:
    """A fine-tuned layer, and its training losses."""

    layer: nn.Module
    losses: list[float]  # mean of each tenth of the steps
    steps: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "steps", "tokens", "seconds")}


def heal(
    model: nn.Module,
    block: Block,
    layer: nn.Module,
    windows: Tensor,
    *,
    steps: int = 200,
    seed: int = 0,
) -> Healed:
    """Adam 1e-4 on the next-token loss, two windows a step; a float32 copy of `layer` is trained."""
    began = time.perf_counter()
    layer = copy.deepcopy(layer).float().requires_grad_(True)
    if isinstance(layer, TrainableMap) and layer.hidden is not None:
        layer.hidden.requires_grad_(False)
    runs = Cast(layer)
    params = [p for p in layer.parameters() if p.requires_grad]
    frozen = {p: p.requires_grad for p in model.parameters()}
    adam = torch.optim.Adam(params, lr=LEARNING_RATE)
    g = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    losses: list[float] = []
    try:
        model.requires_grad_(False)
        with swapped(model, {block: runs}), evaluating(model):
            for _ in range(steps):
                ids = windows[torch.randint(len(windows), (WINDOWS,), generator=g)].to(device)
                loss = _next_token_loss(model, ids)
                adam.zero_grad()
                loss.backward()
                adam.step()
                losses.append(float(loss.detach()))
    finally:
        for p, before in frozen.items():
            p.requires_grad_(before)
    layer.requires_grad_(False)
    tenth = max(1, steps // 10)
    curve = [
        sum(losses[i : i + tenth]) / len(losses[i : i + tenth]) for i in range(0, steps, tenth)
    ]
    tokens = steps * WINDOWS * windows.shape[1]
    return Healed(layer, curve, steps, tokens, time.perf_counter() - began)


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    targets = ids[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)


def probe_healing(
    model: nn.Module,
    block: Block,
    swap_map: Callable[[], Affine | UnitMap],
    windows: Tensor,
    *,
    steps: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The swap's map and the block itself, fine-tuned in the same way."""
    Readout(model)  # ValueError for a model without a next-token loss
    fitted = swap_map()
    start = TrainableMap(fitted)
    healed, control = (
        heal(model, block, layer, windows, steps=steps, seed=seed)
        for layer in (start, as_module(model, block))
    )
    layers: dict[str, Layer] = {"swapped": start.requires_grad_(False)}
    layers |= {"healed": healed.layer, "control": control.layer}
    record = {"healed": healed.to_dict(), "control": control.to_dict()}
    return record | {"units": list(getattr(fitted, "units", ()))}, layers
