"""A bounded sample of a block's rows, and how well a layer stands in for the block on rows it never saw.

    fit = gather(model, at, windows)[11]              # x, y, and where each row comes from
    report = gather(model, at, other_windows)[11]
    outcome(layer, affine, report).gain               # share of variance beyond the affine map

Moments need no rows; whatever is fitted beyond a matrix does. Rows of whole windows are kept, so
that a standard error over windows can be had, and how many is for the caller to bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.losses.protocols import Batches
from howlinear.losses.sweeps import model_inputs
from howlinear.models.families import Block, backbone
from howlinear.models.hooks import evaluating, tap
from howlinear.records import statistics

CHUNK = 4096  # rows run at once
OCCLUDED = 256  # rows that the conjunction index is a mean over

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of one block: x (n, d_in) and y (n, d_out) in float32, and where each row comes from."""

    x: Tensor
    y: Tensor
    window: Tensor  # (n,)
    position: Tensor  # (n,) within its window
    token: Tensor | None = None  # (n,) the id that was read there

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def spaced(self) -> Tensor:
        """256 rows, or all, from everywhere in the text."""
        return self.x[:: max(1, len(self) // OCCLUDED)][:OCCLUDED]

    @cached_property
    def body(self) -> Tensor:
        """(n,) rows that are no window's first."""
        return self.position > 0

    @cached_property
    def spread(self) -> Tensor:
        """(n,) squared distance of y from the mean of all rows."""
        return _around_mean(self.y)

    @cached_property
    def spread_body(self) -> Tensor:
        """(n,) the same around the mean of the body, and zero at first positions."""
        spread = torch.zeros(len(self), dtype=torch.float64)
        spread[self.body] = _around_mean(self.y[self.body])
        return spread


def gather(model: nn.Module, at: Sequence[Block], windows: Batches) -> dict[int, Sample]:
    """Every row of some windows, by block index. 4 (d_in + d_out) bytes a row and block."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {b.index: [] for b in at}
    before = 0
    inputs: dict[str, Tensor] = {}

    def receive(block: Block, rows: Rows) -> None:
        own = (
            rows.x.to(torch.float32, copy=True).cpu(),
            rows.y.float().cpu(),
            rows.window.cpu() + before,
        )
        name = "decoder_input_ids" if block.stack == "decoder" else "input_ids"
        read, token = inputs.get(name, inputs.get("input_ids")), torch.full((len(rows.x),), -1)
        if read is not None and int(rows.kept[-1]) < read.numel():
            token = read.reshape(-1)[rows.kept].cpu()
        parts[block.index].append((*own, rows.position.cpu(), token))

    with torch.no_grad(), evaluating(model), tap(model, receive, at=at):
        for inputs in model_inputs(model, windows):
            backbone(model)(**inputs)
            before += len(next(iter(inputs.values())))
    samples = {}
    for index in list(parts):
        x, y, window, position, token = map(torch.cat, zip(*parts.pop(index), strict=True))
        samples[index] = Sample(x, y, window, position, None if bool((token < 0).any()) else token)
    return samples


def bytes_of(block: Block, rows: int) -> int:
    """What `gather` keeps of one block."""
    return rows * (4 * (block.d_in + block.d_out) + 3 * 8)


def _around_mean(y: Tensor) -> Tensor:
    mean = y.double().mean(0) if len(y) else torch.zeros(y.shape[1], dtype=torch.float64)
    return torch.cat([(part.double() - mean).square().sum(1) for part in y.split(CHUNK)])


# -- how well a layer does -------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A layer beside the affine map, on the same rows.

    `gain` is the share of variance by which the layer leaves less than the map; its standard error
    is over windows: rows of one window may be alike, windows are taken as independent.
    """

    r2: float
    r2_body: float
    gain: float
    gain_se: float
    gain_body: float
    gain_body_se: float
    cosine: float
    conjunction: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def outcome(layer: Layer, affine: Layer, sample: Sample) -> Outcome:
    after, cosine = errors(layer, sample)
    before, _ = errors(affine, sample)
    gain, gain_se = ratio(before - after, sample.spread, sample.window)
    body = sample.body.double()
    gain_body, gain_body_se = ratio(body * (before - after), sample.spread_body, sample.window)
    return Outcome(
        r2=1 - ratio(after, sample.spread, sample.window)[0],
        r2_body=1 - ratio(body * after, sample.spread_body, sample.window)[0],
        gain=gain,
        gain_se=gain_se,
        gain_body=gain_body,
        gain_body_se=gain_body_se,
        cosine=cosine,
        conjunction=conjunction(layer, sample.spaced),
    )


class Cast(nn.Module):
    """A layer run in the dtype and on the device of its own weights, whatever x comes in.

    Rows (n, d) become one window: experts take nothing else.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        own = layer.parameters() if isinstance(layer, nn.Module) else iter(())
        self.like = next(own, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.like is None:  # maps take any dtype; not to be run in less than float32
            return self.layer(x.to(torch.promote_types(x.dtype, torch.float32))).to(x)
        rows = x.to(self.like)
        return self.layer(rows if x.ndim > 2 else rows[None]).reshape(*x.shape[:-1], -1).to(x)


def size_of(layer: Any) -> int:
    """Parameters of a map or of a module."""
    own = layer.parameters
    return own if isinstance(own, int) else sum(p.numel() for p in own())


@torch.no_grad()
def errors(layer: Layer, sample: Sample) -> tuple[Tensor, float]:
    """(n,) squared error of each row, and the mean cosine of y and the layer's output."""
    squares, cosines = [], 0.0
    for x, y in zip(sample.x.split(CHUNK), sample.y.split(CHUNK), strict=True):
        guess = layer(x)
        squares.append((y - guess).double().square().sum(1))
        cosines += float(torch.cosine_similarity(y, guess, dim=1).sum())
    return torch.cat(squares), cosines / max(len(sample), 1)


def ratio(part: Tensor, whole: Tensor, window: Tensor) -> tuple[float, float]:
    """sum(part) / sum(whole) over rows, and its standard error over windows."""
    _, cluster = window.unique(return_inverse=True)
    k = int(cluster.max()) + 1 if len(cluster) else 0
    parts, wholes = (
        torch.zeros(k, dtype=torch.float64).index_add_(0, cluster, v.double())
        for v in (part, whole)
    )
    return statistics.ratio(zip(parts.tolist(), wholes.tolist(), strict=True))


@torch.no_grad()
def conjunction(layer: Layer, x: Tensor) -> float:
    """Does the layer need both halves of its input together? 0 for whatever is a sum over features.

    The response is the mean output feature. Each half of the input features is set to zero, then
    both: mean over rows of clamp((drop_a + drop_b - drop_ab) / |drop_ab|, 0, 1).
    """
    half = x.shape[1] // 2
    first, second = x.clone(), x.clone()
    first[:, :half] = 0
    second[:, half:] = 0
    whole, a, b, none = (layer(v).double().mean(1) for v in (x, first, second, torch.zeros_like(x)))
    together = whole - none
    excess = (whole - a) + (whole - b) - together
    return float((excess / together.abs().clamp_min(1e-12)).clamp(0, 1).mean())
