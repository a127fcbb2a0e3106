"""The maps of a run's blocks: fitted from its moments, with sink units kept or rows weighted.

maps = RunMaps(model, folder, Profile.load(folder))
maps.plain(block), maps.map(block, 2)       # least squares; with two sink units kept
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine, UnitMap
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.solving import solve
from howlinear.models.families import Block, Replacement, block_at
from howlinear.models.forward import Batch, WindowsLike, run_rows
from howlinear.models.naming import BlockNames, indices_of
from howlinear.models.units import taken
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockProfile
from howlinear.run.tensors import read_moments
from howlinear.run.work import Work

UNITS = (0, 1, 2, 4)  # sink units that a map may keep
# weights of rows in a fit: all alike; without first positions; by 1/|h|; by 1/|y|^2
WEIGHTINGS = ("none", "body", "stream", "output")


def match(model: nn.Module, run: Profile, at: BlockNames) -> list[tuple[Block, BlockProfile]]:
    """The model's blocks beside the run's, or those `at`; a run of another model is refused."""
    wanted, pairs = indices_of(at, {p.index: p.path for p in run.blocks}), []
    for p in run.blocks:
        b = block_at(model, p.path)
        if b is None or (b.d_in, b.d_out) != (p.d_in, p.d_out):
            here = f"{b.d_in} to {b.d_out}" if b else "missing"
            raise ValueError(
                f"the run was made with another model: its block {p.index} ({p.path}) is "
                f"{p.d_in} to {p.d_out}, this model's is {here}"
            )
        if p.index in wanted:
            pairs.append((replace(b, index=p.index), p))
    return pairs


class RunMaps:
    """The maps of a run's blocks, each fitted from its moments when it is first used.

    With weighting "stream" or "output" the model reads `fit`, the run's text, once more for blocks `at`.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        run: Profile,
        weighting: str = "none",
        fit: WindowsLike | None = None,
        at: Sequence[Block] = (),
        work: Work | None = None,
    ) -> None:
        if weighting not in WEIGHTINGS:
            expected = ", ".join(WEIGHTINGS)
            raise ValueError(f"unknown weighting {weighting!r}, expected {expected} (`weighting`)")
        self.model, self.folder, self.run, self.weighting = model, folder, run, weighting
        self.like = next(model.parameters()).detach()
        self.records = {p.index: p for p in run.blocks}
        self.fitted: dict[tuple[int, int], Affine | UnitMap] = {}  # by block and units kept
        self.saved: dict[int, Affine] = {}
        self.weighted: dict[int, Moments] = {}
        if weighting in ("stream", "output"):
            if fit is None:
                raise ValueError(f"weighting {weighting} needs the text that the run was fitted on")
            units = {b.index: self.records[b.index].sink_units or [] for b in at}
            self.weighted = weighted_moments(model, at, fit, weighting, units, work)

    def ladder(self, block: Block) -> list[int]:
        """Numbers of sink units that a map of this block may keep."""
        return [k for k in UNITS if k <= len(self.records[block.index].sink_units or ())]

    def map(self, block: Block, k: int) -> Affine | UnitMap:
        """The map that keeps the first k sink units."""
        if k == 0 and self.weighting == "none":
            return self.plain(block)
        key = (block.index, k)
        if key not in self.fitted:
            joint, _ = _fitted(self._rows(block), block.d_in + k)
            units = tuple(self.records[block.index].sink_units or ())[:k]
            hidden = taken(self.model, block, units) if units else None
            fitted = UnitMap.split(joint, units, hidden) if hidden else joint
            self.fitted[key] = fitted.to(self.like)
        return self.fitted[key]

    def squared_error(self, block: Block, k: int) -> float:
        """The fit's sum of squared errors with the first k sink units kept."""
        return _fitted(self._rows(block), block.d_in + k)[1]

    def plain(self, block: Block) -> Affine:
        """Least squares without units or weights: the map that the run saved."""
        if block.index not in self.saved:
            self.saved[block.index] = self.run.maps[block.index].to(self.like)
        return self.saved[block.index]

    def baselines(self, block: Block) -> dict[str, Replacement]:
        """What a map has to beat: zero, and the mean output."""
        parts = read_moments(self.folder, self.records[block.index])
        mean = merged([*parts["body"], *parts["first"]]).mean_y.to(self.like)
        return {
            "zero": lambda x: x.new_zeros(*x.shape[:-1], block.d_out),
            "mean": lambda x: mean.to(x).expand(*x.shape[:-1], block.d_out),
        }

    def _rows(self, block: Block) -> Accumulator:
        if block.index in self.weighted:
            return self.weighted[block.index]
        parts = read_moments(self.folder, self.records[block.index])
        return merged(
            parts["body"] if self.weighting == "body" else [*parts["body"], *parts["first"]]
        )


def _fitted(rows: Accumulator, columns: int) -> tuple[Affine, float]:
    """The map of the first columns of x, and its sum of squared errors."""
    narrow = rows.narrow(columns)
    affine, Z = solve(narrow)
    return affine, float(narrow.S_yy.sum() - Z.square().sum())


def weighted_moments(
    model: nn.Module,
    at: Sequence[Block],
    windows: WindowsLike,
    weighting: str,
    units: dict[int, list[int]],
    work: Work | None = None,
) -> dict[int, Moments]:
    """Moments of [x, sink units] and y with rows weighted by 1/|h| ("stream") or 1/|y|^2 ("output")."""
    work = work or Work()
    sums = {b.index: Moments(b.d_in + len(units[b.index]), b.d_out) for b in at}

    def receive(_: Batch, block: Block, rows: Rows) -> None:
        if weighting == "output":
            weight = rows.y.float().square().sum(1).reciprocal()
        elif rows.inverse_stream is None:
            raise ValueError(
                f"block {block.index} ({block.path}): the residual stream of this family is not "
                'known: use `weighting="output"` or body'
            )
        else:
            weight = rows.inverse_stream
        x = rows.x if rows.hidden is None else torch.cat([rows.x, rows.hidden], 1)
        sums[block.index].update(x, rows.y, weight)

    read = {i: torch.tensor(u) for i, u in units.items() if u}
    run_rows(model, windows, receive, at=at, units=read, work=work)
    return {index: work.ranks.added(total) for index, total in sums.items()}
