"""Results on stdout, as a table or as JSON, and what each of them records about its making."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import howlinear
from howlinear.cli.printer import terminal_console, write_whole
from howlinear.cli.progress import follows


def show(result: Any, show_table: Callable[..., None], where: Path | None, as_json: bool) -> None:
    """Print the result as one JSON document, or as a table and where its file is."""
    if follows():
        return
    if as_json:
        print_json(result.to_dict())
        return
    console = terminal_console()
    show_table(console, result.to_dict(), result.blocks)
    if where is not None:
        write_whole(console, f"results in {where}")


def print_json(data: dict[str, Any]) -> None:
    """One document. Characters that stdout cannot encode become JSON escapes."""
    from howlinear.records import files

    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    print(files.dumps(data, ascii_only=encoding != "utf8"))


def command_line() -> str:
    return shlex.join(["howlinear", *sys.argv[1:]])


def made_by() -> dict[str, Any]:
    """The command and the versions of what it ran with, for a result's file."""
    import platform

    import torch
    import transformers

    versions = {
        "howlinear": howlinear.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"command": command_line(), "versions": versions}
