"""Moments and maps of a run folder: one safetensors file for each block, with a checksum.

    save_moments(folder, store)                 # folder/moments/11.safetensors
    read_store(folder, block)                   # a BlockStore again, every part of it checked
    read_map(folder, block)                     # the fitted map and the R2 of each output feature

With one file for each block, no more than one block at a time is held or written. A file carries a
checksum of everything in it, is written to a temporary name and renamed. Names, shapes and contents
are checked when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator
from howlinear.linear.affine import Affine
from howlinear.linear.stores import PARTS, BlockStore, Place, name_of
from howlinear.records.fields import BlockProfile
from howlinear.records.files import atomic, one_line

T = TypeVar("T")


# -- files of tensors -----------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """A safetensors file with a checksum of names, shapes, contents and `about`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():  # contiguous, on the CPU, and no two share memory
        value = value.detach().cpu().contiguous()
        kept[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        try:
            save_file(kept, str(temporary), {**about, "crc32": checksum(kept, about)})
        except SafetensorError as err:  # a full disk
            raise OSError(one_line(err)) from None


def read_tensors(path: Path, **about: str) -> dict[str, Tensor]:
    """What `write_tensors` wrote there with the same `about`; ValueError in one line otherwise."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} does not exist: is it a complete run folder?")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, AttributeError) as err:
        raise ValueError(f"{path} is not a readable safetensors file: {one_line(err)}") from None
    stated = metadata.pop("crc32", None)
    if stated is None:
        raise ValueError(f"{path} was not written by howlinear: it has no checksum")
    if stated != checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its checksum does not fit, copy or make it again")
    for name, value in about.items():
        if metadata.get(name) != value:
            raise ValueError(f"{path} is of another {name}: {metadata.get(name)}, expected {value}")
    return tensors


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Of names, dtypes, shapes and contents of contiguous tensors on the CPU, and of `about`."""
    crc = zlib.crc32(repr(sorted(about.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        crc = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), crc)
        if value.numel():
            crc = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


# -- moments of one block -------------------------------------------------------------------------


def save_moments(folder: str | Path, store: BlockStore) -> None:
    """Write one block's accumulators to a folder."""
    path = _path(folder, "moments", store.block)
    write_tensors(path, store.state_dict(), kind="moments", block=store.block.path)


def fill_store(folder: str | Path, store: BlockStore) -> None:
    """Fill a store without rows from a folder."""
    _read(_path(folder, "moments", store.block), store.block, store.load_state_dict, "moments")


def read_store(folder: str | Path, block: Place) -> BlockStore:
    """One block's accumulators from a folder, with its row sample and what is known of it."""
    path = _path(folder, "moments", block)
    return _read(path, block, lambda state: BlockStore.from_state(block, state), "moments")


def _path(folder: str | Path, name: str, block: Place) -> Path:
    return Path(folder) / name / f"{name_of(block)}.safetensors"


def _read(path: Path, block: Place, take: Callable[[dict[str, Tensor]], T], kind: str) -> T:
    tensors = read_tensors(path, kind=kind, block=block.path)
    try:
        return take(tensors)
    except Exception as err:  # a file can hold anything, down to shapes that cannot be allocated
        raise ValueError(f"{path}: {one_line(err)}") from None


def read_moments(folder: str | Path, block: Place) -> dict[str, list[Accumulator]]:
    """One block's accumulators from a run folder, by part ("body", "first"), one for each fold.

    Their x is the block's input with its sink units as last columns: see `Accumulator.narrow`.
    """
    store = read_store(folder, block)
    return {part: getattr(store, part) for part in PARTS}


# -- the map of one block -------------------------------------------------------------------------


def map_tensors(affine: Affine, r2_by_feature: Tensor) -> dict[str, Tensor]:
    """A map and the R2 of each output feature as tensors to write or to send."""
    return {
        "weight": affine.weight,
        "bias": affine.bias,
        "rank": torch.tensor(affine.rank),
        "r2_by_feature": r2_by_feature,
    }


def write_map(folder: str | Path, block: Place, affine: Affine, r2_by_feature: Tensor) -> None:
    tensors = map_tensors(affine, r2_by_feature)
    write_tensors(_path(folder, "maps", block), tensors, kind="map", block=block.path)


def read_map(folder: str | Path, block: Place) -> tuple[Affine, Tensor]:
    """The saved map of a block, and the R2 of each output feature."""
    path = _path(folder, "maps", block)
    return _read(path, block, lambda tensors: _checked_map(tensors, block), "map")


def _checked_map(tensors: dict[str, Tensor], block: Place) -> tuple[Affine, Tensor]:
    shapes = {
        "weight": (block.d_out, block.d_in),
        "bias": (block.d_out,),
        "rank": (),
        "r2_by_feature": (block.d_out,),
    }
    for name, shape in shapes.items():
        value = tensors.get(name)
        if value is None or value.shape != shape or value.is_complex():
            raise ValueError(f"block {block.index} has no {name} {shape}")
    if not bool(tensors["weight"].isfinite().all() and tensors["bias"].isfinite().all()):
        raise ValueError(f"block {block.index} is not finite")
    weight, bias = tensors["weight"].double(), tensors["bias"].double()
    return Affine(weight, bias, int(tensors["rank"]), block.path), tensors["r2_by_feature"]


class Saved(Mapping[int, T]):
    """One part of what `read_map` gives for each block of a run folder, read when it is used."""

    def __init__(self, folder: Path, blocks: Sequence[BlockProfile], part: int) -> None:
        self.folder, self.blocks, self.part = folder, {b.index: b for b in blocks}, part
        for b in blocks:
            path = _path(folder, "maps", b)
            if not path.is_file():
                raise ValueError(f"{path} does not exist: is {folder} a complete run folder?")

    def __getitem__(self, index: int) -> T:
        parts: tuple[Any, Any] = read_map(self.folder, self.blocks[index])
        return cast(T, parts[self.part])

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


def saved_maps(folder: Path, blocks: Sequence[BlockProfile]) -> tuple[Saved[Affine], Saved[Tensor]]:
    """The maps of a run folder, and the R2 of each of their output features."""
    return Saved(folder, blocks, 0), Saved(folder, blocks, 1)
