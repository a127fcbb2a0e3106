"""How a measurement is carried out: processes, batch size, progress.

    work = Work(Ranks.start(), batch_size=8, progress=bars)
    advance = work.begin("swapping", 4096)      # tokens to run
    advance(512)                                # tokens done

Nothing here changes what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from howlinear.run.ranks import ALONE, Ranks

Advance = Callable[[int], None]  # called with the number of tokens done
Progress = Callable[[str, int], Advance]  # called with a label and the number of tokens to run


@dataclass(frozen=True)
class Work:
    """The processes that share a measurement, its batch size, and where progress is reported."""

    ranks: Ranks = ALONE
    batch_size: int = 8
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch size must be at least 1, got {self.batch_size} (--batch-size)")

    def begin(self, label: str, tokens: int = 0) -> Advance:
        """Announce a step; the function to call with tokens done."""
        return _ignore if self.progress is None else self.progress(label, tokens)


def _ignore(tokens: int) -> None:
    """Progress that is not reported."""
