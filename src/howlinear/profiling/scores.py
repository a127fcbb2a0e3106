"""One block's moments -> its scores with standard errors, and the map that is saved.

    measured = measure(store, split)
    measured.record.r2, measured.record.r2_se, measured.map

Every held-out group is scored with the map fitted on the others; the saved map is fitted on all
rows. With 5 folds a block takes about 8 factorisations, O(d^3) each. No rows are read but the
bounded sample for `stream_error`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine
from howlinear.linear.folds import Folds, Split
from howlinear.linear.rows import RowSample
from howlinear.linear.scoring import (
    Score,
    effective_rank,
    input_stats,
    r2_se,
    score,
    score_both,
    spectrum,
)
from howlinear.linear.solving import solve, solve_both
from howlinear.linear.stores import BlockStore, OutNorm
from howlinear.profiling.expected import expected_kl, held_out
from howlinear.records.fields import BlockExpert, BlockProfile
from howlinear.records.statistics import student
from howlinear.records.verdicts import kind_of
from howlinear.run.tensors import map_tensors, write_map

ENOUGH = 4  # rows a column to score an expert by: with fewer, held-out R2 is off by (1 - R2) / 3


@dataclass(frozen=True, eq=False)
class Measured:
    """A record; the map fitted on all rows and the R2 of each output feature, if there is a map."""

    record: Any  # BlockProfile or BlockExpert
    map: tuple[Affine, Tensor] | None = None
    float32_shift: float | None = None  # of R2 by products in float32, about

    def state_dict(self) -> dict[str, Tensor]:
        """The map as tensors; none without a map."""
        return map_tensors(*self.map) if self.map else {}

    @classmethod
    def from_state(cls, plain: Measured, state: dict[str, Tensor]) -> Measured:
        """A result without its map, and the map as tensors."""
        if not state:
            return plain
        affine = Affine(state["weight"], state["bias"], int(state["rank"]))
        return replace(plain, map=(affine, state["r2_by_feature"]))

    @property
    def plain(self) -> Measured:
        """The same without the map."""
        return replace(self, map=None)

    def saved(self, folder: Path) -> Measured:
        """Write the map to a run folder, if there is one; the same without it."""
        if self.map:
            write_map(folder, self.record, *self.map)
        return self.plain


def is_expert(store: BlockStore) -> bool:
    return bool(getattr(store.block, "expert", ""))


def measure_store(store: BlockStore, split: Split, tokens: int) -> Measured:
    """Scores of a block or an expert, of a text of so many tokens."""
    if is_expert(store):
        return measure_expert(store, split, tokens)
    return replace(measure(store, split), float32_shift=store.float32_shift)


def measure(store: BlockStore, split: Split) -> Measured:
    """Score every held-out group with the map fitted on the others; fit the saved map on all."""
    known, block, held = store.known, store.block, split.held(store.sizes)
    n_fit = _fewest_rows(store, held)
    if known.units:
        store = store.narrow(0)
    crossed = _cross_validate(store, held, around_fit=not isinstance(split, Folds))
    total = Score.pooled(crossed.scores)
    full = merged([*store.body, *store.first])
    affine, _ = solve(full)
    squares = float(total.ss_tot.sum())
    first_share = crossed.first_squares / squares if squares > 0 else math.nan
    stream, stream_se = _stream_error(store.sample, crossed.maps, known.norm)
    rank = crossed.effective_rank
    rank_share = math.inf if rank is None else rank / block.d_out
    r2s = _r2_fields(crossed, total, isinstance(split, Folds))
    record = BlockProfile(
        index=block.index,
        path=block.path,
        d_in=block.d_in,
        d_out=block.d_out,
        kind=kind_of(total.r2, r2s["r2_body"], total.r2_feature["median"], first_share, rank_share),
        **r2s,
        first_share=first_share,
        sink_units=known.units,
        sink_shares=known.shares,
        effective_rank=rank,
        **input_stats(full, affine.rank),
        stream_error=stream,
        stream_error_se=stream_se,
        **_expected_fields(store, crossed.maps),
        rmse=total.rmse,
        residual_norm=total.residual_norm,
        output_norm=total.output_norm,
        n_fit=n_fit,
        n_heldout=total.n,
        rows_per_column=n_fit / block.d_in,
        map_spectrum=spectrum(torch.linalg.svdvals(affine.weight.float())),
    )
    return Measured(record, (affine, total.r2_by_feature))


def _fewest_rows(store: BlockStore, held: list[int]) -> int:
    """Rows of the smallest fit; too few are refused: a stream's length is known when it is read."""
    block, n_fit = store.block, min(store.n - store.sizes[f] for f in held)
    if n_fit <= block.d_in:
        raise ValueError(
            f"too little text: block {block.index} ({block.path}) has {n_fit} rows to fit "
            f"{block.d_in} columns; about {40 * block.d_in} tokens are needed (`tokens`)"
        )
    return n_fit


def _r2_fields(crossed: Crossed, total: Score, folds: bool) -> dict[str, Any]:
    """Every field of a record that is an R2; one split has no standard errors and no curve."""
    body, se = crossed.body, r2_se(crossed.scores) if folds else None
    reach = None if se is None else student(len(crossed.scores) - 1) * se
    return {
        "r2": total.r2,
        "r2_se": se,
        "r2_interval": None if reach is None else [total.r2 - reach, total.r2 + reach],
        "r2_body": Score.pooled(body).r2 if body else math.nan,
        "r2_body_se": r2_se(body) if folds and body else None,
        "r2_scalar": total.r2_scalar,
        "r2_feature": total.r2_feature,
        "r2_curve": [total.r2 + gain for gain in (*crossed.gains, 0.0)] if folds else None,
        "fold_sums": [s.sums() for s in crossed.scores] if folds else None,
    }


