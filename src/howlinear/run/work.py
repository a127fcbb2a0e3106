"""How a measurement is carried out: processes, batch size, progress.

    work = Work(Ranks.start(), batch_size=8, progress=bars)
    advance = work.begin("swapping", 4096)      # tokens to run
    advance(512)                                # tokens done

    steps = Steps({"fit": 30, "score": 30}, {"fit": 5.0, "score": 1.0})     # how many, how long
    steps.done("fit", 2.5)                      # seconds
    work.begin(f"scoring{steps}")               # "scoring, about 80 s left"

Nothing here changes what is measured. Several processes divide one text:

    ranks = Ranks.start()                   # under torchrun; one process alone is Ranks()
    if ranks.mine(number): ...              # batches are dealt out in turn
    store = ranks.collect(store, owner)     # at the owner with the rows of all ranks, else None
    sums = ranks.added(sums)                # the rows of all ranks, at every rank
    ranks.share(value)                      # the value of rank 0, at every rank

Moments are added along a tree, in log2(ranks) steps, for any kind of accumulator. The owner of a block
solves it, so that solving is divided too. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from howlinear.linear.moments import Moments
from howlinear.linear.stores import BlockStore
from howlinear.records.words import duration

Advance = Callable[[int], None]  # called with the number of tokens done
Progress = Callable[[str, int], Advance]  # called with a label and the number of tokens to run
S = TypeVar("S", BlockStore, Moments)
T = TypeVar("T")

PATIENCE = timedelta(hours=12)  # for a slower rank; a rank that died is noticed at once


@dataclass(frozen=True)
class Ranks:
    """The number of this process, and of all processes that share the work."""

    rank: int = 0
    count: int = 1

    @classmethod
    def start(cls) -> Ranks:
        """Join the other processes if torchrun started this one."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)  # sums travel through main memory
        return cls(dist.get_rank(), dist.get_world_size())

    def stop(self) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.barrier()  # no rank leaves while another still sends
            dist.destroy_process_group()

    def mine(self, number: int) -> bool:
        return number % self.count == self.rank

    def collect(self, store: S, owner: int) -> S | None:
        """The rows of all ranks at their owner; None at the other ranks."""
        place, step = (self.rank - owner) % self.count, 1
        while step < self.count:
            if place % (2 * step):
                self._send(store.state_dict(), (self.rank - step) % self.count)
                return None
            if place + step < self.count:
                state = self._receive((self.rank + step) % self.count)
                store.merge(_revived(store, state))
            step *= 2
        return store

    def collect_all(self, stores: list[BlockStore]) -> list[BlockStore]:
        """Stores that this rank owns, with the rows of all ranks; `stores` is emptied."""
        owned = []
        for i in range(len(stores)):
            store = self.collect(stores.pop(0), i % self.count)
            owned += [] if store is None else [store]
        return owned

    def added(self, sums: Moments) -> Moments:
        """The rows of all ranks, at every rank."""
        if self.count == 1:
            return sums
        total = self.collect(sums, 0)
        state = {} if total is None else {n: v.cpu() for n, v in total.state_dict().items()}
        heads = self.share([(name, v.dtype, tuple(v.shape)) for name, v in state.items()])
        for name, dtype, shape in heads:
            state[name] = state.get(name, torch.empty(shape, dtype=dtype)).contiguous()
            if state[name].numel():
                dist.broadcast(state[name].reshape(-1).view(torch.uint8), 0)
        return _revived(sums, state) if total is None else total

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values (n, k), the shorter ones padded with zeros."""
        if self.count == 1:
            return values
        most = max(self.gather(len(values)))
        total = torch.nn.functional.pad(values.cpu(), (0, 0, 0, most - len(values))).contiguous()
        dist.all_reduce(total)
        return total

    def tensors_at_first(self, tensors: Mapping[str, Tensor], owner: int) -> dict[str, Tensor]:
        """Tensors of the owner at rank 0; the argument unchanged at the other ranks."""
        if owner != 0 and self.rank == owner:
            self._send(tensors, 0)
        return self._receive(owner) if owner != 0 and self.rank == 0 else dict(tensors)

    def share(self, value: Any) -> Any:
        """A small value of rank 0 at every rank."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """A small value of each rank at every rank, in order."""
        if self.count == 1:
            return [value]
        box: list[Any] = [None] * self.count
        dist.all_gather_object(box, value)
        return box

    def joined(self, by_block: dict[int, T]) -> dict[int, T]:
        """Small values by block of all ranks, at every rank."""
        every = {i: value for part in self.gather(by_block) for i, value in part.items()}
        return {i: every[i] for i in sorted(every)}

    # -- sending tensors

    def _send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
        heads = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
        dist.send_object_list([heads], to)
        for value in tensors.values():
            if value.numel():
                dist.send(value.reshape(-1).view(torch.uint8), to)

    def _receive(self, source: int) -> dict[str, Tensor]:
        box: list[Any] = [None]
        dist.recv_object_list(box, source)
        tensors = {}
        for name, dtype, shape in box[0]:
            value = torch.empty(shape, dtype=dtype)
            if value.numel():
                dist.recv(value.reshape(-1).view(torch.uint8), source)
            tensors[name] = value
        return tensors


def _revived(like: S, state: Mapping[str, Tensor]) -> S:
    """What another rank sent, as the same type as `like`."""
    if isinstance(like, BlockStore):
        return BlockStore.from_state(like.block, state, like.body[0].device)
    twin = Moments(like.d_in, like.d_out, device=like.device)
    twin.load_state_dict(state)
    return twin


ALONE = Ranks()


@dataclass(frozen=True)
class Work:
    """The processes that share a measurement, its batch size, and where progress is reported."""

    ranks: Ranks = ALONE
    batch_size: int = 8
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch size must be at least 1, got {self.batch_size} (`batch_size`)")

    def begin(self, label: str, tokens: int = 0) -> Advance:
        """Announce a step; the function to call with tokens done."""
        return _ignore if self.progress is None else self.progress(label, tokens)


class Steps:
    """Steps of several kinds, and the time that those to come will take.

    A kind that was done takes what it took on average. Any other takes time in proportion to its size,
    a guess, at the rate of the steps that were done.
    """

    def __init__(self, counts: Mapping[str, int], sizes: Mapping[str, float]) -> None:
        self.to_come, self.sizes = dict(counts), sizes
        self.taken: dict[str, list[float]] = {}

    def done(self, kind: str, seconds: float, count: int = 1) -> None:
        """So many steps of one kind took these seconds."""
        self.taken.setdefault(kind, []).extend([seconds / count] * count)
        self.to_come[kind] -= count

    def skip(self, kind: str) -> None:
        """One step of this kind is not needed."""
        self.to_come[kind] -= 1

    @property
    def left(self) -> float | None:
        """Seconds of all steps to come; None before the first one is done."""
        if not self.taken:
            return None
        sizes = sum(self.sizes[kind] * len(each) for kind, each in self.taken.items())
        rate = sum(map(sum, self.taken.values())) / sizes
        each = {kind: size * rate for kind, size in self.sizes.items()}
        each |= {kind: sum(taken) / len(taken) for kind, taken in self.taken.items()}
        return sum(count * each[kind] for kind, count in self.to_come.items())

    def __str__(self) -> str:
        """What a label ends with: empty while nothing is known, and when nothing is to come."""
        return f", {duration(self.left)} left" if self.left else ""


def _ignore(tokens: int) -> None:
    """Progress that is not reported."""
