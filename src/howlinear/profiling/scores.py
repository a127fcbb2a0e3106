"""One block's moments -> its scores, the map that is saved, and how sure both are.

    measured = measure(store, split)
    measured.record.r2, measured.record.r2_se, measured.affine

Every held-out group is scored with the map fitted on the others; the saved map is fitted on all
rows. About 14 factorisations of the width a block with 5 folds, O(d^3) each; no rows are read but
the bounded sample that `stream_error` needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from howlinear.linear.accumulators import Accumulator, merged
from howlinear.linear.affine import Affine
from howlinear.linear.folds import Folds, Split
from howlinear.linear.row_sample import RowSample
from howlinear.linear.scoring import Score, effective_rank, input_stats, r2_se, score, spectrum
from howlinear.linear.solving import solve
from howlinear.linear.stores import BlockStore, OutNorm
from howlinear.records.fields import BlockExpert, BlockProfile
from howlinear.records.verdicts import kind_of, safety_of

ENOUGH = 4  # rows a column to score an expert by: with fewer, held-out R2 is off by (1 - R2) / 3


@dataclass(frozen=True, eq=False)
class Measured:
    """One block's record, the map that is saved, and the R2 of each output feature."""

    record: BlockProfile
    affine: Affine
    r2_by_feature: Tensor


@dataclass(frozen=True, eq=False)
class MeasuredExpert:
    """One expert's record, and its map where it was given enough tokens to fit one."""

    record: BlockExpert
    affine: Affine | None = None
    r2_by_feature: Tensor | None = None


def measure(store: BlockStore, split: Split) -> Measured:
    """Score every held-out group with the map fitted on the others; fit the saved map on all."""
    known = store.known
    block, held = store.block, split.held(store.sizes)
    folds = isinstance(split, Folds)  # one split has no spread
    crossed = _cross_validate(store, held, around_fit=not folds)
    total = Score.pooled(crossed.scores)
    r2_body = Score.pooled(crossed.body).r2 if crossed.body else math.nan
    full = merged([*store.body, *store.first], block.d_in)
    affine, _ = solve(full)
    first_share = _first_share(store, held)
    stream, stream_se = _stream_error(store.sample, crossed.maps, known.norm)
    n_fit = min(sum(store.sizes) - store.sizes[f] for f in held)
    rank = crossed.effective_rank
    rank_share = math.inf if rank is None else rank / block.d_out
    signal = None
    if known.care is not None:
        signal = 0.5 * float((known.care * total.ss_res.cpu()).sum()) / total.weight
    record = BlockProfile(
        index=block.index,
        path=block.path,
        d_in=block.d_in,
        d_out=block.d_out,
        kind=kind_of(total.r2, r2_body, total.r2_feature["median"], first_share, rank_share),
        safety=safety_of(signal, first_share, known.shares),
        r2=total.r2,
        r2_se=r2_se(crossed.scores) if folds else None,
        r2_body=r2_body,
        r2_body_se=r2_se(crossed.body) if folds and crossed.body else None,
        r2_scalar=total.r2_scalar,
        r2_feature=total.r2_feature,
        r2_curve=[total.r2 + gain for gain in (*crossed.gains, 0.0)] if folds else None,
        first_share=first_share,
        sink_units=known.units,
        sink_shares=known.shares,
        effective_rank=rank,
        **input_stats(full, affine.rank),
        stream_error=stream,
        stream_error_se=stream_se,
        swap_signal=signal,
        rmse=total.rmse,
        residual_norm=total.residual_norm,
        output_norm=total.output_norm,
        n_fit=n_fit,
        n_heldout=total.n,
        rows_per_column=n_fit / block.d_in,
        fold_sums=[s.sums() for s in crossed.scores] if folds else None,
        map_spectrum=spectrum(torch.linalg.svdvals(affine.weight)),
    )
    return Measured(record, affine, total.r2_by_feature)


