"""Blocks on inputs that are not their own, or not as they come: sums of rows, and R2 by folds.

    stats = input_moments(model, windows, at, 8, advance)       # block index -> mean, covariance
    asked = {3: {"own": (None, run, d), "x2": (double, run, d)}}
    feed(model, windows, blocks, asked, Folds(5), 8, advance)   # block index -> output -> sums
    on_gaussian(run, block, stats[3], windows, Folds(5), 0, None)

Least squares does not care how inputs are written: regressing f(Ax + c) on x gives the R2 of f on
Ax + c, whatever invertible A. So the outputs of several blocks, and of one block on scaled, moved
or whitened inputs, share one set of sums and one factorisation with x on its left side. No
activations are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.controls.gaussian import draw, symmetric_root
from howlinear.linear.affine import Affine, score
from howlinear.linear.crossval import cross_validate
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.stores import Folds
from howlinear.models.families import Block, backbone, call_options
from howlinear.models.hooks import as_module, tap
from howlinear.records.jackknife import Sums
from howlinear.run.ranks import ALONE, Ranks

Rewrite = Callable[[Tensor], Tensor]
Output = tuple[Rewrite | None, Rewrite, int]  # move x first, then run, d_out


def as_function(model: nn.Module, block: Block) -> Callable[[Tensor], Tensor]:
    """The block as a function of rows, in its own dtype and on its own device."""
    module = as_module(model, block)
    parameter = next(model.parameters())

    def run(x: Tensor) -> Tensor:
        windows = x if x.dim() == 3 else x[None]  # experts count on batches of windows
        with torch.no_grad():
            y = module(windows.to(parameter))
        return (y[0] if isinstance(y, tuple) else y).view(*x.shape[:-1], -1)

    return run


@contextmanager
def _heard(
    model: nn.Module, at: Sequence[Block], receive: Any
) -> Iterator[Callable[[Tensor], None]]:
    """Inside, a call with windows runs the model without its head."""
    net, device = backbone(model), next(model.parameters()).device
    extra = call_options(net)

    def run(ids: Tensor) -> None:
        with torch.no_grad():
            net(input_ids=ids.to(device), **extra)

    with tap(model, receive, at=at):
        yield run


def input_moments(
    model: nn.Module,
    windows: Tensor,
    at: Sequence[Block],
    batch_size: int,
    advance: Callable[[int], None],
    ranks: Ranks = ALONE,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean and covariance of what enters each block."""
    sums = {b.index: Moments(b.d_in, 1) for b in at}

    def receive(block: Block, rows: Rows) -> None:
        sums[block.index].update(rows.x, rows.x[..., :1])

    with _heard(model, at, receive) as run:
        for number, batch in enumerate(windows.split(batch_size)):
            if ranks.mine(number):
                run(batch)
            advance(batch.numel())
    sums = {i: ranks.added(m) for i, m in sums.items()}
    return {i: (m.mean_x, m.gram()[0] / m.weight) for i, m in sums.items()}


def feed(
    model: nn.Module,
    windows: Tensor,
    known: Any,
    asked: dict[int, dict[Any, Output]],
    split: Folds,
    batch_size: int,
    advance: Callable[[int], None],
    predicted: Mapping[int, Affine] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> dict[int, dict[Any, Sums]]:
    """Cross-validated sums of every output asked for on the inputs of each block.

    `asked` has an output "own" first, the block's own. `predicted` has maps of that one to score on
    the same rows, by block.
    """
    at = [known[i] for i in sorted(asked)]
    groups: dict[int, list[Moments]] = {}
    slices: dict[int, dict[Any, slice]] = {}
    for b in at:
        start, slices[b.index] = 0, {}
        for name, (_, _, width) in asked[b.index].items():
            slices[b.index][name] = slice(start, start + width)
            start += width
        groups[b.index] = [Moments(b.d_in, start) for _ in range(split.groups)]
    offset = 0

    def receive(block: Block, rows: Rows) -> None:
        assert rows.shape is not None
        B, L = rows.shape
        x = rows.x.view(B, L, -1)
        outputs = [
            rows.y if name == "own" else run(x if move is None else move(x))
            for name, (move, run, _) in asked[block.index].items()
        ]
        y = torch.cat([o.view(B, L, -1) for o in outputs], -1)
        for g, w, p in split.pieces([offset + i * L for i in range(B)], L):
            groups[block.index][g].update(x[w, p], y[w, p])

    with _heard(model, at, receive) as run_model:
        for number, batch in enumerate(windows.split(batch_size)):
            if ranks.mine(number):
                run_model(batch)
            offset += batch.numel()
            advance(batch.numel())
    found: dict[int, dict[Any, Sums]] = {}
    for k, b in enumerate(at):
        own = [ranks.collect(m, k % ranks.count) for m in groups.pop(b.index)]
        kept = [m for m in own if m is not None and m.n]
        if not ranks.mine(k):
            continue
        found[b.index] = _cross_validated(kept, slices[b.index])
        if b.index in predicted:
            found[b.index]["predicted"] = [_as_first(predicted[b.index], kept)]
    return ranks.joined(found)


def _cross_validated(groups: list[Moments], slices: dict[Any, slice]) -> dict[Any, Sums]:
    """[SS_res, SS_tot] of each fold by the map of the others, for each part of the outputs."""
    scores = cross_validate(groups)
    return {name: [[one.sums(part) for one in scores]] for name, part in slices.items()}


def _as_first(affine: Affine, groups: list[Moments]) -> list[list[float]]:
    """[SS_res, SS_tot] of each fold by a map of the first outputs alone."""
    more = groups[0].d_out - affine.d_out
    W = torch.nn.functional.pad(affine.weight, (0, 0, 0, more))
    whole = Affine(W, torch.nn.functional.pad(affine.bias, (0, more)), affine.rank)
    return [score(whole, m).sums(slice(affine.d_out)) for m in groups]


def on_gaussian(
    module: Callable[[Tensor], Tensor],
    block: Block,
    stats: tuple[Tensor, Tensor],
    windows: Tensor,
    split: Folds,
    seed: int,
    expected: Affine | None,
) -> tuple[Sums, Sums | None]:
    """R2 on as many Gaussian rows as the text has, and of the predicted map there."""
    generator, root = torch.Generator().manual_seed(seed), symmetric_root(stats[1])
    groups = [Moments(block.d_in, block.d_out) for _ in range(split.groups)]
    sizes = [0] * split.groups
    length = windows.shape[1]
    for g, w, _ in split.pieces([i * length for i in range(len(windows))], length):
        sizes[g] += (w.stop - w.start) * length
    for moments, size in zip(groups, sizes, strict=True):
        for start in range(0, size, 4096):
            x = draw(stats[0], root, min(4096, size - start), generator)
            moments.update(x.float(), module(x.float()))
    kept = [m for m in groups if m.n]
    sums = _cross_validated(kept, {"own": slice(None)})["own"]
    if expected is None:
        return sums, None
    return sums, [[score(expected, m).sums() for m in kept]]
