"""`howlinear control KIND`: is linearity learned, and whose doing is it?"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from howlinear.cli.parts import (
    AllowPickle,
    AsJson,
    BatchSize,
    Device,
    TrustRemoteCode,
    asked_of,
    fitting,
    own_device,
    progress_bars,
    run_model,
    run_text,
    say,
    show,
    slug,
    text_of,
    versions,
)
from howlinear.cli.tables.control import (
    show_cross_feed,
    show_matched,
    show_random_init,
    show_training,
)
from howlinear.run import room

SHOW = {"random-init": show_random_init, "matched": show_matched, "cross-feed": show_cross_feed}

control = typer.Typer(
    help="Experiments that tell what is learned from what is architectural.",
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)

# -- flags

ModelOrRun = Annotated[
    str | None,
    typer.Argument(help="A run folder, hub id, folder or .gguf file; the built-in model if none."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder to write; the run, or runs/MODEL-control."),
]
TextFile = Annotated[
    str | None,
    typer.Option(help="A utf-8 text, or python-docs, python-code. WikiText-2 by default."),
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens to read; max(30000, 40 x width) by default.", min=1)
]
MaxLength = Annotated[int, typer.Option(help="Window length in tokens.", min=2)]
FoldCount = Annotated[int, typer.Option(help="Cross-validation folds.", min=2)]
Blocks = Annotated[
    str | None, typer.Option(help="Blocks to measure: 3,5,9-12 or a regular expression.")
]


@control.command("random-init")
def random_init(
    model: ModelOrRun = None,
    seeds: Annotated[int, typer.Option(help="How many untrained models.", min=1)] = 3,
    shuffled: Annotated[
        bool,
        typer.Option("--shuffled", help="Permute trained weights instead of drawing fresh ones."),
    ] = False,
    out: Out = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    max_length: MaxLength = 512,
    folds: FoldCount = 5,
    blocks: Blocks = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """The trained profile against a band of untrained ones, same architecture, same windows."""
    given = _Given(model, text_file, tokens, max_length, folds, device)
    net, ids = given.load(trust_remote_code, allow_pickle)

    from howlinear.controls.random_init import random_init as measure
    from howlinear.run.work import Work

    with progress_bars() as begin:
        result = measure(
            net,
            ids,
            trained=given.trained(blocks),
            seeds=seeds,
            shuffled=shuffled,
            at=blocks,
            folds=given.folds,
            work=Work(given.ranks, batch_size, begin),
        )
    given.write(result, net, out, as_json)


@control.command()
def matched(
    model: ModelOrRun = None,
    out: Out = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    max_length: MaxLength = 512,
    folds: FoldCount = 5,
    blocks: Blocks = None,
    seed: Annotated[int, typer.Option(help="Of the Gaussian rows.")] = 0,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Each block on Gaussian, whitened and scaled inputs, beside the map that weights predict."""
    given = _Given(model, text_file, tokens, max_length, folds, device)
    net, ids = given.load(trust_remote_code, allow_pickle)

    from howlinear import blocks as blocks_of
    from howlinear.controls.matched import matched as measure
    from howlinear.controls.matched import memory
    from howlinear.run.work import Work

    given.check_room(memory(blocks_of(net, blocks), given.folds))
    with progress_bars() as begin:
        result = measure(
            net,
            ids,
            at=blocks,
            folds=given.folds,
            seed=seed,
            work=Work(given.ranks, batch_size, begin),
        )
    given.write(result, net, out, as_json)


