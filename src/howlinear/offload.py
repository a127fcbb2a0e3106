"""Models whose weights are elsewhere: on disk or on the CPU until a module runs (accelerate's offload).

    with resident([layer]):         # its weights are where it runs, and stay there until the end
        ...
    device_of(model)                # where it runs, wherever its weights are kept

For a model whose weights are all in place nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def resident(modules: Sequence[Any]) -> Iterator[None]:
    """Inside, the weights of these modules are loaded once and stay, however often they run."""
    held: list[tuple[Any, nn.Module]] = []
    try:
        for module in modules:
            for part in module.modules() if isinstance(module, nn.Module) else ():
                for hook in _hooks(part):
                    if hook.offload:
                        hook.pre_forward(part)
                        hook.offload = False
                        held.append((hook, part))
        yield
    finally:
        for hook, part in held:
            hook.offload = True
            hook.post_forward(part, None)


def is_offloaded(model: nn.Module) -> bool:
    """Are some weights not in place?"""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def device_of(module: nn.Module) -> torch.device:
    """Where a module runs."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    hooks = (hook for part in module.modules() for hook in _hooks(part))
    return next((torch.device(h.execution_device) for h in hooks), torch.device("cpu"))


def run_on(model: nn.Module, device: torch.device) -> None:
    """Run offloaded modules there."""
    for part in model.modules():
        for hook in _hooks(part):
            hook.execution_device = device
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                part._buffers[name] = buffer.to(device)


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks that load weights before a module runs."""
    found: Any = getattr(module, "_hf_hook", None)
    every = getattr(found, "hooks", [found])
    return [hook for hook in every if hasattr(hook, "offload") and hasattr(hook, "weights_map")]
