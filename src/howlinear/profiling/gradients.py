"""How much predictions depend on each block's output: a backward pass over a few windows.

    problem = why_no_gradients(model, text, course)     # "" where there are some
    sample_gradients(model, stores, text, split, course)
    stores[11].gradients.gradient                       # (rows, d_out)

Replace a block's output y_t by y_t + e_t at every position t. To second order the KL divergence of the
predictions from the original ones, summed over a window, is E[(sum_t g_t . e_t)^2] / 2 nats, where g_t is
the gradient by y_t of sum_s v_s . logits_s, and the v_s are independent random vectors with mean 0 and the
covariance diag(p_s) - p_s p_s', p_s being the model's own prediction at position s (Fisher's information).
Labels drawn from p_s give such a v_s. Random signs z do too, v = sqrt(p) z - p (sqrt(p) . z), with
far less variance where the model is sure of its prediction.

Where an output norm lies between block and residual add, the gradient is the one by the norm's output.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import RowSplit, Split
from howlinear.linear.gradients import LENGTH, WINDOWS, GradientSample
from howlinear.linear.rows import Rows, hashed
from howlinear.linear.stores import BlockStore
from howlinear.losses.readout import Readout
from howlinear.models.families import Block, call_options
from howlinear.models.forward import IDS, Batch, Windows, check_ids
from howlinear.models.hooks import evaluating, tap
from howlinear.models.offload import device_of, is_offloaded
from howlinear.profiling.passes import Course

LOGITS = 2**24  # at a time


def why_no_gradients(model: nn.Module, text: Windows, course: Course) -> str:
    """Why the cost of a swap cannot be estimated; "" where it can."""
    if course.layerwise:
        return "a model that is read layer by layer has no backward pass"
    if is_offloaded(model):
        return "a model with offloaded weights has no backward pass"
    if not text.repeatable:
        return "a stream of windows is read once"
    if any(set(batch.inputs) != {IDS} for batch in text.batches(course.batch_size)):
        return "windows have more than token ids"
    if any(parameter.is_inference() for parameter in model.parameters()):
        return "the model was made in inference mode, which has no gradients"
    try:
        Readout(model)
    except (ValueError, AttributeError, TypeError) as problem:  # not a language model
        return str(problem) or f"{type(model).__name__} predicts no tokens"
    return ""


def sample_gradients(
    model: nn.Module,
    stores: Sequence[BlockStore],
    text: Windows,
    split: Split,
    course: Course,
) -> None:
    """Fill the gradient samples of these stores with windows of this course's part of the text.

    Runs the first LENGTH tokens of each chosen window forward and backward. Where predictions are not
    finite nothing is filled: the pass says which block is not.
    """
    stores = [store for store in stores if _has_output(store)]
    chosen = _chosen_windows(text, split, course)
    if not stores or not chosen:
        return
    at: list[Any] = [store.block for store in stores]
    units = {s.block.index: torch.tensor(s.known.units) for s in stores if s.known.units}
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for windows in _batches(chosen, getattr(head, "out_features", LOGITS)):
        ids = torch.stack([window.ids for window in windows]).to(device_of(model))
        check_ids(model, {IDS: ids})
        rows, gradients = _run(model, at, units, ids, [window.key for window in windows])
        if not gradients:
            return
        for store in stores:
            _add(store, windows, rows[store.block.index], gradients[store.block.index])


def gradients_on(model: nn.Module, at: Sequence[Block], ids: Tensor) -> dict[Block, GradientSample]:
    """Rows of these windows (n, length) with gradients, by block; {} where predictions are not finite."""
    samples = {block: GradientSample(block.d_in, block.d_out) for block in at}
    for part, rows, gradients in _parts(model, at, ids):
        if not gradients:
            return {}
        for block, sample in samples.items():
            taken, gradient = rows[block.index], gradients[block.index]
            x, y = (t.detach().view(*gradient.shape[:2], -1) for t in (taken.x, taken.y))
            for i, window in enumerate(part):
                kept = (x[i, :-1], y[i, :-1], gradient[i, :-1])
                sample.add(window, *kept, group=0, cluster=window)
    return samples


def gradient_products(model: nn.Module, at: Sequence[Block], ids: Tensor) -> dict[Block, Tensor]:
    """(d_out, d_out) sum of g g' over the tokens of these windows (n, length), by block.

    {} where predictions are not finite.
    """
    sums: dict[Block, Tensor] = {}
    for _, _, gradients in _parts(model, at, ids):
        if not gradients:
            return {}
        for block in at:
            g = gradients[block.index][:, :-1].flatten(0, 1).float()
            total = sums.get(block)
            sums[block] = g.t() @ g if total is None else total.addmm_(g.t(), g)
    return sums


def _parts(
    model: nn.Module, at: Sequence[Block], ids: Tensor
) -> Iterator[tuple[range, dict[int, Rows], dict[int, Tensor]]]:
    """Rows and gradients (n, LENGTH, d_out) of so few windows that their logits stay small, and their numbers."""
    readout = Readout(model)
    ids = ids[:, :LENGTH].to(readout.device)
    size = max(1, LOGITS // (readout.vocabulary * ids.shape[1]))
    for start in range(0, len(ids), size):
        part = range(start, min(start + size, len(ids)))
        yield part, *_run(model, at, {}, ids[part.start : part.stop], part)


class _Window:
    """A window that is sampled."""

    def __init__(self, batch: Batch, i: int, group: int, seed: int) -> None:
        self.ids, self.group = batch.inputs[IDS][i, :LENGTH].cpu(), group
        self.cluster = int(batch.clusters[i])
        place = zlib.crc32(self.ids.numpy().tobytes(), batch.offsets[i] % 2**32)
        self.key = int(hashed(torch.tensor([place]), seed))


def _has_output(store: BlockStore) -> bool:
    """Is the block no expert, and every norm between it and the residual add known?"""
    return store.known.has_stream and not getattr(store.block, "expert", "")


def _chosen_windows(text: Windows, split: Split, course: Course) -> list[_Window]:
    """Windows of this part of the text with the smallest keys that some map will not be fitted on."""
    every: list[_Window] = []
    for batch in text.batches(course.batch_size):
        if not course.mine(batch.number):
            continue
        for i, offset in enumerate(batch.offsets):
            length = min(LENGTH, batch.inputs[IDS].shape[1])
            groups = {group for group, *_ in split.pieces([offset], length)}
            if length > 1 and groups <= _held(split):
                every.append(_Window(batch, i, groups.pop(), course.seed))
    return sorted(every, key=lambda window: window.key)[:WINDOWS]


def _batches(windows: Sequence[_Window], vocabulary: int) -> Iterator[list[_Window]]:
    """Windows of one length, so few that their logits stay small."""
    for length in sorted({len(window.ids) for window in windows}):
        same = [window for window in windows if len(window.ids) == length]
        size = max(1, LOGITS // (vocabulary * length))
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _held(split: Split) -> set[int]:
    """The groups that some map is not fitted on."""
    return {1} if isinstance(split, RowSplit) else set(range(split.groups))


def _run(
    model: nn.Module,
    at: Sequence[Block],
    units: dict[int, Tensor],
    ids: Tensor,
    seeds: Sequence[int],
) -> tuple[dict[int, Rows], dict[int, Tensor]]:
    """Rows of each block, and gradients (B, L, d_out) by its output; none if not finite."""
    rows: dict[int, Rows] = {}
    with (
        torch.enable_grad(),
        evaluating(model),
        tap(model, lambda block, taken: rows.update({block.index: taken}), at=at, units=units),
        _leaves(model, at) as leaves,
    ):
        logits = model(input_ids=ids, **call_options(model)).logits
    p = logits.detach().float().softmax(-1)
    if not bool(p.sum().isfinite()):
        return rows, {}
    for window, seed in zip(p, seeds, strict=True):  # one at a time, in place: new memory is slow
        window.copy_(_drawn(window, torch.Generator().manual_seed(seed)))
    gradients = torch.autograd.grad(logits, list(leaves.values()), p.to(logits))
    if not all(bool(g.isfinite().all()) for g in gradients):
        return rows, {}
    return rows, {i: g.reshape(*ids.shape, -1) for i, g in zip(leaves, gradients, strict=True)}


def _drawn(p: Tensor, generator: torch.Generator) -> Tensor:
    """(L, vocabulary) with mean 0 and covariance diag(p) - p p' at each position; 0 at the last.

    The token after the last one is not part of the window.
    """
    signs = torch.empty(p.shape, dtype=torch.int8).random_(2, generator=generator)
    u = p.sqrt().mul_(signs.mul_(2).sub_(1).to(p.device))
    v = u.addcmul_(p, u.sum(-1, keepdim=True), value=-1)
    v[-1] = 0
    return v


@contextmanager
def _leaves(model: nn.Module, at: Sequence[Block]) -> Iterator[dict[int, Tensor]]:
    """Inside, each block's output gets zeros added, leaves of the graph to differentiate by."""
    leaves: dict[int, Tensor] = {}

    def hook(block: Block) -> Any:
        def add(_: nn.Module, args: Any, output: Any) -> Any:
            y = output[0] if isinstance(output, tuple) else output
            leaves[block.index] = torch.zeros_like(y, requires_grad=True)
            changed = y + leaves[block.index]
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return model.get_submodule(block.out_norm or block.exit).register_forward_hook(add)

    with ExitStack() as stack:
        for block in at:
            stack.callback(hook(block).remove)
        yield leaves


def _add(store: BlockStore, windows: Sequence[_Window], rows: Rows, gradient: Tensor) -> None:
    """Add the rows of these windows but each window's last, which predicts nothing."""
    length = gradient.shape[1]
    x = rows.x if rows.hidden is None else torch.cat([rows.x, rows.hidden.to(rows.x)], 1)
    x, y = (t.detach().view(len(windows), length, -1)[:, :-1] for t in (x, rows.y))
    for i, window in enumerate(windows):
        named = {"group": window.group, "cluster": window.cluster}
        store.gradients.add(window.key, x[i], y[i], gradient[i, :-1], **named)
