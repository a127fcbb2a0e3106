"""Text that a model writes itself: windows to fit on that cover what it was trained on, not one domain.

    ids = generated_windows(model, tokenizer, 32, 512)       # (32, 512), the same for the same seed

Each window begins with a token drawn at random from the vocabulary, behind the special tokens that windows
have; the rest is sampled from the model's predictions at temperature 1 (arXiv 2305.17888 calibrates so, too).
Special tokens are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.cutting import first_ids
from howlinear.models.hooks import evaluating
from howlinear.models.offload import device_of, is_offloaded

BATCH = 32  # windows that are written at once


def generated_windows(
    model: nn.Module,
    tokenizer: Any,
    count: int,
    length: int,
    *,
    bos: str = "auto",
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """(count, length) token ids. ValueError for a model that does not generate.

    `progress` is called with the number of tokens written since the last call.
    """
    can = getattr(model, "can_generate", lambda: False)
    if not can() or model.config.is_encoder_decoder:  # type: ignore[union-attr]
        raise ValueError(f"{type(model).__name__} does not write text: name a text to fit on")
    if is_offloaded(model):
        raise ValueError("a model writes text with all weights in memory: name a text to fit on")
    random = torch.Generator().manual_seed(seed)
    special = sorted(set(tokenizer.all_special_ids))
    plain = torch.ones(len(tokenizer), dtype=torch.bool)
    plain[special] = False
    start = torch.tensor(first_ids(tokenizer, bos), dtype=torch.long)
    parts = []
    for first in range(0, count, BATCH):
        n = min(BATCH, count - first)
        drawn = torch.multinomial(plain.float(), n, generator=random)  # n different tokens
        ids = torch.cat([start.expand(n, -1), drawn[:, None]], 1)
        parts.append(_continued(model, ids, length, special, random, progress))
    return torch.cat(parts)


@torch.no_grad()
def _continued(
    model: nn.Module,
    ids: Tensor,
    length: int,
    special: list[int],
    random: torch.Generator,
    progress: Callable[[int], None],
) -> Tensor:
    """Windows that begin with `ids` (n, tokens)."""
    device, new, cache = device_of(model), ids, None
    with evaluating(model):
        while ids.shape[1] < length:
            out = model(input_ids=new.to(device), past_key_values=cache, use_cache=True)
            logits, cache = out.logits[:, -1].float().cpu(), out.past_key_values
            logits[:, special] = -torch.inf
            new = torch.multinomial(logits.softmax(-1), 1, generator=random)
            ids = torch.cat([ids, new], 1)
            progress(len(ids))
    return ids
