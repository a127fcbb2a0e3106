"""What replacements cost in loss, on the text for choosing and on the text for reporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from howlinear.losses.perplexity import Comparison, compare_all
from howlinear.losses.protocols import EvalProtocol, protocol_of
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import Variant, sweep
from howlinear.models.families import Block, Replacement
from howlinear.models.forward import WindowsLike
from howlinear.models.hooks import swapped
from howlinear.run.work import Work

OPTION_TOKENS = 1024  # tokens on which the cost of one option is measured


class Losses:
    """Measures replacements of blocks. `reason` says why a model without a loss has no costs."""

    def __init__(
        self,
        model: nn.Module,
        choose: WindowsLike,
        report: WindowsLike,
        protocol: EvalProtocol | str | None,
        work: Work,
    ) -> None:
        self.model, self.choose, self.report, self.work = model, choose, report, work
        self.protocol = protocol_of(report, protocol)
        self.reason = ""
        try:
            Readout(model)
        except ValueError as error:
            self.reason = str(error)

    def alone(self, label: str, variants: Sequence[Variant]) -> list[Comparison]:
        """Each replacement of one block alone, on the first tokens of the text for choosing."""
        windows = self.choose
        if isinstance(windows, Tensor):
            windows = windows[: max(2, OPTION_TOKENS // windows.shape[1])]
        swept = sweep(
            self.model, variants, windows, protocol=self.protocol, work=self.work, label=label
        )
        return [cost.change for cost in swept.costs if cost.change is not None]

    def together(
        self, maps: Sequence[Mapping[Block, Replacement]], windows: WindowsLike
    ) -> list[Comparison]:
        """The model with all blocks of each mapping replaced."""
        changes = [partial(swapped, self.model, replacements) for replacements in maps]
        advance = self.work.begin("measuring", _tokens(windows))
        return compare_all(self.model, changes, windows, self.protocol, progress=advance)


def _tokens(windows: WindowsLike) -> int:
    return windows.numel() if isinstance(windows, Tensor) else 0
