"""The table of probes: one row for each kind.

A probe is a module with a function of rows, and a row here that calls it for one block. It returns a
record for probe.json and layers, by name, that can be swapped in for the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from howlinear.linear.affine import Affine, UnitMap
from howlinear.losses.protocols import EvalProtocol
from howlinear.models.families import Block
from howlinear.probing.bilinear import SOLVERS, probe_products
from howlinear.probing.healing import probe_healing
from howlinear.probing.ladder import probe_units
from howlinear.probing.polynomials import degrees
from howlinear.probing.reading import Decode, probe_residual
from howlinear.probing.rounding import rounding_errors
from howlinear.probing.samples import Layer, Sample
from howlinear.probing.training import baselines, dense, poly, probe_network, seeded

Layers = dict[str, Layer]


@dataclass(frozen=True)
class ProbeSettings:
    """Which probes are made and how."""

    kinds: tuple[str, ...] = field(default_factory=lambda: tuple(FAST))
    rank: int = 16  # of bilinear layers
    solver: str = "ours"  # of the bilinear probe: ours or paper
    seeds: int = 3
    seed: int = 0
    train_steps: int = 3000  # of the trained linear layers
    heal_steps: int = 200
    protocol: EvalProtocol | str | None = None  # of the loss with a layer swapped in
    memory: int | None = None  # bytes of rows and layers held at once; None: any
    keep_layers: bool = True  # in the result, for all blocks
    decode: Decode | None = None  # token id -> text
    about: dict[str, Any] = field(default_factory=dict)  # model and text, for probe.json

    def __post_init__(self) -> None:
        if unknown := [k for k in self.kinds if k not in PROBES]:
            known = ", ".join(KINDS)
            raise ValueError(f"there is no probe {unknown[0]!r}: choose of {known} (`kinds`)")
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {self.solver!r}: ours or paper (`solver`)")
        if self.rank < 1 or self.seeds < 1:
            raise ValueError("rank and seeds must be 1 at least (`rank`, `seeds`)")


@dataclass(frozen=True, eq=False)
class Subject:
    """One block, its map and its rows: the arguments of every probe."""

    model: nn.Module
    block: Block
    affine: Affine
    samples: tuple[Sample, Sample, Sample]  # rows to fit on, to choose by and to report on
    settings: ProbeSettings
    swap_map: Callable[[], Affine | UnitMap]  # what `howlinear swap` chose, or the affine map
    heal_on: Tensor | None  # windows

    @property
    def fit(self) -> Sample:
        return self.samples[0]

    @property
    def report(self) -> Sample:
        return self.samples[-1]

    def options(self, *names: str) -> dict[str, Any]:
        """Some of the settings, as arguments."""
        return {name: getattr(self.settings, name) for name in names}

    @property
    def constant(self) -> bool:
        """Does the block's output not vary over the rows?"""
        return not all(float(rows.spread.sum()) > 0 for rows in (self.report, self.fit))


Probe = Callable[[Subject], tuple[dict[str, Any], Layers]]


def _network(name: str, make: Callable[[Subject, int], nn.Module], **options: Any) -> Probe:
    """A probe that trains what `make` makes, once for each seed."""

    def run(s: Subject) -> tuple[dict[str, Any], Layers]:
        first = s.settings.seed + 42  # the paper's 42, 43, 44
        networks = ((seed, make(s, seed)) for seed in range(first, first + s.settings.seeds))
        record, layer = probe_network(networks, *s.samples, s.affine, **options)
        return record | ({} if name == "dense" else {"rank": s.settings.rank}), {name: layer}

    return run


FAST: dict[str, Probe] = {
    "bilinear": lambda s: probe_products(
        *s.samples, s.affine, **s.options("rank", "solver", "seeds", "seed")
    ),
    "degree": lambda s: degrees(*s.samples, s.affine),
    "units": lambda s: probe_units(s.model, s.block, s.fit, s.report, s.affine),
    "where": lambda s: probe_residual(s.model, s.affine, s.fit, s.report, s.settings.decode),
    "quantised": lambda s: rounding_errors(s.model, s.block, s.report),
}
SLOW: dict[str, Probe] = {  # made only on request
    "dense": _network("dense", lambda s, seed: dense(s.fit, seed)),
    "poly": _network("poly", lambda s, seed: poly(s.fit, seed, s.settings.rank)),
    "seeded": _network(
        "seeded", lambda s, seed: seeded(s.affine, seed, s.settings.rank), steps=12000, lr=1e-4
    ),
    "trained": lambda s: baselines(s.fit, s.report, **s.options("train_steps", "seed")),
    "healing": lambda s: probe_healing(
        s.model, s.block, s.swap_map, s.heal_on, **s.options("heal_steps", "seed")
    ),
}
PROBES = FAST | SLOW
KINDS: tuple[str, ...] = tuple(PROBES)
COSTS = "swapping"
SECONDS: dict[str, float] = {  # of one block of the built-in model: first guesses at the time left
    "quantised": 2.0,
    "where": 4.0,
    "units": 15.0,
    "degree": 25.0,
    "bilinear": 100.0,
    COSTS: 110.0,
    "trained": 100.0,  # from here on not measured
    "dense": 100.0,
    "poly": 100.0,
    "seeded": 300.0,
    "healing": 300.0,
}
