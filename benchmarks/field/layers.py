"""Methods that remove whole layers: SLEB, ShortGPT, angles between states, ReplaceMe.

A size that no number of layers hits exactly is the next larger one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from field.llama import (
    BATCH,
    Calibration,
    Made,
    clone,
    entry,
    inputs_of,
    keep_layers,
    linear,
    spread_rows,
    through,
)
from howlinear.models.families import parameter_count

SLEB_TOKENS = 2048  # of calibration text, on which every removal is tried
RIDGES = (1e-6, 1e-3, 1e-1)  # of the mean diagonal: those that ReplaceMe is tried with


def number_of_layers(calibration: Calibration, target: int) -> int:
    return -(-max(target, 0) // parameter_count(calibration.layers[0]))


def without(calibration: Calibration, gone: list[int]) -> Any:
    kept = [i for i in range(len(calibration.layers)) if i not in gone]
    return keep_layers(clone(calibration.model), kept)


# -- SLEB -----------------------------------------------------------------------------------------


def sleb(calibration: Calibration, target: int) -> Made:
    """SLEB (arXiv 2402.09025): remove the layer without which perplexity is lowest, then the next.

    Every removal is tried on calibration text, given the layers removed before. O(layers^2) forwards.
    """
    count = number_of_layers(calibration, target)
    gone: list[int] = []
    for step in range(count):
        gone = calibration.once(
            f"sleb {step + 1}", lambda gone=gone: [*gone, next_one(calibration, gone)]
        )
    return Made(without(calibration, gone), f"layers {sorted(gone)}")


@torch.no_grad()
def next_one(calibration: Calibration, gone: list[int]) -> int:
    """The layer that costs least without those that are gone. States before it are computed once."""
    length = calibration.ids.shape[1]
    ids = spread_rows(calibration.ids, max(1, SLEB_TOKENS // length))
    left = [i for i in range(len(calibration.layers)) if i not in gone]
    losses = torch.zeros(len(left))
    for part in ids.split(BATCH):
        state, options = entry(calibration.model, part)
        for place, i in enumerate(left):
            after = state
            for j in left[place + 1 :]:
                after = through(calibration.layers[j], after, options)
            losses[place] += total_loss(calibration.model, after, part)
            state = through(calibration.layers[i], state, options)
    return left[int(losses.argmin())]


def total_loss(model: Any, state: Tensor, ids: Tensor) -> float:
    """Sum of losses over all tokens, from the states after the last layer."""
    total = 0.0
    for rows, targets in zip(model.model.norm(state), ids, strict=True):
        total += float(
            cross_entropy(model.lm_head(rows[:-1]).float(), targets[1:], reduction="sum")
        )
    return total


# -- ShortGPT and angles --------------------------------------------------------------------------


def shortgpt(calibration: Calibration, target: int) -> Made:
    """ShortGPT (arXiv 2403.03853): remove the layers with the least block influence, all at once.

    Block influence is 1 - the mean cosine of a layer's input and output.
    """
    count = number_of_layers(calibration, target)
    cosines, _ = calibration.cosines if count else (torch.ones(1, 1), None)
    gone = (1 - cosines.diagonal(1)).topk(count, largest=False).indices.tolist() if count else []
    return Made(without(calibration, gone), f"layers {sorted(gone)}")


def angle(calibration: Calibration, target: int) -> Made:
    """The Unreasonable Ineffectiveness of the Deeper Layers (arXiv 2403.17887), without its healing.

    Remove the n consecutive layers whose input and output have the smallest angle at last tokens.
    """
    count = number_of_layers(calibration, target)
    if not count:
        return Made(clone(calibration.model))
    start = int(calibration.cosines[1].diagonal(count).argmin())
    return Made(
        without(calibration, list(range(start, start + count))),
        f"layers {start} to {start + count - 1}",
    )


# -- ReplaceMe ------------------------------------------------------------------------------------


def replaceme(calibration: Calibration, target: int) -> Made:
    """ReplaceMe (arXiv 2505.02819), least squares: n consecutive layers become one matrix.

    The cut is where the states before and after have the smallest cosine distance. With M the output of
    the feed-forward block before the cut, Y the stream that it is added to and L the stream after the cut,
    T = argmin |M T + Y - L|^2 is folded into that block's down projection: nothing is added. One cut; the
    best of three ridges towards 0 is kept.
    """
    count = number_of_layers(calibration, target)
    if not count:
        return Made(clone(calibration.model))
    cosines, _ = calibration.cosines
    first = 1 + int(cosines.diagonal(count)[1:].argmax())  # a layer stays in front of the cut
    ways = {
        f"layers {first} to {first + count - 1} folded into {first - 1}, ridge {ridge:g}": partial(
            folded, first=first, count=count, ridge=ridge
        )
        for ridge in RIDGES
    }
    return calibration.best(ways)


def folded(calibration: Calibration, first: int, count: int, ridge: float) -> Any:
    """The layers first, ..., first + count - 1 replaced by a matrix in the layer before them."""
    W = calibration.layers[first - 1].mlp.down_proj.weight.detach()
    MM, MR = calibration.once(
        f"sums around {first} to {first + count}", lambda: sums_around(calibration, first, count)
    )
    damped = MM.clone()
    damped.diagonal().add_(ridge * float(MM.diagonal().mean()))
    T = torch.linalg.solve(damped, MR)
    small = without(calibration, list(range(first, first + count)))
    small.model.layers[first - 1].mlp.down_proj = linear(T.t() @ W.double(), like=W)
    return small


def sums_around(calibration: Calibration, first: int, count: int) -> tuple[Tensor, Tensor]:
    """M'M and M'(L - Y), as `replaceme` names them."""
    before = calibration.layers[first - 1]
    W = before.mlp.down_proj.weight.detach()
    MM = MR = torch.zeros(2 * [len(W)], dtype=torch.float64)
    for part in calibration.ids.split(BATCH):
        state, options = entry(calibration.model, part)
        for layer in calibration.layers[: first - 1]:
            state = through(layer, state, options)
        with inputs_of({"h": before.mlp.down_proj}) as rows:
            state = through(before, state, options)
        M = rows["h"] @ W.t()
        Y = state.reshape(M.shape) - M
        for layer in calibration.layers[first : first + count]:
            state = through(layer, state, options)
        MM = MM + (M.t() @ M).double()
        MR = MR + (M.t() @ (state.reshape(M.shape) - Y)).double()
    return MM, MR
