"""Fine-tune the layer in place of a block, and nothing else; and the block itself, as a control.

    healed, record = heal(model, block, layer, windows)

Training a swapped layer on text improves it for two reasons: it repairs the swap, and it learns the
text. The original block, trained in the same way, shows the second.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, UnitMap
from howlinear.linear.trainable import TrainableMap
from howlinear.losses.readout import Readout
from howlinear.models.families import Block
from howlinear.models.hooks import as_module, evaluating, frozen, swapped
from howlinear.probing.fitting import descend
from howlinear.probing.samples import Cast, Layer

LEARNING_RATE = 1e-4
WINDOWS = 2  # per step


def heal(
    model: nn.Module,
    block: Block,
    layer: nn.Module,
    windows: Tensor,
    *,
    steps: int = 200,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Any]]:
    """Adam 1e-4 on the next-token loss, two windows a step; a float32 copy of `layer` is trained.

    The trained layer, and a record with the mean loss of each tenth of the steps.
    """
    began = time.perf_counter()
    layer = copy.deepcopy(layer).float()
    if not isinstance(layer, TrainableMap):  # which knows what of it is trained
        layer.requires_grad_(True)
    adam = torch.optim.Adam((p for p in layer.parameters() if p.requires_grad), lr=LEARNING_RATE)
    g = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    with frozen(model), swapped(model, {block: Cast(layer)}), evaluating(model):
        for _ in range(steps):
            ids = windows[torch.randint(len(windows), (WINDOWS,), generator=g)]
            loss = _next_token_loss(model, ids.to(next(model.parameters()).device))
            descend(adam, loss)
            losses.append(float(loss.detach()))
    tenth = max(1, steps // 10)
    tenths = [losses[i : i + tenth] for i in range(0, steps, tenth)]
    return layer.requires_grad_(False), {
        "losses": [sum(part) / len(part) for part in tenths],
        "steps": steps,
        "tokens": steps * WINDOWS * windows.shape[1],
        "seconds": time.perf_counter() - began,
    }


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    targets = ids[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)


def probe_healing(
    model: nn.Module,
    block: Block,
    swap_map: Callable[[], Affine | UnitMap],
    windows: Tensor | None,
    *,
    heal_steps: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The swap's map and the block itself, fine-tuned in the same way."""
    if windows is None:
        raise ValueError("no windows to fine-tune on")
    Readout(model)  # ValueError for a model without a next-token loss
    fitted = swap_map()
    start = TrainableMap(fitted)
    record: dict[str, Any] = {"units": list(getattr(fitted, "units", ()))}
    layers: dict[str, Layer] = {"swapped": start}
    for name, layer in (("healed", start), ("control", as_module(model, block))):
        layers[name], record[name] = heal(model, block, layer, windows, steps=heal_steps, seed=seed)
    return record, layers
