"""`howlinear profile`: from a text to a run, on one machine or many."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

import howlinear
from howlinear.cli import flags
from howlinear.cli.compare import show_comparison
from howlinear.cli.output import follows, made_by, print_json, progress_bars, say, show
from howlinear.cli.printer import terminal_console, write
from howlinear.cli.profile_table import next_step, show_profile, show_shard
from howlinear.cli.sources import Loader, in_full, is_packed, window_length
from howlinear.records.words import duration
from howlinear.run import room
from howlinear.run.folder import RunFolder

Request = dict[str, Any]  # what was asked for, as profile.json records it

SMALLER = "lower --folds (2 at least) or measure fewer --blocks at a time"


Out = Annotated[
    Path | None, Option("--out", "-o", help="Run folder to write; runs/MODEL by default.")
]
Dataset = Annotated[str | None, Option(help="Hub id or folder of a dataset to read.")]
DatasetConfig = Annotated[str | None, Option(help="Configuration of the dataset.")]
DatasetSplit = Annotated[str, Option(help="Split of the dataset to fit on.")]
TextColumn = Annotated[str, Option(help="Column of the dataset that holds the text.")]
Corpus = Annotated[
    list[str] | None,
    Option(
        help="NAME=SOURCE, may be repeated: one run for each text, in OUT/NAME. A source is "
        "wikitext, python-docs, python-code, a file or a dataset's id."
    ),
]
MaxLength = Annotated[int | None, Option(help="Window length in tokens; 512 by default.", min=2)]
Protocol = Annotated[
    Literal["default", "paper"],
    Option(
        help="paper: 15000 tokens in windows of 128, one 80/20 split, no BOS; WikiText-2's rows "
        "joined as in the paper."
    ),
]
Solver = Annotated[
    Literal["moments", "tsqr"],
    Option(help="How rows are accumulated; tsqr is slower and more precise."),
]
Precision = Annotated[
    Literal["auto", "float64", "mixed"],
    Option(
        help="Of products of rows. mixed: float32, added in float64, about twice as fast. auto: mixed "
        "for blocks whose R2 it would move by less than 1e-6."
    ),
]
Bos = Annotated[
    Literal["auto", "always", "never"],
    Option(help="Begin each window with BOS; auto: as the tokenizer does."),
]
Shard = Annotated[
    str | None,
    Option(help="I/N: read part I of N of the text, counted from 0; `merge` adds the parts up."),
]
SaveEvery = Annotated[
    float,
    Option(help="Minutes between saves; an interrupted command resumes from the last save.", min=0),
]
Revision = Annotated[str | None, Option(help="Revision of the model on the hub.")]
Experts = Annotated[
    bool,
    Option("--experts", help="Also measure each expert of a mixture, on the tokens routed to it."),
]
AllTokens = Annotated[
    bool, Option("--all-tokens", help="With --experts: measure each on every token.")
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Print the memory, disk and work needed, and stop.")
]


def profile(
    model: flags.ModelName = None,
    out: Out = None,
    text_file: flags.TextFile = None,
    dataset: Dataset = None,
    dataset_config: DatasetConfig = None,
    split: DatasetSplit = "train",
    text_column: TextColumn = "text",
    corpus: Corpus = None,
    tokens: flags.Tokens = None,
    max_length: MaxLength = None,
    folds: flags.Folds = 5,
    protocol: Protocol = "default",
    blocks: flags.Blocks = None,
    solver: Solver = "moments",
    precision: Precision = "auto",
    bos: Bos = "auto",
    batch_size: flags.BatchSize = 8,
    shard: Shard = None,
    save_every: SaveEvery = 10.0,
    revision: Revision = None,
    dtype: flags.Dtype = "float32",
    device: flags.Device = "cpu",
    device_map: flags.DeviceMap = None,
    experts: Experts = False,
    all_tokens: AllTokens = False,
    layerwise: flags.Layerwise = False,
    dry_run: DryRun = False,
    seed: flags.Seed = 0,
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    overwrite: flags.Overwrite = False,
    as_json: flags.AsJson = False,
) -> None:
    """Measure how linear every block is, write a run folder, print the table."""
    if all_tokens and not experts:
        raise ValueError("--all-tokens is about experts: add --experts")
    flags.check_placement(layerwise, device_map)
    rows = ("all" if all_tokens else "routed") if experts else None
    request: Request = {"model": model, "revision": revision, "dtype": dtype}
    request |= {"tokens": tokens, "max_length": max_length, "folds": folds}
    request |= {"protocol": protocol, "blocks": blocks, "solver": solver}
    request |= {"precision": precision, "experts": rows, "layerwise": layerwise}
    request |= {"device_map": device_map, "bos": bos, "seed": seed}
    request |= {"batch_size": batch_size, "device": device, "shard": list(flags.shard_of(shard))}
    if dry_run:
        _show_needs(request, trust_remote_code, as_json)
        return
    if protocol == "paper" and not (corpus or text_file or dataset):
        text_file = "wikitext-rows"  # WikiText-2 as the paper reads it
    out = out or Path("runs") / flags.slug(model)
    source = [text_file, dataset, dataset_config, split, text_column]
    sources = {out / name: names for name, names in _sources(corpus or [], source).items()}
    loader = Loader(device, trust_remote_code, allow_pickle)
    for folder, place in sources.items():
        if not follows():  # the first of several processes checks
            RunFolder(folder).check_free(in_full(request | {"text": place}), overwrite)
    saving = {"every": 60 * save_every, "overwrite": overwrite}
    _profile_texts(out, sources, request, loader, saving, as_json)


def _sources(corpora: list[str], source: list[Any]) -> dict[str, list[Any]]:
    """Name -> arguments of `corpus.open_text`; one text with an empty name without --corpus."""
    from howlinear.models.corpus import is_file_name

    if not corpora:
        return {"": source}
    text_file, dataset, config, split, column = source
    if text_file or dataset:
        raise ValueError("give all texts with --corpus, without --text-file and --dataset")
    sources: dict[str, list[Any]] = {}
    for text in corpora:
        name, equals, place = text.partition("=")
        name, place = (name, place) if equals else (flags.slug(Path(text).stem), text)
        if not place or flags.slug(name) != name:
            raise ValueError(f"--corpus {text}: write NAME=SOURCE, a name of letters and digits")
        if name in sources:
            raise ValueError(f"--corpus {name} occurs twice: give each text another name")
        file = is_file_name(place)
        sources[name] = [place, None, None] if file else [None, place, config]
        sources[name] += [split, column]
    return sources


def _profile_texts(
    out: Path,
    sources: dict[Path, list[Any]],
    request: Request,
    loader: Loader,
    saving: dict[str, Any],
    as_json: bool,
) -> None:
    """Write a run for each text and print the table; of several texts, their comparison."""
    from howlinear.models import corpus
    from howlinear.models.forward import as_windows
    from howlinear.models.loading import describe
    from howlinear.profiling.merging import fit_windows
    from howlinear.run.work import Ranks

    texts = {folder: corpus.open_text(*source) for folder, source in sources.items()}
    ranks, several, result = Ranks.start(), len(texts) > 1, None
    if ranks.count > 1 and any(source[0] == "-" for source in sources.values()):
        raise ValueError("several processes cannot share one stdin: save the text (--text-file)")
    with _loaded(out / "partial" / str(ranks.rank), request, loader) as (net, tokenizer, cut):
        at = howlinear.blocks(net, request["blocks"])
        model = describe(net, request["model"], request["revision"])
        for folder, text in texts.items():
            if several:
                say(f"{text.name}:")
            about = {"model": model, **made_by(), "corpus": _corpus(text)}
            about["asked"] = in_full(request | {"text": sources[folder]})
            if ranks.share(not saving["overwrite"] and _finished(folder, about)):
                say(f"{folder} holds this profile already: --overwrite to measure again")
                result = None if follows() else _read(folder, request)
                continue
            windows = as_windows(fit_windows(text.fit, tokenizer, cut))
            result = _profile_text(net, at, windows, cut, about, folder, saving, ranks, as_json)
        if not several or request["shard"][1] > 1:
            then = None if result is None else next_step(folder, result.blocks)
            show(result, _table(request), folder, as_json, then=then)
        elif ranks.rank == 0:
            _show_several(list(texts), out, as_json)
    ranks.stop()


def _table(request: Request) -> Callable[..., None]:
    return show_shard if request["shard"][1] > 1 else show_profile


def _show_several(folders: list[Path], out: Path, as_json: bool) -> None:
    from howlinear.profiling.comparing import compare_runs

    comparison = compare_runs(folders)
    comparison.about.update(made_by())
    show(comparison, show_comparison, out, as_json)


def _corpus(text: Any) -> dict[str, Any]:
    """What profile.json says of its text."""
    return {"name": text.name, "part": text.parts[0], "fingerprint": text.fingerprint()}


def _finished(folder: Path, about: dict[str, Any]) -> bool:
    """Is this measured already? Only the first of several processes asks."""
    now = (about["asked"], about["corpus"], about["model"])
    return not follows() and RunFolder(folder).finished(*now)


def _read(folder: Path, request: Request) -> Any:
    """The result of a command that is finished."""
    from howlinear.profiling.gathering import Shard
    from howlinear.profiling.profiler import Profile

    return (Shard if request["shard"][1] > 1 else Profile).load(folder)


def _profile_text(
    net: Any,
    at: Any,
    windows: Any,
    cut: dict[str, Any],
    about: dict[str, Any],
    folder: Path,
    saving: dict[str, Any],
    ranks: Any,
    as_json: bool,
) -> Any:
    """Measure one text and write a run, or a shard of one; what cannot be written is printed."""
    from howlinear.linear.folds import CELL
    from howlinear.profiling.gathering import Scope
    from howlinear.profiling.passes import Course
    from howlinear.run.saving import Saves

    request = about["asked"]
    same = {"weights": about["model"]["weights"], "fingerprint": about["corpus"]["fingerprint"]}
    here = {"ranks": ranks.count, "howlinear": howlinear.__version__, "cell": CELL, **cut}
    saves = Saves(folder, request | same | here, rank=ranks.rank, **saving)
    _check_same(ranks, (same, windows.ids.shape, int(windows.ids.sum())))
    if saves.begun:
        say(f"resuming the interrupted profile in {folder}")
    options = {n: request[n] for n in ("batch_size", "solver", "precision", "seed", "layerwise")}
    course = Course(ranks, shard=tuple(request["shard"]), saves=saves, **options)
    scope = Scope(request["folds"], request["protocol"], request["experts"])
    saves.together = _plan(net, at, windows.ids, scope, course)
    try:
        result = _measured(net, at, windows, scope, replace(course, together=saves.together))
    except KeyboardInterrupt:
        if saves.begun:
            say(f"the same command resumes from the last save in {folder}")
        raise
    result.settings.update(cut, tokens=result.settings["tokens"], batch_size=request["batch_size"])
    result.about.update(about)
    if ranks.rank == 0:
        _save(result, folder, _table(request), as_json)
    saves.close()
    return result


def _save(result: Any, folder: Path, show_table: Callable[..., None], as_json: bool) -> None:
    """Write the run, or print it if that fails: the same command again has only this left to do."""
    try:
        result.save(folder)
    except OSError:
        show(result, show_table, None, as_json)
        raise


def _check_same(ranks: Any, values: tuple[Any, ...]) -> None:
    if any(other != values for other in ranks.gather(values)):
        raise ValueError(
            "the processes read different texts or models: start all with the same flags"
        )


def _plan(net: Any, at: Any, ids: Any, scope: Any, course: Any) -> int:
    """Report what the profile needs and refuse too much; how many blocks are measured at a time."""
    from howlinear.profiling.gathering import with_experts
    from howlinear.profiling.needs import plan_profile

    every = with_experts(net, at, scope.experts)
    needs, together = plan_profile(net, every, ids, scope.folds, course)
    if needs.tokens < ids.numel():
        say(f"{ids.numel()} tokens in all; here and of each process:")
    for line in needs.lines():
        say(line)
    say(f"{duration(needs.seconds(net))}, by the speed of one matrix product")
    check_room(needs.moments, needs.disk, course.saves.folder)
    if together < len(every):
        say(f"moments of all {len(every)} blocks do not fit into memory: {together} at a time")
    return together


def check_room(memory: int, disk: int, out: Path) -> None:
    """Refuse a profile that memory or disk cannot hold, before it starts."""
    room.check_memory(memory, "moments need", SMALLER)
    room.check_disk(disk, "the run needs", out, f"{SMALLER}, or name another place with -o")


def _measured(net: Any, at: Any, windows: Any, scope: Any, course: Any) -> Any:
    """The profile, or the moments of a shard."""
    from howlinear.profiling.gathering import profile_shard
    from howlinear.profiling.profiler import profile

    with progress_bars() as begin:
        course = replace(course, progress=begin)
        if course.shard[1] > 1:
            return profile_shard(net, windows, at=at, scope=scope, course=course)
        return profile(net, windows, at=at, course=course, **vars(scope))


def _cut(net: Any, tokenizer: Any, at: Any, request: Request) -> dict[str, Any]:
    """How the text is cut into windows: as asked for, else as the protocol says."""
    from howlinear.models.cutting import default_tokens

    paper = request["protocol"] == "paper"  # the first tokens, without BOS
    length = window_length(net, tokenizer, request["max_length"] or (128 if paper else 512))
    tokens = 15_000 if paper else default_tokens(max(b.d_in for b in at))
    bos = "never" if paper and request["bos"] == "auto" else request["bos"]
    return {
        "window": length,
        "tokens": request["tokens"] or tokens,
        "bos": bos,
        "spread": not paper,
    }


def _checked_cut(net: Any, tokenizer: Any, request: Request) -> dict[str, Any]:
    """How the text is cut; refused, before weights are read, what the model cannot do."""
    from howlinear.linear.folds import Folds, RowSplit, check_rows
    from howlinear.models.cutting import check_cut
    from howlinear.models.layers import layers_of
    from howlinear.profiling.gathering import with_experts

    if net.main_input_name != "input_ids":
        raise ValueError(
            f"{type(net).__name__} reads {net.main_input_name}, not text: "
            "call howlinear.profile from Python with batches of model inputs"
        )
    at = howlinear.blocks(net, request["blocks"])
    with_experts(net, at, request["experts"])
    if request["layerwise"]:
        layers_of(net, at)
    cut = _cut(net, tokenizer, at, request)
    length, count = cut["window"], cut["tokens"] // cut["window"]
    check_cut(tokenizer, length, cut["tokens"], cut["bos"])
    if request["shard"][1] == 1:
        offsets, tokens = range(0, count * length, length), count * length
        paper = request["protocol"] == "paper"
        split = RowSplit(tokens) if paper else Folds.over(request["folds"], offsets, tokens)
        check_rows(count, length, max(b.d_in for b in at), split)
    return cut


@contextlib.contextmanager
def _loaded(
    partial: Path, request: Request, loader: Loader
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The model, its tokenizer and how the text is cut; weights on disk are removed at the end."""
    model, device_map = request["model"], request["device_map"]
    offload = partial / "weights" if request["layerwise"] or device_map else None
    if request["layerwise"]:
        if is_packed(model):
            say("packed weights are read whole: --layerwise bounds the memory of moments alone")
        device_map = None if is_packed(model) else "disk"
    cut: dict[str, Any] = {}

    def check(net: Any, tokenizer: Any) -> None:
        cut.update(_checked_cut(net, tokenizer, request))

    options = {"device_map": device_map, "offload_folder": offload, "check": check}
    options |= {name: request[name] for name in ("revision", "dtype")}
    yield *loader.load(model, **options), cut
    if offload is not None:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.parent.rmdir()


def _show_needs(request: Request, trust_remote_code: bool, as_json: bool) -> None:
    """Print what a profile would take, from the model's configuration alone."""
    from howlinear.models import loading
    from howlinear.profiling.gathering import with_experts
    from howlinear.profiling.needs import profile_needs

    options = {"revision": request["revision"], "dtype": request["dtype"]}
    net = loading.skeleton(request["model"], trust_remote_code=trust_remote_code, **options)
    at = with_experts(net, howlinear.blocks(net, request["blocks"]), request["experts"])
    cut = _cut(net, None, at, request)
    length = cut["window"]
    windows = max(1, -(-cut["tokens"] // length // request["shard"][1]))
    settings = {name: request[name] for name in ("batch_size", "folds", "solver", "layerwise")}
    cost = profile_needs(net, at, windows=windows, length=length, **settings)
    if as_json:
        print_json(cost.to_dict())
        return
    console = terminal_console()
    for line in cost.lines():
        write(console, line)
