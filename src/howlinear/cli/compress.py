"""`howlinear compress`: a smaller model under a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Exit, Option

from howlinear.cli import flags
from howlinear.cli.output import progress_bars, say, show
from howlinear.cli.printer import Column, print_table, write, write_notes
from howlinear.cli.sources import GENERATED, PARTS, Loader, RunSource, is_packed
from howlinear.records.fields import BlockCompression
from howlinear.records.files import check_writable
from howlinear.records.words import duration, number, perplexity, plural, signed, size, title
from howlinear.run import room

Out = Annotated[Path | None, Option("--out", "-o", help="Folder to write the smaller model to.")]
MaxIncrease = Annotated[
    str | None, Option(help="Largest rise of perplexity, as a share; 5% by default.")
]
RemoveParams = Annotated[
    str | None, Option(help="Share of the feed-forward parameters to remove: 20%.")
]
TargetSize = Annotated[
    str | None, Option(help="Largest size of the weights, in the dtype of the source: 200MB.")
]
Speedup = Annotated[
    float | None, Option(help="How many times fewer multiply-adds prefill should have: 1.2.")
]
ReplacedBlocks = Annotated[
    str | None, Option(help="Blocks to replace, without planning: 3,5,9-12 or a regex.")
]
PlanFile = Annotated[Path | None, Option(help="A plan.json to follow; it may be edited.")]
Rank = Annotated[
    str, Option(help="Rank of the matrices: auto, full, 0 for no matrix, or a number.")
]
KeepUnits = Annotated[
    str, Option(help="Hidden units that each replaced block keeps: auto or a number.")
]
Export = Annotated[
    Literal["hf", "stock", "nemotron-nas", "gguf"],
    Option(help="Kind of checkpoint. stock, nemotron-nas, gguf: for engines without remote code."),
]
GgufType = Annotated[
    Literal["f16", "bf16", "q8_0", "source"],
    Option(help="With gguf: type of matrices. source: unchanged ones keep the source's bytes."),
]
Tokens = Annotated[int, Option(help="Tokens to choose by; as many others to report on.", min=256)]
Curve = Annotated[
    str | None,
    Option(help="More sizes to measure: 5%,10%,20%."),
]
Baselines = Annotated[
    bool, Option("--baselines", help="Measure simpler methods of the same size, too.")
]
AlsoFit = Annotated[
    list[str] | None,
    Option(
        help="Another text to fit on: generated (by the model itself; the default), python-docs, "
        "python-code, a file, or none; may be repeated."
    ),
]
Heal = Annotated[
    int,
    Option(help="Steps of training all maps at once on the original's predictions: 200.", min=0),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Write plan.json and compress.json, but no model.")
]


def compress(
    run: flags.RunPath,
    model: flags.RunModel = None,
    text_file: flags.RunText = None,
    also_fit: AlsoFit = None,
    out: Out = None,
    max_ppl_increase: MaxIncrease = None,
    remove_params: RemoveParams = None,
    target_size: TargetSize = None,
    speedup: Speedup = None,
    blocks: ReplacedBlocks = None,
    plan: PlanFile = None,
    rank: Rank = "auto",
    keep_units: KeepUnits = "auto",
    export: Export = "hf",
    gguf_type: GgufType = "f16",
    tokens: Tokens = 4096,
    curve: Curve = None,
    baselines: Baselines = False,
    heal: Heal = 0,
    dry_run: DryRun = False,
    device: flags.Device = "cpu",
    device_map: flags.DeviceMap = None,
    layerwise: flags.Layerwise = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Replace blocks under a budget and write a smaller model that loads."""
    from howlinear.models.generated import why_no_text
    from howlinear.run.work import Ranks

    flags.check_placement(layerwise, device_map)
    source = RunSource(run, model, text_file)
    goals = _goals(target_size, speedup, export)
    amount = _amount(max_ppl_increase, remove_params, blocks, plan, goals)
    settings = _settings(rank, keep_units, curve, export)
    source.check_blocks(blocks, every=export == "stock")
    source.check_plan(amount["plan"] or ())
    others = source.other_texts([GENERATED] if also_fit is None else also_fit)
    source.folder.check_addable("plan", "compress")
    exported = _checked_out(out, dry_run)
    ranks = Ranks.start()
    loader = Loader(device, trust_remote_code, allow_pickle)
    with _loaded(source, loader, layerwise, device_map) as net:
        source.check_plan_units(amount["plan"] or ())
        if also_fit is None and (reason := why_no_text(net)):
            say(f"{reason}: maps are fitted on the run's text alone")
            others = []
        _set_goal(amount, source, target_size, speedup)
        settings["target"] = _target(net, export, source.model, exported)
        amount["settings"] = settings | {"baselines": baselines, "heal": heal}
        result, report = _compressed(source, others, tokens, amount, ranks)
        exported = None if result.unmet else exported
        write = partial(_write, source, result, exported, export, report, gguf_type)
        show(result, show_compression, exported or run / "compress.json", as_json, write)
    ranks.stop()
    if result.unmet:
        say(f"howlinear: {result.unmet}")
        raise Exit(1)


