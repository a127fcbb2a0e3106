"""The one pass: text through the model, moments out, and what they say about every block.

    model, tokenizer = load()
    ids = windows(text, tokenizer, 512)
    result = profile(model, ids)
    result.blocks[11].r2, result.blocks[11].r2_body, result.maps[11](x)

Rows go into one accumulator for each block and fold, first positions into another; both are small
or bounded, so memory does not grow with the text. Afterwards each fold is scored with the map
fitted on the others. Nothing is read twice and no activations are stored, but for a bounded,
seeded sample of rows that `stream_error` needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.affine import Affine
from howlinear.families import Block, Rows, backbone, blocks, call_options, tap
from howlinear.fisher import fisher
from howlinear.measuring import measure
from howlinear.moments import TSQR, Accumulator, Moments
from howlinear.records import (
    SCHEMA,
    BlockProfile,
    atomic,
    read_json,
    summarise,
    write_json,
)
from howlinear.stores import (
    CELL,
    PARTS,
    SOLVERS,
    BlockStore,
    Folds,
    RowSplit,
    Split,
    check_rows,
    is_wide,
)
from howlinear.units import writes

PROTOCOLS = ("default", "paper")
DERIVED = ("swap.json", "probe.json", "plan.json", "compress.json", "control-*.json")

Batch = Tensor | dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Profile:
    """What one pass measured. `blocks` is what to read; `maps[i]` is block i's fitted map."""

    blocks: list[BlockProfile]
    maps: dict[int, Affine]
    r2_by_feature: dict[int, Tensor]
    stores: list[BlockStore] = field(repr=False)
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        return summarise(self.blocks)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        notes = []
        lacking = [b.index for b in self.blocks if b.input_rank < b.d_in]
        if lacking:
            which = "all blocks" if len(lacking) == len(self.blocks) else f"blocks {lacking}"
            notes.append(f"inputs lack rank in {which}: the maps of least norm are given")
        unsure = [b for b in self.blocks if b.r2_body_se is not None and b.r2_body_se > 0.1]
        if unsure:
            listed = ", ".join(f"{b.index} (±{b.r2_body_se:.2f})" for b in unsure)
            notes.append(
                f"body R2 of blocks {listed} rests on a few rows: sinks beyond the first position"
            )
        thin = min(b.rows_per_column for b in self.blocks)
        if thin < 20:
            notes.append(
                f"only {thin:.1f} rows a column: held-out R2 is low by about (1 - R2) / {thin:.0f}, "
                "give more tokens (--tokens)"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """`profile.json`, field by field."""
        return {
            "kind": "profile",
            "schema": SCHEMA,
            **self.about,
            "settings": self.settings,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def save(self, folder: str | Path) -> None:
        """Write the run folder; `profile.json` comes last, so that it stands for the whole."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in DERIVED:  # of maps that are about to be gone
            for path in folder.glob(pattern):
                path.unlink()
        moments = {
            f"{store.block.index}.{g}.{part}.{name}": value
            for store in self.stores
            for part in PARTS
            for g, accumulator in enumerate(getattr(store, part))
            for name, value in accumulator.state_dict().items()
        }
        maps: dict[str, Tensor] = {}
        for i, affine in self.maps.items():
            maps[f"{i}.weight"], maps[f"{i}.bias"] = affine.weight, affine.bias
            maps[f"{i}.rank"] = torch.tensor(affine.rank)
            maps[f"{i}.r2_by_feature"] = self.r2_by_feature[i]
        for name, tensors in (("moments", moments), ("maps", maps)):
            with atomic(folder / f"{name}.safetensors") as temporary:
                save_file(_unshared(tensors), str(temporary))
        write_json(folder / "profile.json", self.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read a run folder back, without its moments (`read_moments` has those)."""
        folder = Path(folder)
        data = read_json(folder / "profile.json", "profile")
        listed = data.pop("blocks", None)
        if not isinstance(listed, list) or not all(isinstance(b, dict) for b in listed):
            raise ValueError(f"{folder / 'profile.json'} lists no blocks")
        try:
            records = [BlockProfile.from_dict(b) for b in listed]
        except ValueError as err:
            raise ValueError(f"{folder / 'profile.json'}: {err}") from None
        tensors = _read_tensors(folder / "maps.safetensors")
        maps, features = {}, {}
        for b in records:
            shapes = {
                "weight": (b.d_out, b.d_in),
                "bias": (b.d_out,),
                "rank": (),
                "r2_by_feature": (b.d_out,),
            }
            for name, shape in shapes.items():
                value = tensors.get(f"{b.index}.{name}")
                if value is None or value.shape != shape or value.is_complex():
                    raise ValueError(
                        f"{folder / 'maps.safetensors'}: block {b.index} has no {name} {shape}"
                    )
            part = {name: tensors[f"{b.index}.{name}"] for name in shapes}
            if not bool(part["weight"].isfinite().all() and part["bias"].isfinite().all()):
                raise ValueError(f"{folder / 'maps.safetensors'}: block {b.index} is not finite")
            maps[b.index] = Affine(
                part["weight"].double(), part["bias"].double(), int(part["rank"])
            )
            features[b.index] = part["r2_by_feature"]
        settings = data.pop("settings", {})
        about = {k: v for k, v in data.items() if k not in ("kind", "schema", "summary", "notes")}
        return cls(records, maps, features, [], settings, about)


def read_moments(folder: str | Path, block: BlockProfile) -> dict[str, list[Accumulator]]:
    """One block's accumulators from a run folder: {"body": one a fold, "first": one a fold}.

    Their x is the block's input with its sink units as last columns: see `Accumulator.narrow`.
    """
    path = Path(folder) / "moments.safetensors"
    state = _read_tensors(path, prefix=f"{block.index}.")
    parts: dict[str, list[Accumulator]] = {}
    for part in PARTS:
        groups = {key.split(".")[0] for key in state if key.split(".")[1:2] == [part]}
        if groups != {str(g) for g in range(len(groups))} or not groups:
            raise ValueError(f"{path}: block {block.index} has no complete {part} moments")
        parts[part] = []
        for g in range(len(groups)):
            own = f"{g}.{part}."
            mine = {k.removeprefix(own): v for k, v in state.items() if k.startswith(own)}
            kind = bytes(mine["kind"].flatten().tolist()) if "kind" in mine else b""
            new = TSQR if kind == b"TSQR" else Moments
            try:
                accumulator = new(block.d_in + len(block.sink_units or ()), block.d_out)
                accumulator.load_state_dict(mine)
            except ValueError as err:
                raise ValueError(f"{path}: block {block.index}, fold {g}, {part}: {err}") from None
            parts[part].append(accumulator)
    return parts


def _read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a safetensors file whose names begin with `prefix`, which is taken off."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} does not exist: is {path.parent} a complete run folder?")
    try:
        with safe_open(str(path), "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, RuntimeError, ValueError) as err:
        line = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ValueError(f"{path} is not a readable safetensors file: {line}") from None


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that own their memory: accumulators of a block share one shift."""
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.contiguous()
        tensors[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return tensors


def profile(
    model: nn.Module,
    windows: Tensor | Iterable[Batch],
    *,
    at: Sequence[Block] | str | None = None,
    folds: int = 5,
    protocol: str = "default",
    solver: str = "moments",
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Measure every block (or those `at`) on windows: a LongTensor (n, length), or batches of them.

    Batches may also be dicts of model inputs with masks, pixels or audio features; padding is left
    out. `progress` is called with the number of tokens of each batch done.
    """
    at = blocks(model, at) if at is None or isinstance(at, str) else list(at)
    split = _split(protocol, folds, windows)
    if solver not in SOLVERS:
        raise ValueError(
            f"unknown solver {solver!r}, expected one of {', '.join(SOLVERS)} (--solver)"
        )
    if isinstance(windows, Tensor):
        check_rows(len(windows), windows.shape[1], max(b.d_in for b in at), split)
    device = next(model.parameters()).device
    where = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    stores = [BlockStore(b, split.groups, solver, seed, where, norms=writes(model, b)) for b in at]
    tokens = _pass(model, _batches(windows, batch_size), stores, split, progress)
    for store in stores:
        _check_store(store, split)
    care = (fisher(model, at, windows, seed) if isinstance(windows, Tensor) else None) or {}
    norms = [model.get_submodule(b.out_norm) if b.out_norm else None for b in at]
    results = _spread(
        lambda pair: measure(pair[0], split, pair[1], care.get(pair[0].block.index)),
        list(zip(stores, norms, strict=True)),
    )
    settings = {
        "protocol": protocol,
        "folds": folds if isinstance(split, Folds) else None,
        "solver": solver,
        "seed": seed,
        "tokens": tokens,
        "window": windows.shape[1] if isinstance(windows, Tensor) else None,
    }
    return Profile(
        blocks=[m.record for m in results],
        maps={m.record.index: m.affine for m in results},
        r2_by_feature={m.record.index: m.r2_by_feature for m in results},
        stores=stores,
        settings=settings,
    )


def _split(protocol: str, folds: int, windows: Tensor | Iterable[Batch]) -> Split:
    if protocol == "default":
        return Folds(folds)
    if protocol != "paper":
        raise ValueError(f"unknown protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
    if not isinstance(windows, Tensor):
        raise ValueError("the paper protocol needs all windows at once: a LongTensor (n, length)")
    return RowSplit(windows.numel())


class _Enough(Exception):  # noqa: N818
    """Every block wanted has been heard in this forward."""


def _pass(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Tensor], int, int]],
    stores: list[BlockStore],
    split: Split,
    progress: Callable[[int], None] | None,
) -> int:
    """Run every batch through the model and its rows into the stores; the number of tokens."""
    net = backbone(model)
    device = next(model.parameters()).device
    extra = call_options(net)
    by_index = {store.block.index: store for store in stores}
    # all hidden units at first, then those that the store chose
    units: dict[int, Tensor | None] = {
        i: None if s.units is None else torch.tensor(s.units)
        for i, s in by_index.items()
        if s.norms is not None
    }
    number, tokens, offsets = 0, 0, [0]
    heard = 0

    def receive(block: Block, rows: Rows) -> None:
        try:
            store = by_index[block.index]
            store.update(rows, offsets, split)
            if store.units is not None:
                units[block.index] = torch.tensor(store.units)
        except ValueError as err:
            raise ValueError(f"block {block.index} ({block.path}), batch {number}: {err}") from None
        nonlocal heard
        heard += 1
        if heard == len(stores):
            raise _Enough  # what the model would do from here on, nobody needs

    with (
        torch.no_grad(),  # not inference mode: what a model in training caches, it must train with
        tap(model, receive, at=[store.block for store in stores], units=units),
    ):
        for number, (inputs, count, length) in enumerate(batches):  # noqa: B007
            offsets = [tokens + i * length for i in range(count)]
            heard = 0
            with contextlib.suppress(_Enough):
                net(**{name: value.to(device) for name, value in inputs.items()}, **extra)
            tokens += count * length
            if progress is not None:
                progress(count * length)
    return tokens


