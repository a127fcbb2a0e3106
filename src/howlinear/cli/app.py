"""The command `howlinear`: its subcommands, and errors as one line.

Tables go to stdout and progress to stderr; `--json` prints one document and nothing else. A user's
mistake is one line and exit code 2.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import howlinear
from howlinear.cli.bench import bench
from howlinear.cli.compare import compare
from howlinear.cli.compress import compress
from howlinear.cli.control import control
from howlinear.cli.flags import with_flags
from howlinear.cli.merge import merge
from howlinear.cli.output import follows
from howlinear.cli.probe import probe
from howlinear.cli.profile import profile
from howlinear.cli.report import report
from howlinear.cli.reproduce import reproduce
from howlinear.cli.swap import swap
from howlinear.models import bfloat16
from howlinear.records.words import escaped

READERS = ("compare", "merge", "report")  # commands that run no model
INTERRUPTED = 130  # exit code, as of a shell

# typer contains a copy of click in some versions and imports click in others
UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        """Commands in the order of `--help`: typer puts `control`, a group, last."""
        *names, control = super().list_commands(ctx)
        names.insert(names.index("merge"), control)
        return names


app = typer.Typer(
    name="howlinear",
    cls=_Commands,
    help="How linear is each feed-forward block of a transformer, and how sure are we?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)
for command in (profile, swap, report, compress, probe, compare, merge, reproduce, bench):
    app.command()(command)
app.add_typer(control, name="control")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"howlinear {howlinear.__version__}")
        raise typer.Exit


@app.callback()
def top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How linear is each feed-forward block of a transformer, and how sure are we?"""
    if context.invoked_subcommand not in READERS and "--help" not in sys.argv:
        bfloat16.limit()  # before anything imports torch


def main() -> None:
    """Run the command. A user's mistake is one line and exit code 2, not a traceback."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Escaped("howlinear: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("howlinear").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not a traceback
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # some versions of typer return it
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; no incomplete file is left", INTERRUPTED)
    except UsageError as err:
        _fail(err.format_message() or "no command: howlinear --help lists them", 2)
    except (ValueError, OSError) as err:
        _fail(str(err) or type(err).__name__, 2)
    except (MemoryError, RuntimeError) as err:
        text, kinds = str(err), {kind.__name__ for kind in type(err).__mro__}
        if "gloo" in text or "DistError" in kinds:
            _fail(f"another process ended, so this one cannot continue ({text[:120]})", 1)
        full = "out of memory" in text.lower() or "can't allocate" in text
        if isinstance(err, RuntimeError) and not full:
            raise
        _fail("out of memory: lower --batch-size, --folds or --max-length", 2)


class _Escaped(logging.Formatter):
    """Escapes control characters: warnings may quote names from files."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, super().format(record).splitlines()))


def _flags() -> set[str]:
    """The flags of all commands."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    every = [c for group in commands for c in getattr(group, "commands", {"": group}).values()]
    return {flag for command in every for option in command.params for flag in option.opts}


def _fail(message: str, code: int) -> None:
    rank = f"rank {os.environ['RANK']}: " if follows() else ""
    line = f"howlinear: {rank}{' '.join(with_flags(message, _flags()).split())}"
    print(escaped(line), file=sys.stderr, flush=True)
    sys.exit(code)
