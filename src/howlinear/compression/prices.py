"""What each way to replace blocks saves in parameters and costs in loss.

    options = price_options(fitter, sizes, losses, rank="auto", units="auto")

A few ways are priced for each block: one matrix beside SINKS hidden units, and shares ALONE of the
hidden units without a matrix. Their price is what the errors of the map are expected to cost, by the
gradients of the predictions on a few windows (`profiling.expected`): no block is swapped for it. The
prices of other ways are interpolated from these, by the share of variance that each way leaves unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from howlinear.compression.plan import Option, expected
from howlinear.compression.refitting import Refitter, Shape
from howlinear.compression.targets import FORMATS, INSTEAD, STOCK, is_stock_width
from howlinear.linear.affine import Factored, Map, UnitMap
from howlinear.linear.gradients import WINDOWS
from howlinear.linear.unit_selection import GROUP
from howlinear.losses.perplexity import Comparison, compare_all
from howlinear.losses.protocols import EvalProtocol, protocol_of
from howlinear.losses.readout import KeptReadout
from howlinear.losses.sweeps import Variant, sweep
from howlinear.models.families import Block, Replacement, blocks, parameter_count
from howlinear.models.forward import WindowsLike, as_windows
from howlinear.models.hooks import as_module, swapped
from howlinear.models.units import hidden_count, taken
from howlinear.profiling.expected import expected_kl
from howlinear.profiling.gradients import gradients_on, why_no_gradients
from howlinear.profiling.passes import Course
from howlinear.run.work import Work
from howlinear.swapping.choosing import expected as expected_costs
from howlinear.swapping.choosing import suggested
from howlinear.swapping.maps import RunMaps

ALONE = (0.5, 0.75)
RANKS = (1 / 16, 1 / 8, 1 / 4)  # of the width, beside these shares of the hidden units:
BESIDE = (0.0, 0.25, 0.5)
PRICED = 48  # windows that go forward and backward to price options, WINDOWS at a time
OPTION_TOKENS = 1024  # tokens on which the cost of one option is measured
SINKS = 4  # hidden units beside a matrix, at least: attention sinks need a few, and few suffice


class Sizes:
    """Parameters and hidden units of blocks, and what maps in their place save in a kind of export.

    A stock model has one width (`even`): all blocks keep the same number of hidden units, and biases only
    where the family has them. In a format of `targets` each map is stored as stock hidden units; where all
    blocks get biases, these add up to `added`.
    """

    def __init__(self, model: nn.Module, at: Sequence[Block], target: str = "hf") -> None:
        self.even, self.form = target == STOCK, FORMATS.get(target)
        self.others = [b for b in blocks(model) if b not in at]
        modules = {b: as_module(model, b) for b in at}
        every = model.named_parameters(remove_duplicate=False)
        uses = Counter(id(p) for _, p in every)
        shared = {p for p, count in uses.items() if count > 1}  # stay while another module has them
        self.parameters = {b: parameter_count(m, shared) for b, m in modules.items()}
        self.hidden = {b: hidden_count(model, b) for b in at}
        self.unit = {  # parameters of one hidden unit
            b: sum(p.numel() for p in taken(model, b, [0]).parameters()) + b.d_out
            for b in at
            if self.hidden[b]
        }
        self.biases = all(has_bias(model, b) for b in at)  # of the last projections
        self.total = sum(self.parameters.values())
        stored = [*at, *self.others] if self.form else []
        self.added = sum(self._added(b, hidden_count(model, b)) for b in stored)

    def _added(self, block: Block, hidden: int) -> int:
        return self.form.added(block.d_out, hidden) if self.form else 0

    def saved(self, block: Block, shape: Shape) -> int:
        """Parameters that a map of this shape saves."""
        rank, k = shape
        if self.form:
            full = min(block.d_in, block.d_out)
            stored = self.form.parameters(block.d_in, full if rank is None else min(rank, full), k)
            return self.parameters[block] + self._added(block, self.hidden[block]) - stored
        if self.even:
            return (self.hidden[block] - k) * self.unit.get(block, 0)
        matrix = block.d_in * block.d_out if rank is None else rank * (block.d_in + block.d_out)
        return self.parameters[block] - matrix - block.d_out - k * self.unit.get(block, 0)

    def check_even(self, shapes: Mapping[Block, Shape]) -> None:
        """Refuse what a stock model, with one width for all blocks, cannot hold."""
        if any(rank != 0 for rank, _ in shapes.values()):
            raise ValueError(f"a stock block holds no matrix: plan rank 0 for all, or {INSTEAD}")
        units = {k for _, k in shapes.values()}
        if len(shapes) < len(self.parameters) or len(units) > 1 or 0 in units:
            raise ValueError(
                f"a stock model has one width: replace all {len(self.parameters)} blocks and keep the same "
                f"number of hidden units in each (a budget of `parameters` finds it), or {INSTEAD}"
            )

    def saved_by(self, maps: Mapping[Block, Map]) -> dict[Block, int]:
        """Parameters that each block saves when these maps replace their blocks."""
        if self.form:
            return {
                b: self.saved(b, shape_of(m)) - self._added(b, self.hidden[b])
                for b, m in maps.items()
            }
        if self.even:
            return {b: self.saved(b, shape_of(m)) for b, m in maps.items()}
        return {b: self.parameters[b] - m.parameters for b, m in maps.items()}

    def removed(self, maps: Mapping[Block, Map]) -> int:
        """Parameters that go when these maps replace their blocks."""
        stays = self.added - sum(self._added(b, self.hidden[b]) for b in maps)
        return sum(self.saved_by(maps).values()) - stays

    def units_near(self, block: Block, share: float) -> int:
        """The number of hidden units nearest to a share of them that the elimination passes."""
        return self.at_most(block, max(GROUP * round(share * self.hidden[block] / GROUP), SINKS))

    def at_most(self, block: Block, units: int) -> int:
        return min(units, self.hidden[block])


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
        self.reason, self.original = "", None
        try:
            self.original = KeptReadout(model)
        except ValueError as error:
            self.reason = str(error)

    def expected(self, variants: Sequence[Variant]) -> list[float]:
        """What each replacement of one block alone is expected to cost, in nats a token.

        Measured instead where there are no gradients.
        """
        ids = as_windows(self.choose).ids
        if ids is None or why_no_gradients(self.model, as_windows(ids), Course()):
            return [change.kl for change in self.alone("measuring options", variants)]
        count = min(PRICED, len(ids))
        chosen = ids[torch.arange(count) * len(ids) // count]
        advance = self.work.begin("pricing options", chosen.numel())
        costs = torch.zeros(len(variants), dtype=torch.float64)
        for part in chosen.split(WINDOWS):
            costs += len(part) / len(chosen) * torch.tensor(self._expected_on(part, variants))
            advance(part.numel())
        return costs.tolist()

    @torch.no_grad()
    def _expected_on(self, ids: Tensor, variants: Sequence[Variant]) -> list[float]:
        """The expected costs by the gradients of these windows."""
        at, like = list(dict.fromkeys(b for b, _ in variants)), next(self.model.parameters())
        samples, costs = gradients_on(self.model, at, ids), []
        if not samples:
            raise ValueError("predictions are not finite")
        for block, fitted in variants:
            norm = self.model.get_submodule(block.out_norm) if block.out_norm else None
            after = norm and (lambda y, norm=norm: norm(y.to(like)).cpu().double())
            sample = samples[block]
            guess = fitted(sample.x.to(like)).cpu()
            costs.append(expected_kl(sample, guess, after).nats)
        return costs

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
        tokens = windows.numel() if isinstance(windows, Tensor) else 0
        tokens //= self.work.ranks.count
        advance = self.work.begin("measuring", tokens)
        assert self.original is not None
        return compare_all(
            self.original, changes, windows, self.protocol, work=self.work, progress=advance
        )


def price_options(
    fitter: Refitter, sizes: Sizes, losses: Losses, rank: int | str, units: int | str
) -> list[Option]:
    """Every option of every block that saves parameters, with its cost on the text for choosing."""
    if losses.reason:
        raise ValueError(
            f"`perplexity` and `parameters` measure costs, but {losses.reason}: name "
            "blocks (`at`) or give a `plan`"
        )
    shapes = {b: _priced_shapes(b, sizes, rank, units) for b in fitter.at}
    ranks = {
        b: {sizes.units_near(b, share): _ranks(b, rank) for share in BESIDE}
        for b in fitter.at
        if sizes.hidden[b] and rank != 0
    }
    maps = fitter.survey(shapes, ranks)
    variants = [(b, fitted) for b in fitter.at for fitted in maps[b]]
    costs = iter(losses.expected(variants))
    options = []
    for b in fitter.at:
        priced = {shape: next(costs) for shape in shapes[b]}
        rests = fitter.rests[b]
        points = [(rests[shape], cost) for shape, cost in priced.items() if shape in rests]
        by_shape = {shape: expected(points, rest) for shape, rest in rests.items()} | priced
        for (r, k), cost in by_shape.items():
            saved = sizes.saved(b, (r, k))
            if saved > 0 and _allowed(b, (r, k), sizes, rank, units):
                options.append(Option(b.index, r, k, saved, cost))
    return losses.work.ranks.share(options)  # all ranks must follow one plan


def _priced_shapes(block: Block, sizes: Sizes, rank: int | str, units: int | str) -> list[Shape]:
    if not sizes.hidden[block]:
        return [(full_or(rank), 0)]
    if units != "auto":
        k = sizes.at_most(block, int(units))
        return [(None, k), (0, k)] if rank == "auto" else [(full_or(rank), k)]
    matrix: list[Shape] = [] if rank == 0 else [(None, sizes.units_near(block, 0.0))]
    return matrix + [(0, sizes.units_near(block, share)) for share in ALONE]


def _ranks(block: Block, rank: int | str) -> list[int]:
    if rank == "auto":
        return [max(round(part * min(block.d_in, block.d_out)), 1) for part in RANKS]
    return [r] if (r := full_or(rank)) else []


def _allowed(block: Block, shape: Shape, sizes: Sizes, rank: int | str, units: int | str) -> bool:
    """Does a shape agree with the rank and the number of hidden units that the user set, if any?"""
    r, k = shape
    if rank != "auto" and r != full_or(rank):
        return False
    if units != "auto":
        return k == sizes.at_most(block, int(units))
    if sizes.even:
        return is_stock_width(k, sizes.hidden[block])
    return r == 0 or k >= sizes.at_most(block, SINKS)


def has_bias(model: nn.Module, block: Block) -> bool:
    """Does the last projection of a block have a bias?"""
    down = model.get_submodule(block.down) if block.down else None
    return getattr(down, "bias", None) is not None


def shape_of(fitted: Map) -> Shape:
    """The rank of a map's matrix, None for full, and the hidden units that it keeps."""
    affine = fitted.affine if isinstance(fitted, UnitMap) else fitted
    units = len(fitted.units) if isinstance(fitted, UnitMap) else 0
    return (affine.rank if isinstance(affine, Factored) else None), units


def full_or(rank: int | str) -> int | None:
    """The rank of a matrix as a shape has it: None for full."""
    return None if rank in ("auto", "full") else int(rank)


def shapes_of_named(
    fitter: Refitter,
    sizes: Sizes,
    maps: RunMaps,
    at: Sequence[Block],
    rank: int | str,
    units: int | str,
) -> dict[Block, Shape]:
    """One matrix for each block; with units "auto", the sink units beside it that the run suggests."""
    r = full_or(rank)
    if units != "auto":
        return {b: (r, sizes.at_most(b, int(units))) for b in at}
    counts = {b: suggested(b, maps, expected_costs) for b in at}
    for b, k in counts.items():
        fitter.keep_units(b, (maps.records[b.index].sink_units or [])[:k])
    return {b: (r, k) for b, k in counts.items()}
