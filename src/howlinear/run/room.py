"""Memory and disk that are free, and refusing work that would not fit, before it starts.

    check_memory(needed, "moments need", "lower `folds`")
    check_disk(needed, "the run needs", folder, "name another place with `out`")

Estimates of what is needed stand beside the code that needs it. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from howlinear.records.words import size


def available_memory() -> int | None:
    """Bytes that this process may still use, by the system and the container; None if unknown.

    Processes that torchrun started on one machine share its memory equally.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    if not limits:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limits else None


def check_memory(needed: int, subject: str, way_out: str) -> None:
    """Refuse what memory cannot hold. `subject` begins the message: "moments need"."""
    free = available_memory()
    if free is not None and needed > free:
        raise ValueError(f"{subject} {size(needed)} of memory and {size(free)} are free: {way_out}")


def check_disk(needed: int, subject: str, out: Path, way_out: str) -> None:
    """Refuse what the disk of a folder, which need not exist yet, cannot hold."""
    folder = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{subject} {size(needed)} of disk and {size(free)} are free in {folder}: {way_out}"
        )
