"""Stores and maps as files, one a block, and what a profile that was killed leaves to go on from.

    write_store(folder, store)                  # folder/moments/11.safetensors
    read_store(folder, block)                   # a BlockStore again, every part of it checked
    read_map(folder, block)                     # the fitted map and the R2 of each output feature

    saves = Saves(folder, asked, every=600)     # a pass that goes on where it was killed
    begun = saves.resume(stores)                # batches that are in the stores already
    saves.tick(stores, done)                    # writes them when it is time to
    saves.finish(store)                         # a block is done: its moments are where they stay
    saves.close()                               # the run is complete

One file a block, so that nothing ever holds or writes more than one block at a time. A file carries
a checksum of everything in it, is written to a temporary name and renamed; what is read is somebody
else's word until it is checked. A save of a pass is a folder of its own, complete when its
`pass.json` is there; the older one goes when the newer one is complete.
"""

from __future__ import annotations

import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from howlinear.linear.affine import Affine
from howlinear.linear.moments import Accumulator
from howlinear.linear.stores import PARTS, BlockStore, Place, name_of
from howlinear.records.fields import BlockProfile
from howlinear.records.files import SCHEMA, atomic, check_same, clean, read_json, write_json

T = TypeVar("T")
# what is made from the maps of a run, and goes when they go
DERIVED = (
    "swap.json",
    "swap-experts.json",
    "probe.json",
    "plan.json",
    "compress.json",
    "control-*.json",
)