@contextmanager
def _loaded(
    source: RunSource, loader: Loader, layerwise: bool, device_map: str | None
) -> Iterator[Any]:
    """The model; weights that are rewritten on disk are removed at the end."""
    if layerwise and is_packed(source.model):
        say("packed weights are read whole: --layerwise has no effect")
    elif layerwise:
        device_map = "disk"
    if device_map is None:
        yield source.load(loader)
        return
    with TemporaryDirectory(prefix=".weights-", dir=source.folder.folder) as weights:
        yield source.load(loader, device_map=device_map, offload_folder=weights)


def _write(
    source: RunSource, result: Any, out: Path | None, export: str, report: Any, gguf_type: str
) -> None:
    """Add the results to the run; write the smaller model, if asked for."""
    from howlinear.export.write import write_export

    source.folder.add(result.plan_dict())
    source.folder.add(result.to_dict())
    if out is not None:
        say(f"writing {out}")
        of = (export, source.model, report, gguf_type)
        write_export(source.net, source.tokenizer, result, out, *of)
        source.folder.add(result.to_dict())


def _checked_out(out: Path | None, dry_run: bool) -> Path | None:
    """The folder to write, if any; one that cannot be written to, or none without --dry-run, is refused."""
    from howlinear.export.write import check_free

    if out is not None:
        check_free(out)
        check_writable(out / "config.json", "name another folder with -o")
    elif not dry_run:
        raise ValueError("no folder for the smaller model: name one with -o, or pass --dry-run")
    return None if dry_run else out


def _target(net: Any, export: str, model: str | None, out: Path | None) -> str:
    """What the plan counts for; refused, before fitting, what cannot be exported or does not fit on the disk."""
    from howlinear.export.write import check_exportable, engine_limits, plan_target

    if out is not None or export != "hf":  # a plan for hf needs no model that can be written
        check_exportable(net, export, model)
    for limit in engine_limits(net, export):
        say(limit)
    _check_disk(net, out)
    return plan_target(net, export, model)


def _settings(rank: str, keep_units: str, curve: str | None, export: str) -> dict[str, Any]:
    """Fields of `CompressSettings`."""
    shares = [flags.share_of(part, "--curve", most=1) for part in curve.split(",")] if curve else ()
    matrix_rank = flags.number_or(rank, "--rank", "auto", "full")
    units = flags.number_or(keep_units, "--keep-units", "auto")
    if export == "stock" and matrix_rank not in ("auto", 0):
        raise ValueError("a stock block holds no matrix: leave out --rank, or use --export hf")
    return {"curve": shares, "rank": matrix_rank, "units": units}


