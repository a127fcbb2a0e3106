"""Results on stdout, messages and progress bars on stderr; what results record about their making.

    show(result, show_profile, folder, as_json)
    say("loading gpt2")
    with progress_bars() as begin:
        advance = begin("swapping", 4096)       # tokens to run
        advance(512)                            # tokens done

Of several processes that torchrun started only the first prints.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import howlinear
from howlinear.cli.printer import terminal_console, write_whole
from howlinear.records.words import duration, escaped, plural

SOON = 5.0  # seconds of work before the time that is left is told
Advance = Callable[[int], None]
Progress = Callable[[str, int], Advance]  # as in `run.work`, which needs torch


# -- stdout


def show(
    result: Any,
    show_table: Callable[..., None],
    where: Path | None,
    as_json: bool,
    write: Callable[[], Any] = lambda: None,
    then: str | None = None,
) -> None:
    """Write the result and print it: as one JSON document, or as a table and where its file is.

    `then` is a last line: what to do next. The result is also printed if it cannot be written, before the error.
    """
    if follows():
        return
    try:
        write()
    except BaseException:
        _print(result, show_table, None, as_json)
        raise
    _print(result, show_table, where, as_json)
    if then is not None and not as_json:
        write_whole(terminal_console(), then)


def _print(result: Any, show_table: Callable[..., None], where: Path | None, as_json: bool) -> None:
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


# -- stderr


def follows() -> bool:
    """Is this one of several processes that torchrun started, and not the first?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def say(message: str, end: str = "\n") -> None:
    """Print a message to stderr."""
    if not follows():
        print(escaped(message), end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars with tokens done, tokens a second and time left; lines where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    # FORCE_COLOR makes a log interactive for rich: a moving bar would fill it
    moving = console.is_interactive and sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    disabled = not moving or follows()
    with Bars(*columns, console=console, transient=True, disable=disabled) as bars:

        def begin(label: str, tokens: int) -> Advance:
            if not moving:
                say(f"{label}: {tokens} tokens to run" if tokens else label)
            for task in bars.tasks:
                bars.update(task.id, visible=False)
            number = bars.add_task(escaped(label), total=tokens or None, rate="")
            tell = _time_teller(label, tokens)

            def advance(done: int) -> None:
                bars.advance(number, done)
                task = bars.tasks[-1]
                of = f"/{tokens}" if tokens else ""
                speed = f" {task.speed:.0f}/s" if task.speed else ""
                bars.update(number, rate=f"{task.completed:.0f}{of} tokens{speed}")
                if not moving:
                    tell(task.completed)

            return advance

        yield begin


def _time_teller(label: str, tokens: int) -> Callable[[float], None]:
    """Called with the tokens done: says how long the rest takes.

    After a while, each time half of it is left, and if it was far off.
    """
    began, told = time.monotonic(), math.inf

    def tell(done: float) -> None:
        nonlocal told
        taken = time.monotonic() - began
        if taken < SOON or not 0 < done < tokens:
            return
        left = taken * (tokens - done) / done
        if left > 4 * SOON and not told / 2 <= left <= 2 * told:
            told = left
            say(f"{label}: {duration(left)} left")

    return tell


def left_of(noun: str, count: int) -> Callable[[bool], None]:
    """Called after each of several things (was it measured?): says how long the others take."""
    from howlinear.run.work import Steps

    steps, began = Steps({noun: count}, {noun: 1.0}), time.perf_counter()

    def done(measured: bool) -> None:
        nonlocal began
        seconds, began = time.perf_counter() - began, time.perf_counter()
        if not measured:
            steps.skip(noun)
            return
        steps.done(noun, seconds)
        if others := steps.to_come[noun]:
            say(f"{plural(others, noun)} to come{steps}")

    return done