# -- files of tensors -----------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """A safetensors file with a checksum of names, shapes, contents and `about`."""
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():  # contiguous, on the CPU, and each with memory of its own
        value = value.detach().cpu().contiguous()
        kept[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        save_file(kept, str(temporary), {**about, "crc32": _checksum(kept, about)})


def read_tensors(path: Path, **about: str) -> dict[str, Tensor]:
    """What `write_tensors` wrote there about the same thing; ValueError in one line otherwise."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} does not exist: is it a complete run folder?")
    try:
        with safe_open(str(path), "pt") as file:
            said = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, AttributeError) as err:
        raise ValueError(f"{path} is not a readable safetensors file: {_line(err)}") from None
    checksum = said.pop("crc32", None)
    if checksum is None:
        raise ValueError(f"{path} was not written by howlinear: it has no checksum")
    if checksum != _checksum(tensors, said):
        raise ValueError(f"{path} is damaged: its checksum does not fit, copy or make it again")
    for name, value in about.items():
        if said.get(name) != value:
            raise ValueError(f"{path} is of another {name}: {said.get(name)}, expected {value}")
    return tensors


def _line(err: Exception) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    found = zlib.crc32(repr(sorted(about.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), found)
        if value.numel():
            found = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


# -- one block ------------------------------------------------------------------------------------


def write_store(folder: Path, store: BlockStore) -> None:
    path = folder / "moments" / f"{name_of(store.block)}.safetensors"
    write_tensors(path, store.state_dict(), kind="moments", block=store.block.path)


def read_store(folder: str | Path, block: Place, device: Any = "cpu") -> BlockStore:
    """One block's accumulators from a run folder, with whatever else goes with them."""
    path = Path(folder) / "moments" / f"{name_of(block)}.safetensors"
    state = read_tensors(path, kind="moments", block=block.path)
    try:
        return BlockStore.from_state(block, state, device)
    except Exception as err:  # a file can hold anything, down to shapes that nobody can allocate
        raise ValueError(f"{path}: {_line(err)}") from None


def read_moments(folder: str | Path, block: Place) -> dict[str, list[Accumulator]]:
    """One block's accumulators from a run folder: {"body": one a fold, "first": one a fold}.

    Their x is the block's input with its sink units as last columns: see `Accumulator.narrow`.
    """
    store = read_store(folder, block)
    return {part: getattr(store, part) for part in PARTS}


def write_map(folder: Path, block: Place, affine: Affine, r2_by_feature: Tensor) -> None:
    tensors = {
        "weight": affine.weight,
        "bias": affine.bias,
        "rank": torch.tensor(affine.rank),
        "r2_by_feature": r2_by_feature,
    }
    path = folder / "maps" / f"{name_of(block)}.safetensors"
    write_tensors(path, tensors, kind="map", block=block.path)


def read_map(folder: str | Path, block: Place) -> tuple[Affine, Tensor]:
    """The saved map of a block, and the R2 of each output feature."""
    path = Path(folder) / "maps" / f"{name_of(block)}.safetensors"
    tensors = read_tensors(path, kind="map", block=block.path)
    try:
        return _checked_map(tensors, block)
    except Exception as err:  # likewise
        raise ValueError(f"{path}: {_line(err)}") from None


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
    return Affine(weight, bias, int(tensors["rank"])), tensors["r2_by_feature"]


class Saved(Mapping[int, T]):
    """Something of each block of a run folder, by block index, read when it is asked for."""

    def __init__(
        self,
        folder: Path,
        blocks: Sequence[BlockProfile],
        read: Callable[[Path, BlockProfile], T],
    ) -> None:
        self.folder, self.blocks, self.read = folder, {b.index: b for b in blocks}, read
        for b in blocks:
            path = folder / "maps" / f"{b.index}.safetensors"
            if not path.is_file():
                raise ValueError(f"{path} does not exist: is {folder} a complete run folder?")

    def __getitem__(self, index: int) -> T:
        return self.read(self.folder, self.blocks[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


def saved_maps(folder: Path, blocks: Sequence[BlockProfile]) -> tuple[Saved[Affine], Saved[Tensor]]:
    """The maps of a run folder, and the R2 of each of their output features."""
    return (
        Saved(folder, blocks, lambda at, b: read_map(at, b)[0]),
        Saved(folder, blocks, lambda at, b: read_map(at, b)[1]),
    )


def forget(folder: Path) -> None:
    """Remove what stands in a run folder, first what says that it is complete."""
    for pattern in ("profile.json", "shard.json", *DERIVED):
        for path in folder.glob(pattern):
            path.unlink()
    for name in ("moments", "maps"):
        shutil.rmtree(folder / name, ignore_errors=True)


# -- a pass that may be killed --------------------------------------------------------------------


class Saves:
    """What is on disk of a profile that is under way.

    `asked` is whatever must be the same for a pass to go on: a folder that holds an unfinished
    profile of something else is refused with what differs. `every` is in seconds. Each of several
    ranks saves its own part of the pass; blocks are finished by the first.
    """

    def __init__(
        self, folder: str | Path, asked: Mapping[str, Any], every: float, rank: int = 0
    ) -> None:
        self.folder, self.every, self.rank = Path(folder), every, rank
        self.asked, self.done = dict(asked), set[str]()
        self._last = time.monotonic()
        self.together: int | None = None  # blocks at a time, as the pass began
        if rank == 0:
            self._sweep()
        if self._progress.is_file():
            before = read_json(self._progress, "progress")
            check_same(self.folder, before.get("asked"), clean(self.asked))
            done, together = before.get("done"), before.get("together")
            self.together = together if type(together) is int and together > 0 else None
            self.done = (
                {name for name in done if isinstance(name, str)}
                if isinstance(done, list)
                else set()
            )

    @property
    def begun(self) -> bool:
        """Is there anything to go on from?"""
        return self._progress.is_file()

    @property
    def _progress(self) -> Path:
        return self.folder / "progress.json"

    @property
    def room(self) -> Path:
        """A folder of this rank's own, which goes when the run is complete."""
        return self.folder / "partial" / str(self.rank)

    @property
    def due(self) -> bool:
        """Is the last save long ago?"""
        return time.monotonic() - self._last >= self.every

    def _write(self) -> None:
        about = {"kind": "progress", "schema": SCHEMA, "asked": self.asked}
        about |= {"together": self.together}
        write_json(self._progress, {**about, "done": sorted(self.done)})

    def _sweep(self) -> None:
        """Remove what a kill in the middle of a write left behind."""
        for folder in (self.folder, self.folder / "moments", self.folder / "maps"):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def resume(self, stores: Sequence[BlockStore]) -> int:
        """Fill fresh stores from the last save of a pass over the same blocks; batches done."""
        for at, said in self._complete():
            if said.get("blocks") != [s.block.path for s in stores]:
                continue
            if said.get("asked") != clean(self.asked):  # of a rank whose first one never saved
                continue
            for store in stores:
                path = at / f"{name_of(store.block)}.safetensors"
                state = read_tensors(path, kind="moments", block=store.block.path)
                try:
                    store.take(state)
                except Exception as err:
                    raise ValueError(f"{path}: {_line(err)}") from None
            return int(said["batches"])
        return 0

    def tick(self, stores: Sequence[BlockStore], batches: int) -> bool:
        """Write the stores if the last save is long ago; `batches` are in them."""
        if not self.due:
            return False
        if not self.begun and self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
        older = [at for at, _ in self._complete()]
        at = self.room / str(batches)
        if at in older:
            return False
        shutil.rmtree(at, ignore_errors=True)  # half of a save that was killed
        for store in stores:
            path = at / f"{name_of(store.block)}.safetensors"
            write_tensors(path, store.state_dict(), kind="moments", block=store.block.path)
        paths = [s.block.path for s in stores]
        about = {"kind": "pass", "schema": SCHEMA, "asked": self.asked, "batches": batches}
        write_json(at / "pass.json", {**about, "blocks": paths})
        for old in older:
            _remove(old)
        self._last = time.monotonic()
        return True

    def finish(self, store: BlockStore) -> None:
        """A block has seen all rows: its moments go where they stay, an earlier run's go."""
        if not self.done:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            forget(self.folder)
        write_store(self.folder, store)
        self.done.add(name_of(store.block))
        self._write()

    def close(self) -> None:
        """The run is complete. Each rank removes what is its own, the first one what is left."""
        shutil.rmtree(self.room, ignore_errors=True)
        if self.rank == 0:
            start_again(self.folder)

    def _complete(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Complete saves of this rank, the latest first."""
        folders = self.room.iterdir() if self.room.is_dir() else ()
        numbered = [at for at in folders if at.name.isdecimal()]
        for at in sorted(numbered, key=lambda at: -int(at.name)):
            with suppress(ValueError):
                said = read_json(at / "pass.json", "pass")
                if type(said.get("batches")) is int:
                    yield at, said


def _remove(save: Path) -> None:
    """First what makes it complete: a kill in the middle must not leave half of it believed."""
    (save / "pass.json").unlink(missing_ok=True)
    shutil.rmtree(save, ignore_errors=True)


def start_again(folder: Path) -> None:
    """Leave nothing that a profile could go on from."""
    (folder / "progress.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "partial", ignore_errors=True)