def measure_expert(store: BlockStore, split: Split, tokens: int) -> MeasuredExpert:
    """Score an expert on the rows that it was given, of a text of so many tokens; or say why not."""
    block, sizes, d = store.block, store.sizes, store.block.d_in
    fit = sum(sizes) - max(sizes) if isinstance(split, Folds) else sizes[0]
    known: dict[str, Any] = {
        name: getattr(block, name) for name in ("index", "expert", "path", "d_in", "d_out")
    }
    known |= {
        "tokens": store.n,
        "share": store.n / tokens,
        "n_fit": fit,
        "rows_per_column": fit / d,
    }
    scores = [f.name for f in fields(BlockExpert) if f.name not in {*known, "problem"}]
    if sum(size > 0 for size in sizes) < 2 or fit < ENOUGH * d:
        wanted = math.ceil(tokens * ENOUGH * d / fit) if fit else 0
        more = f"about {wanted} tokens would do (--tokens)" if wanted else "hardly a token came"
        problem = f"{fit} rows to fit {d} columns, fewer than {ENOUGH} each: {more}"
        known |= dict.fromkeys(scores)
        return MeasuredExpert(BlockExpert(**known, problem=problem))
    found = measure(store, split)
    known |= {name: getattr(found.record, name) for name in scores}
    return MeasuredExpert(BlockExpert(**known, problem=None), found.affine, found.r2_by_feature)


@dataclass(frozen=True, eq=False)
class Crossed:
    """What fitting on all groups but one and scoring that one gave."""

    scores: list[Score]  # one a held-out group
    body: list[Score]  # the same without first positions, in the fit and in the score
    maps: dict[int, Affine]  # by the group that did not take part
    effective_rank: int | None  # by the last group
    gains: list[float]  # of fewer fit rows, by the last group: what the learning curve is made of


def _cross_validate(store: BlockStore, held: list[int], around_fit: bool) -> Crossed:
    groups, d = [g for g, size in enumerate(store.sizes) if size], store.block.d_in
    scores: list[Score] = []
    body: list[Score] = []
    maps: dict[int, Affine] = {}
    for f in held:
        rest = [g for g in groups if g != f]
        train, test = merged([store.body[g] for g in rest], d), store.body[f].narrow(d)
        if train.n > d and test.n:
            body.append(score(solve(train)[0], test))
        for g in rest:
            train.merge(store.first[g].narrow(d))
        test.merge(store.first[f].narrow(d))
        maps[f], Z = solve(train)
        scores.append(score(maps[f], test))
    rank = effective_rank(maps[f], Z, train.mean_x, test, around_fit=around_fit)
    return Crossed(scores, body, maps, rank, _curve(store, rest, test, scores[-1]))


def _curve(store: BlockStore, rest: list[int], test: Accumulator, full: Score) -> list[float]:
    """What fitting on 1, 2, ... groups fewer than all of `rest` changes, on one held-out group.

    One group is enough: all points share its rows, so its own difficulty cancels.
    """
    gains, d = [], store.block.d_in
    train = None
    for g in rest[:-1]:
        body = store.body[g].narrow(d)
        train = body if train is None else train.merge(body)
        train.merge(store.first[g].narrow(d))
        enough = train.n > d
        gains.append(score(solve(train)[0], test).r2 - full.r2 if enough else math.nan)
    return gains


def _first_share(store: BlockStore, held: list[int]) -> float:
    """Share of the held-out variance of y that first positions carry."""
    part = whole = 0.0
    for f in held:
        if not store.first[f].n:
            continue
        first = store.first[f].narrow(store.block.d_in)
        both = first.copy().merge(store.body[f].narrow(store.block.d_in))
        away = (first.mean_y - both.mean_y).square()
        part += float((first.S_yy + first.weight * away).sum())
        whole += float(both.S_yy.sum())
    return part / whole if whole > 0 else math.nan


def _stream_error(
    sample: RowSample, maps: dict[int, Affine], norm: OutNorm | None
) -> tuple[float, float]:
    """Mean of |y - Wx - b|^2 / |h|^2 over sampled rows, each by a map that did not see it."""
    ratios = []
    for f, affine in maps.items():
        at = sample.group == f
        x, y, size = (
            sample.x[at, : affine.d_in].double(),
            sample.y[at].double(),
            sample.stream[at].double(),
        )
        guess = affine(x.to(affine.weight.device)).cpu()
        if norm is not None:
            y, guess = norm(y), norm(guess)
        ratios.append((y - guess).square().sum(1) / size)
    r = torch.cat(ratios)
    if not len(r):
        return math.nan, math.nan
    return float(r.mean()), float(r.std() / math.sqrt(len(r))) if len(r) > 1 else math.nan
