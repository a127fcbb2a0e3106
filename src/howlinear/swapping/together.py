"""Several blocks replaced at once: how far their costs are from adding up.

(found,) = additivity(joint, {3: tally, 5: tally, 9: tally})
found["kl"], found["kl_sum"], found["kl_gap"], found["kl_gap_se"]

The joint swap and the single ones are measured on the same windows, so the gap (joint cost less the sum
of single costs) has a standard error paired by cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from howlinear.losses.perplexity import Comparison
from howlinear.records.files import clean
from howlinear.records.statistics import ratio
from howlinear.swapping.rounds import Tally

JOINT = "together"  # the name of such swaps among the sums of swap.json


def additivity(joint: Tally, single: Mapping[int, Tally]) -> list[dict[str, Any]]:
    """The record of one joint swap; none while some of the swaps have fewer windows than others."""
    tallies = [joint, *single.values()]
    if len({tally.windows for tally in tallies}) > 1:
        return []
    changes = [tally.change for tally in tallies]
    record: dict[str, Any] = {"blocks": list(single), "windows": joint.windows}
    record |= {"tokens": changes[0].tokens, "clusters": changes[0].clusters}
    for name, sums_of in (("kl", _divergence), ("delta_nll", _growth)):
        both, *alone = (sums_of(change) for change in changes)
        total = torch.stack(alone).sum(0)
        for end, sums in (("", both), ("_sum", total), ("_gap", both - total)):
            pairs = torch.stack([sums, changes[0].counts], 1)[changes[0].counts > 0]
            record[name + end], record[f"{name}{end}_se"] = ratio(pairs.tolist())
    return [clean(record)]


def _divergence(change: Comparison) -> Tensor:
    return change.divergence


def _growth(change: Comparison) -> Tensor:
    return change.nll_changed - change.nll
