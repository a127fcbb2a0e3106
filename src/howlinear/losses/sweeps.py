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
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.losses.perplexity import Comparison, Loss, Reference, TokenScores, reference
from howlinear.losses.protocols import EvalProtocol, ScoredBatch, protocol_of, scored_batches
from howlinear.losses.readout import Readout, chunks
from howlinear.models.families import Block, Replacement, block_at, blocks
from howlinear.models.forward import Batch, WindowsLike, as_stream, as_windows, run_rows
from howlinear.models.hooks import swapped, tap
from howlinear.models.recording import Recording
from howlinear.records.files import clean
from howlinear.records.words import escaped
from howlinear.run.work import Advance, Ranks, Work

ROOM = 2**26  # logits of the original model that are kept to compare variants with

Variant = tuple[Block, Replacement]


@dataclass(frozen=True, eq=False, repr=False)
class SwapCost:
    """What one replacement of one block does to the model, and how far it is from the block."""

    block: Block
    change: Comparison | None  # of the model's predictions, where it makes any
    cosine: float  # mean over rows, of the block's output and the replacement's
    rmse: float  # of an element of the block's output
    stream_error: float  # mean over rows of |y - map(x)|^2 / |h|^2; nan where h is not known

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
    maps: Mapping[int, Replacement],
    windows: WindowsLike,
    *,
    protocol: EvalProtocol | str | None = None,
    batch_size: int = 8,
    progress: Advance | None = None,
) -> list[SwapCost]:
    """The cost of replacing each block alone, by depth index, on windows (n, length) of token ids.

    `maps` may hold anything that takes x (..., d_in) to y (..., d_out). A map of a profile replaces
    the module that it was fitted on, whatever its index. `windows` may also be one stream of tokens
    with a protocol; see `losses.protocols`. `progress` is called with tokens done.
    """
    by_index = {block.index: block for block in blocks(model)}
    chosen = {i: maps[i] for i in sorted(maps)}  # once: a run's maps are read from files
    variants = [(_block_of(model, by_index, i, fitted), fitted) for i, fitted in chosen.items()]
    work = Work(batch_size=batch_size, progress=None if progress is None else lambda *_: progress)
    return sweep(model, variants, windows, protocol=protocol, work=work).costs


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
    _check_widths(variants)
    work, protocol, readout = work or Work(), protocol_of(windows, protocol), Readout(model)
    recording = Recording(model, [block for block, _ in variants])
    note = _why_whole(recording, readout) if resume else ""
    resumed = resume and not note
    scores = [(TokenScores(), _Errors(model, block)) for block, _ in variants]
    advance = work.begin(label, _tokens(windows) * len(variants) // work.ranks.count)
    size = max(1, min(work.batch_size, ROOM // (readout.vocabulary * protocol.length)))
    for number, batch in enumerate(scored_batches(windows, protocol, size)):
        if not work.ranks.mine(number):
            continue
        rows, originals = _original(readout, recording, batch)
        for (block, replacement), (score, error) in zip(variants, scores, strict=True):
            watched = error.watching(replacement, rows[block])
            before = recording.resumed(block) if resumed else nullcontext()
            with before, swapped(model, {block: watched}):
                states = batch.rows(readout.states(batch.inputs))
            for original, part in zip(originals, _parts(batch, readout), strict=True):
                score.update(original, readout.logits(states[part]))
            advance(batch.tokens)
    costs = []
    for (block, _), (score, error) in zip(variants, scores, strict=True):
        score.sums = work.ranks.sum(score.sums)
        costs.append(SwapCost(block, score.comparison(protocol), *error.means(work.ranks)))
    return Sweep(costs, resumed, note)


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
    return [SwapCost(block, None, *errors[block].means(work.ranks)) for block in maps]


def _original(
    readout: Readout, recording: Recording, batch: ScoredBatch
) -> tuple[dict[Block, Rows], list[Reference]]:
    """The blocks' rows and the unchanged model's predictions of one batch."""
    rows: dict[Block, Rows] = {}
    at = list(recording.before)
    with recording.recording(), tap(recording.model, rows.__setitem__, at=at):
        states = batch.rows(readout.states(batch.inputs))
    targets, cluster = batch.targets, batch.cluster
    return rows, [
        reference(readout.logits(states[part]), targets[part], cluster[part])
        for part in _parts(batch, readout)
    ]


def _parts(batch: ScoredBatch, readout: Readout) -> Iterator[slice]:
    return chunks(int(batch.counted.sum()), readout.vocabulary)


def _check_widths(variants: Sequence[Variant]) -> None:
    for block, replacement in variants:
        widths = [getattr(replacement, name, None) for name in ("d_in", "d_out")]
        if None not in widths and widths != [block.d_in, block.d_out]:
            raise ValueError(
                f"the map of {block} takes {widths[0]} to {widths[1]}, "
                f"the block {block.d_in} to {block.d_out}: a map of another model?"
            )


class _Errors:
    """How far a replacement is from its block, summed over the rows it is run on."""

    def __init__(self, model: nn.Module, block: Block) -> None:
        self.out_norm = model.get_submodule(block.out_norm) if block.out_norm else None
        # rows, elements, cosines, squared errors, squared errors over the stream's squared norm
        self.sums = torch.zeros(5, dtype=torch.float64)

    def watching(self, replacement: Replacement, rows: Rows) -> Replacement:
        """The replacement, which also adds its errors on these rows when it runs."""

        def run(x: Tensor) -> Tensor:
            guess = replacement(x)
            if guess.shape[-1] == rows.y.shape[-1]:  # another width is refused by `swapped`
                self.update(rows, guess)
            return guess

        return run

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

    def means(self, ranks: Ranks) -> tuple[float, float, float]:
        """(cosine, rmse, stream_error) over the rows of all ranks."""
        n, elements, cosine, squares, stream = ranks.sum(self.sums[None])[0].tolist()
        if not n:
            return math.nan, math.nan, math.nan
        return cosine / n, math.sqrt(squares / elements), stream / n


def _total(values: Tensor) -> float:
    """In float64, so that it is the same however many threads or processes take part."""
    return float(values.cpu().sum(dtype=torch.float64))
