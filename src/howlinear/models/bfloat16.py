"""Whether bfloat16 matrix products run on this CPU, tested in a child process.

    limit()         # before torch is imported: restrict the instruction set where products crash
    check(dtype)    # ValueError in one line where a bfloat16 model would end the process

Some virtual machines report Intel's AMX instructions and do not have them. There oneDNN, which torch
uses for bfloat16, ends the process with an illegal instruction: no exception, no message. oneDNN
reads `ONEDNN_MAX_CPU_ISA` once, so a process that has started torch can only refuse.

The probe takes as long as importing torch. It runs once a process, and only where the processor
reports AMX.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
CPU_INFO = Path("/proc/cpuinfo")
PROBE = "import torch; a = torch.ones(512, 512).bfloat16(); a @ a"


def limit() -> None:
    """Set the variable for this process and its children where bfloat16 products would crash."""
    if VARIABLE not in os.environ and crashes():
        os.environ[VARIABLE] = LIMIT
        crashes.cache_clear()


def check(dtype: Any, device: Any = "cpu") -> None:
    """Refuse bfloat16 on a CPU where its products end the process."""
    if str(dtype) == "torch.bfloat16" and str(device) == "cpu" and crashes():
        raise ValueError(
            "bfloat16 products crash on this processor (illegal instruction): "
            f'set {VARIABLE}={LIMIT} before Python starts, or use `dtype="float32"`'
        )


@functools.cache
def crashes() -> bool:
    """Does a bfloat16 product end a process that has this environment?"""
    if not (CPU_INFO.is_file() and "amx_bf16" in CPU_INFO.read_text()):  # a file of Linux
        return False
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    return done.returncode < 0  # ended by a signal
