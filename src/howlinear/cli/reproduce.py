"""`howlinear reproduce`: the paper's protocol, its numbers beside ours."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import command_line, print_json
from howlinear.cli.printer import terminal_console, write
from howlinear.cli.profile import profile
from howlinear.cli.progress import follows, say
from howlinear.cli.tables.reproduce import show_reproductions
from howlinear.records import paper
from howlinear.records.paper import Reproduction, reproduce_run

LOCAL = "`howlinear profile FOLDER --protocol paper -o RUN`, then `howlinear reproduce RUN`"

ModelOrRun = Annotated[
    str | None,
    Argument(
        help="gpt2, pythia-160m or llama-160m, all three if omitted; or a run that `howlinear "
        "profile --protocol paper` wrote.",
        metavar="[MODEL|RUN]",
    ),
]
Out = Annotated[
    Path | None,
    Option(
        "--out",
        "-o",
        help="Run folder to write; runs/reproduce-MODEL by default. For several models: the "
        "folder of their run folders.",
    ),
]


def reproduce(
    source: ModelOrRun = None,
    out: Out = None,
    device: flags.Device = "cpu",
    allow_pickle: flags.AllowPickle = False,
    overwrite: flags.Overwrite = False,
    as_json: flags.AsJson = False,
) -> None:
    """Measure by the paper's protocol, and print the paper's numbers beside ours."""
    unreached: dict[str, str] = {}
    name = _paper_name(source)
    options = {"device": device, "allow_pickle": allow_pickle, "overwrite": overwrite}
    if source is not None and name is None:
        if out is not None:
            raise ValueError("a run is only read, nothing is written: drop -o")
        results = [reproduce_run(_run_folder(source))]
    elif name is not None:
        if reason := _unreachable(name):
            raise ValueError(f"{_id(name)}: {reason}: with a local copy run {LOCAL}")
        results = [_measure(name, out, options)]
    else:
        results = _measure_all(out, options, unreached)
    if not follows():
        _show(results, unreached, as_json)


def _measure_all(
    out: Path | None, options: dict[str, Any], unreached: dict[str, str]
) -> list[Reproduction]:
    """Every model of the paper that is available, else the built-in model."""
    results, failed = [], None
    for name in paper.paper()["models"]:
        reason = _unreachable(name)
        try:
            if reason is None:
                results.append(_measure(name, out / name if out else None, options))
        except (ValueError, OSError) as err:
            failed = failed or err
            reason = " ".join(str(err).split())
        if reason is not None:
            unreached[name] = reason
    if failed and not results:  # a model was available: the user can correct the error
        raise failed
    if not results:
        say("none of the paper's models is available: measuring the built-in model")
        results.append(_measure(None, out / flags.slug(None) if out else None, options))
    return results


def _measure(name: str | None, out: Path | None, options: dict[str, Any]) -> Reproduction:
    """Run `howlinear profile --protocol paper` without its table."""
    out = out or Path("runs") / f"reproduce-{name or flags.slug(None)}"
    with contextlib.redirect_stdout(io.StringIO()):
        profile(None if name is None else _id(name), out=out, protocol="paper", **options)
    return reproduce_run(out)


def _paper_name(source: str | None) -> str | None:
    """The name of a model of the paper, from its name or its hub id; None for anything else."""
    models = paper.paper()["models"]
    return next((name for name, known in models.items() if source in (name, known["id"])), None)


def _run_folder(source: str) -> Path:
    """A run folder; ValueError with the command that makes one otherwise."""
    run = Path(source).expanduser()
    if (run / "profile.json").is_file():
        return run
    if (run / "config.json").is_file() or run.suffix == ".gguf":
        command = shlex.join(["howlinear", "profile", source, "--protocol", "paper", "-o", "RUN"])
        raise ValueError(f"{source} is a model: run `{command}`, then `howlinear reproduce RUN`")
    names = ", ".join(paper.paper()["models"])
    raise ValueError(
        f"{source} is no run folder and none of the paper's models ({names}): "
        "`howlinear profile MODEL --protocol paper -o RUN` makes a run of any other"
    )


def _id(name: str) -> str:
    return str(paper.paper()["models"][name]["id"])


def _unreachable(name: str) -> str | None:
    """Why a model of the paper is not available; None if it is."""
    from howlinear.models import loading

    try:
        loading.skeleton(_id(name))
    except ValueError as err:
        reason = " ".join(str(err).split()).partition(": run `hf download")[0]
        return reason.removeprefix("model ").removeprefix(f"{_id(name)} ").removeprefix("is ")
    return None


def _show(results: list[Reproduction], unreached: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json(paper.document(results, unreached, command_line()))
        return
    console = terminal_console()
    show_reproductions(console, results, unreached)
    if unreached:
        write(console, f"with local copies of the paper's models: {LOCAL}")
