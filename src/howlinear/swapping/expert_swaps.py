"""From a run that measured experts to what replacing single experts costs.

    result = measure_expert_swaps(model, "runs/moe", "3,5.17", report=test_windows)
    result.blocks[0].expert, result.blocks[0].delta_ppl, result.blocks[0].delta_ppl_se

Tokens that the router sends to the expert get w map(x) in place of w f(x); router, weights and the
other experts stay. The whole layer as one matrix is what `swap` measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from howlinear.linear.affine import Affine
from howlinear.losses.perplexity import Loss
from howlinear.losses.protocols import Batches, EvalProtocol
from howlinear.losses.sweeps import SwapCost, sweep
from howlinear.models.experts import SHARED, Expert, Mixture, mixtures, replaced
from howlinear.models.families import blocks
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockExpert, ExpertSwap
from howlinear.records.words import signed
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder
from howlinear.run.ranks import ALONE, Ranks
from howlinear.run.tensors import read_map
from howlinear.run.work import Work

ESTIMATES = [
    f"{name}{end}" for name in ("delta_nll", "delta_ppl", "kl", "top1") for end in ("", "_se")
]


@dataclass(frozen=True, eq=False, repr=False)
class ExpertSwaps(Result):
    """What swaps cost, expert by expert; `blocks` is what to read."""

    blocks: list[ExpertSwap]
    base: Loss
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        """`swap-experts.json`, field by field."""
        return "swap-experts", {
            "settings": self.settings,
            "base": self.base.to_dict(),
            "blocks": [b.to_dict() for b in self.blocks],
        }

    def _line(self) -> str:
        rises = ((f"{b.index}.{b.expert}", b.delta_ppl) for b in self.blocks)
        alone = f"{len(self.blocks)} experts, each replaced alone"
        return f"{alone}, perplexity {extremes(rises, signed)}"

    def save(self, folder: str | Path) -> None:
        RunFolder(folder).write(self.to_dict())


def measure_expert_swaps(
    model: nn.Module,
    folder: str | Path,
    which: str,
    *,
    report: Batches,
    protocol: EvalProtocol | str | None = None,
    n_bytes: int | None = None,
    batch_size: int = 8,
    ranks: Ranks = ALONE,
    progress: Callable[[str, int], Callable[[int], None]] | None = None,
) -> ExpertSwaps:
    """Replace each of these experts alone by its map: "all", layers ("3") or experts ("3.17")."""
    run = Profile.load(folder)
    wanted = chosen(run.experts, which)
    by_index = {m.block.index: m for m in mixtures(model, blocks(model))}
    pairs = [(_mixture(by_index, e), e, read_map(folder, e)[0].to(_like(model))) for e in wanted]
    variants = [(m.block, replaced(model, m, {_key(e): a})) for m, e, a in pairs]
    work = Work(ranks, batch_size, progress)
    swept = sweep(model, variants, report, protocol=protocol, work=work, label="swapping experts")
    records = [_record(model, *pair, cost) for pair, cost in zip(pairs, swept.costs, strict=True)]
    base = Loss(swept.base.protocol, swept.base.counts, swept.base.sums, n_bytes)
    settings = {"protocol": base.protocol.name, "tokens": base.tokens, "batch_size": batch_size}
    return ExpertSwaps(records, base, settings)


def chosen(experts: list[BlockExpert], which: str) -> list[BlockExpert]:
    """Those of a run's experts that are asked for and have a map."""
    if not experts:
        raise ValueError("the run measured no experts: profile with --experts")
    asked = [part.strip() for part in which.split(",")]
    found: list[BlockExpert] = []
    for part in asked:
        if part != "all" and not re.fullmatch(r"\d+(\.\w+)?", part):
            raise ValueError(
                f"--experts {part!r}: write all, a block (3) or an expert (3.17, 3.shared)"
            )
        own = [e for e in experts if part in ("all", str(e.index), f"{e.index}.{e.expert}")]
        if not own:
            raise ValueError(f"--experts {part}: the run measured no such expert")
        ready = [e for e in own if e.problem is None]
        if not ready:
            raise ValueError(f"expert {own[0].index}.{own[0].expert} has no map: {own[0].problem}")
        found += [e for e in ready if e not in found]
    return found


def _key(expert: BlockExpert) -> Expert:
    return SHARED if expert.expert == SHARED else int(expert.expert)


def _mixture(by_index: dict[int, Mixture], expert: BlockExpert) -> Mixture:
    found = by_index.get(expert.index)
    if found is None or found.expert(_key(expert)).path != expert.path:
        raise ValueError(f"the run was made with another model: it has no {expert.path}")
    return found


def _like(model: nn.Module) -> Any:
    return next(model.parameters()).detach()


def _record(
    model: nn.Module, mixture: Mixture, expert: BlockExpert, affine: Affine, cost: SwapCost
) -> ExpertSwap:
    assert cost.change is not None
    path = mixture.shared if expert.expert == SHARED and mixture.shared else mixture.path
    own = sum(p.numel() for p in model.get_submodule(path).parameters())
    own //= 1 if expert.expert == SHARED else mixture.count
    return ExpertSwap(
        index=expert.index,
        expert=expert.expert,
        path=expert.path,
        tokens=expert.tokens,
        r2=expert.r2,
        **{name: getattr(cost.change, name) for name in ESTIMATES},
        params_saved=own - affine.parameters,
    )
