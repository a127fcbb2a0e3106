"""`howlinear control KIND`: what is learned, and what follows from the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer import Argument, Option

from howlinear.cli import flags
from howlinear.cli.control_tables import (
    show_cross_feed,
    show_matched,
    show_random_init,
    show_training,
)
from howlinear.cli.output import left_of, made_by, progress_bars, say, show
from howlinear.cli.sources import Loader, RunSource, absolute, window_length
from howlinear.records.words import size
from howlinear.run import room
from howlinear.run.folder import RunFolder

control = typer.Typer(
    help="Run experiments that separate what is learned from what is architectural.",
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)

TRAINING = "control-checkpoints"  # the file of `checkpoints`

ModelOrRun = Annotated[
    str | None,
    Argument(
        help="A run folder, a hub id, a folder, a .gguf file or built-in, which is the default.",
        callback=flags.named,
    ),
]
Out = Annotated[
    Path | None,
    Option("--out", "-o", help="Folder to write; the run's, or runs/MODEL-control."),
]
MaxLength = Annotated[int, Option(help="Window length in tokens.", min=2)]
SeedCount = Annotated[int, Option(help="Number of untrained models.", min=1)]
Shuffled = Annotated[
    bool, Option("--shuffled", help="Permute trained weights instead of drawing new ones.")
]
ModelA = Annotated[
    str,
    Argument(
        help="Model A: a run folder, a hub id, a folder, a .gguf file or built-in.",
        callback=flags.named,
    ),
]
ModelB = Annotated[str, Argument(help="Model B, of the same width as A.", callback=flags.named)]
Pairs = Annotated[str, Option(help="Blocks to pair: same, all, or A:B such as 3:5,4:4.")]
Checkpoints = Annotated[str, Argument(help="A hub id, or a folder of checkpoint folders.")]
Revisions = Annotated[
    str | None,
    Option(help="Revisions on the hub, or names of folders: step0,step1000,main."),
]


@control.command("random-init")
def random_init(
    model: ModelOrRun = None,
    seeds: SeedCount = 3,
    shuffled: Shuffled = False,
    out: Out = None,
    model_place: flags.RunModel = None,
    text_file: flags.TextFile = None,
    tokens: flags.Tokens = None,
    max_length: MaxLength = 512,
    folds: flags.Folds = 5,
    blocks: flags.Blocks = None,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Compare the trained profile with untrained models of the same architecture."""
    from howlinear.controls.random_init import random_init as measure

    subject = _Subject(model, text_file, tokens, max_length, folds, model_place)
    folder = subject.folder("control-random-init", out)
    net, ids = subject.load(
        Loader(device, trust_remote_code, allow_pickle), blocks=blocks, decoder=True
    )
    options: dict[str, Any] = {"seeds": seeds, "shuffled": shuffled, "at": blocks}
    with progress_bars() as begin:
        options |= {"folds": subject.folds, "work": subject.work(batch_size, begin)}
        options["after_seed"] = partial(subject.keep, net, folder)
        result = measure(net, ids, trained=subject.trained(net, blocks), **options)
    subject.write(result, show_random_init, net, folder, as_json)


