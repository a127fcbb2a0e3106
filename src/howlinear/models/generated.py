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

MOST = 64  # windows that are written at once
CACHE = 2**32  # bytes that their keys and values may take, at most


def why_no_text(model: nn.Module) -> str:
    """Why a model cannot write text; "" if it can."""
    can = getattr(model, "can_generate", lambda: False)
    if not can() or model.config.is_encoder_decoder:  # type: ignore[union-attr]
        return f"{type(model).__name__} does not write text"
    return "a model writes text with all weights in memory" if is_offloaded(model) else ""


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
    if reason := why_no_text(model):
        raise ValueError(f"{reason}: name another text with `also_fit`")
    random = torch.Generator().manual_seed(seed)
    size = min(len(tokenizer), model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    plain = torch.ones(size, dtype=torch.bool)
    plain[[i for i in tokenizer.all_special_ids if i < size]] = False
    start = torch.tensor(first_ids(tokenizer, bos), dtype=torch.long)
    parts = []
    batch = _windows_at_once(model, length)
    for first in range(0, count, batch):
        n = min(batch, count - first)
        drawn = torch.multinomial(plain.float(), n, replacement=True, generator=random)
        ids = torch.cat([start.expand(n, -1), drawn[:, None]], 1)
        parts.append(_continued(model, ids, length, plain, random, progress))
    return torch.cat(parts)


def _windows_at_once(model: Any, length: int) -> int:
    """As many as keys and values of full width leave memory for."""
    config = model.config.get_text_config()
    size = 2 * config.num_hidden_layers * config.hidden_size * length * model.dtype.itemsize
    return int(min(max(CACHE // size, 1), MOST))


@torch.no_grad()
def _continued(
    model: nn.Module,
    ids: Tensor,
    length: int,
    plain: Tensor,
    random: torch.Generator,
    progress: Callable[[int], None],
) -> Tensor:
    """Windows that begin with `ids` (n, tokens); tokens that are not `plain` are not written."""
    device, new = device_of(model), ids
    options: dict[str, Any] = {}
    progress(ids.numel())
    with evaluating(model):
        while ids.shape[1] < length:
            out = model(input_ids=new.to(device), use_cache=True, **options)
            logits = out.logits[:, -1, : len(plain)].float().cpu()
            if not bool(logits.isfinite().all()):
                raise ValueError("predictions are not finite: the model cannot write text")
            logits[:, ~plain] = -torch.inf
            new = torch.multinomial(logits.softmax(-1), 1, generator=random)
            ids = torch.cat([ids, new], 1)
            progress(len(ids))
            if getattr(out, "past_key_values", None) is None:  # no cache: the whole window again
                new = ids
            else:
                options = {"past_key_values": out.past_key_values}
    return ids
