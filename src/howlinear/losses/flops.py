"""Multiply-adds of a forward, counted while it runs, attention and experts included.

    multiply_adds(lambda: model(ids))

torch's own counter knows no attention kernels on the CPU and no experts, and counts all of a causal
kernel's square. This relies on names of torch's operators and on where `is_causal` stands in their
arguments; an operator that is renamed counts nothing, which tests/test_speed.py notices by formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

# Attention kernels that skip masked products when `is_causal` is set: its place in their arguments.
CAUSAL = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
}


def multiply_adds(run: Callable[[], Any]) -> int:
    """Multiply-adds of what `run` computes."""
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        run()
    return int(counter.get_total_flops()) // 2


def _formulas() -> dict[Any, Callable[..., int]]:
    aten = torch.ops.aten
    formulas = {
        getattr(aten, name): _attention(position)
        for name, position in CAUSAL.items()
        if hasattr(aten, name)
    }
    return formulas | ({aten._grouped_mm: _grouped} if hasattr(aten, "_grouped_mm") else {})


def _attention(position: int) -> Callable[..., int]:
    def flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
        batch, heads, n, width = q  # (B, H, L, d)
        m = k[2]
        causal = options.get("is_causal", len(rest) > position - 3 and rest[position - 3])
        pairs = n * (n + 1) // 2 if causal and n == m else n * m
        return int(2 * batch * heads * pairs * (width + v[3]))

    return flops


def _grouped(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """(rows, d) by (experts, d, e): each row is multiplied by one expert's matrix."""
    return int(2 * weights[-1] * math.prod(rows))
