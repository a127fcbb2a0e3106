"""What each swap costs: the model run with one block at a time replaced, on text that no fit saw.

    costs = swap_costs(model, {11: affine, 28: other}, windows)     # one map a block
    costs[0].change.delta_ppl, costs[0].change.delta_ppl_se, costs[0].cosine

Every number is paired: the original and each variant see the same tokens, and the blocks before the
swapped one are computed once. See `losses.perplexity` for how a difference gets its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.losses.perplexity import Comparison, Loss, Reference, TokenScores, reference
from howlinear.losses.protocols import (
    EvalProtocol,
    ScoredBatch,
    as_tokens,
    protocol_of,
    scored_batches,
)
from howlinear.losses.readout import Readout, chunks
from howlinear.models.families import Block, Replacement, block_at, blocks
from howlinear.models.forward import Batch, WindowsLike, as_stream, as_windows, run_rows
from howlinear.models.hooks import swapped, tap
from howlinear.models.recording import Recording
from howlinear.records.files import clean
from howlinear.records.words import escaped
from howlinear.run.work import Advance, Work

ROOM = 2**26  # logits of the original model that are kept to compare variants with

Variant = tuple[Block, Replacement]
Together = Mapping[Block, Replacement]  # several blocks replaced at once


@dataclass(frozen=True, eq=False, repr=False)
class SwapCost:
    """What one replacement of one block does to the model, and how far it is from the block.

    Costs of the same replacement on different windows add up with `+`.
    """

    block: Block
    change: Comparison | None  # of the model's predictions, where it makes any
    errors: Tensor  # (5,) sums over rows, see `_Errors`

    def __add__(self, other: SwapCost) -> SwapCost:
        both = self.change and other.change and self.change + other.change
        return SwapCost(self.block, both, self.errors + other.errors)

    @property
    def cosine(self) -> float:
        """Mean over rows of the cosine of the block's output and the replacement's."""
        return self._mean(2, 0)

    @property
    def rmse(self) -> float:
        """Of an element of the block's output."""
        return math.sqrt(self._mean(3, 1))

    @property
    def stream_error(self) -> float:
        """Mean over rows of |y - map(x)|^2 / |h|^2; nan where h is not known."""
        return self._mean(4, 0)

    def _mean(self, total: int, number: int) -> float:
        sums = self.errors.tolist()
        return sums[total] / sums[number] if sums[number] else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values, None for numbers that are not finite."""
        place = {"index": self.block.index, "path": self.block.path}
        change = None if self.change is None else self.change.to_dict()
        names = ("cosine", "rmse", "stream_error")
        return {**place, "change": change, **clean({name: getattr(self, name) for name in names})}

    def __repr__(self) -> str:
        cost = f"cosine {self.cosine:.3f}" if self.change is None else str(self.change)
        return escaped(f"<SwapCost of {self.block}: {cost}>")


@dataclass(frozen=True, eq=False)
class Sweep:
    """Costs in the order of the variants."""

    costs: list[SwapCost]
    resumed: bool  # were the layers before a swap computed once?
    note: str = ""  # why not, where that was tried

    @property
    def base(self) -> Loss:
        """The loss of the model as it is."""
        change = self.costs[0].change
        assert change is not None
        return change.original


def swap_costs(
    model: nn.Module,
    maps: Mapping[Any, Replacement],
    windows: WindowsLike,
    *,
    protocol: EvalProtocol | str | None = None,
    batch_size: int = 8,
    progress: Advance | None = None,
) -> list[SwapCost]:
    """The cost of replacing each block alone, in depth order, on windows (n, length) of token ids.

    `maps` has, for blocks named as in `blocks`, anything that takes x (..., d_in) to y (..., d_out). A
    map of a profile replaces the module that it was fitted on, whatever its index. `windows` may also
    be one stream of tokens with a protocol; see `losses.protocols`. `progress` is called with tokens done.
    """
    by_index = {block.index: block for block in blocks(model)}
    variants: list[Variant] = []
    for name, fitted in maps.items():  # once: a run's maps are read from files
        if isinstance(name, SupportsIndex):
            variants.append((_block_of(model, by_index, name.__index__(), fitted), fitted))
        else:
            variants += [(block, fitted) for block in blocks(model, name)]
    variants.sort(key=lambda variant: variant[0].index)
    work = Work(batch_size=batch_size, progress=None if progress is None else lambda *_: progress)
    return sweep(model, variants, as_tokens(windows), protocol=protocol, work=work).costs


def _block_of(
    model: nn.Module, by_index: Mapping[int, Block], index: int, fitted: Replacement
) -> Block:
    """The block of this index, unless the map carries the path of another module."""
    block, path = by_index.get(index), getattr(fitted, "path", "")
    if path and not (block and f".{block.path}".endswith(f".{path}")):
        block = block_at(model, path)
        if block is None:
            raise ValueError(
                f"map {index} was fitted on {path}, which {type(model).__name__} does not have: "
                "a map of another model?"
            )
        return replace(block, index=index)
    if block is None:
        raise ValueError(f"there is no block {index}: the model has {len(by_index)} blocks")
    return block


def sweep(
    model: nn.Module,
    variants: Sequence[Variant],
    windows: WindowsLike,
    *,
    protocol: EvalProtocol | str | None = None,
    resume: bool = True,
    work: Work | None = None,
    label: str = "swapping",
) -> Sweep:
    """The model once as it is, and once with each variant alone.

    Progress is in tokens of all variants. Of several ranks each runs some of the batches; all get
    the whole result. `resume=False` runs every layer for every variant: the slow reference.
    """
    sweeper = Sweeper(model, [block for block, _ in variants], resume=resume, work=work)
    costs = sweeper.run(variants, windows, protocol=protocol, label=label)
    return Sweep(costs, sweeper.resumed, sweeper.note)


class Sweeper:
    """A model made ready to have some of its blocks replaced, in one sweep or in several."""

    def __init__(
        self,
        model: nn.Module,
        at: Sequence[Block],
        *,
        resume: bool = True,
        work: Work | None = None,
    ) -> None:
        self.model, self.work, self.readout = model, work or Work(), Readout(model)
        self.recording = Recording(model, at)
        self.note = _why_whole(self.recording, self.readout) if resume else ""
        self.resumed = resume and not self.note

    def run(
        self,
        variants: Sequence[Variant | Together],
        windows: WindowsLike,
        *,
        protocol: EvalProtocol | str | None = None,
        positions: int | None = None,
        first: int = 0,
        label: str = "swapping",
    ) -> list[SwapCost]:
        """The model once as it is, and once with each variant alone; costs in their order.

        For `positions` and `first` see `scored_batches`. Of several blocks that are replaced
        together, the cost names the first one and has no errors.
        """
        changes = [dict(v) if isinstance(v, Mapping) else dict([v]) for v in variants]
        for change in changes:
            _check_widths(list(change.items()))
        protocol, ranks = protocol_of(windows, protocol), self.work.ranks
        scores = [(TokenScores(), _Errors(self.model, *change)) for change in changes]
        advance = self.work.begin(label, _tokens(windows) * len(variants) // ranks.count)
        logits = self.readout.vocabulary * min(protocol.length, positions or protocol.length)
        size = max(1, min(self.work.batch_size, ROOM // logits))
        batches = scored_batches(windows, protocol, size, positions, first)
        for number, batch in enumerate(batches):
            if not ranks.mine(number):
                continue
            rows, originals = self._original(batch, [b for change in changes for b in change])
            for change, (score, error) in zip(changes, scores, strict=True):
                states = self._changed(batch, error.watching(change, rows))
                for original, part in zip(originals, self._parts(batch), strict=True):
                    score.update(original, self.readout.logits(states[part]))
                advance(batch.tokens)
        costs = []
        for change, (score, error) in zip(changes, scores, strict=True):
            score.sums = ranks.sum(score.sums)
            errors = ranks.sum(error.sums[None])[0]
            costs.append(SwapCost(next(iter(change)), score.comparison(protocol), errors))
        return costs

    def _original(
        self, batch: ScoredBatch, at: Sequence[Block]
    ) -> tuple[dict[Block, Rows], list[Reference]]:
        """The blocks' rows and the unchanged model's predictions of one batch."""
        rows: dict[Block, Rows] = {}
        at = list(dict.fromkeys(at))
        with self.recording.recording(), tap(self.model, rows.__setitem__, at=at):
            states = batch.rows(self.readout.states(batch.inputs))
        targets, cluster = batch.targets, batch.cluster
        return rows, [
            reference(self.readout.logits(states[part]), targets[part], cluster[part])
            for part in self._parts(batch)
        ]

    def _changed(self, batch: ScoredBatch, change: dict[Block, Replacement]) -> Tensor:
        """(n, d), the states that predict, with blocks replaced; layers before them do not run."""
        first = min(change, key=lambda block: block.index)
        before = self.recording.resumed(first) if self.resumed else nullcontext()
        with before, swapped(self.model, change):
            return batch.rows(self.readout.states(batch.inputs))

    def _parts(self, batch: ScoredBatch) -> Iterator[slice]:
        return chunks(int(batch.counted.sum()), self.readout.vocabulary)


def _why_whole(recording: Recording, readout: Readout) -> str:
    """Why the model cannot be resumed at the blocks, tested on a few tokens; "" where it can."""
    probe = {"input_ids": torch.arange(10, 14)[None] % readout.vocabulary}
    problem = recording.problem(lambda: readout.states(probe))
    why = f"every swap ran the whole model, since it could not be resumed: {problem}"
    return why if problem else ""


def _tokens(windows: WindowsLike) -> int:
    """Tokens to run; 0 where only reading tells."""
    stream = as_stream(windows)
    return as_windows(windows).tokens if stream is None else len(stream)


def map_errors(
    model: nn.Module,
    variants: Sequence[Variant],
    windows: WindowsLike,
    work: Work | None = None,
) -> list[SwapCost]:
    """How far each replacement is from its block, for models that predict no next token."""
    _check_widths(variants)
    work, maps = work or Work(), dict(variants)
    errors = {block: _Errors(model, block) for block in maps}

    def receive(_: Batch, block: Block, rows: Rows) -> None:
        errors[block].update(rows, maps[block](rows.x))

    run_rows(model, windows, receive, at=list(maps), work=work, label="comparing")
    sums = {block: work.ranks.sum(error.sums[None])[0] for block, error in errors.items()}
    return [SwapCost(block, None, sums[block]) for block in maps]


def _check_widths(variants: Sequence[Variant]) -> None:
    for block, replacement in variants:
        widths = [getattr(replacement, name, None) for name in ("d_in", "d_out")]
        if None not in widths and widths != [block.d_in, block.d_out]:
            raise ValueError(
                f"the map of {block} takes {widths[0]} to {widths[1]}, "
                f"the block {block.d_in} to {block.d_out}: a map of another model?"
            )


class _Errors:
    """How far a replacement is from its block, summed over the rows it is run on.

    Nothing is summed for several blocks that are replaced together.
    """

    def __init__(self, model: nn.Module, block: Block, *others: Block) -> None:
        self.out_norm = model.get_submodule(block.out_norm) if block.out_norm else None
        self.alone = not others
        # rows, elements, cosines, squared errors, squared errors over the stream's squared norm
        self.sums = torch.zeros(5, dtype=torch.float64)

    def watching(
        self, change: Mapping[Block, Replacement], rows: Mapping[Block, Rows]
    ) -> dict[Block, Replacement]:
        """The replacements; one alone also adds its errors on these rows when it runs."""
        if not self.alone:
            return dict(change)
        ((block, replacement),) = change.items()
        theirs = rows[block]

        def run(x: Tensor) -> Tensor:
            guess = replacement(x)
            if guess.shape[-1] == theirs.y.shape[-1]:  # another width is refused by `swapped`
                self.update(theirs, guess)
            return guess

        return {block: run}

    def update(self, rows: Rows, guess: Tensor) -> None:
        y, guess = rows.y, guess.detach().reshape(-1, guess.shape[-1])
        if len(guess) != len(y):  # the rows leave padding out
            guess = guess[rows.kept]
        y, guess = y.float(), guess.float()
        cosine = _total(torch.cosine_similarity(y, guess, dim=1))
        squares, stream = _total((y - guess).square()), math.nan
        if rows.stream is not None:
            if self.out_norm is not None:
                y, guess = self.out_norm(rows.y), self.out_norm(guess.to(rows.y))
            stream = _total((y - guess).float().square().sum(1) / rows.stream)
        self.sums += torch.tensor([len(y), y.numel(), cosine, squares, stream], dtype=torch.float64)


def _total(values: Tensor) -> float:
    """In float64, so that it is the same however many threads or processes take part."""
    return float(values.cpu().sum(dtype=torch.float64))
