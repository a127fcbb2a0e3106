"""`howlinear bench`: speed and size of a model, or of two by turns."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, print_json
from howlinear.cli.printer import terminal_console
from howlinear.cli.sources import Loader, window_length
from howlinear.cli.tables.bench import show_bench

Against = Annotated[
    str | None,
    Option(help="A second model, timed by turns; built-in: the built-in model."),
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
        name = None if against == "built-in" else against
        other, _ = loader.load(name, dtype=dtype)
        result = speed.compare_speeds(net, other, folders=(model, name), **options)
        result.about["against"] = loading.describe(other, name)
    result.about.update(model=loading.describe(net, model), **made_by())
    if as_json:
        print_json(result.to_dict())
    else:
        show_bench(terminal_console(), result.to_dict())
