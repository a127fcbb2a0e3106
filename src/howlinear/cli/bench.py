"""`howlinear bench`: speed and size of a model, or of two by turns."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Console
from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, print_json
from howlinear.cli.printer import Column, print_table, terminal_console, write
from howlinear.cli.sources import Loader, window_length
from howlinear.records.words import count, number, size

Against = Annotated[
    str | None,
    Option(help="A second model, timed by turns: a hub id, a folder, a .gguf file or built-in."),
]
PrefillTokens = Annotated[int, Option(help="Tokens of each prefill.", min=1)]
NewTokens = Annotated[int, Option(help="Tokens to decode.", min=1)]
Repeats = Annotated[int, Option(help="Number of timings of each model.", min=1)]


def bench(
    model: flags.ModelName = None,
    against: Against = None,
    max_length: PrefillTokens = 512,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 5,
    batch_size: flags.BatchSize = 1,
    dtype: flags.Dtype = "float32",
    device: flags.Device = "cpu",
    seed: flags.Seed = 0,
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Measure prefill and decode speed in tokens a second, and sizes."""
    from howlinear.losses import speed
    from howlinear.models import loading

    loader = Loader(device, trust_remote_code, allow_pickle)
    net, tokenizer = loader.load(model, dtype=dtype)
    options = {"length": window_length(net, tokenizer, max_length), "batch": batch_size}
    options |= {"new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    result: Any
    if against is None:
        result = speed.measure(net, folder=model, **options)
    else:
        name = flags.named(against)
        other, _ = loader.load(name, dtype=dtype)
        result = speed.compare_speeds(net, other, folders=(model, name), **options)
        result.about["against"] = loading.describe(other, name)
    result.about.update(model=loading.describe(net, model), **made_by())
    if as_json:
        print_json(result.to_dict())
    else:
        show_bench(terminal_console(), result.to_dict())


# -- tables


def _rate(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 1 if spread["median"] < 100 else 0
    low, middle, high = (f"{spread[k]:.{digits}f}" for k in ("q25", "median", "q75"))
    return f"{middle} ({low}-{high})"


COLUMNS = (
    Column("", "role", words=True),
    Column("params", "parameters", count),
    Column("memory", "bytes", size),
    Column("on disk", "bytes_on_disk", lambda value: "-" if value is None else size(value)),
    Column("prefill tokens/s", "prefill", _rate),
    Column("decode tokens/s", "decode", _rate),
)


def show_bench(console: Console, data: dict[str, Any]) -> None:
    """The table that `howlinear bench` prints."""
    s, roles = data["settings"], ("model", "against")[: len(data["speeds"])]
    for role in roles:
        if role in data:
            write(console, f"{role}: {data[role]['id']}", width=console.width)
    threads = f"{s['threads']} thread{'s' * (s['threads'] > 1)}"
    write(
        console,
        f"{s['batch']} x {s['length']} tokens of prefill, {s['new_tokens']} decoded after "
        f"{s['prompt']}, {s['repeats']} times; {s['dtype']}, {s['device']}, {threads}",
    )
    rows = [speed | {"role": role} for role, speed in zip(roles, data["speeds"], strict=True)]
    print_table(console, COLUMNS, rows)
    comparison = data["comparison"]
    if comparison is not None:
        write(console, comparison["verdict"])
    if comparison is not None and comparison["saved_share"] is not None:
        share, promised = comparison["saved_share"], 1 - 1 / comparison["promised"]
        saved = number(100 * share * promised, 0)
        write(console, f"{saved} % of the time of prefill saved; by multiply-adds {promised:.0%}")
