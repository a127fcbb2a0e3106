"""Results as values: frozen dataclasses that are written to JSON and read back checked.

    write_json("run/profile.json", profile.to_dict())
    read_json("run/profile.json", kind="profile")["blocks"][3]["r2"]

This is the one place that names the fields of the files in a run folder. Numbers that are not
finite become null. Files are written under a temporary name and renamed, so that a reader sees
the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

SCHEMA = 1
MAX_JSON = 64 * 2**20  # bytes; a larger file is not one of ours


TYPES: dict[str, Any] = {  # what a field's annotation admits in JSON
    "int": int,
    "float": (int, float),
    "str": str,
    "None": type(None),
    "list[int]": list,
    "list[float]": list,
    "list[list[float]]": list,
    "dict[str, float]": dict,
    "dict[str, Any]": dict,
}
LARGEST = 1e100  # nothing that is measured comes near; squares of what is beyond overflow
COUNTS = ("index", "d_in", "d_out", "effective_rank", "input_rank", "n_fit", "n_heldout")


class _Record:
    """One block's fields, to and from JSON."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        every: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
        if missing := [f.name for f in every if f.default is MISSING and f.name not in data]:
            raise ValueError(f"a block lacks {', '.join(missing)}")
        given = [f for f in every if f.name in data]  # an older file may lack what has a default
        for f in given:
            value, types = data[f.name], str(f.type).split(" | ")
            if not any(_admits(t, value) for t in types) and not (
                value is None and "float" in types
            ):
                raise ValueError(f"a block's {f.name} is {value!r:.60}, expected {f.type}")
            if f.name in COUNTS and value is not None and value < 0:
                raise ValueError(f"a block's {f.name} is {value}, expected a count")
        return cls(**{f.name: data[f.name] for f in given})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]


def _admits(annotation: str, value: Any) -> bool:
    """Does a field of this type hold this? null stands for NaN in a float's place."""
    if isinstance(value, bool) or not isinstance(value, TYPES[annotation]):
        return False
    if isinstance(value, int | float):
        return abs(value) < LARGEST
    if annotation == "dict[str, float]":
        return all(v is None or _admits("float", v) for v in value.values())
    if annotation == "list[float]":
        return all(v is None or _admits("float", v) for v in value)
    if annotation == "list[int]":
        return all(_admits("int", v) and v >= 0 for v in value)
    if annotation == "list[list[float]]":  # pairs
        return all(_admits("list[float]", v) and len(v) == 2 and None not in v for v in value)
    return True


@dataclass(frozen=True)
class BlockProfile(_Record):
    """How linear one block is. Every field is defined in docs/fields.md."""

    index: int
    path: str
    d_in: int
    d_out: int
    kind: str
    safety: str
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
    swap_signal: float | None
    rmse: float
    residual_norm: float
    output_norm: float
    n_fit: int
    n_heldout: int
    rows_per_column: float
    fold_sums: list[list[float]] | None = None
    input_spectrum: list[list[float]] | None = None
    map_spectrum: list[list[float]] | None = None


@dataclass(frozen=True)
class BlockExpert(_Record):
    """How linear one expert of a mixture is, on the tokens that it was given."""

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
class BlockSwap(_Record):
    """What replacing one block by its map costs. Every field is defined in docs/fields.md."""

    index: int
    path: str
    units: list[int]
    weighting: str
    delta_nll: float | None
    delta_nll_se: float | None
    delta_ppl: float | None
    delta_ppl_se: float | None
    kl: float | None
    kl_se: float | None
    top1: float | None
    top1_se: float | None
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
    swap_signal: float | None


@dataclass(frozen=True)
class ExpertSwap(_Record):
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
class BlockProbe(_Record):
    """What one block's map leaves is made of, by kind of probe. Fields are in docs/fields.md."""

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


@dataclass(frozen=True)
class BlockPlan(_Record):
    """What becomes of one block. Fields are in docs/fields.md."""

    index: int
    path: str
    rank: int | None  # of the matrix; null: full, 0: no matrix
    units: int  # hidden units kept


@dataclass(frozen=True)
class BlockCompression(_Record):
    """What became of one block. Fields are in docs/fields.md."""

    index: int
    path: str
    replaced: int
    rank: int | None
    units: list[int]
    parameters: int
    parameters_left: int
    kl_alone: float | None


#: what a monitor keeps of a block's profile
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


KINDS = (
    "broadly linear",
    "outlier-concentrated",
    "first-position only",
    "partly linear",
    "nonlinear",
)


def kind_of(r2: float, r2_body: float, median: float, first_share: float, rank_share: float) -> str:
    """A block's profile in plain words. The thresholds are conventions, stated in docs/fields.md."""
    if math.isnan(r2_body):  # every row is a first position
        r2_body = r2
    if first_share >= 0.5 and r2 - r2_body >= 0.2:
        return "first-position only"
    if r2_body >= 0.75 and median >= 0.5:
        return "broadly linear"
    if r2 >= 0.5 and (median < 0.5 * r2 or rank_share <= 0.02):
        return "outlier-concentrated"
    return "partly linear" if r2_body >= 0.4 else "nonlinear"


