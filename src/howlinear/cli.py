"""The command. Thin: read flags, call the library, show what came back.

Tables go to stdout and progress to stderr; `--json` prints one document and nothing else. What a
user can get wrong is answered in one line and exit code 2.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import howlinear
from howlinear import bfloat16
from howlinear.cli_control import control
from howlinear.cli_parts import (
    PARTS,
    AllowPickle,
    AsJson,
    BatchSize,
    Device,
    ModelName,
    RunFolder,
    TrustRemoteCode,
    asked_of,
    budget_of,
    fitting,
    follows,
    held_out,
    inputs_for,
    number_or,
    own_device,
    print_json,
    progress_bars,
    room_for_batch,
    room_for_rows,
    run_model,
    run_text,
    say,
    share_of,
    show,
    versions,
)
from howlinear.cli_profile import merge, profile
from howlinear.cli_report import report
from howlinear.cli_reproduce import reproduce
from howlinear.escaping import escaped


class Units(StrEnum):
    auto = "auto"
    none = "0"
    one = "1"
    two = "2"
    four = "4"


class Weighting(StrEnum):
    none = "none"
    body = "body"
    stream = "stream"
    output = "output"


class Search(StrEnum):
    ours = "ours"
    paper = "paper"


class Export(StrEnum):
    hf = "hf"
    narrow = "narrow"
    nemotron_nas = "nemotron-nas"


READERS = ("compare", "merge", "report")  # commands that run no model
INTERRUPTED = 130  # exit code, as of a shell

# typer brings a click of its own in some versions and asks for the real one in others
UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="howlinear",
    help="How linear is each feed-forward block of a transformer, and how sure are we?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)
app.command()(profile)
app.command()(merge)
app.command()(report)
app.command()(reproduce)
app.add_typer(control, name="control")


def _version(asked: bool) -> None:
    if asked:
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


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Profiles side by side: correlations and shifts with intervals; maps of one text on another."""
    from howlinear import comparing, records

    result = comparing.compare_runs(runs)
    result.about.update(command=shlex.join(["howlinear", *sys.argv[1:]]), versions=versions())
    if out is not None:
        records.write_json(out, result.to_dict())
    show(result, "show_comparison", out, as_json)


