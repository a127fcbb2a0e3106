"""The command. Thin: read flags, call the library, show what came back.

Tables go to stdout and progress to stderr; `--json` prints one document and nothing else. What a
user can get wrong is answered in one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import howlinear

if TYPE_CHECKING:
    from howlinear.corpus import Text


class Protocol(StrEnum):
    default = "default"
    paper = "paper"


class Solver(StrEnum):
    moments = "moments"
    tsqr = "tsqr"


class Bos(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


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


# -- flags that several commands take

RunFolder = Annotated[Path, typer.Argument(help="A run folder that `howlinear profile` wrote.")]
BatchSize = Annotated[int, typer.Option(help="Windows run at once.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result's JSON and nothing else.")]


PARTS = ("fit", "choose", "report")
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


def _version(asked: bool) -> None:
    if asked:
        print(f"howlinear {howlinear.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How linear is each feed-forward block of a transformer, and how sure are we?"""


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Argument(help="A hub id, a folder or a .gguf file; the built-in model if left out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder to write; runs/MODEL by default.")
    ] = None,
    text_file: Annotated[
        str | None, typer.Option(help="A utf-8 text to read, - for stdin. WikiText-2 by default.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A dataset's hub id or folder.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Its configuration.")] = None,
    split: Annotated[str, typer.Option(help="Its split to fit on.")] = "train",
    text_column: Annotated[str, typer.Option(help="Its column that holds text.")] = "text",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to read; max(30000, 40 x width) by default.", min=1)
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Window length in tokens; 512 by default.", min=2)
    ] = None,
    folds: Annotated[int, typer.Option(help="Cross-validation folds.", min=2)] = 5,
    protocol: Annotated[
        Protocol, typer.Option(help="paper: 15000 tokens, windows of 128, one 80/20 split, no BOS.")
    ] = Protocol.default,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to measure: 3,5,9-12 or a regular expression.")
    ] = None,
    solver: Annotated[
        Solver, typer.Option(help="tsqr is slower and has more digits.")
    ] = Solver.moments,
    bos: Annotated[
        Bos, typer.Option(help="Start windows with BOS; auto: as the tokenizer does.")
    ] = Bos.auto,
    batch_size: BatchSize = 8,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the row sample.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a folder that holds something else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure every block, write a run folder, print the table."""
    paper = protocol is Protocol.paper
    out = out or Path("runs") / _slug(model)
    settings = {
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "text": [text_file, dataset, dataset_config, split, text_column],
        "tokens": tokens,
        "max_length": max_length,
        "folds": folds,
        "protocol": protocol.value,
        "blocks": blocks,
        "solver": solver.value,
        "bos": bos.value,
        "seed": seed,
    }
    check_folder(out, settings, overwrite)
    text = _text(text_file, dataset, dataset_config, split, text_column)

    from howlinear import corpus, models, profiling, stores

    say(f"loading {model or 'the built-in model'}")
    net, tokenizer = models.load(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    at = howlinear.blocks(net, blocks)
    length = max_length or (128 if paper else 512)
    budget = tokens or (15_000 if paper else corpus.default_tokens(max(b.d_in for b in at)))
    start = "never" if paper and bos is Bos.auto else bos.value
    ids = corpus.windows(
        text.fit, tokenizer, _fitting(net, tokenizer, length), tokens=budget, bos=start
    )
    needs = stores.needs(at, ids.numel() // ids.shape[1], folds, solver.value)
    check_room(needs, out)
    say(f"{ids.numel()} tokens; {needs.memory / 1e9:.1f} GB of memory for moments", end="")
    say(f", {needs.disk / 1e9:.1f} GB of disk in {out}")
    with progress_bar(ids.numel()) as advance:
        result = profiling.profile(
            net,
            _inputs(net, ids, batch_size),
            at=at,
            folds=folds,
            protocol=protocol.value,
            solver=solver.value,
            batch_size=batch_size,
            seed=seed,
            progress=advance,
        )
    result.settings.update(window=ids.shape[1], bos=start, batch_size=batch_size)
    result.about.update(
        model=models.describe(net, model, revision),
        corpus={"name": text.name, "part": text.parts[0], "fingerprint": text.fingerprint()},
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        asked=settings,
        versions=_versions(),
    )
    result.save(out)
    _show(result, "show_profile", out, as_json)


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
    asked, about = _asked(run)
    text = _run_text(run, asked, about)

    from howlinear import corpus
    from howlinear.perplexity import Protocol as Cut
    from howlinear.swap import measure_swaps

    cut = Cut.parse(protocol)
    net, tokenizer = _run_model(run, asked, about, device, trust_remote_code, allow_pickle)
    bos = about["settings"].get("bos", "auto")
    if cut.name.startswith("windows"):
        cut = Cut.parse(f"windows-{_fitting(net, tokenizer, cut.length)}")
    report, n_bytes = _held_out(text.report(), tokenizer, cut, tokens, bos)
    choose, _ = _held_out(text.choose(), tokenizer, cut, max(tokens // 2, 1), bos)
    fit = None
    if weighting in (Weighting.stream, Weighting.output):
        length, budget = about["settings"]["window"], about["settings"]["tokens"]
        fit = _inputs(net, corpus.windows(text.fit, tokenizer, length, tokens=budget, bos=bos), 8)
    with progress_bars() as begin:
        result = measure_swaps(
            net,
            run,
            choose=_inputs(net, choose, batch_size),
            report=_inputs(net, report, batch_size),
            fit=fit,
            at=blocks,
            units=units.value if units is Units.auto else int(units.value),
            weighting=weighting.value,
            protocol=cut,
            n_bytes=n_bytes,
            batch_size=batch_size,
            progress=begin,
        )
    result.about.update(
        model=about["model"],
        corpus={"name": text.name, "choose": text.parts[1], "report": text.parts[2]},
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=_versions(),
    )
    result.save(run)
    _show(result, "show_swaps", run / "swap.json", as_json)


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
    asked, about = _asked(run)
    text = _run_text(run, asked, about)

    from howlinear import probing
    from howlinear.perplexity import Protocol as Cut
    from howlinear.profiling import Profile
    from howlinear.swap import match

    names = probing.KINDS if kind == "all" else tuple(k.strip() for k in kind.split(","))
    how = probing.Settings(names, rank=rank, solver=solver.value, seeds=seeds, seed=seed)
    net, tokenizer = _run_model(run, asked, about, "cpu", trust_remote_code, allow_pickle)
    at = [b for b, _ in match(net, Profile.load(run), blocks)]
    bos, length = about["settings"].get("bos", "auto"), about["settings"]["window"]
    budget = min(rows or 30_000, about["settings"]["tokens"])
    fit, choose, report = (
        _inputs(net, ids, 8)
        for ids in probing.windows_of(text, tokenizer, length, budget, about["settings"], seed)
    )
    memory = _room_for_rows(net, at, [probing.count(w) for w in (fit, choose, report)])
    cut = Cut.parse(f"windows-{_fitting(net, tokenizer, 128)}")
    predict = _held_out(text.report(), tokenizer, cut, tokens, bos)[0] if tokens else None
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
            predict=None if predict is None else _inputs(net, predict, 8),
            protocol=cut,
            heal_on=healed,
            decode=lambda token: tokenizer.decode([token]),
            memory=memory,
            keep_layers=False,
            about={
                "model": about["model"],
                "corpus": {"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
                "command": shlex.join(["howlinear", *sys.argv[1:]]),
                "versions": _versions(),
            },
            progress=begin,
        )
    _show(result, "show_probes", run / "probe.json", as_json)


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
    asked, about = _asked(run)
    budget = _budget(max_ppl_increase, remove_params, blocks, plan)
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
    text = _run_text(run, asked, about)
    net, tokenizer = _run_model(run, asked, about, device, trust_remote_code, allow_pickle)
    if not dry_run:
        exporting.check(net, export.value, add_biases)
    settings = about["settings"]
    bos, window, budgeted = settings.get("bos", "auto"), settings["window"], settings["tokens"]
    fit = corpus.windows(text.fit, tokenizer, window, tokens=budgeted, bos=bos)
    cut = Cut.parse(f"windows-{_fitting(net, tokenizer, 128)}")
    choose, report = (
        _held_out(part, tokenizer, cut, tokens, bos)[0] for part in (text.choose(), text.report())
    )
    _room_for_batch(net, run, fit.numel())
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
            rank="full" if plain else _number_or(rank, "--rank", "auto", "full"),
            units=0 if plain else _number_or(keep_units, "--keep-units", "auto"),
            intercept=not plain,
            protocol=cut,
            curve=[_share(part, "--curve") for part in curve.split(",")] if curve else (),
            baselines=baselines,
            progress=begin,
        )
    result.about.update(
        model=about["model"],
        corpus={"name": text.name, **dict(zip(PARTS, text.parts, strict=True))},
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=_versions(),
    )
    if out is not None and not dry_run:
        say(f"writing {out}")
        exporting.write_export(
            net, tokenizer, result, out, export.value, asked["model"], report, add_biases
        )
    write_json(run / "plan.json", result.plan_dict())
    write_json(run / "compress.json", result.to_dict())
    where = run / "compress.json" if out is None or dry_run else out
    _show(result, "show_compression", where, as_json)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A hub id, a folder or a .gguf file; the built-in model if left out."),
    ] = None,
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
    from howlinear import models, records, speed

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
        "length": _fitting(net, tokenizer, max_length),
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
        versions=_versions(),
    )
    if as_json:
        print(records.dumps(result.to_dict()))
        return
    from rich.console import Console

    from howlinear import terminal

    terminal.show_bench(Console(highlight=False), result.to_dict())


# -- what the commands need ----------------------------------------------------------------------


def _show(result: Any, table: str, where: Path, as_json: bool) -> None:
    """The result as one JSON document, or as a table of `terminal` and where to find it."""
    from howlinear import records

    if as_json:
        print(records.dumps(result.to_dict()))
        return
    from rich.console import Console

    from howlinear import terminal

    console = Console(highlight=False)
    getattr(terminal, table)(console, result.to_dict(), result.blocks)
    console.print(f"results in {where}", markup=False, soft_wrap=True)


def _text(
    text_file: str | None, dataset: str | None, config: str | None, split: str, column: str
) -> Text:
    from howlinear import corpus

    if text_file and dataset:
        raise ValueError("two texts: give --text-file or --dataset, not both")
    if text_file:
        return corpus.from_file(text_file)
    return corpus.from_dataset(dataset, config, split, column) if dataset else corpus.builtin()


def _asked(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run was asked for, and profile.json itself."""
    from howlinear import records

    about = records.read_json(run / "profile.json", "profile")
    asked, wanted = about.get("asked"), ("model", "revision", "dtype", "text")
    parts = [about.get(name) for name in ("model", "corpus", "settings")]
    if not isinstance(asked, dict) or not all(name in asked for name in wanted):
        raise ValueError(
            f"{run} does not say how its model and text were loaded, as `howlinear profile` would: "
            "call howlinear.swap_costs from Python"
        )
    if not all(isinstance(part, dict) for part in parts) or len(asked["text"]) != 5:
        raise ValueError(f"{run / 'profile.json'} lacks model, corpus or settings: profile again")
    if asked["text"][0] == "-":
        raise ValueError(f"{run} read its text from stdin: save it, profile it with --text-file")
    return asked, about


