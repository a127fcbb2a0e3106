"""What each swap costs: the model run with one block at a time replaced, on text that no fit saw.

    costs = swap_costs(model, {11: affine, 28: other}, windows)     # one map a block
    costs[0].change.delta_ppl, costs[0].change.delta_ppl_se, costs[0].cosine

Every number is paired: the original and each variant see the same tokens, and the blocks before the
swapped one are computed once. See `perplexity` for how a difference gets its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.losses.perplexity import Comparison, Loss, Reference, TokenScores, reference
from howlinear.losses.protocols import Batch, Batches, Protocol, batches, protocol_of
from howlinear.losses.readout import Readout, chunks
from howlinear.models.families import Block, backbone, blocks
from howlinear.models.hooks import evaluating, swapped, tap
from howlinear.models.resuming import Recording
from howlinear.records.escaping import escaped
from howlinear.records.files import clean
from howlinear.run.ranks import ALONE, Ranks

ROOM = 2**26  # logits of the original model that are kept while variants are held against them

Replacement = Callable[[Tensor], Tensor]
Variant = tuple[Block, Replacement]


@dataclass(frozen=True, eq=False, repr=False)
class Cost:
    """What one replacement of one block does to the model, and how far it is from the block."""

    block: Block
    change: Comparison | None  # of the model's predictions, where it makes any
    cosine: float  # mean over rows, of the block's output and the replacement's
    rmse: float  # of an element of the block's output
    stream_error: float  # mean over rows of |y - map(x)|^2 / |h|^2; nan where h is not known

    def to_dict(self) -> dict[str, Any]:
        """Plain values, None for numbers that are not finite."""
        found: dict[str, Any] = {"index": self.block.index, "path": self.block.path}
        found["change"] = None if self.change is None else self.change.to_dict()
        names = ("cosine", "rmse", "stream_error")
        return found | clean({name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        said = f"cosine {self.cosine:.3f}" if self.change is None else str(self.change)
        return escaped(f"<Cost of block {self.block.index} ({self.block.path}): {said}>")


@dataclass(frozen=True, eq=False)
class Sweep:
    """Costs in the order of the variants; `resumed`: were the blocks before a swap computed once?"""

    costs: list[Cost]
    base: Loss
    resumed: bool


def swap_costs(
    model: nn.Module,
    maps: Mapping[int, Replacement],
    windows: Batches,
    *,
    protocol: Protocol | str | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> list[Cost]:
    """The cost of replacing each block alone, by depth index, on windows (n, length) of token ids.

    `maps` may hold anything that takes x (..., d_in) to y (..., d_out). `windows` may also be one
    stream of tokens with a protocol; see `perplexity`. `progress` is called with tokens done.
    """
    by_index = {block.index: block for block in blocks(model)}
    if missing := [i for i in maps if i not in by_index]:
        raise ValueError(f"there is no block {missing[0]}: the model has {len(by_index)} blocks")
    variants = [(by_index[i], maps[i]) for i in sorted(maps)]
    return sweep(
        model, variants, windows, protocol=protocol, batch_size=batch_size, progress=progress
    ).costs


def sweep(
    model: nn.Module,
    variants: Sequence[Variant],
    windows: Batches,
    *,
    protocol: Protocol | str | None = None,
    batch_size: int = 8,
    resume: bool = True,
    ranks: Ranks = ALONE,
    progress: Callable[[int], None] | None = None,
) -> Sweep:
    """The model once as it is, and once with each variant alone. `progress` hears tokens a variant.

    Several `ranks` take batches in turn, and each has the whole result.
    """
    for block, replacement in variants:
        check_widths(block, replacement)
    how, readout = protocol_of(windows, protocol), Readout(model)
    at = list(dict.fromkeys(block for block, _ in variants))
    recording = Recording(model, at)
    probe = {"input_ids": torch.arange(10, 14)[None] % readout.vocabulary}
    resumed = resume and recording.works(lambda: readout.states(probe))
    scores = [TokenScores() for _ in variants]
    errors = [_Errors(_norm(model, block)) for block, _ in variants]
    base = TokenScores()
    size = max(1, min(batch_size, ROOM // (readout.vocabulary * how.length)))
    for number, batch in enumerate(batches(windows, how, size)):
        if not ranks.mine(number):
            continue
        rows, originals = _original(model, readout, recording, batch, at)
        for original in originals:
            base.update(original, original.log_p)
        for (block, replacement), score, error in zip(variants, scores, errors, strict=True):
            with ExitStack() as stack:
                if resumed:
                    stack.enter_context(recording.resumed(block))
                watched = error.watching(replacement, rows[block])
                stack.enter_context(swapped(model, {block: watched}))
                states = batch.rows(readout.states(batch.inputs))
            for original, part in zip(originals, _parts(batch, readout), strict=True):
                score.update(original, readout.logits(states[part]))
            if progress is not None:
                progress(batch.inputs["input_ids"].numel())
    for score in (base, *scores):
        score.sums = ranks.sum(score.sums)
    costs = [
        Cost(block, score.comparison(how), *error.means(ranks))
        for (block, _), score, error in zip(variants, scores, errors, strict=True)
    ]
    return Sweep(costs, base.comparison(how).original, resumed)


def map_errors(
    model: nn.Module, variants: Sequence[Variant], windows: Batches, ranks: Ranks = ALONE
) -> list[Cost]:
    """How far each replacement is from its block: all that can be said without a prediction."""
    for block, replacement in variants:
        check_widths(block, replacement)
    errors = {block: _Errors(_norm(model, block)) for block, _ in variants}
    maps = dict(variants)

    def receive(block: Block, rows: Rows) -> None:
        errors[block].update(rows, maps[block](rows.x))

    with torch.no_grad(), evaluating(model), tap(model, receive, at=list(maps)):
        for number, inputs in enumerate(model_inputs(model, windows)):
            if ranks.mine(number):
                backbone(model)(**inputs)
    return [Cost(block, None, *errors[block].means(ranks)) for block in maps]


def model_inputs(
    model: nn.Module, windows: Batches, batch_size: int = 8
) -> Iterator[dict[str, Tensor]]:
    """Batches of windows (n, length), or of dicts of inputs, on the model's device."""
    device = next(model.parameters()).device
    for given in windows.split(batch_size) if isinstance(windows, Tensor) else windows:
        inputs = {"input_ids": given} if isinstance(given, Tensor) else given
        yield {name: value.to(device) for name, value in inputs.items()}


