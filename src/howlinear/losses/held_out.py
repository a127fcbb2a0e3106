"""Tokens of a text that no map was fitted on, cut as a protocol wants them.

    ids, n_bytes = held_out_tokens(text.report(), tokenizer, EvalProtocol.parse("windows-128"), 4096)

`n_bytes` is the length of the predicted text in utf-8, for bits a byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from howlinear.losses.protocols import EvalProtocol
from howlinear.models import corpus


def held_out_tokens(
    text: str, tokenizer: Any, protocol: EvalProtocol, tokens: int, bos: str = "auto"
) -> tuple[Tensor, int]:
    """About `tokens` tokens to predict, as windows (n, length) or one stream (n,); their bytes."""
    if not text.strip():
        raise ValueError("the held-out text is empty: profile a longer text (--text-file)")
    if protocol.name.startswith("windows"):
        count = -(-tokens // (protocol.length - 1))
        wanted = count * protocol.length
        ids = corpus.windows(text, tokenizer, protocol.length, tokens=wanted, bos=bos)
        predicted = list(ids[:, 1:])
    else:  # one stream without special tokens
        wanted = max(tokens + 1, protocol.length)
        ids = torch.tensor(corpus.first_tokens(text, tokenizer, wanted))
        predicted = [ids[first:end] for _, end, first in protocol.cut(len(ids))]
    return ids, sum(len(tokenizer.decode(part).encode()) for part in predicted)
