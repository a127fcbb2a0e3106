"""JSON files that are written whole and read checked.

    write_json("run/profile.json", profile.to_dict())
    read_json("run/profile.json", kind="profile")["blocks"][3]["r2"]

Numbers that are not finite become null. A file is written under a temporary name and renamed: a
reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from howlinear.records.fields import Record

SCHEMA = 1
MAX_JSON = 64 * 2**20  # bytes; howlinear writes no larger file


def clean(value: Any) -> Any:
    """The same value with null in place of numbers that are not finite."""
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
    """A file that howlinear wrote, checked for kind and schema; ValueError in one line otherwise."""
    path = Path(path)
    try:
        data = _parsed(_text(path))
    except FileNotFoundError:
        raise ValueError(_absent(path, kind)) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as err:
        raise ValueError(f"{path} is not a readable JSON file: {one_line(err)}") from None
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise ValueError(f"{path} is not a howlinear {kind} file")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {data.get('schema')!r}, this version reads {SCHEMA}: "
            f"write it again or install the howlinear that wrote it"
        )
    return data


def _absent(path: Path, kind: str) -> str:
    if kind == "plan":
        return f"{path} does not exist: name a plan.json that howlinear compress wrote (`plan`)"
    if not path.parent.is_dir():
        return f"{path.parent} does not exist: name a run folder that howlinear profile wrote"
    return f"{path.parent} is not a run folder of howlinear profile: it has no {path.name}"


R = TypeVar("R", bound=Record)


def blocks_of(path: str | Path, data: Mapping[str, Any], record: type[R]) -> list[R]:
    """The blocks that a file lists, checked; ValueError in one line if they are not as expected."""
    listed = data.get("blocks")
    if not (isinstance(listed, list) and listed and all(isinstance(b, dict) for b in listed)):
        raise ValueError(f"{path} lists no blocks")
    try:
        return [record.from_dict(b) for b in listed]
    except (ValueError, TypeError) as err:
        raise ValueError(f"{path}: {err}") from None


def read_monitor(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rows of a monitor.jsonl; ValueError in one line if it is not one."""
    path = Path(path)
    try:
        header, *rows = map(_parsed, _text(path).splitlines())
    except (OSError, ValueError, RecursionError) as err:
        raise ValueError(f"{path} is not a readable monitor file: {one_line(err)}") from None
    known = isinstance(header, dict) and header.get("kind") == "monitor"
    if not known or header.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a howlinear monitor file of schema {SCHEMA}")
    for row in rows:
        ok = isinstance(row, dict) and type(row.get("step")) is int
        if not ok or not isinstance(row.get("blocks"), list):
            raise ValueError(f"{path}: a row has no step or no blocks")
    return header, rows


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path} is larger than any file of howlinear ({MAX_JSON} bytes)")
    return path.read_bytes().decode("utf-8")


def _parsed(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)


def one_line(err: Exception) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__


def check_writable(path: str | Path, way_out: str = "") -> None:
    """Refuse, before the work, a file that cannot be written there.

    A megabyte is written without a name to the nearest folder that exists: a full disk, a quota and
    missing permissions all show.
    """
    path = Path(path)
    try:
        folder = next(p for p in path.absolute().parents if p.exists())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        reason = f"{path} cannot be written ({err.strerror or err})"
        raise ValueError(f"{reason}: {way_out}" if way_out else reason) from None


def check_file(path: Path) -> None:
    """Refuse, before the work, a file named with -o that cannot be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file with `out`")
    if not path.parent.is_dir():
        raise ValueError(
            f"there is no folder {path.parent}: make it, or name another place with `out`"
        )
    check_writable(path, "name another place with `out`")


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary file that replaces `path` if the `with` block succeeds, and is removed otherwise."""
    path = Path(path)
    try:
        with _replacing(path) as temporary:
            yield temporary
    except OSError as err:
        raise OSError(f"{path} cannot be written ({err.strerror or err})") from err


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
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
