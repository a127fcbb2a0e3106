"""`howlinear profile`: from a text to a run, on one machine or many."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import howlinear
from howlinear.cli import flags
from howlinear.cli.measuring import Measurement, extent, start_of
from howlinear.cli.output import made_by, print_json, show
from howlinear.cli.progress import follows, say
from howlinear.cli.sources import Loader
from howlinear.cli.tables.compare import show_comparison
from howlinear.cli.tables.printer import terminal_console, write
from howlinear.cli.tables.profile import show_profile, show_shard
from howlinear.run.folder import RunFolder


class Protocol(StrEnum):
    default = "default"
    paper = "paper"


class Solver(StrEnum):
    moments = "moments"
    tsqr = "tsqr"


class Precision(StrEnum):
    float64 = "float64"
    mixed = "mixed"


class DeviceMap(StrEnum):
    auto = "auto"


class Bos(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


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
ProtocolName = Annotated[
    Protocol,
    Option(
        help="paper: 15000 tokens in windows of 128, one 80/20 split, no BOS; WikiText-2's rows "
        "joined as in the paper."
    ),
]
SolverName = Annotated[
    Solver, Option(help="How rows are accumulated; tsqr is slower and more precise.")
]
PrecisionName = Annotated[
    Precision,
    Option(
        help="mixed: float32 products and float64 sums, for devices without fast float64; the "
        "difference is measured and reported."
    ),
]
StartToken = Annotated[Bos, Option(help="Begin each window with BOS; auto: as the tokenizer does.")]
Shard = Annotated[
    str | None,
    Option(help="I/N: read part I of N of the text, counted from 0; `merge` adds the parts up."),
]
SaveEvery = Annotated[
    float,
    Option(help="Minutes between saves; an interrupted command resumes from the last save.", min=0),
]
Revision = Annotated[str | None, Option(help="Revision of the model on the hub.")]
Placement = Annotated[
    DeviceMap | None,
    Option(help="auto: divide the model among GPUs, memory and disk (accelerate)."),
]
Experts = Annotated[
    bool,
    Option("--experts", help="Also measure each expert of a mixture, on the tokens routed to it."),
]
AllTokens = Annotated[
    bool, Option("--all-tokens", help="With --experts: measure each on every token.")
]
Layerwise = Annotated[
    bool,
    Option("--layerwise", help="Keep one layer's weights and moments in memory at a time."),
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
    protocol: ProtocolName = Protocol.default,
    blocks: flags.Blocks = None,
    solver: SolverName = Solver.moments,
    precision: PrecisionName = Precision.float64,
    bos: StartToken = Bos.auto,
    batch_size: flags.BatchSize = 8,
    shard: Shard = None,
    save_every: SaveEvery = 10.0,
    revision: Revision = None,
    dtype: flags.Dtype = "float32",
    device: flags.Device = "cpu",
    device_map: Placement = None,
    experts: Experts = False,
    all_tokens: AllTokens = False,
    layerwise: Layerwise = False,
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
    if layerwise and device_map:
        raise ValueError("--layerwise places weights itself: drop --device-map")
    rows = ("all" if all_tokens else "routed") if experts else None
    request: dict[str, Any] = {"model": model, "revision": revision, "dtype": dtype}
    request |= {"tokens": tokens, "max_length": max_length, "folds": folds}
    request |= {"protocol": protocol.value, "blocks": blocks, "solver": solver.value}
    request |= {"precision": precision.value, "experts": rows, "layerwise": layerwise}
    request |= {"device_map": device_map and device_map.value, "bos": bos.value, "seed": seed}
    request |= {"batch_size": batch_size, "device": device, "shard": list(flags.shard_of(shard))}
    if dry_run:
        _show_needs(request, trust_remote_code, as_json)
        return
    if protocol is Protocol.paper and not (corpus or text_file or dataset):
        text_file = "wikitext-rows"  # WikiText-2 as the paper reads it
    out = out or Path("runs") / flags.slug(model)
    source = [text_file, dataset, dataset_config, split, text_column]
    sources = {out / name: names for name, names in _sources(corpus or [], source).items()}
    loader = Loader(device, trust_remote_code, allow_pickle)
    for folder, place in sources.items():
        if not follows():  # the first of several processes checks
            RunFolder(folder).check_free(request | {"text": place}, overwrite)
    _profile_texts(out, sources, request, loader, 60 * save_every, as_json)


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
    request: dict[str, Any],
    loader: Loader,
    every: float,
    as_json: bool,
) -> None:
    """Write a run for each text and print the table; of several texts, their comparison."""
    from howlinear.models import corpus
    from howlinear.profiling.comparing import compare_runs
    from howlinear.run.ranks import Ranks

    texts = {folder: corpus.open_text(*source) for folder, source in sources.items()}
    ranks, several, result = Ranks.start(), len(texts) > 1, None
    if ranks.count > 1 and any(source[0] == "-" for source in sources.values()):
        raise ValueError("several processes cannot share one stdin: save the text (--text-file)")
    with _loaded(out / "partial" / str(ranks.rank), request, loader) as (net, tokenizer):
        measurement = Measurement(net, howlinear.blocks(net, request["blocks"]), request, ranks)
        length, tokens = extent(net, tokenizer, measurement.at, request)
        for folder, text in texts.items():
            say(f"{text.name}: " if several else "", end="")
            ids = corpus.windows(text.fit, tokenizer, length, tokens=tokens, bos=start_of(request))
            text_request = request | {"text": sources[folder]}
            done = several and RunFolder(folder).holds("profile", text_request, text.fingerprint())
            if ranks.share(done):
                say(f"{folder} is complete already")
                continue
            result = measurement.run(ids, folder, text, text_request, every)
        if request["shard"][1] > 1:
            show(result, show_shard, folder, as_json)
        elif not several:
            show(result, show_profile, folder, as_json)
        elif ranks.rank == 0:
            comparison = compare_runs(list(texts))
            comparison.about.update(made_by())
            show(comparison, show_comparison, out, as_json)
    ranks.stop()


@contextlib.contextmanager
def _loaded(partial: Path, request: dict[str, Any], loader: Loader) -> Iterator[tuple[Any, Any]]:
    """The model and its tokenizer; weights on disk are removed at the end."""
    model, device_map = request["model"], request["device_map"]
    offload = partial / "weights" if request["layerwise"] or device_map else None
    if request["layerwise"]:
        packed = model is None or str(model).endswith(".gguf")
        if packed:
            say("packed weights are read whole: --layerwise bounds the memory of moments alone")
        device_map = None if packed else "disk"
    options = {"device_map": device_map, "offload_folder": offload}
    yield loader.load(model, revision=request["revision"], dtype=request["dtype"], **options)
    if offload is not None:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.parent.rmdir()


def _show_needs(request: dict[str, Any], trust_remote_code: bool, as_json: bool) -> None:
    """Print what a profile would take, from the model's configuration alone."""
    from howlinear.models import loading
    from howlinear.profiling.gathering import with_experts
    from howlinear.profiling.needs import profile_needs

    options = {"revision": request["revision"], "dtype": request["dtype"]}
    net = loading.skeleton(request["model"], trust_remote_code=trust_remote_code, **options)
    at = with_experts(net, howlinear.blocks(net, request["blocks"]), request["experts"])
    length, tokens = extent(net, None, at, request)
    windows = max(1, -(-tokens // length // request["shard"][1]))
    settings = {name: request[name] for name in ("batch_size", "folds", "solver", "layerwise")}
    cost = profile_needs(net, at, windows=windows, length=length, **settings)
    if as_json:
        print_json(cost.to_dict())
        return
    console = terminal_console()
    for line in cost.lines():
        write(console, line)