SAFETY = ("likely safe", "some cost", "costly", "sink", "unknown")


def safety_of(
    swap_signal: float | None, first_share: float | None, sink_shares: list[float] | None
) -> str:
    """May this block become one matrix? In plain words; conventions, stated in docs/fields.md."""
    if swap_signal is None or math.isnan(swap_signal):
        return "unknown"
    if swap_signal < 0.03:
        return "likely safe"
    if swap_signal < 0.1:
        return "some cost"
    made_by_few = sink_shares is not None and sum(sink_shares) >= 0.5
    return "sink" if made_by_few and (first_share or 0.0) >= 0.5 else "costly"


def summarise(blocks: list[BlockProfile]) -> dict[str, Any]:
    """Heterogeneity over depth: range, largest jump between neighbours, rank correlation."""
    values = [b.r2 for b in blocks]
    jumps = [abs(b - a) for a, b in pairwise(values)]
    jump = max(range(len(jumps)), key=jumps.__getitem__) if jumps else None
    low, high = min(blocks, key=lambda b: b.r2), max(blocks, key=lambda b: b.r2)
    return {
        "r2_min": low.r2,
        "r2_min_block": low.index,
        "r2_max": high.r2,
        "r2_max_block": high.index,
        "largest_jump": None if jump is None else jumps[jump],
        "largest_jump_after": None if jump is None else blocks[jump].index,
        "largest_jump_before": None if jump is None else blocks[jump + 1].index,
        "depth_spearman": spearman([float(b.index) for b in blocks], values),
    }


def spearman(a: list[float], b: list[float]) -> float | None:
    """Rank correlation with ties sharing their mean rank; None where one side does not vary."""
    return pearson(_ranks(a), _ranks(b))


def pearson(x: list[float], y: list[float]) -> float | None:
    """Correlation; None where one side does not vary."""
    if not x:
        return None
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xx = sum((u - mx) ** 2 for u in x)
    yy = sum((v - my) ** 2 for v in y)
    if xx <= 0 or yy <= 0:
        return None
    return sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / math.sqrt(xx * yy)


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            ranks[k] = (i + j) / 2
        i = j + 1
    return ranks


def clean(value: Any) -> Any:
    """The same value with numbers that JSON cannot hold as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def dumps(data: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    return json.dumps(clean(data), indent=1, allow_nan=False, ensure_ascii=ascii_only)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    with atomic(path) as temporary:
        temporary.write_text(dumps(data) + "\n", encoding="utf-8")


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """A file that this package wrote, checked for kind and schema; ValueError in one line otherwise."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path} is larger than any file of ours ({MAX_JSON} bytes)")
        data = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: is {path.parent} a run folder?") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as err:
        raise ValueError(f"{path} is not a readable JSON file: {_one_line(err)}") from None
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise ValueError(f"{path} is not a howlinear {kind} file")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {data.get('schema')!r}, this version reads {SCHEMA}: "
            f"make it anew or install the howlinear that wrote it"
        )
    return data


R = TypeVar("R", bound=_Record)


def blocks_of(path: str | Path, data: Mapping[str, Any], record: type[R]) -> list[R]:
    """The blocks that a file lists, checked; ValueError in one line if they are not as expected."""
    listed = data.get("blocks")
    if not (isinstance(listed, list) and listed and all(isinstance(b, dict) for b in listed)):
        raise ValueError(f"{path} lists no blocks")
    try:
        return [record.from_dict(b) for b in listed]
    except (ValueError, TypeError) as err:
        raise ValueError(f"{path}: {err}") from None


def check_same(folder: Path, before: Any, now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings, and name them."""
    if not isinstance(before, dict):
        raise ValueError(f"{folder / 'progress.json'} is damaged: pass --overwrite to start again")
    for name in now:
        if before.get(name) != now[name]:
            raise ValueError(
                f"{folder} holds an unfinished profile with another {name} ({before.get(name)}, now "
                f"{now[name]}): ask for the same to go on, or pass --overwrite to start again"
            )


def read_monitor(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rows of a monitor.jsonl; ValueError in one line if it is not one."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path} is larger than any file of ours ({MAX_JSON} bytes)")
        lines = path.read_bytes().decode("utf-8").splitlines()
        header, *rows = (json.loads(line, parse_constant=_no_constant) for line in lines)
    except (OSError, ValueError, RecursionError) as err:
        raise ValueError(f"{path} is not a readable monitor file: {_one_line(err)}") from None
    known = isinstance(header, dict) and header.get("kind") == "monitor"
    if not known or header.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a howlinear monitor file of schema {SCHEMA}")
    for row in rows:
        ok = isinstance(row, dict) and type(row.get("step")) is int
        if not ok or not isinstance(row.get("blocks"), list):
            raise ValueError(f"{path}: a row has no step or no blocks")
    return header, rows


def _no_constant(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)


def _one_line(err: Exception) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block ends well, else is removed."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
