"""The fields of the files in a run folder, as frozen dataclasses: one for each kind of block entry.

    BlockProfile.from_dict(data)        # checked; ValueError names the field
    record.to_dict()

`files` writes and reads the JSON. null stands for a float that is not finite, and is
read as NaN where a field must be a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from typing import Any, Self

TYPES: dict[str, Any] = {"int": int, "float": int | float, "str": str, "dict": dict, "list": list}
LARGEST = 1e100  # far above every measurement; squares of larger numbers overflow
COUNTS = ("index", "d_in", "d_out", "effective_rank", "input_rank", "n_fit", "n_heldout", "windows")


class Record:
    """One block's fields, to and from JSON."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        every: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
        if missing := [f.name for f in every if f.default is MISSING and f.name not in data]:
            raise ValueError(
                f"a block lacks {', '.join(missing)}: measure again what an earlier version measured"
            )
        present = {f.name: f.type for f in every if f.name in data}
        for name, annotation in present.items():
            value = data[name]
            if not any(_admits(t, value) for t in str(annotation).split(" | ")):
                raise ValueError(f"a block's {name} is {value!r:.60}, expected {annotation}")
            if name in COUNTS and value is not None and value < 0:
                raise ValueError(f"a block's {name} is {value}, expected a count")
        values = {name: data[name] for name in present}
        empty = {n: math.nan for n, v in values.items() if v is None and present[n] == "float"}
        return cls(**values | empty)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]


def _admits(annotation: str, value: Any) -> bool:
    """May a field with this annotation have this value?"""
    if value is None or annotation == "None":
        return value is None and annotation in ("None", "float")
    name, _, inner = annotation.removesuffix("]").partition("[")
    if isinstance(value, bool) or not isinstance(value, TYPES[name]):
        return False
    if name in ("int", "float"):
        return bool(abs(value) < LARGEST)
    if annotation == "dict[str, float]":
        return all(_admits("float", v) for v in value.values())
    if annotation == "list[list[float]]":  # pairs
        return all(_admits("list[float]", v) and len(v) == 2 and None not in v for v in value)
    return name != "list" or all(_admits(inner, v) and (inner == "float" or v >= 0) for v in value)


@dataclass(frozen=True)
class BlockProfile(Record):
    """How linear one block is. Every field is defined in docs/fields.md."""

    index: int
    path: str
    d_in: int
    d_out: int
    kind: str
    r2: float
    r2_se: float | None
    r2_body: float | None
    r2_body_se: float | None
    r2_scalar: float
    r2_feature: dict[str, float]
    r2_curve: list[float] | None
    first_share: float | None
    sink_units: list[int] | None
    sink_shares: list[float] | None
    effective_rank: int | None
    input_rank: int
    input_condition: float | None
    input_participation: float
    input_range: float | None
    stream_error: float | None
    stream_error_se: float | None
    expected_kl: float | None
    expected_kl_se: float | None
    expected_beyond: float | None
    rmse: float
    residual_norm: float
    output_norm: float
    n_fit: int
    n_heldout: int
    rows_per_column: float
    fold_sums: list[list[float]] | None = None
    input_spectrum: list[list[float]] | None = None
    map_spectrum: list[list[float]] | None = None
    r2_interval: list[float] | None = None


@dataclass(frozen=True)
class BlockExpert(Record):
    """How linear one expert of a mixture is, on the tokens that were routed to it."""

    index: int
    expert: str
    path: str
    d_in: int
    d_out: int
    tokens: int
    share: float
    r2: float | None
    r2_se: float | None
    r2_body: float | None
    r2_scalar: float | None
    effective_rank: int | None
    input_rank: int | None
    rmse: float | None
    residual_norm: float | None
    output_norm: float | None
    n_fit: int
    rows_per_column: float
    fold_sums: list[list[float]] | None
    problem: str | None


@dataclass(frozen=True)
class BlockSwap(Record):
    """What replacing one block by its map costs. Every field is defined in docs/fields.md."""

    index: int
    path: str
    units: list[int]
    weighting: str
    verdict: str | None
    kl: float | None
    kl_se: float | None
    delta_nll: float | None
    delta_nll_se: float | None
    delta_ppl: float | None
    delta_ppl_se: float | None
    top1: float | None
    top1_se: float | None
    tokens: int
    windows: int
    clusters: int
    kl_plain: float | None
    kl_zero: float | None
    kl_mean: float | None
    delta_nll_plain: float | None
    delta_nll_zero: float | None
    delta_nll_mean: float | None
    delta_ppl_plain: float | None
    delta_ppl_zero: float | None
    delta_ppl_mean: float | None
    cosine: float
    rmse: float
    stream_error: float | None
    params_saved: int
    multiply_adds_saved: int | None


@dataclass(frozen=True)
class ExpertSwap(Record):
    """What replacing one expert of a mixture by its map costs."""

    index: int
    expert: str
    path: str
    tokens: int
    r2: float | None
    delta_nll: float
    delta_nll_se: float
    delta_ppl: float
    delta_ppl_se: float
    kl: float
    kl_se: float
    top1: float
    top1_se: float
    params_saved: int


@dataclass(frozen=True)
class BlockProbe(Record):
    """The residual of one block's map, by kind of probe. Fields are in docs/fields.md."""

    index: int
    path: str
    r2: float
    r2_body: float
    linear: dict[str, Any]
    bilinear: dict[str, Any] | None = None
    degree: dict[str, Any] | None = None
    units: dict[str, Any] | None = None
    dense: dict[str, Any] | None = None
    poly: dict[str, Any] | None = None
    seeded: dict[str, Any] | None = None
    trained: dict[str, Any] | None = None
    where: dict[str, Any] | None = None
    quantised: dict[str, Any] | None = None
    healing: dict[str, Any] | None = None

    def beside(self, older: BlockProbe | None) -> BlockProbe:
        """This record, with the kinds that only an older one of the block has."""
        if older is None:
            return self
        kinds = [f.name for f in fields(self) if f.default is None]
        added = {kind: getattr(older, kind) for kind in kinds if getattr(self, kind) is None}
        return replace(self, linear=older.linear | self.linear, **added)


@dataclass(frozen=True)
class BlockPlan(Record):
    """The planned replacement of one block. Fields are in docs/fields.md."""

    index: int
    path: str
    rank: int | None  # of the matrix; null: full, 0: no matrix
    units: int  # hidden units kept


@dataclass(frozen=True)
class BlockCompression(Record):
    """The replacement of one block in a compressed model. Fields are in docs/fields.md."""

    index: int
    path: str
    replaced: int
    rank: int | None
    units: list[int]
    parameters: int
    parameters_left: int
    kl_alone: float | None
    correction: float | None = None  # missing in files of earlier versions


#: fields of a block's profile that a monitor keeps
MONITORED = (
    "index",
    "r2",
    "r2_se",
    "r2_body",
    "r2_body_se",
    "r2_scalar",
    "first_share",
    "effective_rank",
    "input_participation",
    "residual_norm",
    "output_norm",
)
