"""`howlinear reproduce`: the paper's protocol, its numbers beside ours."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.output import command_line, follows, print_json, say
from howlinear.cli.printer import (
    Column,
    digits,
    print_table,
    terminal_console,
    write,
    write_notes,
    write_whole,
)
from howlinear.cli.profile import profile
from howlinear.records.words import number, plural, title
from howlinear.report import paper
from howlinear.report.paper import PREDICTED, Reproduction, reproduce_run
from howlinear.run.folder import RunFolder

PAPER = "runs/paper"  # a run folder for commands that messages suggest
LOCAL = (
    f"`howlinear profile FOLDER --protocol paper -o {PAPER}`, then `howlinear reproduce {PAPER}`"
)

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
        results, unreached = _measure_all(out, options)
    if not follows():
        _show(results, unreached, as_json)


def _measure_all(
    out: Path | None, options: dict[str, Any]
) -> tuple[list[Reproduction], dict[str, str]]:
    """Every model of the paper that is available, else the built-in model; why others are not."""
    results, unreached, failed = [], {}, None
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
    return results, unreached


def _measure(name: str | None, out: Path | None, options: dict[str, Any]) -> Reproduction:
    """Run `howlinear profile --protocol paper` without its table."""
    out = out or Path("runs") / f"reproduce-{name or flags.slug(None)}"
    table = io.StringIO()
    try:
        with contextlib.redirect_stdout(table):
            profile(None if name is None else _id(name), out=out, protocol="paper", **options)
    except OSError:  # what could not be written
        print(table.getvalue(), end="")
        raise
    return reproduce_run(out)


def _paper_name(source: str | None) -> str | None:
    """The name of a model of the paper, from its name or its hub id; None for anything else."""
    models = paper.paper()["models"]
    return next((name for name, known in models.items() if source in (name, known["id"])), None)


def _run_folder(source: str) -> Path:
    """A run folder; ValueError with the command that makes one otherwise."""
    run = Path(source).expanduser()
    if RunFolder(run).has("profile"):
        return run
    if (run / "config.json").is_file() or run.suffix == ".gguf":
        command = shlex.join(["howlinear", "profile", source, "--protocol", "paper", "-o", PAPER])
        raise ValueError(
            f"{source} is a model: run `{command}`, then `howlinear reproduce {PAPER}`"
        )
    names = ", ".join(paper.paper()["models"])
    raise ValueError(
        f"{source} is no run folder and none of the paper's models ({names}): "
        f"`howlinear profile MODEL --protocol paper -o {PAPER}` makes a run of any other"
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


# -- tables

Format = Callable[[Any], str]


def _whole(value: Any) -> str:
    return "-" if value is None else f"{value:.0f}"


def _large(value: Any) -> str:
    """Two digits, or a power of ten: a swap may cost anything."""
    return number(value, 2) if value is None or abs(value) < 1e5 else f"{value:.1e}"


QUANTITIES: dict[str, tuple[str, Format]] = {  # the name of each in tables, and its format
    "r2_scalar": ("R2 scalar", digits(4)),
    "r2_feature_median": ("median", digits(3)),
    "effective_rank": ("rank", _whole),
    "delta_ppl": ("dPPL", _large),
    "bilinear_gain": ("gain", digits(4)),
}
PROFILED = ("r2_scalar", "r2_feature_median", "effective_rank")  # the others: swaps and probes
MEANS = (
    "R2 scalar: around one mean of all elements, the paper's R2_lin; R2: around the mean of each "
    "feature, ours alone; body: that without first positions; median: of the features' R2; rank: "
    "of the map that keeps 90 % of R2"
)
MEANS_MORE = (
    "dPPL: rise of perplexity by plain least squares in the block's place; gain: of the bilinear "
    "probe, as a share of the variance around one mean"
)


def _show(results: list[Reproduction], unreached: dict[str, str], as_json: bool) -> None:
    """The tables of each run; before them the models that were not measured, with the reason."""
    if as_json:
        print_json(paper.document(results, unreached, command_line()))
        return
    console = terminal_console()
    by_reason: dict[str, list[str]] = {}
    for name, reason in unreached.items():
        by_reason.setdefault(reason, []).append(name)
    if unreached:
        groups = (f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        write(console, f"not measured: {'; '.join(groups)}")
    for i, result in enumerate(results):
        if i or unreached:
            write(console)
        show_reproduction(console, result)
    if unreached:
        write(console, f"with local copies of the paper's models: {LOCAL}")


def show_reproduction(console: Console, result: Reproduction) -> None:
    """One run: a table of the profile, and one of swaps and probes if they were measured."""
    model, text, settings = (result.about[part] for part in ("model", "corpus", "settings"))
    write(
        console,
        f"{title(str(model.get('id')))}, {plural(len(result.blocks), 'block')}, the paper's protocol",
    )
    write(
        console,
        f"{text.get('name')} {text.get('part')}: {settings.get('tokens')} tokens in windows "
        f"of {settings.get('window')}",
    )
    profiled = [q for q in result.measured if q in PROFILED]
    others = [q for q in result.measured if q not in PROFILED]
    tables = [quantities for quantities in (profiled, others) if quantities]
    for quantities in tables:
        columns = [c for q in quantities for c in _columns(q, bool(result.name))]
        print_table(console, (Column("#", "index"), *columns), result.blocks)
    if result.summary:
        print_table(console, SUMMARY, result.summary.items())
    write(console, MEANS)
    if len(tables) > 1:
        write(console, MEANS_MORE)
    write_notes(console, result.notes)
    if "delta_ppl" not in result.measured and result.name:
        run = shlex.quote(result.run)
        write(
            console,
            f"to add what swaps cost: `howlinear swap {run} --tokens {PREDICTED} --all-tokens "
            f"--positions all --units 0`, then `howlinear reproduce {run}`",
        )
    write_whole(console, f"results in {result.run}")


def _columns(quantity: str, paper: bool) -> list[Column]:
    """Our number and the paper's if there is one; R2 scalar has the difference and our R2 beside it."""
    name, form = QUANTITIES[quantity]

    def side(heading: str, key: str, above: str = "", form: Format = form) -> Column:
        return Column(heading, lambda block: block[quantity][key], form, above=above)

    columns = (
        [side("ours", "ours", name), side("paper", "paper")] if paper else [side(name, "ours")]
    )
    if quantity == "r2_scalar":
        columns += [side("diff.", "difference", form=_signed(form))] if paper else []
        columns += [Column("R2", "r2", number), Column("body", "r2_body", number)]
    return columns


def _signed(form: Format) -> Format:
    return lambda value: "-" if value is None else ("+" if value >= 0 else "") + form(value)


def _largest(row: tuple[str, dict[str, Any]]) -> str:
    quantity, summary = row
    if summary["at"] is None:
        return "-"
    difference = _signed(QUANTITIES[quantity][1])(summary["largest_difference"])
    return f"{difference} at {summary['at']}"


SUMMARY = (  # of (quantity, summary)
    Column("ours and the paper's", lambda row: QUANTITIES[row[0]][0], words=True),
    Column("blocks", lambda row: row[1]["blocks"]),
    Column("correlation", lambda row: row[1]["pearson"], digits(4)),
    Column("largest difference", _largest),
)
