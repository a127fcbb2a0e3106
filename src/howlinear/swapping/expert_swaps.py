"""What replacing single experts costs, from a run that measured experts.

    result = measure_expert_swaps(model, "runs/moe", "3,5.17", report=test_windows)
    result.blocks[0].expert, result.blocks[0].delta_ppl, result.blocks[0].delta_ppl_se

Tokens that the router sends to the expert get w map(x) in place of w f(x); router, weights and the
other experts stay. `swaps` measures the whole layer as one matrix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from howlinear.linear.affine import Affine
from howlinear.losses.perplexity import Loss
from howlinear.losses.protocols import EvalProtocol
from howlinear.losses.sweeps import SwapCost, sweep
from howlinear.models.experts import SHARED, Expert, Mixture, mixtures, replaced
from howlinear.models.forward import WindowsLike
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockExpert, ExpertSwap
from howlinear.records.words import plural, signed
from howlinear.report.results import Result, extremes
from howlinear.run.folder import RunFolder, with_blocks
from howlinear.run.tensors import read_map
from howlinear.run.work import Work
from howlinear.swapping.swaps import estimates


@dataclass(frozen=True, eq=False, repr=False)
class ExpertSwaps(Result):
    """Costs of swaps, expert by expert: `blocks` are records."""

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

    def save(self, folder: str | Path) -> None:
        """Write swap-experts.json. Experts measured with the same settings stay beside these."""
        run, data = RunFolder(folder), self.to_dict()
        if before := run.alike(data):
            data["blocks"] = with_blocks(before, data)
        run.add(data, before)

    def _line(self) -> str:
        rises = ((f"{b.index}.{b.expert}", b.delta_ppl) for b in self.blocks)
        alone = f"{plural(len(self.blocks), 'expert')}, each replaced alone"
        return f"{alone}, perplexity {extremes(rises, signed)}"


def measure_expert_swaps(
    model: nn.Module,
    folder: str | Path,
    which: str,
    *,
    report: WindowsLike,
    protocol: EvalProtocol | str | None = None,
    work: Work | None = None,
) -> ExpertSwaps:
    """Replace each of these experts alone by its map: "all", layers ("3") or experts ("3.17")."""
    run, work = Profile.load(folder), work or Work()
    like, wanted = next(model.parameters()).detach(), chosen(run.experts, which)
    by_index = {m.block.index: m for m in mixtures(model)}
    pairs = [(_mixture(by_index, e), e, read_map(folder, e)[0].to(like)) for e in wanted]
    variants = [(m.block, replaced(model, m, {_key(e): a})) for m, e, a in pairs]
    swept = sweep(model, variants, report, protocol=protocol, work=work, label="swapping experts")
    records = [_record(model, *pair, cost) for pair, cost in zip(pairs, swept.costs, strict=True)]
    base = swept.base
    settings = {"protocol": base.protocol.name, "tokens": base.tokens}
    return ExpertSwaps(records, base, settings | {"batch_size": work.batch_size})


def chosen(experts: list[BlockExpert], which: str) -> list[BlockExpert]:
    """The experts of a run that `which` names and that have a map."""
    if not experts:
        raise ValueError("the run measured no experts: profile with `experts`")
    selected: list[BlockExpert] = []
    for part in map(str.strip, which.split(",")):
        if part != "all" and not re.fullmatch(r"\d+(\.\w+)?", part):
            raise ValueError(
                f"`experts` {part!r}: write all, a block (3) or an expert (3.17, 3.shared)"
            )
        named = [e for e in experts if part in ("all", str(e.index), f"{e.index}.{e.expert}")]
        if not named:
            raise ValueError(f"`experts` {part}: the run measured no such expert")
        mapped = [e for e in named if e.problem is None]
        if not mapped:
            first = named[0]
            raise ValueError(f"expert {first.index}.{first.expert} has no map: {first.problem}")
        selected += [e for e in mapped if e not in selected]
    return selected


def _key(expert: BlockExpert) -> Expert:
    return SHARED if expert.expert == SHARED else int(expert.expert)


def _mixture(by_index: dict[int, Mixture], expert: BlockExpert) -> Mixture:
    mixture = by_index.get(expert.index)
    if mixture is None or mixture.expert(_key(expert)).path != expert.path:
        raise ValueError(f"the run was made with another model: it has no {expert.path}")
    return mixture


def _record(
    model: nn.Module, mixture: Mixture, expert: BlockExpert, affine: Affine, cost: SwapCost
) -> ExpertSwap:
    path = mixture.shared if expert.expert == SHARED and mixture.shared else mixture.path
    parameters = sum(p.numel() for p in model.get_submodule(path).parameters())
    parameters //= 1 if expert.expert == SHARED else mixture.count
    return ExpertSwap(
        index=expert.index,
        expert=expert.expert,
        path=expert.path,
        tokens=expert.tokens,
        r2=expert.r2,
        **estimates(cost),
        params_saved=parameters - affine.parameters,
    )