def _run_text(run: Path, asked: dict[str, Any], about: dict[str, Any]) -> Text:
    """The text of a run, as it was then."""
    text = _text(*asked["text"])
    if text.fingerprint() != about["corpus"]["fingerprint"]:
        raise ValueError(f"the text of {run} has changed since: profile again ({text.name})")
    return text


def _run_model(
    run: Path,
    asked: dict[str, Any],
    about: dict[str, Any],
    device: str,
    trust_remote_code: bool,
    allow_pickle: bool,
) -> tuple[Any, Any]:
    """The model of a run, as it was then, and its tokenizer."""
    from howlinear import models

    say(f"loading {asked['model'] or 'the built-in model'}")
    net, tokenizer = models.load(
        asked["model"],
        revision=asked["revision"],
        dtype=asked["dtype"],
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    _check_model(run, about["model"], models.describe(net, asked["model"], asked["revision"]))
    return net, tokenizer


def _check_model(run: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("family", "revision", "parameters", "weights"):
        if before.get(name) != now[name]:
            raise ValueError(
                f"{run} was made with another model: {name} was {before.get(name)}, "
                f"{now['id']} has {now[name]}: profile again"
            )


def _held_out(text: str, tokenizer: Any, cut: Any, tokens: int, bos: str) -> tuple[Any, int]:
    """Tokens of a held-out text, as the protocol cuts them, and the bytes that it predicts."""
    import torch

    from howlinear import corpus

    if not text.strip():
        raise ValueError("the held-out text is empty: profile a longer text (--text-file)")
    if not cut.name.startswith("windows"):  # one stream, nothing around it
        ids = torch.tensor(corpus.first_tokens(text, tokenizer, max(tokens + 1, cut.length)))
        predicted = [ids[first:end] for _, end, first in cut.cut(len(ids))]
    else:
        count = -(-tokens // (cut.length - 1))
        ids = corpus.windows(text, tokenizer, cut.length, tokens=count * cut.length, bos=bos)
        predicted = list(ids[:, 1:])
    return ids, sum(len(tokenizer.decode(part).encode()) for part in predicted)


def _budget(
    max_ppl_increase: str | None, remove_params: str | None, blocks: str | None, plan: Path | None
) -> Any:
    """One of the four ways to say how much to replace; 5 % perplexity if nobody does."""
    given = {
        "--max-ppl-increase": max_ppl_increase,
        "--remove-params": remove_params,
        "--blocks": blocks,
        "--plan": plan,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} ask for different things: give one of them")
    from howlinear.compress import Budget

    if remove_params is not None:
        return Budget(parameters=_share(remove_params, "--remove-params"))
    return Budget(perplexity=_share(max_ppl_increase or "5%", "--max-ppl-increase"))


def _share(text: str, flag: str) -> float:
    """5%, 5 % or 0.05."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 10:
        raise ValueError(f"{flag} {text!r} is not a share: write 5% or 0.05")
    return value


def _number_or(text: str, flag: str, *words: str) -> int | str:
    if text in words:
        return text
    if not text.isdecimal():
        raise ValueError(f"{flag} {text!r} is neither {', '.join(words)} nor a number")
    return int(text)


def _slug(model: str | None) -> str:
    if model is None:
        return "SmolLM2-135M-Instruct"
    name = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name).strip(".") or "model"


def _fitting(net: Any, tokenizer: Any, length: int) -> int:
    """A window length that the model's positions allow."""
    limits = (
        getattr(net.config.get_text_config(), "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),  # RoBERTa's is two below its positions
    )
    most = min((m for m in limits if isinstance(m, int) and m >= 2), default=length)
    if most < length:
        say(f"windows of {most} tokens, all that the model has positions for, instead of {length}")
    return min(most, length)


def _inputs(net: Any, ids: Any, batch_size: int) -> Any:
    """Windows as they are; an encoder-decoder reads each with both its halves."""
    if net.main_input_name != "input_ids":
        raise ValueError(
            f"{type(net).__name__} reads {net.main_input_name}, not text: "
            "call howlinear.profile from Python with batches of model inputs"
        )
    if not net.config.is_encoder_decoder:
        return ids
    return [{"input_ids": b, "decoder_input_ids": b} for b in ids.split(batch_size)]


def _versions() -> dict[str, str]:
    import platform

    import torch
    import transformers

    return {
        "howlinear": howlinear.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def check_folder(out: Path, asked: dict[str, Any], overwrite: bool) -> None:
    """Refuse a folder that holds anything but an earlier run of the same command."""
    from howlinear import records

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder with -o")
    if overwrite or not out.exists() or not any(out.iterdir()):
        return
    with contextlib.suppress(ValueError):
        if records.read_json(out / "profile.json", "profile").get("asked") == asked:
            return
    raise ValueError(f"{out} is not empty: name another folder with -o, or pass --overwrite")


def check_room(needs: Any, out: Path) -> None:
    """Refuse before hours of work what memory or disk cannot hold."""
    way_out = "lower --folds (2 at least) or measure fewer --blocks at a time"
    free = available_memory()
    if free is not None and needs.memory > free:
        raise ValueError(
            f"moments need {needs.memory / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free: "
            f"{way_out}"
        )
    folder = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    disk = shutil.disk_usage(folder).free
    if needs.disk > disk:
        raise ValueError(
            f"the run needs {needs.disk / 1e9:.1f} GB of disk and {disk / 1e9:.1f} GB are free "
            f"in {folder}: {way_out}, or name another place with -o"
        )


def _room_for_rows(net: Any, at: Any, counts: list[int]) -> int | None:
    """Say what rows a probe reads and holds, refuse what memory cannot hold; bytes it may use."""
    from howlinear import probing

    room = available_memory()
    memory = None if room is None else room // 2
    together, needed = probing.needs(net, at, sum(counts), memory)
    if room is not None and needed > room:
        raise ValueError(
            f"rows need {needed / 1e9:.1f} GB of memory and {room / 1e9:.1f} GB are free: "
            "lower --rows"
        )
    say(f"{counts[0]} rows to fit on, {counts[1]} to choose by, {counts[2]} to report on; ", end="")
    say(f"{together} block{'s' * (together > 1)} at a time, {needed / 1e9:.1f} GB of memory")
    return memory


def _room_for_batch(net: Any, run: Path, tokens: int) -> None:
    """Say what running a whole text at once takes, and refuse what memory cannot hold."""
    from howlinear.profiling import Profile
    from howlinear.refitting import memory
    from howlinear.swap import match
    from howlinear.units import hidden_count

    at = [b for b, _ in match(net, Profile.load(run), None)]
    needed, room = memory(at, {b: hidden_count(net, b) for b in at}, tokens), available_memory()
    if room is not None and needed > room:
        raise ValueError(
            f"fitting on {tokens} tokens at once needs {needed / 1e9:.1f} GB of memory and "
            f"{room / 1e9:.1f} GB are free: profile fewer --tokens"
        )
    say(f"{tokens} tokens to fit on; about {needed / 1e9:.1f} GB of memory")


def available_memory() -> int | None:
    """Bytes that can still be had, by the system and by the container's limit; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    if not found:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found) if found else None


def say(message: str, end: str = "\n") -> None:
    """Progress, for people: stderr."""
    shown = "".join(c if c.isprintable() else "?" for c in message)
    print(shown, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(tokens: int) -> Iterator[Callable[[int], None]]:
    """The bar of a profile, which solves when all tokens are read."""
    with progress_bars() as begin:
        advance, left = begin("profiling", tokens), tokens

        def done(count: int) -> None:
            nonlocal left
            left -= count
            advance(count)
            if left <= 0:
                begin("solving", 0)

        yield done


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Tokens done, tokens a second and time left, of one thing after another; where somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def begin(what: str, tokens: int) -> Callable[[int], None]:
            if not console.is_terminal:
                say(f"{what}: {tokens} tokens to run" if tokens else what)
            for task in bar.tasks:
                bar.update(task.id, visible=False)
            number = bar.add_task(what, total=tokens or None, rate="")

            def advance(done: int) -> None:
                bar.advance(number, done)
                speed = bar.tasks[-1].speed
                if speed:
                    bar.update(number, rate=f"{speed:.0f}/s")

            return advance

        yield begin


def main() -> None:
    """Run the command; a user's mistake is one line and exit code 2, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="howlinear: %(message)s", stream=sys.stderr)
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
        if "out of memory" not in str(err).lower() and "can't allocate" not in str(err):
            raise
        _fail("out of memory: lower --batch-size, --folds or --max-length", 2)


def _fail(message: str, code: int) -> None:
    say(f"howlinear: {' '.join(message.split())}")
    sys.exit(code)