@app.command()
def swap(
    run: RunFolder,
    tokens: Annotated[
        int, typer.Option(help="Tokens to predict; half as many to choose units by.", min=1)
    ] = 4096,
    units: Annotated[
        Units, typer.Option(help="Sink units that a map keeps; auto: chosen for each block.")
    ] = Units.auto,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to swap: 3,5,9-12 or a regular expression.")
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help="Replace single experts instead: all, or blocks and experts such as 3,5.17,7.shared."
        ),
    ] = None,
    weighting: Annotated[
        Weighting,
        typer.Option(
            help="Rows in the fit: none, without first positions (body), by 1/|h| (stream) or "
            "by 1/|y|^2 (output)."
        ),
    ] = Weighting.none,
    protocol: Annotated[
        str, typer.Option(help="windows-N, stride-LENGTH-STRIDE or gptq-2048.")
    ] = "windows-128",
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    asked, about = asked_of(run)
    text = run_text(run, asked, about)

    from howlinear import corpus
    from howlinear.perplexity import Protocol as Cut
    from howlinear.ranks import Ranks
    from howlinear.swap import measure_swaps

    cut, ranks = Cut.parse(protocol), Ranks.start()
    code = (trust_remote_code, allow_pickle)
    net, tokenizer = run_model(run, asked, about, own_device(device), *code)
    bos = about["settings"].get("bos", "auto")
    if cut.name.startswith("windows"):
        cut = Cut.parse(f"windows-{fitting(net, tokenizer, cut.length)}")
    report, n_bytes = held_out(text.report(), tokenizer, cut, tokens, bos)
    told = {
        "model": about["model"],
        "corpus": {"name": text.name, "choose": text.parts[1], "report": text.parts[2]},
        "command": shlex.join(["howlinear", *sys.argv[1:]]),
        "versions": versions(),
    }
    if experts is not None:
        from howlinear.swap_experts import measure_expert_swaps

        how: dict[str, Any] = {"protocol": cut, "n_bytes": n_bytes, "batch_size": batch_size}
        with progress_bars() as begin:
            result: Any = measure_expert_swaps(
                net, run, experts, report=report, ranks=ranks, progress=begin, **how
            )
        _finish_swap(result, told, run, ranks, "show_expert_swaps", "swap-experts.json", as_json)
        return
    choose, _ = held_out(text.choose(), tokenizer, cut, max(tokens // 2, 1), bos)
    fit = None
    if weighting in (Weighting.stream, Weighting.output):
        length, budget = about["settings"]["window"], about["settings"]["tokens"]
        fit = inputs_for(
            net, corpus.windows(text.fit, tokenizer, length, tokens=budget, bos=bos), 8
        )
    with progress_bars() as begin:
        result = measure_swaps(
            net,
            run,
            choose=inputs_for(net, choose, batch_size),
            report=inputs_for(net, report, batch_size),
            fit=fit,
            at=blocks,
            units=units.value if units is Units.auto else int(units.value),
            weighting=weighting.value,
            protocol=cut,
            n_bytes=n_bytes,
            batch_size=batch_size,
            ranks=ranks,
            progress=begin,
        )
    _finish_swap(result, told, run, ranks, "show_swaps", "swap.json", as_json)


def _finish_swap(
    result: Any, about: dict[str, Any], run: Path, ranks: Any, table: str, name: str, as_json: bool
) -> None:
    result.about.update(about)
    if ranks.rank == 0:
        result.save(run)
    show(result, table, run / name, as_json)
    ranks.stop()


@app.command()
def probe(
    run: RunFolder,
    kind: Annotated[
        str,
        typer.Option(
            help="Probes, with commas: bilinear, degree, units, where, quantised; slower: dense, "
            "poly, seeded, trained, healing; or all."
        ),
    ] = "bilinear,degree,units,where,quantised",
    rank: Annotated[int, typer.Option(help="Products of the bilinear layer.", min=1)] = 16,
    solver: Annotated[
        Search, typer.Option(help="Of the bilinear layer; paper: Adam on raw inputs, gated.")
    ] = Search.ours,
    seeds: Annotated[int, typer.Option(help="Starts of whatever is searched for.", min=1)] = 3,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to probe: 3,5,9-12 or a regular expression.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Rows to fit on, of the run's text; a quarter as many to choose by, a third to "
            "report on. All that the run read, 30000 at most, by default.",
            min=1,
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens to predict with each fitted layer swapped in; 0: none.", min=0),
    ] = 4096,
    seed: Annotated[int, typer.Option(help="Of row samples and the first start.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Find out what the map of each block leaves is made of."""
    asked, about = asked_of(run)
    text = run_text(run, asked, about)

    from howlinear import probing
    from howlinear.perplexity import Protocol as Cut
    from howlinear.profiling import Profile
    from howlinear.swap import match

    names = probing.KINDS if kind == "all" else tuple(k.strip() for k in kind.split(","))
    how = probing.Settings(names, rank=rank, solver=solver.value, seeds=seeds, seed=seed)
    net, tokenizer = run_model(run, asked, about, "cpu", trust_remote_code, allow_pickle)
    at = [b for b, _ in match(net, Profile.load(run), blocks)]
    bos, length = about["settings"].get("bos", "auto"), about["settings"]["window"]
    budget = min(rows or 30_000, about["settings"]["tokens"])
    fit, choose, report = (
        inputs_for(net, ids, 8)
        for ids in probing.windows_of(text, tokenizer, length, budget, about["settings"], seed)
    )
    memory = room_for_rows(net, at, [probing.count(w) for w in (fit, choose, report)])
    cut = Cut.parse(f"windows-{fitting(net, tokenizer, 128)}")
    predict = held_out(text.report(), tokenizer, cut, tokens, bos)[0] if tokens else None
    healed = None
    if "healing" in names:
        from howlinear import corpus

        most = max(budget, cut.length)
        healed = corpus.windows(text.fit, tokenizer, cut.length, tokens=most, bos=bos)
    with progress_bars() as begin:
        result = probing.probe(
            net,
            run,
            fit=fit,
            choose=choose,
            report=report,
            settings=how,
            at=blocks,
            predict=None if predict is None else inputs_for(net, predict, 8),
            protocol=cut,
            heal_on=healed,
            decode=lambda token: tokenizer.decode([token]),
            memory=memory,
            keep_layers=False,
            about={
                "model": about["model"],
                "corpus": {"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
                "command": shlex.join(["howlinear", *sys.argv[1:]]),
                "versions": versions(),
            },
            progress=begin,
        )
    show(result, "show_probes", run / "probe.json", as_json)


@app.command()
def compress(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the smaller model.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="How much perplexity may rise; 5% by default.")
    ] = None,
    remove_params: Annotated[
        str | None, typer.Option(help="How many of the feed-forward parameters go: 20%.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to replace, without planning: 3,5,9-12 or a regex.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan.json to follow, perhaps edited by hand.")
    ] = None,
    rank: Annotated[
        str, typer.Option(help="Rank of the matrices: auto, full, 0 for none, or a number.")
    ] = "auto",
    keep_units: Annotated[
        str, typer.Option(help="Hidden units kept in each replaced block: auto or a number.")
    ] = "auto",
    export: Annotated[
        Export, typer.Option(help="narrow and nemotron-nas: for engines without remote code.")
    ] = Export.hf,
    add_biases: Annotated[
        bool, typer.Option("--add-biases", help="narrow: switch on a family's biases for it.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(help="Tokens to choose by, and as many others to report on.", min=256)
    ] = 4096,
    curve: Annotated[
        str | None, typer.Option(help="Measure these sizes too, ours and baselines: 5%,10%,20%.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure simpler ways to remove as much.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write plan.json and compress.json, no model.")
    ] = False,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Replace blocks under a budget and write a smaller model that loads."""
    asked, about = asked_of(run)
    budget = budget_of(max_ppl_increase, remove_params, blocks, plan)
    if out is None and not dry_run:
        raise ValueError("where to? Name a folder with -o, or pass --dry-run")

    from howlinear import corpus, exporting
    from howlinear import plan as plans
    from howlinear.compress import compress_model
    from howlinear.perplexity import Protocol as Cut
    from howlinear.records import read_json, write_json

    chosen = None if plan is None else plans.from_dict(read_json(plan, "plan"))
    if out is not None:
        exporting.check_free(out)
    text = run_text(run, asked, about)
    net, tokenizer = run_model(run, asked, about, device, trust_remote_code, allow_pickle)
    if not dry_run:
        exporting.check(net, export.value, add_biases)
    settings = about["settings"]
    bos, window, budgeted = settings.get("bos", "auto"), settings["window"], settings["tokens"]
    fit = corpus.windows(text.fit, tokenizer, window, tokens=budgeted, bos=bos)
    cut = Cut.parse(f"windows-{fitting(net, tokenizer, 128)}")
    choose, report = (
        held_out(part, tokenizer, cut, tokens, bos)[0] for part in (text.choose(), text.report())
    )
    room_for_batch(net, run, fit.numel())
    plain = export is Export.nemotron_nas  # which has no place for biases, factors and units
    with progress_bars() as begin:
        result = compress_model(
            net,
            run,
            budget,
            fit=fit,
            choose=choose,
            report=report,
            plan=chosen,
            at=blocks,
            rank="full" if plain else number_or(rank, "--rank", "auto", "full"),
            units=0 if plain else number_or(keep_units, "--keep-units", "auto"),
            intercept=not plain,
            protocol=cut,
            curve=[share_of(part, "--curve") for part in curve.split(",")] if curve else (),
            baselines=baselines,
            progress=begin,
        )
    result.about.update(
        model=about["model"],
        corpus={"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=versions(),
    )
    if out is not None and not dry_run:
        say(f"writing {out}")
        exporting.write_export(
            net, tokenizer, result, out, export.value, asked["model"], report, add_biases
        )
    write_json(run / "plan.json", result.plan_dict())
    write_json(run / "compress.json", result.to_dict())
    where = run / "compress.json" if out is None or dry_run else out
    show(result, "show_compression", where, as_json)


@app.command()
def bench(
    model: ModelName = None,
    against: Annotated[
        str | None, typer.Option(help="A model to take turns with; built-in: the built-in one.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of prefill.", min=1)] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="How often each is timed.", min=1)] = 5,
    batch_size: BatchSize = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of the tokens.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode tokens a second, and sizes."""
    from howlinear import models, speed

    def loaded(name: str | None) -> tuple[Any, Any]:
        say(f"loading {name or 'the built-in model'}")
        return models.load(
            name,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )

    net, tokenizer = loaded(model)
    how: dict[str, Any] = {
        "length": fitting(net, tokenizer, max_length),
        "batch": batch_size,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "seed": seed,
    }
    result: Any
    if against is None:
        result = speed.measure(net, folder=model, **how)
    else:
        name = None if against == "built-in" else against
        other, _ = loaded(name)
        result = speed.compare_speeds(net, other, folders=(model, name), **how)
        result.about["against"] = models.describe(other, name)
    result.about.update(
        model=models.describe(net, model),
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=versions(),
    )
    if as_json:
        print_json(result.to_dict())
        return
    from howlinear import terminal

    terminal.show_bench(terminal.terminal_console(), result.to_dict())


def main() -> None:
    """Run the command; a user's mistake is one line and exit code 2, never a traceback."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Escaped("howlinear: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a code instead of a traceback
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # some versions of typer say it this way
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; nothing half-written is left", INTERRUPTED)
    except UsageError as err:
        _fail(err.format_message(), 2)
    except MemoryError:
        _fail("out of memory: lower --batch-size, --folds or --max-length", 2)
    except (ValueError, OSError) as err:
        _fail(str(err), 2)
    except RuntimeError as err:
        kinds = {kind.__name__ for kind in type(err).__mro__}
        if "gloo" in str(err) or "DistError" in kinds:
            _fail(f"another process is gone, this one cannot go on ({str(err)[:120]})", 1)
        if "out of memory" not in str(err).lower() and "can't allocate" not in str(err):
            raise
        _fail("out of memory: lower --batch-size, --folds or --max-length", 2)


class _Escaped(logging.Formatter):
    """Warnings may quote names from outside."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, super().format(record).splitlines()))


def _fail(message: str, code: int) -> None:
    rank = f"rank {os.environ['RANK']}: " if follows() else ""
    line = f"howlinear: {rank}{' '.join(message.split())}"
    print(escaped(line), file=sys.stderr, flush=True)
    sys.exit(code)
