"""Models whose weights stay on disk or on the CPU until a module runs (accelerate's offload).

    with resident([layer]):         # its weights are loaded once and stay on its device
        ...
    device_of(model)                # where it runs, wherever its weights are kept
    value_of(model, name, tensor)   # a tensor of its state_dict, wherever it is kept

For a model that is not offloaded, nothing here has an effect. This relies on accelerate's
`AlignDevicesHook`: `module._hf_hook` with `offload`, `weights_map`, `execution_device`, `pre_forward`
and `post_forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.ggufs import one_line


@contextmanager
def resident(modules: Sequence[Any]) -> Iterator[None]:
    """Inside, the weights of these modules are loaded once, however often they run."""
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
    """Are some weights on disk or elsewhere until they are used?"""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def check_weights(model: nn.Module) -> None:
    """ValueError for a model on the meta device that nothing will load weights into."""
    if is_offloaded(model) and not any(_hooks(part) for part in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no weights, it is on the meta device: load it with "
            "howlinear.load or from_pretrained"
        )


def device_of(module: nn.Module) -> torch.device:
    """The device that a module runs on."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    hooks = (hook for part in module.modules() for hook in _hooks(part))
    return next((torch.device(h.execution_device) for h in hooks), torch.device("cpu"))


def like(model: nn.Module) -> Tensor:
    """An empty tensor of the dtype of a model's weights, on the device that it runs on."""
    return torch.empty(0, dtype=next(model.parameters()).dtype, device=device_of(model))


def run_on(model: nn.Module, device: torch.device) -> None:
    """Make offloaded modules run on a device."""
    for part in model.modules():
        for hook in _hooks(part):
            hook.execution_device = device
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                part._buffers[name] = buffer.to(device)


def move(model: nn.Module, device: torch.device, device_map: str | None, label: str) -> None:
    """Bring a model to the device it runs on. ValueError with what to type where it does not fit."""
    try:
        if device_map is None:
            model.to(device)
        elif device_map == "disk":
            run_on(model, device)
    except RuntimeError as err:
        cause = f"{label} does not fit on device {device} ({one_line(err)})"
        raise ValueError(f'{cause}: use `dtype="bfloat16"` or `device="cpu"`') from err


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks that load weights before a module runs."""
    hook: Any = getattr(module, "_hf_hook", None)
    every = getattr(hook, "hooks", [hook])  # several are kept in one
    return [h for h in every if hasattr(h, "offload") and hasattr(h, "weights_map")]


def some_values(model: nn.Module, name: str, parameter: nn.Parameter, at: list[int]) -> Tensor:
    """A few elements of a parameter by their flat indices, without loading an offloaded one whole."""
    if parameter.device.type != "meta":
        return parameter.detach().reshape(-1)[at].float().cpu()
    hooks = [h for h in _hooks(model.get_submodule(name.rpartition(".")[0])) if h.offload]
    entry = getattr(getattr(hooks[0].weights_map, "dataset", None), "index", {}).get(name, {})
    if "safetensors_file" not in entry or parameter.dim() < 1:
        return value_of(model, name, parameter).reshape(-1)[at].float().cpu()
    from safetensors import safe_open

    row = parameter[0].numel() if parameter.dim() > 1 else 1
    with safe_open(entry["safetensors_file"], "pt") as file:
        rows = file.get_slice(entry.get("weight_name", name))
        values = [rows[k // row : k // row + 1].reshape(-1)[k % row] for k in at]
    return torch.stack(values).to(parameter.dtype).float()


def value_of(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a model's state; an offloaded one is read. It uses no other name of this module."""
    if tensor.device.type != "meta":
        return tensor.detach()
    path, _, short = name.rpartition(".")
    hook = getattr(model.get_submodule(path), "_hf_hook", None)
    kept = (getattr(h, "weights_map", None) for h in getattr(hook, "hooks", [hook]))
    weights = next(w for w in kept if w is not None)
    return weights[short].detach().to(tensor.dtype)


def tied_copies(model: nn.Module) -> set[int]:
    """The `id` of each offloaded parameter that is tied to another: a forward gives both an object."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = ((parameters.get(name), parameters.get(source)) for name, source in ties.items())
    return {id(p) for p, q in pairs if p is not q and p is not None and p.is_meta and q is not None}


def release(modules: Sequence[nn.Module]) -> None:
    """Remove accelerate's hooks from modules whose offloaded weights are not needed again."""
    for part in (part for module in modules for part in module.modules()):
        if "_hf_hook" in part.__dict__:
            for name in ("_hf_hook", "_old_forward", "forward"):  # bound to this module
                part.__dict__.pop(name, None)


def round_offloaded(model: nn.Module, dtype: torch.dtype) -> None:
    """Offloaded weights are rounded to `dtype` whenever they are loaded."""
    for part in model.modules():
        for hook in _hooks(part):
            if hook.offload:
                hook.weights_map = _Rounded(hook.weights_map, dtype)


class _Rounded(Mapping[str, Tensor]):
    """A map of weights, rounded when they are read."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype

    def __getitem__(self, name: str) -> Tensor:
        value = self.weights[name]
        return value.to(self.dtype) if value.is_floating_point() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)
