"""Weights as they are stored: rounded to a dtype, written in shards.

round_weights(model, torch.bfloat16)              # the model in memory is then the stored one
write_weights(model.state_dict(), folder, torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from howlinear.export.folder import write_json
from howlinear.models.offload import round_offloaded

SHARD = "5GB"
SMALL_SHARD = "1GB"  # of weights that are not in memory


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round all saved tensors to `dtype`, in place, and leave the model in float32.

    A checkpoint in bfloat16 is another model than the float32 one in memory. After rounding they
    are the same and can be compared to float32 precision. Offloaded tensors are rounded when they
    are loaded.
    """
    model.float()
    tensors = {name: t for name, t in model.state_dict().items() if not t.is_meta}
    for name, tensor in tensors.items():
        _check_range(name, tensor, dtype)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))
    round_offloaded(model, dtype)


def _check_range(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if not (tensor.is_floating_point() and tensor.numel()):
        return
    low, high = (float(end) for end in tensor.aminmax())  # isfinite takes 20 times longer
    if not -torch.finfo(dtype).max <= low <= high <= torch.finfo(dtype).max:
        raise ValueError(f"{name} does not fit in {dtype}")


@contextmanager
def stored_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Saved tensors are in `dtype` inside the block and in float32 again after it.

    Rounded weights lose nothing. `model.to(dtype)` would also round tensors that are not saved,
    such as the frequencies of rotary positions.
    """
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}
    try:
        for tensor in tensors.values():
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor in tensors.values():
            tensor.data = tensor.data.float()


def write_weights(
    state: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write tensors as safetensors in `dtype`; integers stay integers.

    Tensors are read, by name, and cast shard by shard, so one shard beside the model is in memory.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    kinds = {name: dtype if t.is_floating_point() else t.dtype for name, t in state.items()}
    shapes = {name: t.to("meta", kinds[name]) for name, t in state.items()}
    size = SMALL_SHARD if any(t.is_meta for t in state.values()) else SHARD
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=size)
    for file, names in plan.filename_to_tensors.items():
        shard = {}
        for name in names:
            tensor = (read or state.__getitem__)(name).detach()
            _check_range(name, tensor, dtype)
            # copies, since safetensors refuses tensors that share memory
            shard[name] = tensor.to("cpu", kinds[name], copy=True).contiguous()
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def weight_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def tensor_bytes(folder: Path) -> int:
    """Bytes of all tensors in the safetensors files of a folder: the files without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total