def _batches(
    windows: Tensor | Iterable[Batch], batch_size: int
) -> Iterator[tuple[dict[str, Tensor], int, int]]:
    """(model inputs, number of windows, tokens a window counts for)."""
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size} (--batch-size)")
    for batch in windows.split(batch_size) if isinstance(windows, Tensor) else windows:
        inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
        main = inputs.get("input_ids", next(iter(inputs.values())))
        # pictures and sounds have no tokens to count: each is a cell of its own
        length = main.shape[1] if "input_ids" in inputs else CELL
        yield inputs, len(main), length


def _check_store(store: BlockStore, split: Split) -> None:
    """The same check for streams, whose length is known only afterwards."""
    sizes = store.sizes
    fewest = min(sum(sizes) - sizes[f] for f in split.held(sizes))
    if fewest <= store.block.d_in:
        raise ValueError(
            f"too little text: block {store.block.index} ({store.block.path}) has {fewest} rows to "
            f"fit {store.block.d_in} columns; about {40 * store.block.d_in} tokens are needed (--tokens)"
        )


def _spread(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Blocks in parallel, a core each: small factorisations do not use two cores well."""
    threads = torch.get_num_threads()
    wide = is_wide([store.block for store, _ in items])
    if threads == 1 or wide or len(items) == 1 or items[0][0].body[0].device.type != "cpu":
        return [work(item) for item in items]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