def _goals(target_size: str | None, speedup: float | None, export: str) -> dict[str, Any]:
    """A size or a speed by its flag; refused, before the model is loaded, if it cannot be meant."""
    if target_size is not None:
        flags.bytes_of(target_size, "--target-size")
    if speedup is not None and not speedup > 1:
        raise ValueError(f"--speedup {speedup:g} is no gain: write a number above 1, such as 1.2")
    if export == "gguf" and target_size is not None:
        raise ValueError(
            "--target-size counts the source's dtype, not GGUF types: use --remove-params"
        )
    return {"--target-size": target_size, "--speedup": speedup}


def _set_goal(
    amount: dict[str, Any], source: RunSource, target_size: str | None, speedup: float | None
) -> None:
    """Turn a size or a speed into the share of parameters that must go."""
    from howlinear.compression import goals
    from howlinear.compression.plan import Budget

    net, at = source.net, source.blocks()
    if target_size is not None:
        wanted = flags.bytes_of(target_size, "--target-size")
        amount["budget"] = Budget(parameters=goals.share_for_bytes(net, at, wanted))
    if speedup is not None:
        amount["budget"] = Budget(parameters=goals.share_for_speed(net, at, speedup))


def _amount(
    max_ppl_increase: str | None,
    remove_params: str | None,
    blocks: str | None,
    plan: Path | None,
    goals: dict[str, Any],
) -> dict[str, Any]:
    """How much to replace: one of six flags, or +5 % perplexity without any."""
    values = {
        "--max-ppl-increase": max_ppl_increase,
        "--remove-params": remove_params,
        "--blocks": blocks,
        "--plan": plan,
        **goals,
    }
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude each other: give one of them")

    from howlinear.compression import plan as plans
    from howlinear.compression.plan import Budget
    from howlinear.records.files import read_json

    if remove_params is not None:
        budget = Budget(parameters=flags.share_of(remove_params, "--remove-params", most=1))
    else:
        budget = Budget(perplexity=flags.share_of(max_ppl_increase or "5%", "--max-ppl-increase"))
    chosen = None if plan is None else plans.from_dict(read_json(plan, "plan"))
    return {"budget": budget, "plan": chosen, "at": blocks}


def _compressed(
    source: RunSource, others: list[Any], tokens: int, amount: dict[str, Any], ranks: Any
) -> tuple[Any, Any]:
    """The compression, and the windows that it is reported on."""
    from howlinear.compression import healing
    from howlinear.compression.compress import CompressSettings, compress_model
    from howlinear.run.work import Work

    cut, texts = source.protocol(), {}
    for part in ("choose", "report"):
        texts[part], _ = source.held_out(part, cut, tokens)
    windows, more = source.fit_windows().ids, _reported_on(source, others, cut, tokens)
    _check_memory(source.net, source.blocks(), windows)
    left = _time_left(source, others, tokens, amount, ranks.count)
    say(f"compressing takes {duration(left.seconds)}, by the speed of one matrix product")
    follow = partial(left.following, say=say)
    texts["fit"], read = source.mixed_windows(others, follow=follow)
    if steps := amount["settings"]["heal"]:
        amount["settings"]["heal_on"] = source.heal_windows(others, steps, healing.TOKENS)
    amount["settings"] = CompressSettings(protocol=cut, **amount["settings"])
    with progress_bars() as begin:
        work, folder = Work(ranks, progress=follow(begin)), source.folder.folder
        result = compress_model(source.net, folder, **texts, **amount, work=work)
        if others:
            result.texts.extend(_costs_on(source.net, result, read, more, cut, work))
    result.about.update(source.about(*PARTS))
    return result, texts["report"]


def _reported_on(source: RunSource, others: list[Any], cut: Any, tokens: int) -> list[Any]:
    """Windows of each other text to report on; None for the model's own text."""
    from howlinear.losses.protocols import held_out_tokens

    how = (source.tokenizer, cut, tokens, source.bos)
    return [
        None if text == GENERATED else held_out_tokens(text.report(), *how)[0] for text in others
    ]


