"""What several commands need: flags, texts and models of runs, room, progress.

Nothing here prints to stdout but `show` and `print_json`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import howlinear
from howlinear.cli.tables.printer import terminal_console, write_whole
from howlinear.records.escaping import escaped
from howlinear.run import folder, room

if TYPE_CHECKING:
    from howlinear.models.corpus import Text

# -- flags that several commands take

ModelName = Annotated[
    str | None,
    typer.Argument(help="A hub id, a folder or a .gguf file; the built-in model if left out."),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder that `howlinear profile` wrote.")]
BatchSize = Annotated[int, typer.Option(help="Windows run at once.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write into a folder that holds something else.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result's JSON and nothing else.")]

PARTS = ("fit", "choose", "report")


def show(result: Any, show_table: Callable[..., None], where: Path | None, as_json: bool) -> None:
    """Print the result as one JSON document, or as a table and where its file is."""
    if follows():
        return
    if as_json:
        print_json(result.to_dict())
        return
    console = terminal_console()
    show_table(console, result.to_dict(), result.blocks)
    if where is not None:
        write_whole(console, f"results in {where}")


def print_json(data: dict[str, Any]) -> None:
    """One document; where stdout cannot hold every letter, with codes that JSON has for them."""
    from howlinear.records import files

    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    print(files.dumps(data, ascii_only=encoding != "utf8"))


def text_of(
    text_file: str | None, dataset: str | None, config: str | None, split: str, column: str
) -> Text:
    from howlinear.models import corpus

    if text_file and dataset:
        raise ValueError("two texts: give --text-file or --dataset, not both")
    if text_file:
        return corpus.open_text(text_file)
    return corpus.dataset_text(dataset, config, split, column) if dataset else corpus.builtin_text()


def texts_of(
    corpora: list[str],
    text_file: str | None,
    dataset: str | None,
    config: str | None,
    split: str,
    column: str,
) -> dict[str, list[Any]]:
    """Name -> what `text_of` takes. One text without a name unless --corpus names some."""
    from howlinear.models import corpus

    if not corpora:
        return {"": [text_file, dataset, config, split, column]}
    if text_file or dataset:
        raise ValueError("give all texts with --corpus, without --text-file and --dataset")
    found: dict[str, list[Any]] = {}
    for given in corpora:
        name, equals, source = given.partition("=")
        name, source = (name, source) if equals else (slug(Path(given).stem), given)
        if not source or slug(name) != name:
            raise ValueError(f"--corpus {given}: write NAME=SOURCE, a name of letters and digits")
        if name in found:
            raise ValueError(f"--corpus {name} is there twice: give each text a name of its own")
        is_file = source in corpus.BUILTIN or source == "-" or Path(source).expanduser().exists()
        looks = is_file or source.startswith((".", "/", "~")) or source.endswith(".txt")
        found[name] = (
            [source, None, None, split, column] if looks else [None, source, config, split, column]
        )
    return found


def asked_of(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run was asked for, and profile.json itself."""
    return folder.RunFolder(run).request()


def run_text(run: Path, asked: dict[str, Any], about: dict[str, Any]) -> Text:
    """The text of a run, as it was then."""
    text = text_of(*asked["text"])
    folder.RunFolder(run).check_text(text.fingerprint(), text.name)
    return text