@control.command()
def matched(
    model: ModelOrRun = None,
    out: Out = None,
    model_place: flags.RunModel = None,
    text_file: flags.TextFile = None,
    tokens: flags.Tokens = None,
    max_length: MaxLength = 512,
    folds: flags.Folds = 5,
    blocks: flags.Blocks = None,
    seed: flags.Seed = 0,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Measure each block on Gaussian, whitened and scaled inputs, and the map its weights imply."""
    from howlinear import blocks as blocks_of
    from howlinear.controls.matched import matched as measure
    from howlinear.controls.matched import memory

    subject = _Subject(model, text_file, tokens, max_length, folds, model_place)
    folder = subject.folder("control-matched", out)
    net, ids = subject.load(
        Loader(device, trust_remote_code, allow_pickle), blocks=blocks, decoder=True
    )
    _check_sums(memory(blocks_of(net, blocks), subject.folds), "measure fewer --blocks at a time")
    with progress_bars() as begin:
        work = subject.work(batch_size, begin)
        result = measure(net, ids, at=blocks, folds=subject.folds, seed=seed, work=work)
    subject.write(result, show_matched, net, folder, as_json)


@control.command("cross-feed")
def cross_feed(
    model_a: ModelA,
    model_b: ModelB,
    pairs: Pairs = "same",
    out: Out = None,
    text_file: flags.TextFile = None,
    tokens: flags.Tokens = None,
    max_length: MaxLength = 512,
    folds: flags.Folds = 5,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Run blocks of A on inputs of B and the reverse: do weights or inputs make the difference?"""
    from howlinear import blocks
    from howlinear.controls.cross_feed import check_widths, depth_pairs, memory
    from howlinear.controls.cross_feed import cross_feed as measure
    from howlinear.models import loading

    a, b = (_Subject(m, text_file, tokens, max_length, folds) for m in (model_a, model_b))
    folder = a.folder("control-cross-feed", out)
    loader = Loader(device, trust_remote_code, allow_pickle)
    shell_a, shell_b = (side.skeleton(trust_remote_code) for side in (a, b))
    sides = blocks(shell_a), blocks(shell_b)
    chosen = depth_pairs(pairs, *map(len, sides))
    check_widths(shell_a, shell_b, sides, chosen)  # mistakes are found without weights
    net_a, ids_a = a.load(loader, decoder=True)
    b.read_text_of(a, ids_a.length)
    net_b, ids_b = b.load(loader, decoder=True)
    _check_sums(max(memory(side, a.folds, chosen) for side in sides), "name fewer --pairs")
    with progress_bars() as begin:
        options: dict[str, Any] = {"folds": a.folds, "work": a.work(batch_size, begin)}
        result = measure(net_a, net_b, ids_a, ids_b, pairs=pairs, **options)
    result.about["model_b"] = loading.describe(net_b, b.name, b.revision)
    a.write(result, show_cross_feed, net_a, folder, as_json)


@control.command()
def checkpoints(
    model: Checkpoints,
    revisions: Revisions = None,
    out: Out = None,
    text_file: flags.TextFile = None,
    tokens: flags.Tokens = None,
    max_length: MaxLength = 512,
    folds: flags.Folds = 5,
    blocks: flags.Blocks = None,
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Profile checkpoints of a training. The same command again measures only those missing."""
    from howlinear.controls.checkpoints import read_training
    from howlinear.models import loading

    stages = loading.checkpoints(model, revisions.split(",") if revisions else None)
    subject = _Subject(model, text_file, tokens, max_length, folds)
    text = subject.text.fingerprint()
    settings: dict[str, Any] = {"model": absolute(model), "text": text, "tokens": tokens}
    settings |= {"max_length": max_length, "folds": folds, "blocks": blocks}
    folder = subject.folder(TRAINING, out)
    result = subject.ranks.share(read_training(folder, settings))
    loader = Loader(device, trust_remote_code, allow_pickle)
    tell_left = left_of("checkpoint", len(stages))
    for label, (subject.name, subject.revision) in stages.items():
        added = _add_checkpoint(result, subject, label, loader, blocks, batch_size)
        if added:
            result.sort(list(stages))
            if subject.ranks.rank == 0:
                _write_training(folder, result, as_json)
        tell_left(added)
    show(result, show_training, folder.path(TRAINING), as_json)
    subject.ranks.stop()


def _write_training(folder: RunFolder, result: Any, as_json: bool) -> None:
    """Write the checkpoints measured so far; print them if that fails."""
    try:
        folder.write(result.to_dict())
    except OSError:
        show(result, show_training, None, as_json)
        raise


def _add_checkpoint(
    result: Any, subject: _Subject, label: str, loader: Loader, at: str | None, batch_size: int
) -> bool:
    """Measure one checkpoint of a training, unless the result has it: then False."""
    from howlinear.models import loading

    if subject.revision and subject.revision == result.commit(label):
        return False  # what a commit holds cannot change
    net, ids = subject.load(loader, label, at)
    about = loading.describe(net, subject.name, subject.revision)
    if result.holds(label, about):
        return False
    with progress_bars() as begin:
        work = subject.work(batch_size, begin)
        result.measure(net, ids, label, about, at=at, work=work)
    result.about.update(model=about, corpus=subject.corpus(), **made_by())
    return True


class _Subject:
    """A model and a text by name, or those of a run with the run's settings."""

    revision: str | None = None
    source: RunSource | None = None
    # settings of the run that determines the windows
    cut: Mapping[str, Any] = MappingProxyType({"spread": True})

    def __init__(
        self,
        name: str | None,
        text_file: str | None,
        tokens: int | None,
        length: int,
        folds: int,
        model: str | None = None,  # where the model of a run is now
    ) -> None:
        from howlinear.models import corpus
        from howlinear.run.work import Ranks

        self.name, self.tokens, self.length, self.folds = name, tokens, length, folds
        if name and RunFolder(name).has("profile"):
            self._read_run(RunSource(Path(name), model, text_file))
        elif model is not None:
            raise ValueError(f"--model is for a run, and {name} is none: name the model alone")
        else:
            self.text = corpus.open_text(text_file)
        self.ranks = Ranks.start()

    def _read_run(self, source: RunSource) -> None:
        if source.settings.get("protocol") != "default":
            raise ValueError(
                f"{source.folder.folder} follows the paper's split, which has no folds: name a model"
            )
        self.source, self.name, self.revision = source, source.model, source.revision
        self.text = source.text
        measured = (source.settings[name] for name in ("tokens", "window", "folds"))
        self.tokens, self.length, self.folds = measured
        self.cut = source.settings

    def read_text_of(self, other: _Subject, length: int) -> None:
        """Read the text of another subject in the same windows."""
        if self.source is not None and self.text.fingerprint() != other.text.fingerprint():
            raise ValueError(
                f"{self.source.folder.folder} read {self.text.name} and the other "
                f"{other.text.name}: name its model"
            )
        self.text, self.tokens, self.length, self.cut = other.text, other.tokens, length, other.cut

    def load(
        self,
        loader: Loader,
        label: str | None = None,
        blocks: str | None = None,
        decoder: bool = False,
    ) -> tuple[Any, Any]:
        """The model and its windows; the number of tokens depends on the width of the blocks.

        With `decoder`, models that do not read one stream of tokens are refused.
        """
        from howlinear import blocks as blocks_of
        from howlinear.models.cutting import check_cut, default_tokens
        from howlinear.models.forward import as_windows
        from howlinear.profiling.merging import fit_windows

        cut = dict(self.cut)

        def check(net: Any, tokenizer: Any) -> None:
            """Refuse, before weights are read, blocks and windows that there are not."""
            if decoder and (net.main_input_name != "input_ids" or net.config.is_encoder_decoder):
                name = type(net).__name__
                raise ValueError(f"{name} is not a model that reads one stream of tokens")
            widest = max(b.d_in for b in blocks_of(net, blocks))
            tokens = self.tokens or default_tokens(widest)
            if self.source is None or self.cut is not self.source.settings:
                cut.update(window=window_length(net, tokenizer, self.length), tokens=tokens)
                check_cut(tokenizer, cut["window"], tokens, cut.get("bos", "auto"))

        if self.source is not None:
            net, tokenizer = self.source.load(loader, check), self.source.tokenizer
            if self.cut is self.source.settings:
                return net, self.source.fit_windows()
        else:
            net, tokenizer = loader.load(self.name, label, revision=self.revision, check=check)
        return net, as_windows(fit_windows(self.text.fit, tokenizer, cut))

    def skeleton(self, trust_remote_code: bool) -> Any:
        """The model without its weights."""
        from howlinear.models import loading

        trusted = {"trust_remote_code": trust_remote_code}
        return loading.skeleton(self.name, revision=self.revision, **trusted)

    def work(self, batch_size: int, progress: Any) -> Any:
        from howlinear.run.work import Work

        return Work(self.ranks, batch_size, progress)

    def corpus(self) -> dict[str, str]:
        """What a result records of the text."""
        return {"name": self.text.name, "fingerprint": self.text.fingerprint()}

    def trained(self, net: Any, blocks: str | None) -> Any:
        """The profile of the run, of these blocks, if it has them all; else None."""
        if self.source is None:
            return None
        from howlinear import blocks as blocks_of
        from howlinear.profiling.profiler import Profile

        profile = Profile.load(self.source.folder.folder)
        records = {(b.index, b.path): b for b in profile.blocks}
        wanted = [(b.index, b.path) for b in blocks_of(net, blocks)]
        if not records.keys() >= set(wanted):
            return None
        return replace(profile, blocks=[records[place] for place in wanted])

    def folder(self, kind: str, out: Path | None) -> RunFolder:
        """Where the result goes: `out`, or beside the run; refused if it cannot be written there."""
        beside = self.source.folder if self.source else _folder(self.name)
        folder = RunFolder(out) if out else beside
        folder.check_addable(kind, way_out="name another folder with -o")
        return folder

    def write(
        self, result: Any, show_table: Any, net: Any, folder: RunFolder, as_json: bool
    ) -> None:
        """Write the result and print it."""
        self.ranks.stop()
        if self.ranks.rank == 0:
            data = self._described(result, net)
            where = folder.path(data["kind"])
            show(result, show_table, where, as_json, lambda: _add(folder, data))

    def keep(self, net: Any, folder: RunFolder, so_far: Any) -> None:
        """Write what there is of a result, if that can be: at the end it is printed if not."""
        if self.ranks.rank == 0:
            with suppress(OSError):
                _add(folder, self._described(so_far, net))

    def _described(self, result: Any, net: Any) -> dict[str, Any]:
        """The result as it is written, with its model, text and command."""
        from howlinear.models import loading

        model = loading.describe(net, self.name, self.revision)
        result.about.update(model=model, corpus=self.corpus(), **made_by())
        data: dict[str, Any] = result.to_dict()
        return data


def _add(folder: RunFolder, data: dict[str, Any]) -> None:
    """Write a result in the place of what an unfinished command has left of it."""
    from howlinear.controls.random_init import UNFINISHED

    before = folder.alike(data)
    unfinished = before and any(str(n).startswith(UNFINISHED) for n in before.get("notes", []))
    folder.add(data, replaced=before if unfinished else None)


def _folder(model: str | None) -> RunFolder:
    return RunFolder(Path("runs") / f"{flags.slug(model)}-control")


def _check_sums(needed: int, way_out: str) -> None:
    """Report the memory of the sums, and refuse too much."""
    room.check_memory(needed, "sums need", way_out)
    say(f"{size(needed)} of memory for sums")