def _costs_on(
    net: Any, result: Any, read: list[Any], more: list[Any], cut: Any, work: Any
) -> Iterator[dict[str, Any]]:
    """What was read of each text, the run's first, and what the maps cost there."""
    from howlinear.compression.compress import change_on

    rest = (None if ids is None else change_on(net, result.maps, ids, cut, work) for ids in more)
    for text, change in zip(read, [result.change, *rest], strict=True):
        yield text | {"change": None if change is None else change.to_dict()}


def _time_left(
    source: RunSource, others: list[Any], held_out: int, amount: dict[str, Any], ranks: int
) -> Any:
    """How long the compression takes, by its steps."""
    from howlinear.compression.healing import TOKENS
    from howlinear.compression.needs import TimeLeft, prediction_work, steps_of
    from howlinear.compression.search import USUAL
    from howlinear.models.offload import is_offloaded
    from howlinear.models.units import hidden_count
    from howlinear.profiling.needs import seconds_each

    net, windows, settings = source.net, source.fit_windows().ids, amount["settings"]
    planned = {p.index: p.units for p in amount["plan"] or ()}
    searched = not planned and amount["at"] is None
    at = [b for b in source.blocks(amount["at"]) if not planned or b.index in planned]
    fits = USUAL if searched and amount["budget"].parameters is None else ()
    surveyed = searched or any(planned.values()) or settings["units"] not in ("auto", 0)
    lower = any(p.rank for p in amount["plan"] or ()) or settings["rank"] not in ("auto", "full", 0)
    steps = steps_of(
        net,
        {b: hidden_count(net, b) for b in at},
        tokens=windows.numel(),
        length=windows.shape[1],
        held_out=held_out,
        fits=fits,
        weighed="units" if surveyed else "matrices" if lower else "",
        priced="" if not searched else "swaps" if is_offloaded(net) else "gradients",
        sizes=1 + len(settings["curve"] if searched else ()),
        ranks=ranks,
    )
    each = prediction_work(net, windows.shape[1])
    writing = [("the model writes text", float(each * source.to_write(others)))]
    healing = [("healing", 4.0 * each * settings["heal"] * TOKENS)]
    return TimeLeft(writing + steps + healing, seconds_each(net))


def _check_disk(net: Any, out: Path | None) -> None:
    """Refuse a disk that could not hold the model, which becomes smaller, as its source stores it."""
    if out is None:
        return
    import torch

    size = getattr(net, "stored_dtype", torch.float32).itemsize
    needed = size * sum(p.numel() for p in net.parameters())
    room.check_disk(needed, "the smaller model needs up to", out, "name another place with -o")


def _check_memory(net: Any, at: list[Any], windows: Any) -> None:
    """Report the memory that fitting takes beside the model, and refuse too much."""
    from howlinear.compression.refitting import memory
    from howlinear.models.units import hidden_count
    from howlinear.run.work import Work

    batch = min(len(windows), Work().batch_size) * windows.shape[1]
    needed = memory(at, {b: hidden_count(net, b) for b in at}, batch)
    room.check_memory(needed, "fitting needs", "use a machine with more memory")
    say(f"{windows.numel()} tokens to fit on; about {size(needed)} of memory beside the model")


# -- tables


METHODS = {
    "ours": "refitted along the plan",
    "healed": "the same, healed",
    "swap": "one matrix each, cheapest swaps first",
    "r2": "one matrix each, highest R2 first",
    "zero": "blocks removed, cheapest first",
}


def _matrix(rank: int | None) -> str:
    return "full" if rank is None else f"rank {rank}" if rank else "-"


def _bold(point: dict[str, Any]) -> str:
    return "bold" if point["method"] in ("ours", "healed") else ""


def _change(point: dict[str, Any]) -> str:
    return f"{signed(point['delta_ppl'])} ±{number(point['delta_ppl_se'], 2)}"