def run_model(
    run: Path,
    asked: dict[str, Any],
    about: dict[str, Any],
    device: str,
    trust_remote_code: bool,
    allow_pickle: bool,
) -> tuple[Any, Any]:
    """The model of a run, as it was then, and its tokenizer."""
    from howlinear.models import loading

    say(f"loading {asked['model'] or 'the built-in model'}")
    net, tokenizer = loading.load(
        asked["model"],
        revision=asked["revision"],
        dtype=asked["dtype"],
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    now = loading.describe(net, asked["model"], asked["revision"])
    folder.RunFolder(run).check_model(now)
    return net, tokenizer


def held_out(text: str, tokenizer: Any, cut: Any, tokens: int, bos: str) -> tuple[Any, int]:
    """Tokens of a held-out text, as the protocol cuts them, and the bytes that it predicts."""
    import torch

    from howlinear.models import corpus

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


def budget_of(
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
    from howlinear.compression.plan import Budget

    if remove_params is not None:
        return Budget(parameters=share_of(remove_params, "--remove-params"))
    return Budget(perplexity=share_of(max_ppl_increase or "5%", "--max-ppl-increase"))


def share_of(text: str, flag: str) -> float:
    """5%, 5 % or 0.05."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 10:
        raise ValueError(f"{flag} {text!r} is not a share: write 5% or 0.05")
    return value


def number_or(text: str, flag: str, *words: str) -> int | str:
    if text in words:
        return text
    if not text.isdecimal():
        raise ValueError(f"{flag} {text!r} is neither {', '.join(words)} nor a number")
    return int(text)


def slug(model: str | None) -> str:
    if model is None:
        return "SmolLM2-135M-Instruct"
    name = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name).strip(".") or "model"


def fitting(net: Any, tokenizer: Any, length: int) -> int:
    """A window length that the model's positions allow."""
    limits = (
        getattr(net.config.get_text_config(), "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),  # RoBERTa's is two below its positions
    )
    most = min((m for m in limits if isinstance(m, int) and m >= 2), default=length)
    if most < length:
        say(f"windows of {most} tokens, all that the model has positions for, instead of {length}")
    return min(most, length)


def inputs_for(net: Any, ids: Any, batch_size: int) -> Any:
    """Windows as they are; an encoder-decoder reads each with both its halves."""
    if net.main_input_name != "input_ids":
        raise ValueError(
            f"{type(net).__name__} reads {net.main_input_name}, not text: "
            "call howlinear.profile from Python with batches of model inputs"
        )
    if not net.config.is_encoder_decoder:
        return ids
    return [{"input_ids": b, "decoder_input_ids": b} for b in ids.split(batch_size)]


def versions() -> dict[str, str]:
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
    """Refuse a folder that holds anything but the same command's run, complete or interrupted."""
    if not follows():  # the first of several processes checks
        folder.RunFolder(out).check_free(asked, overwrite)


def check_room(memory: int, disk: int, out: Path) -> None:
    """Refuse a profile that memory or disk cannot hold, before it starts."""
    way_out = "lower --folds (2 at least) or measure fewer --blocks at a time"
    room.check_memory(memory, "moments need", way_out)
    room.check_disk(disk, "the run needs", out, f"{way_out}, or name another place with -o")


def room_for_rows(net: Any, at: Any, counts: list[int]) -> int | None:
    """Say what rows a probe reads and holds, refuse what memory cannot hold; bytes it may use."""
    from howlinear.probing import probes

    free = room.available_memory()
    memory = None if free is None else free // 2
    together, needed = probes.needs(net, at, sum(counts), memory)
    room.check_memory(needed, "rows need", "lower --rows")
    say(f"{counts[0]} rows to fit on, {counts[1]} to choose by, {counts[2]} to report on; ", end="")
    say(f"{together} block{'s' * (together > 1)} at a time, {needed / 1e9:.1f} GB of memory")
    return memory


def room_for_batch(net: Any, run: Path, tokens: int) -> None:
    """Say what running a whole text at once takes, and refuse what memory cannot hold."""
    from howlinear.compression.refitting import memory
    from howlinear.models.units import hidden_count
    from howlinear.profiling.profiler import Profile
    from howlinear.swapping.swaps import match

    at = [b for b, _ in match(net, Profile.load(run), None)]
    needed = memory(at, {b: hidden_count(net, b) for b in at}, tokens)
    subject = f"fitting on {tokens} tokens at once needs"
    room.check_memory(needed, subject, "profile fewer --tokens")
    say(f"{tokens} tokens to fit on; about {needed / 1e9:.1f} GB of memory")


def follows() -> bool:
    """Is this one of several processes that torchrun started, and not the first?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def own_device(device: str) -> str:
    """Each process of a machine has a GPU of its own."""
    if device == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ:
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device


def say(message: str, end: str = "\n") -> None:
    """Progress, for people: stderr."""
    if follows():
        return
    print(escaped(message), end=end, file=sys.stderr, flush=True)


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
    # FORCE_COLOR colours a log; a bar that moves is no use in one
    watched = console.is_interactive and sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not watched or follows()
    ) as bar:

        def begin(what: str, tokens: int) -> Callable[[int], None]:
            if not watched:
                say(f"{what}: {tokens} tokens to run" if tokens else what)
            for task in bar.tasks:
                bar.update(task.id, visible=False)
            number = bar.add_task(escaped(what), total=tokens or None, rate="")

            def advance(done: int) -> None:
                bar.advance(number, done)
                speed = bar.tasks[-1].speed
                if speed:
                    bar.update(number, rate=f"{speed:.0f}/s")

            return advance

        yield begin
