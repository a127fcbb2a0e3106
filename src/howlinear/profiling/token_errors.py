"""Where a block is nonlinear, token by token.

    found = residuals(model, windows, 3)
    worst = found.error.argsort(descending=True)[:20]
    tokenizer.convert_ids_to_tokens(found.token[worst].tolist())

Without a map, windows of even number are scored with the map that is fitted on those of odd number, and
the other way round, so that no row is scored with a map that has seen it. That takes two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine, Map
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.solving import fit
from howlinear.models.families import Block, one_block
from howlinear.models.forward import IDS, Batch, WindowsLike, as_windows, run_rows
from howlinear.models.naming import BlockName
from howlinear.run.work import Work


@dataclass(frozen=True, eq=False, repr=False)
class TokenErrors:
    """One entry a row, in the order of the text; padding is left out."""

    block: Block
    token: Tensor  # (n,) token ids; -1 where the rows are no tokens of input_ids
    window: Tensor  # (n,) number of the window, from 0
    position: Tensor  # (n,) in the window, from 0
    error: Tensor  # (n,) |y - map(x)|^2, float64
    output: Tensor  # (n,) |y - mean y|^2, float64: 1 - sum(error) / sum(output) is R2

    def __repr__(self) -> str:
        return f"<TokenErrors of {len(self.error)} rows of {self.block}>"

    def to_dataframe(self, tokenizer: Any = None) -> Any:
        """A pandas DataFrame with a line a row; with a tokenizer, the tokens as text."""
        from howlinear.profiling.profiler import imported

        names = ("window", "position", "token", "error", "output")
        columns = {name: getattr(self, name).numpy() for name in names}
        if tokenizer is not None:
            columns["text"] = [tokenizer.decode([token]) for token in self.token.tolist()]
        return imported("pandas", "to_dataframe").DataFrame(columns)


def residuals(
    model: nn.Module,
    windows: WindowsLike,
    block: BlockName,
    fitted: Map | None = None,
    *,
    batch_size: int = 8,
) -> TokenErrors:
    """The squared error of a block's map at each token, with the tokens.

    `fitted` is a map, such as `result.maps[3]`. Without one, each half of the windows (even, odd) is
    scored with the map of the other half, and batches that come one by one are kept in memory.
    """
    place, text, work = one_block(model, block), as_windows(windows), Work(batch_size=batch_size)
    maps = [fitted, fitted] if fitted is not None else []
    if not maps:
        text = text.read()
        halves = [Moments(place.d_in, place.d_out) for _ in range(2)]

        def add(batch: Batch, _: Block, rows: Rows) -> None:
            half = _windows(batch, rows) % 2
            for number, moments in enumerate(halves):
                moments.update(rows.x[half == number], rows.y[half == number])

        run_rows(model, text, add, at=place, work=work)
        maps = [fit(halves[1]), fit(halves[0])]
    parts: list[tuple[Tensor, ...]] = []

    def take(batch: Batch, _: Block, rows: Rows) -> None:
        parts.append(_errors(batch, rows, maps))

    run_rows(model, text, take, at=place, work=work)
    token, window, position, error, y = (torch.cat(part) for part in zip(*parts, strict=True))
    output = (y - y.mean(0)).square().sum(1)
    return TokenErrors(place, token, window, position, error, output)


def _windows(batch: Batch, rows: Rows) -> Tensor:
    """(n,) the number of each row's window."""
    return batch.first + rows.kept.cpu() // rows.lead[1]


def _errors(batch: Batch, rows: Rows, maps: list[Any]) -> tuple[Tensor, ...]:
    """Token, window, position, squared error and y of each row."""
    places, window = rows.kept.cpu(), _windows(batch, rows)
    ids = batch.inputs.get(IDS)
    fits = ids is not None and rows.lead == tuple(ids.shape)
    token = (
        ids.cpu().reshape(-1)[places] if ids is not None and fits else torch.full_like(places, -1)
    )
    x, y = rows.x.cpu().double(), rows.y.cpu().double()
    error = y.new_zeros(len(y))
    for number, fitted in enumerate(maps):
        mine = window % 2 == number
        inputs = (
            x if isinstance(fitted, Affine) else rows.x.cpu()
        )  # hidden units have a dtype of their own
        error[mine] = (y[mine] - fitted(inputs[mine]).double()).square().sum(1)
    return token, window, rows.position.cpu(), error, y
