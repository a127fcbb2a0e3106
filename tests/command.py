"""The command in a process of its own."""

import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "howlinear"]


def run(*args, env=None, **kwargs):
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "80"} | (env or {}),
        **kwargs,
    )
