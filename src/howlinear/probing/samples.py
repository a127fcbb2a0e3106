"""A bounded sample of a block's rows, and scores of layers in its place on rows they were not fitted on.

    fit = gather(model, at, windows)[11]              # x, y, cluster, position, token
    report = gather(model, at, other_windows)[11]
    outcome(layer, affine, report).gain               # share of variance beyond the affine map

A matrix is fitted from moments; other layers need rows. Rows of whole windows are kept, for standard
errors over documents or windows. The caller bounds their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.rows import Rows
from howlinear.models.families import Block
from howlinear.models.forward import Batch, WindowsLike, run_rows
from howlinear.records import statistics

CHUNK = 4096  # rows run at once
OCCLUDED = 256  # rows that the conjunction index is a mean over

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of one block: x (n, d_in) and y (n, d_out) in float32, and the place of each row in the text."""

    x: Tensor
    y: Tensor
    cluster: Tensor  # (n,) the document of each row, or its window
    position: Tensor  # (n,) within its window
    token: Tensor | None = None  # (n,) id of the token at that position

    def __len__(self) -> int:
        return len(self.x)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """x and y of some rows at a time."""
        return zip(self.x.split(CHUNK), self.y.split(CHUNK), strict=True)

    @cached_property
    def spaced(self) -> Tensor:
        """x of at most 256 rows, evenly spaced."""
        return self.x[:: max(1, len(self) // OCCLUDED)][:OCCLUDED]

    @cached_property
    def body(self) -> Tensor:
        """(n,) is the row not the first of its window?"""
        return self.position > 0

    @cached_property
    def spread(self) -> Tensor:
        """(n,) squared distance of y from the mean of all rows."""
        return _around_mean(self.y)

    @cached_property
    def spread_body(self) -> Tensor:
        """(n,) squared distance of y from the mean of the body; zero at first positions."""
        spread = torch.zeros(len(self), dtype=torch.float64)
        spread[self.body] = _around_mean(self.y[self.body])
        return spread


def gather(model: nn.Module, at: Sequence[Block], windows: WindowsLike) -> dict[int, Sample]:
    """Every row of the windows, by block index. 4 (d_in + d_out) bytes a row and block."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {b.index: [] for b in at}

    def receive(batch: Batch, block: Block, rows: Rows) -> None:
        inputs, kept = batch.inputs, rows.kept.cpu()
        name = "decoder_input_ids" if block.stack == "decoder" else "input_ids"
        ids, token = inputs.get(name, inputs.get("input_ids")), torch.full((len(rows.x),), -1)
        if ids is not None and int(kept[-1]) < ids.numel():
            token = ids.reshape(-1).cpu()[kept]
        x, y = rows.x.to(torch.float32, copy=True).cpu(), rows.y.float().cpu()
        cluster = batch.clusters[rows.window.cpu()]
        parts[block.index].append((x, y, cluster, rows.position.cpu(), token))

    run_rows(model, windows, receive, at=at)
    samples = {}
    for index in list(parts):
        x, y, cluster, position, token = map(torch.cat, zip(*parts.pop(index), strict=True))
        samples[index] = Sample(x, y, cluster, position, None if bool((token < 0).any()) else token)
    return samples


def sample_bytes(block: Block, rows: int) -> int:
    """Bytes that `gather` keeps of one block."""
    return rows * (4 * (block.d_in + block.d_out) + 3 * 8)


def _around_mean(y: Tensor) -> Tensor:
    mean = y.double().mean(0) if len(y) else torch.zeros(y.shape[1], dtype=torch.float64)
    return torch.cat([(part.double() - mean).square().sum(1) for part in y.split(CHUNK)])


# -- scores of a layer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A layer beside the affine map, on the same rows.

    `gain` is the share of variance that the layer explains beyond the map. Its standard error is over
    documents (windows where these are not known), which are taken as independent; their rows are not.
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
    gain, gain_se = ratio(before - after, sample.spread, sample.cluster)
    body = sample.body.double()
    gain_body, gain_body_se = ratio(body * (before - after), sample.spread_body, sample.cluster)
    return Outcome(
        r2=1 - ratio(after, sample.spread, sample.cluster)[0],
        r2_body=1 - ratio(body * after, sample.spread_body, sample.cluster)[0],
        gain=gain,
        gain_se=gain_se,
        gain_body=gain_body,
        gain_body_se=gain_body_se,
        cosine=cosine,
        conjunction=conjunction(layer, sample.spaced),
    )


class Cast(nn.Module):
    """Runs a layer in the dtype and on the device of its weights; returns those of x.

    Rows (n, d) become one window (1, n, d), the shape that experts need.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        parameters = layer.parameters() if isinstance(layer, nn.Module) else iter(())
        self.like = next(parameters, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.like is None:  # maps take any dtype, but lose accuracy below float32
            return self.layer(x.to(torch.promote_types(x.dtype, torch.float32))).to(x)
        rows = x.to(self.like)
        return self.layer(rows if x.ndim > 2 else rows[None]).reshape(*x.shape[:-1], -1).to(x)


def size_of(layer: Any) -> int:
    """Parameters of a map or of a module."""
    if isinstance(layer, nn.Module):
        return sum(p.numel() for p in layer.parameters())
    return int(layer.parameters)


@torch.no_grad()
def errors(layer: Layer, sample: Sample) -> tuple[Tensor, float]:
    """(n,) squared error of each row, and the mean cosine of y and the layer's output."""
    squares, cosines = [], 0.0
    for x, y in sample.chunks():
        guess = layer(x)
        squares.append((y - guess).double().square().sum(1))
        cosines += float(torch.cosine_similarity(y, guess, dim=1).sum())
    return torch.cat(squares), cosines / max(len(sample), 1)


def r2_of(layer: Layer, sample: Sample) -> float:
    """Share of the variance of y that the layer explains."""
    return 1 - float(errors(layer, sample)[0].sum() / sample.spread.sum())


def ratio(part: Tensor, whole: Tensor, cluster: Tensor) -> tuple[float, float]:
    """sum(part) / sum(whole) over rows, and its standard error over clusters."""
    _, cluster = cluster.unique(return_inverse=True)
    k = int(cluster.max()) + 1 if len(cluster) else 0
    parts, wholes = (
        torch.zeros(k, dtype=torch.float64).index_add_(0, cluster, v.double())
        for v in (part, whole)
    )
    return statistics.ratio(zip(parts.tolist(), wholes.tolist(), strict=True))


@torch.no_grad()
def conjunction(layer: Layer, x: Tensor) -> float:
    """Does the layer need both halves of its input together? 0 for a sum over features.

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