@control.command("cross-feed")
def cross_feed(
    model_a: Annotated[str, typer.Argument(help="Model A: a run, hub id, folder or .gguf file.")],
    model_b: Annotated[str, typer.Argument(help="Model B, of the same width.")],
    pairs: Annotated[
        str, typer.Option(help="Depths to pair: same, all, or 3:5,4:4 (A's first).")
    ] = "same",
    out: Out = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    max_length: MaxLength = 512,
    folds: FoldCount = 5,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Blocks of A on B's inputs and the other way round: whose weights, whose inputs?"""
    from howlinear import blocks
    from howlinear.controls.cross_feed import cross_feed as measure
    from howlinear.controls.cross_feed import depth_pairs, memory
    from howlinear.models import loading
    from howlinear.run.work import Work

    a, b = (
        _Given(name, text_file, tokens, max_length, folds, device) for name in (model_a, model_b)
    )
    net_a, ids_a = a.load(trust_remote_code, allow_pickle)
    b.read_as(a, ids_a.shape[1])
    net_b, ids_b = b.load(trust_remote_code, allow_pickle)
    own = blocks(net_a), blocks(net_b)
    chosen = depth_pairs(pairs, len(own[0]), len(own[1]))
    a.check_room(max(memory(side, a.folds, chosen) for side in own), "name fewer --pairs")
    with progress_bars() as begin:
        result = measure(
            net_a,
            net_b,
            ids_a,
            ids_b,
            pairs=pairs,
            folds=a.folds,
            work=Work(a.ranks, batch_size, begin),
        )
    result.about["model_b"] = loading.describe(net_b, b.name, b.revision)
    a.write(result, net_a, out, as_json)


@control.command()
def checkpoints(
    model: Annotated[str, typer.Argument(help="A hub id, or a folder of checkpoint folders.")],
    revisions: Annotated[
        str | None,
        typer.Option(help="Revisions on the hub, or names of folders: step0,step1000,main."),
    ] = None,
    out: Out = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    max_length: MaxLength = 512,
    folds: FoldCount = 5,
    blocks: Blocks = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """The profile over training. What is measured stays, so that the same command goes on."""
    from howlinear import blocks as blocks_of
    from howlinear.controls.checkpoints import read_training
    from howlinear.models import corpus, loading
    from howlinear.records import files
    from howlinear.run.ranks import Ranks
    from howlinear.run.work import Work

    ranks = Ranks.start()
    stages = loading.checkpoints(model, revisions.split(",") if revisions else None)
    text = text_of(text_file, None, None, "train", "text")
    asked = {
        "model": model,
        "text": [text.name, text.fingerprint()],
        "tokens": tokens,
        "max_length": max_length,
        "folds": folds,
        "blocks": blocks,
    }
    folder = out or Path("runs") / f"{slug(model)}-control"
    path = folder / "control-checkpoints.json"
    result = ranks.share(read_training(path, asked))
    for name, (where, revision) in stages.items():
        if name in result.measured:
            continue
        say(f"loading {name}")
        net, tokenizer = loading.load(
            where,
            revision=revision,
            device=own_device(device),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        widest = max(b.d_in for b in blocks_of(net, blocks))
        ids = corpus.windows(
            text.fit,
            tokenizer,
            fitting(net, tokenizer, max_length),
            tokens=tokens or corpus.default_tokens(widest),
        )
        with progress_bars() as begin:
            result.measure(net, ids, name, at=blocks, work=Work(ranks, batch_size, begin))
        result.about.update(
            model=loading.describe(net, where, revision),
            command=shlex.join(["howlinear", *sys.argv[1:]]),
            versions=versions(),
        )
        del net
        result.sort(list(stages))
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(path, result.to_dict())
    show(result, show_training, path, as_json)
    ranks.stop()


class _Given:
    """A model and a text, by a run that was made of them or by name."""

    def __init__(
        self,
        name: str | None,
        text_file: str | None,
        tokens: int | None,
        max_length: int,
        folds: int,
        device: str,
    ) -> None:
        self.run = Path(name) if name and (Path(name) / "profile.json").is_file() else None
        self.name, self.revision, self.device = name, None, own_device(device)
        self.tokens, self.length, self.folds, self.bos = tokens, max_length, folds, "auto"
        if self.run is None:
            self.text = text_of(text_file, None, None, "train", "text")
            return
        if text_file:
            raise ValueError(f"{self.run} has a text of its own: drop --text-file, or name a model")
        self.asked, self.profile = asked_of(self.run)
        settings = self.profile["settings"]
        if settings.get("protocol") != "default":
            raise ValueError(
                f"{self.run} follows the paper's split, which has no folds: name a model"
            )
        self.text = run_text(self.run, self.asked, self.profile)
        self.name, self.revision = self.asked["model"], self.asked["revision"]
        self.tokens, self.length = settings["tokens"], settings["window"]
        self.folds, self.bos = settings["folds"], settings.get("bos", "auto")

    def read_as(self, other: _Given, length: int) -> None:
        """The text of another one in place of its own, in the same windows."""
        if self.run is not None and self.text.fingerprint() != other.text.fingerprint():
            raise ValueError(
                f"{self.run} read {self.text.name} and the other {other.text.name}: name its model"
            )
        self.text, self.tokens, self.length = other.text, other.tokens, length

    def load(self, trust_remote_code: bool, allow_pickle: bool) -> tuple[Any, Any]:
        """The model and its windows."""
        from howlinear import blocks
        from howlinear.models import corpus, loading
        from howlinear.run.ranks import Ranks

        self.ranks = Ranks.start()
        if self.run is not None:
            code = (trust_remote_code, allow_pickle)
            net, tokenizer = run_model(self.run, self.asked, self.profile, self.device, *code)
        else:
            say(f"loading {self.name or 'the built-in model'}")
            net, tokenizer = loading.load(
                self.name,
                device=self.device,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
            )
        if net.main_input_name != "input_ids" or net.config.is_encoder_decoder:
            raise ValueError(f"{type(net).__name__} is not a model that reads one stream of tokens")
        widest = max(b.d_in for b in blocks(net))
        ids = corpus.windows(
            self.text.fit,
            tokenizer,
            fitting(net, tokenizer, self.length),
            tokens=self.tokens or corpus.default_tokens(widest),
            bos=self.bos,
        )
        return net, ids

    def check_room(self, needed: int, way_out: str = "measure fewer --blocks at a time") -> None:
        """Say what the sums take, and refuse what memory cannot hold."""
        room.check_memory(needed, "sums need", way_out)
        say(f"{needed / 1e9:.1f} GB of memory for sums")

    def trained(self, blocks: str | None) -> Any:
        """The run's own profile, where it holds what is asked for."""
        if self.run is None or blocks != self.asked.get("blocks"):
            return None
        from howlinear.profiling.profiler import Profile

        return Profile.load(self.run)

    def write(self, result: Any, net: Any, out: Path | None, as_json: bool) -> None:
        from howlinear.models import loading
        from howlinear.records import files

        self.ranks.stop()
        if self.ranks.rank:
            return
        result.about.update(
            model=loading.describe(net, self.name, self.revision),
            corpus={"name": self.text.name, "fingerprint": self.text.fingerprint()},
            command=shlex.join(["howlinear", *sys.argv[1:]]),
            versions=versions(),
        )
        folder = out or self.run or Path("runs") / f"{slug(self.name)}-control"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"control-{result.kind}.json"
        files.write_json(path, result.to_dict())
        show(result, SHOW[result.kind], path, as_json)
