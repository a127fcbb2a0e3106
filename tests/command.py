"""The command, in a process of its own or in this one."""

import contextlib
import io
import os
import subprocess
import sys

import pytest

from howlinear.cli import app

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


def inside(*args):
    """The command in this process: seconds sooner, for what needs no process of its own."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["howlinear", *map(str, args)])
        captured = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with captured[0], captured[1], pytest.raises(SystemExit) as stopped:
            app.main()
    return subprocess.CompletedProcess(args, stopped.value.code, out.getvalue(), err.getvalue())
