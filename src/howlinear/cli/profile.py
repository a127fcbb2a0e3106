"""`howlinear profile` and `howlinear merge`: from a text to a run, on one machine or many."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import howlinear
from howlinear.cli.parts import (
    AllowPickle,
    AsJson,
    BatchSize,
    Device,
    ModelName,
    Overwrite,
    TrustRemoteCode,
    check_folder,
    check_room,
    fitting,
    inputs_for,
    own_device,
    print_json,
    progress_bar,
    say,
    show,
    slug,
    text_of,
    texts_of,
    versions,
)
from howlinear.cli.tables.compare import show_comparison
from howlinear.cli.tables.printer import terminal_console, write
from howlinear.cli.tables.profile import show_profile, show_shard
from howlinear.run import room
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


def profile(
    model: ModelName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder to write; runs/MODEL by default.")
    ] = None,
    text_file: Annotated[
        str | None,
        typer.Option(
            help="A utf-8 text, - for stdin, or python-docs, python-code; WikiText-2 if none."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A dataset's hub id or folder.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Its configuration.")] = None,
    split: Annotated[str, typer.Option(help="Its split to fit on.")] = "train",
    text_column: Annotated[str, typer.Option(help="Its column that holds text.")] = "text",
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SOURCE, more than once: a run for each text, OUT/NAME. A source is wikitext, "
            "python-docs, python-code, a file or a dataset's id."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to read; max(30000, 40 x width) by default.", min=1)
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Window length in tokens; 512 by default.", min=2)
    ] = None,
    folds: Annotated[int, typer.Option(help="Cross-validation folds.", min=2)] = 5,
    protocol: Annotated[
        Protocol,
        typer.Option(
            help="paper: 15000 tokens, windows of 128, one 80/20 split, no BOS; WikiText-2's rows "
            "joined as the paper does."
        ),
    ] = Protocol.default,
    blocks: Annotated[
        str | None, typer.Option(help="Blocks to measure: 3,5,9-12 or a regular expression.")
    ] = None,
    solver: Annotated[
        Solver, typer.Option(help="tsqr is slower and has more digits.")
    ] = Solver.moments,
    precision: Annotated[
        Precision,
        typer.Option(
            help="mixed: float32 products, float64 sums, for devices without fast float64; the "
            "difference is measured and told."
        ),
    ] = Precision.float64,
    bos: Annotated[
        Bos, typer.Option(help="Start windows with BOS; auto: as the tokenizer does.")
    ] = Bos.auto,
    batch_size: BatchSize = 8,
    shard: Annotated[
        str | None,
        typer.Option(
            help="I/N: read part I of N of the text, from 0, and leave the sums to `merge`."
        ),
    ] = None,
    save_every: Annotated[
        float,
        typer.Option(help="Minutes between saves; a killed command goes on from the last.", min=0),
    ] = 10.0,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    device: Device = "cpu",
    device_map: Annotated[
        DeviceMap | None,
        typer.Option(help="auto: divide the model among GPUs, memory and disk (accelerate)."),
    ] = None,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Measure every expert of a mixture too, on its own tokens."),
    ] = False,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="With --experts: each on every token instead.")
    ] = False,
    layerwise: Annotated[
        bool,
        typer.Option(
            "--layerwise",
            help="Layer by layer: one layer's weights and moments in memory at a time.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, and stop.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the row sample.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure every block, write a run folder, print the table."""
    paper = protocol is Protocol.paper
    out = out or Path("runs") / slug(model)
    part = shard_of(shard)
    settings = {
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "tokens": tokens,
        "max_length": max_length,
        "folds": folds,
        "protocol": protocol.value,
        "blocks": blocks,
        "solver": solver.value,
        "precision": precision.value,
        "experts": ("all" if all_tokens else "routed") if experts else None,
        "layerwise": layerwise,
        "device_map": device_map.value if device_map else None,
        "bos": bos.value,
        "seed": seed,
        "batch_size": batch_size,
        "device": device,
        "shard": list(part),
    }
    if all_tokens and not experts:
        raise ValueError("--all-tokens is about experts: add --experts")
    if layerwise and device_map:
        raise ValueError("--layerwise places weights itself: drop --device-map")
    if dry_run:
        _dry(settings, trust_remote_code, as_json)
        return
    if paper and not (corpus or text_file or dataset):
        text_file = "wikitext-rows"  # WikiText-2 as the paper reads it
    sources = texts_of(corpus or [], text_file, dataset, dataset_config, split, text_column)
    runs = {out / name if name else out: source for name, source in sources.items()}
    for folder, source in runs.items():
        check_folder(folder, settings | {"text": source}, overwrite)
    texts = {folder: text_of(*source) for folder, source in runs.items()}

    from howlinear.models import corpus as corpora
    from howlinear.models import loading
    from howlinear.profiling import comparing
    from howlinear.run.ranks import Ranks

    ranks = Ranks.start()
    if ranks.count > 1 and "-" in [source[0] for source in runs.values()]:
        raise ValueError("several processes cannot share one stdin: save the text (--text-file)")
    elsewhere = out / "partial" / f"{ranks.rank}" / "weights" if layerwise or device_map else None
    say(f"loading {model or 'the built-in model'}")
    net, tokenizer = loading.load(
        model,
        revision=revision,
        dtype=dtype,
        device=own_device(device),
        device_map=_placed(model, layerwise, device_map),
        offload_folder=elsewhere,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    at = howlinear.blocks(net, blocks)
    length, budget = _extent(net, tokenizer, at, settings)
    start = "never" if paper and bos is Bos.auto else bos.value
    about = {
        "model": loading.describe(net, model, revision),
        "command": shlex.join(["howlinear", *sys.argv[1:]]),
        "versions": versions(),
    }
    how: dict[str, Any] = {"solver": solver.value, "precision": precision.value, "seed": seed}
    wanted: Any = settings["experts"]
    work = _Work(net, at, folds, protocol.value, batch_size, layerwise, wanted, how)
    result: Any = None
    for folder, text in texts.items():
        say(f"{text.name}: " if len(texts) > 1 else "", end="")
        ids = corpora.windows(text.fit, tokenizer, length, tokens=budget, bos=start)
        own = {"name": text.name, "part": text.parts[0], "fingerprint": text.fingerprint()}
        asked = settings | {"text": runs[folder]}
        there = len(texts) > 1 and RunFolder(folder).holds("profile", asked, own["fingerprint"])
        if ranks.share(there):
            say(f"{folder} is there")
            continue
        result = work.measured(
            ids,
            folder,
            {**about, "corpus": own, "asked": asked},
            {"window": ids.shape[1], "bos": start, "batch_size": batch_size},
            part,
            ranks,
            60 * save_every,
        )
    if part[1] > 1 or len(texts) == 1:
        show(result, show_shard if part[1] > 1 else show_profile, folder, as_json)
    else:
        result = comparing.compare_runs(list(texts)) if ranks.rank == 0 else None
        if result is not None:
            result.about.update(command=about["command"], versions=versions())
        show(result, show_comparison, out, as_json)
    if elsewhere is not None:
        shutil.rmtree(elsewhere.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            elsewhere.parent.parent.rmdir()
    ranks.stop()


@dataclass(frozen=True)
class _Work:
    """A loaded model, and what is to be measured of it."""

    net: Any
    at: Any
    folds: int
    protocol: str
    batch_size: int
    layerwise: bool
    experts: str | None
    how: dict[str, Any]  # solver, precision, seed

    def measured(
        self,
        ids: Any,
        folder: Path,
        about: dict[str, Any],
        settings: dict[str, Any],
        shard: tuple[int, int],
        ranks: Any,
        every: float,
    ) -> Any:
        """One text read, and a run or a shard written."""
        from howlinear.profiling import profiler, shards
        from howlinear.profiling.gathering import Scope
        from howlinear.profiling.passes import Course
        from howlinear.run.saving import Saves

        same = about["asked"] | {
            "weights": about["model"]["weights"],
            "fingerprint": about["corpus"]["fingerprint"],
            "ranks": ranks.count,
            "howlinear": howlinear.__version__,
        }
        saves = Saves(folder, same, every, ranks.rank)
        alike = (same["fingerprint"], same["weights"], ids.shape, int(ids.sum()))
        if any(other != alike for other in ranks.gather(alike)):
            raise ValueError("the processes have read different texts or models: give all the same")
        if saves.begun:
            say(f"going on from what {folder} holds")
        saves.together, walks = self._room(ids, folder, shard[1], ranks, saves)
        windows = inputs_for(self.net, ids, self.batch_size)
        try:
            with progress_bar(walks * -(-ids.numel() // (shard[1] * ranks.count))) as advance:
                course = Course(
                    ranks=ranks,
                    batch_size=self.batch_size,
                    progress=lambda label, tokens: advance,
                    shard=shard,
                    layerwise=self.layerwise,
                    together=saves.together,
                    saves=saves,
                    **self.how,
                )
                scope = Scope(self.folds, self.protocol, self.experts)
                if shard[1] > 1:
                    result: Any = shards.profile_shard(
                        self.net, windows, at=self.at, scope=scope, course=course
                    )
                else:
                    result = profiler.profile(
                        self.net, windows, at=self.at, course=course, **vars(scope)
                    )
        except KeyboardInterrupt:
            if saves.begun:
                say(f"the same command goes on from the last save in {folder}")
            raise
        result.settings.update(settings)
        result.about.update(about)
        if ranks.rank == 0:
            result.save(folder)
        saves.close()
        return result

    def _room(
        self, ids: Any, folder: Path, parts: int, ranks: Any, saves: Any
    ) -> tuple[int | None, int]:
        """Say what it takes; how many blocks fit into memory at once, None for all, and how often
        each window is run."""
        from howlinear.profiling.gathering import with_experts
        from howlinear.profiling.needs import most_together, profile_cost

        solver, free = self.how["solver"], room.available_memory()
        every = with_experts(self.net, self.at, self.experts)
        count = -(-len(ids) // (parts * ranks.count))
        most: int | None = len(every)
        if free is not None and not self.layerwise:
            most = most_together(every, count, self.folds, solver, free)
        if saves.begun:  # in the groups that it began with
            most = saves.together or len(every)
        most = min(ranks.gather(most or 0)) or None  # all ranks read the same groups
        cost = profile_cost(
            self.net,
            every,
            windows=count,
            length=ids.shape[1],
            batch_size=self.batch_size,
            folds=self.folds,
            solver=solver,
            together=most or 1,
            layerwise=self.layerwise,
        )
        if count < len(ids):
            say(f"{ids.numel()} tokens in all; here and of each process:")
        for line in cost.lines():
            say(line)
        check_room(cost.moments, cost.disk, folder)
        if most is not None and most < len(every):
            say(f"moments of all {len(every)} blocks do not fit into memory: {most} at a time")
        together = most if most is not None and most < len(every) else None
        return together, cost.walks


def _placed(model: str | None, layerwise: bool, device_map: DeviceMap | None) -> str | None:
    """Where weights are kept: on disk layer by layer, but for packed files, which are read whole."""
    packed = model is None or str(model).endswith(".gguf")
    if layerwise and packed:
        say("packed weights are read whole: --layerwise bounds the memory of moments alone")
    if layerwise:
        return None if packed else "disk"
    return device_map.value if device_map else None


def _extent(net: Any, tokenizer: Any, at: Any, settings: dict[str, Any]) -> tuple[int, int]:
    """Window length and tokens to read, as asked for or as the protocol has them."""
    from howlinear.models import corpus

    paper = settings["protocol"] == "paper"
    length = fitting(net, tokenizer, settings["max_length"] or (128 if paper else 512))
    wanted = 15_000 if paper else corpus.default_tokens(max(b.d_in for b in at))
    return length, settings["tokens"] or wanted


def _dry(settings: dict[str, Any], trust_remote_code: bool, as_json: bool) -> None:
    """What a profile would take, by the model's configuration alone."""
    from howlinear.models import loading
    from howlinear.profiling.gathering import with_experts
    from howlinear.profiling.needs import profile_cost

    net = loading.skeleton(
        settings["model"],
        revision=settings["revision"],
        dtype=settings["dtype"],
        trust_remote_code=trust_remote_code,
    )
    at = with_experts(net, howlinear.blocks(net, settings["blocks"]), settings["experts"])
    length, budget = _extent(net, None, at, settings)
    cost = profile_cost(
        net,
        at,
        windows=max(1, -(-budget // length // settings["shard"][1])),
        length=length,
        batch_size=settings["batch_size"],
        folds=settings["folds"],
        solver=settings["solver"],
        layerwise=settings["layerwise"],
    )
    if as_json:
        print_json(cost.to_dict())
        return
    console = terminal_console()
    for line in cost.lines():
        write(console, line)


def shard_of(text: str | None) -> tuple[int, int]:
    """ "2/8" -> (2, 8), parts counted from 0."""
    if text is None:
        return 0, 1
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard {text}: write I/N with I from 0 to N - 1, such as 0/8 to 7/8")
    return int(part), int(parts)