def _expected_fields(store: BlockStore, maps: dict[int, Affine]) -> dict[str, Any]:
    """What replacing the block by its plain map is expected to cost; None without gradients."""
    names = ("expected_kl", "expected_kl_se", "expected_beyond")
    sample, guess = held_out(store.gradients, maps)
    if not len(sample):
        return dict.fromkeys(names)
    expected = expected_kl(sample, guess, store.known.norm)
    return dict(zip(names, (expected.nats, expected.se, expected.share_beyond), strict=True))


def measure_expert(store: BlockStore, split: Split, tokens: int) -> Measured:
    """Score an expert on its rows, out of a text of so many tokens; `problem` if they are too few."""
    block, sizes, d = store.block, store.sizes, store.block.d_in
    fit = sum(sizes) - max(sizes) if isinstance(split, Folds) else sizes[0]
    record: dict[str, Any] = {
        name: getattr(block, name) for name in ("index", "expert", "path", "d_in", "d_out")
    }
    record |= {"tokens": store.n, "share": store.n / tokens}
    record |= {"n_fit": fit, "rows_per_column": fit / d, "problem": None}
    scores = [f.name for f in fields(BlockExpert) if f.name not in record]
    if sum(size > 0 for size in sizes) < 2 or fit < ENOUGH * d:
        wanted = math.ceil(tokens * ENOUGH * d / fit) if fit else 0
        more = f"about {wanted} tokens would do" if wanted else "hardly a token came"
        record["problem"] = f"{fit} rows to fit {d} columns, fewer than {ENOUGH} each: {more}"
        return Measured(BlockExpert(**(record | dict.fromkeys(scores))))
    measured = measure(store, split)
    record |= {name: getattr(measured.record, name) for name in scores}
    return Measured(BlockExpert(**record), measured.map)


@dataclass(frozen=True, eq=False)
class Crossed:
    """Each held-out group scored with the map fitted on the others."""

    scores: list[Score]  # one for each held-out group
    body: list[Score]  # the same without first positions, in the fit and in the score
    maps: dict[int, Affine]  # by held-out group
    first_squares: float  # of y at first positions, around the held-out means
    effective_rank: int | None  # on the last held-out group
    gains: list[float]  # in R2 by fitting fewer groups, on the last held-out group


def _cross_validate(store: BlockStore, held: list[int], around_fit: bool) -> Crossed:
    groups, d = [g for g, size in enumerate(store.sizes) if size], store.block.d_in
    scores: list[Score] = []
    body: list[Score] = []
    maps: dict[int, Affine] = {}
    first_squares = 0.0
    for f in held:
        rest = [g for g in groups if g != f]
        train, firsts = (
            merged([store.body[g] for g in rest]),
            merged([store.first[g] for g in rest]),
        )
        test = merged([store.body[f], store.first[f]])
        if train.n > d and store.body[f].n:
            both = solve_both(train, firsts)
            by_body, by_all = score_both(both, store.body[f], store.first[f], test)
            maps[f] = both.all
            body.append(by_body)
        else:
            maps[f] = solve(merged([train, firsts]))[0]
            by_all = score(maps[f], test)
        scores.append(by_all)
        first_squares += _squares_around(store.first[f], test.mean_y)
    rank = effective_rank(maps[f], train.merge(firsts), test, around_fit=around_fit)
    gains = _curve(store, rest, test, scores[-1])
    return Crossed(scores, body, maps, first_squares, rank, gains)


def _curve(store: BlockStore, rest: list[int], test: Accumulator, full: Score) -> list[float]:
    """R2 on one held-out group when fitted on 1, 2, 4, ... groups of `rest`, less R2 fitted on all.

    One held-out group is enough: all points share its rows, so its own difficulty cancels.
    """
    gains, size = list[float](), 1
    while size < len(rest):
        part = rest[:size]
        train = merged([*(store.body[g] for g in part), *(store.first[g] for g in part)])
        enough = train.n > store.block.d_in
        gains.append(score(solve(train)[0], test).r2 - full.r2 if enough else math.nan)
        size *= 2
    return gains


def _squares_around(rows: Accumulator, mean_y: Tensor) -> float:
    """The sum of squares of y around a mean that is not these rows' own."""
    if not rows.n:
        return 0.0
    if kept := rows.kept():  # which reading S_yy would turn into sums
        return float((kept[1].double() - mean_y).square().sum())
    return float((rows.S_yy + rows.weight * (rows.mean_y - mean_y).square()).sum())


def _stream_error(
    sample: RowSample, maps: dict[int, Affine], norm: OutNorm | None
) -> tuple[float, float]:
    """Mean of |y - Wx - b|^2 / |h|^2 over sampled rows, each by a map that did not see it."""
    ratios = []
    for f, affine in maps.items():
        at = sample.group == f
        x, y = sample.x[at, : affine.d_in].double(), sample.y[at].double()
        size = sample.stream[at].double()
        guess = affine(x.to(affine.weight.device)).cpu()
        if norm is not None:
            y, guess = norm(y), norm(guess)
        ratios.append((y - guess).square().sum(1) / size)
    r = torch.cat(ratios)
    if not len(r):
        return math.nan, math.nan
    return float(r.mean()), float(r.std() / math.sqrt(len(r))) if len(r) > 1 else math.nan
