"""`howlinear reproduce`: the paper's protocol, its numbers beside ours."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from howlinear.cli.parts import AllowPickle, AsJson, Device, Overwrite, follows, say, slug
from howlinear.cli.profile import Protocol, profile
from howlinear.cli.tables.printer import terminal_console, write
from howlinear.cli.tables.reproduce import show_reproductions
from howlinear.records import paper
from howlinear.records.paper import Reproduction, reproduce_run

LOCAL = "`howlinear profile FOLDER --protocol paper -o RUN`, then `howlinear reproduce RUN`"


def reproduce(
    what: Annotated[
        str | None,
        typer.Argument(
            help="gpt2, pythia-160m or llama-160m, all three if left out; or a run that `howlinear "
            "profile --protocol paper` wrote.",
            metavar="[MODEL|RUN]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Run folder to write; runs/reproduce-MODEL by default. Of "
            "several models: the folder of their run folders.",
        ),
    ] = None,
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure by the paper's protocol, and print the paper's numbers beside ours."""
    unreached: dict[str, str] = {}
    name = _named(what)
    how = _How(device, allow_pickle, overwrite)
    if what is not None and name is None:
        if out is not None:
            raise ValueError("a run is only read, nothing is written: drop -o")
        results = [reproduce_run(_run(what))]
    elif name is not None:
        if reason := _unreachable(name):
            raise ValueError(f"{_id(name)}: {reason}: with a local copy run {LOCAL}")
        results = [how.measured(name, out)]
    else:
        results = _every(how, out, unreached)
    if not follows():
        _show(results, unreached, as_json)


def _every(how: _How, out: Path | None, unreached: dict[str, str]) -> list[Reproduction]:
    """All models of the paper that can be had, else the built-in one."""
    results, failed = [], None
    for name in paper.paper()["models"]:
        reason = _unreachable(name)
        try:
            if reason is None:
                results.append(how.measured(name, out / name if out else None))
        except (ValueError, OSError) as err:
            failed = failed or err
            reason = " ".join(str(err).split())
        if reason is not None:
            unreached[name] = reason
    if failed and not results:  # a model was there: what went wrong is for the user to mend
        raise failed
    if not results:
        say("none of the paper's models can be had: the built-in model instead")
        results.append(how.measured(None, out / slug(None) if out else None))
    return results


def _named(what: str | None) -> str | None:
    """The paper's model that is meant, by its name or by its id on the hub."""
    models = paper.paper()["models"]
    return next((name for name, known in models.items() if what in (name, known["id"])), None)


def _run(what: str) -> Path:
    """A run folder, or what to do about it."""
    run = Path(what).expanduser()
    if (run / "profile.json").is_file():
        return run
    if (run / "config.json").is_file() or run.suffix == ".gguf":
        command = shlex.join(["howlinear", "profile", what, "--protocol", "paper", "-o", "RUN"])
        raise ValueError(f"{what} is a model: run `{command}`, then `howlinear reproduce RUN`")
    names = ", ".join(paper.paper()["models"])
    raise ValueError(
        f"{what} is no run folder and none of the paper's models ({names}): "
        "`howlinear profile MODEL --protocol paper -o RUN` makes a run of any other"
    )


def _id(name: str) -> str:
    return str(paper.paper()["models"][name]["id"])


def _unreachable(name: str) -> str | None:
    """Why a model of the paper cannot be had, None if it can."""
    from howlinear.models import loading

    try:
        loading.skeleton(_id(name))
    except ValueError as err:
        told = " ".join(str(err).split()).partition(": run `hf download")[0]
        return told.removeprefix("model ").removeprefix(f"{_id(name)} ").removeprefix("is ")
    return None


@dataclass(frozen=True)
class _How:
    device: str
    allow_pickle: bool
    overwrite: bool

    def measured(self, name: str | None, out: Path | None) -> Reproduction:
        """What `howlinear profile --protocol paper` does, without its table."""
        out = out or Path("runs") / f"reproduce-{name or slug(None)}"
        with contextlib.redirect_stdout(io.StringIO()):
            profile(
                None if name is None else _id(name),
                out=out,
                protocol=Protocol.paper,
                device=self.device,
                allow_pickle=self.allow_pickle,
                overwrite=self.overwrite,
            )
        return reproduce_run(out)


def _show(results: list[Reproduction], unreached: dict[str, str], as_json: bool) -> None:
    from howlinear.records import files

    if as_json:
        command = shlex.join(["howlinear", *sys.argv[1:]])
        print(files.dumps(paper.document(results, unreached, command)))
        return
    console = terminal_console()
    show_reproductions(console, results, unreached)
    if unreached:
        write(console, f"with local copies of the paper's models: {LOCAL}")
