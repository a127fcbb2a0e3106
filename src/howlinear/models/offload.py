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
from torch import Tensor, nn


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


def some_values(model: nn.Module, name: str, parameter: nn.Parameter, at: list[int]) -> Tensor:
    """A few elements of a parameter by their places in it, from wherever it is kept."""
    if parameter.device.type != "meta":
        return parameter.detach().reshape(-1)[at].float().cpu()
    path, _, own = name.rpartition(".")
    hooks = [h for h in _hooks(model.get_submodule(path)) if h.offload]
    kept = hooks[0].weights_map
    entry = getattr(getattr(kept, "dataset", None), "index", {}).get(name, {})
    if "safetensors_file" not in entry or parameter.dim() < 1:
        return kept[own].detach().reshape(-1)[at].float().cpu()
    from safetensors import safe_open

    row = parameter[0].numel() if parameter.dim() > 1 else 1
    with safe_open(entry["safetensors_file"], "pt") as file:
        rows = file.get_slice(entry.get("weight_name", name))
        found = [rows[k // row : k // row + 1].reshape(-1)[k % row] for k in at]
    return torch.stack(found).to(parameter.dtype).float()
