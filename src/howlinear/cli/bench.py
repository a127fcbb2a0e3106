"""`howlinear bench`."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from howlinear.cli.parts import (
    AllowPickle,
    AsJson,
    BatchSize,
    Device,
    ModelName,
    TrustRemoteCode,
    fitting,
    print_json,
    say,
    versions,
)
from howlinear.cli.tables.bench import show_bench
from howlinear.cli.tables.printer import terminal_console


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
    from howlinear.losses import speed
    from howlinear.models import loading

    def loaded(name: str | None) -> tuple[Any, Any]:
        say(f"loading {name or 'the built-in model'}")
        return loading.load(
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
        result.about["against"] = loading.describe(other, name)
    result.about.update(
        model=loading.describe(net, model),
        command=shlex.join(["howlinear", *sys.argv[1:]]),
        versions=versions(),
    )
    if as_json:
        print_json(result.to_dict())
        return
    show_bench(terminal_console(), result.to_dict())
