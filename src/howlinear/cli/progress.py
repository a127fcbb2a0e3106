"""Messages and progress bars on stderr; nothing here prints to stdout.

    say("loading gpt2")
    with progress_bars() as begin:
        advance = begin("swapping", 4096)       # tokens to run
        advance(512)                            # tokens done

Of several processes that torchrun started only the first prints.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from howlinear.records.escaping import escaped

Advance = Callable[[int], None]
Progress = Callable[[str, int], Advance]  # `run.work` has the same types, and needs torch


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
        TextColumn("{task.completed}/{task.total} tokens"),
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

            def advance(done: int) -> None:
                bars.advance(number, done)
                speed = bars.tasks[-1].speed
                if speed:
                    bars.update(number, rate=f"{speed:.0f}/s")

            return advance

        yield begin