def _original(
    model: nn.Module, readout: Readout, recording: Recording, batch: Batch, at: list[Block]
) -> tuple[dict[Block, Rows], list[Reference]]:
    """What the blocks said and what the model predicted before anything is changed."""
    rows: dict[Block, Rows] = {}
    with recording.listening(), tap(model, rows.__setitem__, at=at):
        states = batch.rows(readout.states(batch.inputs))
    targets, window = batch.targets, batch.window
    return rows, [
        reference(readout.logits(states[part]), targets[part], window[part])
        for part in _parts(batch, readout)
    ]


def _parts(batch: Batch, readout: Readout) -> Iterator[slice]:
    return chunks(int(batch.counted.sum()), readout.vocabulary)


def check_widths(block: Block, replacement: Replacement) -> None:
    widths = [getattr(replacement, name, None) for name in ("d_in", "d_out")]
    if None not in widths and widths != [block.d_in, block.d_out]:
        raise ValueError(
            f"the map of block {block.index} ({block.path}) takes {widths[0]} to {widths[1]}, "
            f"the block {block.d_in} to {block.d_out}: a map of another model?"
        )


def _norm(model: nn.Module, block: Block) -> nn.Module | None:
    return model.get_submodule(block.out_norm) if block.out_norm else None


class _Errors:
    """How far a replacement is from its block, summed over the rows it is run on."""

    def __init__(self, out_norm: nn.Module | None) -> None:
        self.out_norm = out_norm
        self.n = self.elements = 0
        self.cosine = self.squares = self.stream = 0.0

    def watching(self, replacement: Replacement, rows: Rows) -> Replacement:
        """The replacement, heard by the way."""

        def run(x: Tensor) -> Tensor:
            guess = replacement(x)
            if guess.shape[-1] == rows.y.shape[-1]:  # else `swapped` has a word to say
                self.update(rows, guess)
            return guess

        return run

    def update(self, rows: Rows, guess: Tensor) -> None:
        y, guess = rows.y, guess.detach().reshape(-1, guess.shape[-1])
        if len(guess) != len(y):  # the rows leave padding out
            guess = guess[rows.kept]
        y, guess = y.float(), guess.float()
        self.n += len(y)
        self.elements += y.numel()
        self.cosine += _total(torch.cosine_similarity(y, guess, dim=1))
        self.squares += _total((y - guess).square())
        if rows.stream is None:
            self.stream = math.nan
            return
        if self.out_norm is not None:
            y, guess = self.out_norm(rows.y), self.out_norm(guess.to(rows.y))
        off = (y - guess).float().square().sum(1) / rows.stream
        self.stream += _total(off)

    def means(self, ranks: Ranks) -> tuple[float, float, float]:
        """(cosine, rmse, stream_error), of what all ranks have summed."""
        own = [self.n, self.elements, self.cosine, self.squares, self.stream]
        n, elements, cosine, squares, stream = ranks.sum(torch.tensor([own], dtype=torch.float64))[
            0
        ].tolist()
        if not n:
            return math.nan, math.nan, math.nan
        return cosine / n, math.sqrt(squares / elements), stream / n


def _total(values: Tensor) -> float:
    """In float64, so that it is the same however many threads or processes take part."""
    return float(values.cpu().sum(dtype=torch.float64))