BLOCKS = (
    Column("#", "index"),
    Column("module", "path", words=True),
    Column("matrix", "rank", _matrix),
    Column("units", lambda b: len(b.units)),
    Column("parameters", "parameters", "{:,}".format),
    Column("left", lambda b: f"{b.parameters_left / b.parameters:.0%}"),
)
CURVE = (
    Column("removed", "share", "{:.1%}".format, style=_bold),
    Column("blocks", "blocks", style=_bold),
    Column("perplexity", "perplexity", perplexity, style=_bold),
    Column("Δppl ± se", _change, style=_bold),
    Column("method", "method", METHODS.__getitem__, words=True, style=_bold),
)


def show_compression(
    console: Console, data: dict[str, Any], blocks: list[BlockCompression]
) -> None:
    """The tables that `howlinear compress` prints: replaced blocks, and methods."""
    replaced = [b for b in blocks if b.replaced]
    write(
        console,
        f"{title(data['model']['id'])}: {len(replaced)} of {plural(len(blocks), 'block')} replaced",
    )
    print_table(console, BLOCKS, replaced)
    removed = data["removed"]
    write(
        console,
        f"{removed:,} parameters removed: {removed / data['feed_forward']:.1%} "
        f"of the feed-forward blocks', {removed / data['parameters']:.1%} of the model's",
    )
    _show_change(console, data["change"])
    for text in (data.get("texts") or [])[1:]:
        _show_change(console, text["change"], f"{text['name']}: ")
    if healed := data.get("healed"):  # not in results of earlier versions
        _show_healing(console, healed, data["curve"])
    if data["exported"] is not None:
        _show_export(console, data["exported"])
    if len({point["method"] for point in data["curve"]}) > 1:
        points = sorted(data["curve"], key=lambda point: (point["removed"], point["method"]))
        print_table(console, CURVE, points)
    write_notes(console, data["notes"])


def _show_change(console: Console, change: dict[str, Any] | None, lead: str = "") -> None:
    if change is None:
        return
    before, after = (change[k]["perplexity"] for k in ("original", "changed"))
    rise = "-" if before is None or after is None else f"{signed(100 * (after / before - 1), 1)}%"
    write(
        console,
        f"{lead}perplexity {perplexity(before)} to {perplexity(after)} ({rise}; "
        f"{signed(change['delta_ppl'])} ± {number(change['delta_ppl_se'], 2)}), "
        f"{change['protocol']}, {change['tokens']} tokens that nothing was fitted to or chosen by",
    )


def _show_healing(console: Console, record: dict[str, Any], curve: list[dict[str, Any]]) -> None:
    steps, before = plural(record["steps_run"], "step"), f"KL {number(record['kl_before'], 4)}"
    if not record["kept"]:
        why = "diverged" if record["diverged"] else "did not lower KL on the text for choosing"
        write(console, f"not healed: {steps} of training {why} ({before}); unhealed maps kept")
        return
    unhealed = next(p["perplexity"] for p in curve if p["method"] == "ours")
    write(
        console,
        f"healed: perplexity {perplexity(unhealed)} before, {steps} in "
        f"{duration(record['seconds'])}, {before} to {number(record['kl_after'], 4)} on the text for "
        "choosing",
    )
    write_notes(console, [record["note"]] if record.get("note") else [])


def _show_export(console: Console, exported: dict[str, Any]) -> None:
    value = exported["perplexity"]
    stored = "" if value is None else f", perplexity {perplexity(value)} so"
    again = "loaded again in a new process" if exported.get("kind") != "gguf" else "read again"
    before = exported.get("bytes_before")  # not in results of earlier versions
    instead = "" if before is None else f" instead of {before / 1e6:.1f}"
    if tensors := exported.get("tensor_bytes"):
        fewer = before - tensors
        instead += f", {abs(fewer):,} bytes {'less' if fewer >= 0 else 'more'} of weights"
    kind = "the source's types" if exported["dtype"] == "source" else exported["dtype"]
    write(
        console,
        f"written in {kind}: {exported['parameters']:,} parameters, "
        f"{(tensors or exported['bytes']) / 1e6:.1f} MB{instead}{stored}; {again}, it agrees",
    )
    write_notes(console, exported["notes"])
