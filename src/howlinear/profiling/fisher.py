"""How much predictions depend on each output feature of each block: one backward pass.

    gradients = fisher(model, at, ids, seed=0)      # squared; block index -> (d_out,)
    0.5 * (gradients[11] * mse).sum()               # about the KL divergence of a swap, nats a token

Replace a block's output y by y + e at every position. To second order the predictions move by a KL
divergence of E[(g . e)^2] / 2 nats a token, g being the gradient by y of the log-likelihood of tokens
drawn from the model's own predictions (Fisher's information; the text's own tokens would measure
surprise instead). Only the diagonal, E[g_j^2], is kept. With the squared error of a map in each
feature, E[e_j^2], it estimates the cost of a swap without running one, assuming that errors and
gradients of different features are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.losses.readout import Readout
from howlinear.models.families import Block, call_options
from howlinear.models.forward import IDS, Windows, check_ids
from howlinear.models.hooks import evaluating

TOKENS = 256  # a few hundred tokens rank blocks as well as thousands do
LENGTH = 64
LOGITS = 2**24  # at a time


def first_tokens(text: Windows) -> Tensor | None:
    """The first LENGTH tokens of every window; None for a stream, or windows of more than ids."""
    if text.ids is not None:
        return text.ids[:, :LENGTH]
    parts: list[Tensor] = []
    for batch in text.batches() if text.repeatable else ():
        if set(batch.inputs) != {IDS}:
            return None
        parts.append(batch.inputs[IDS][:, :LENGTH])
    return torch.cat(parts) if len({part.shape[1] for part in parts}) == 1 else None


def fisher(
    model: nn.Module, at: Sequence[Block], ids: Tensor, seed: int = 0
) -> dict[int, Tensor] | None:
    """Mean squared gradient of each block's output features, (d_out,) float64 on the CPU.

    Reads TOKENS tokens spread over the windows `ids` (n, length). None for models that predict no
    next token of the text they read, or none that is finite, and for models made in inference mode:
    no gradients there.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    if any(parameter.is_inference() for parameter in model.parameters()):
        return None
    try:
        readout = Readout(model)
    except (ValueError, AttributeError, TypeError):  # not a language model
        return None
    generator = torch.Generator().manual_seed(seed)
    ids = ids[:, :LENGTH]
    count = min(len(ids), max(1, TOKENS // ids.shape[1]))
    ids = ids[torch.linspace(0, len(ids) - 1, count).long()]
    sums = {block.index: torch.zeros(block.d_out, dtype=torch.float64) for block in at}
    size = max(1, LOGITS // (readout.vocabulary * ids.shape[1]))
    check_ids(model, {IDS: ids})
    for batch in ids.split(size):
        gradients = _gradients(model, at, batch.to(readout.device), generator)
        if not gradients:
            return None
        for index, gradient in gradients.items():
            flat = gradient.reshape(-1, gradient.shape[-1])
            sums[index] += flat.float().square().sum(0).cpu()  # mps has no float64
    return {index: total / ids.numel() for index, total in sums.items()}


def _gradients(
    model: nn.Module, at: Sequence[Block], ids: Tensor, generator: torch.Generator
) -> dict[int, Tensor]:
    """By block index; none where predictions are not finite: the pass says which block is not."""
    with torch.enable_grad(), evaluating(model), _leaves(model, at) as leaves:
        logits = model(input_ids=ids, **call_options(model)).logits
        p = logits.detach().float().softmax(-1)
        if not bool(p.isfinite().all()):
            return {}
        drawn = torch.multinomial(p.flatten(0, -2).cpu(), 1, generator=generator).to(p.device)
        p.flatten(0, -2).scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=p.dtype))
        p[:, -1] = 0  # the token after the last is not part of the window
        gradients = torch.autograd.grad(logits, list(leaves.values()), p.to(logits))
    return dict(zip(leaves, gradients, strict=True))


@contextmanager
def _leaves(model: nn.Module, at: Sequence[Block]) -> Iterator[dict[int, Tensor]]:
    """Inside, each block's output gets zeros added, leaves of the graph to differentiate by."""
    leaves: dict[int, Tensor] = {}

    def hook(block: Block) -> Any:
        def add(_: nn.Module, args: Any, output: Any) -> Any:
            y = output[0] if isinstance(output, tuple) else output
            leaves[block.index] = torch.zeros_like(y, requires_grad=True)
            changed = y + leaves[block.index]
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return model.get_submodule(block.exit).register_forward_hook(add)

    handles = [hook(block) for block in at]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()
