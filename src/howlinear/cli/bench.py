"""`howlinear bench`: speed and size of a model, or of two by turns; an export in other engines."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Console
from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import made_by, print_json, say
from howlinear.cli.printer import Column, digits, or_dash, print_table, terminal_console, write
from howlinear.cli.sources import Loader, window_length
from howlinear.records.words import count, number, perplexity, plural, size

Against = Annotated[
    str | None,
    Option(help="A second model, timed by turns: a hub id, a folder, a .gguf file or built-in."),
]
PrefillTokens = Annotated[int, Option(help="Tokens of each prefill.", min=1)]
NewTokens = Annotated[int, Option(help="Tokens to decode.", min=1)]
Repeats = Annotated[int, Option(help="Number of timings of each model.", min=1)]
Engines = Annotated[
    bool,
    Option(
        "--engines",
        help="Run a folder of `howlinear compress` in transformers, llama.cpp and vLLM, where they are "
        "installed, beside the original.",
    ),
]
Tokens = Annotated[
    int, Option(help="With --engines: tokens whose predictions are compared.", min=64)
]


def bench(
    model: flags.ModelName = None,
    against: Against = None,
    engines: Engines = False,
    tokens: Tokens = 1024,
    text_file: flags.TextFile = None,
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
    loader = Loader(device, trust_remote_code, allow_pickle)
    timing = {"length": max_length, "new_tokens": new_tokens, "repeats": repeats}
    if engines:
        result, shown = _in_engines(model, against, loader, text_file, tokens, timing), show_engines
    else:
        timing |= {"batch": batch_size, "seed": seed}
        result, shown = _in_transformers(model, against, loader, dtype, timing), show_bench
    result.about.update(made_by())
    if as_json:
        print_json(result.to_dict())
    else:
        shown(terminal_console(), result.to_dict())


def _in_transformers(
    model: str | None, against: str | None, loader: Loader, dtype: str, timing: dict[str, int]
) -> Any:
    """The speed of a model in this process, or of two by turns."""
    from howlinear.losses import speed
    from howlinear.models import loading

    net, tokenizer = loader.load(model, dtype=dtype)
    options = timing | {"length": window_length(net, tokenizer, timing["length"])}
    result: Any
    if against is None:
        result = speed.measure(net, folder=model, **options)
    else:
        name = flags.named(against)
        other, _ = loader.load(name, dtype=dtype)
        result = speed.compare_speeds(net, other, folders=(model, name), **options)
        result.about["against"] = loading.describe(other, name)
    result.about["model"] = loading.describe(net, model)
    return result


def _in_engines(
    folder: str | None,
    against: str | None,
    loader: Loader,
    text_file: str | None,
    tokens: int,
    timing: dict[str, int],
) -> Any:
    """The engines' results for an export, beside the original at `against` or where it was."""
    from howlinear.export.engines import EngineSettings, run_engines
    from howlinear.models import corpus, cutting, loading

    if folder is None:
        raise ValueError("--engines runs a folder that `howlinear compress` wrote: name it")
    source, weights = _origin(folder, against)
    text = corpus.open_text(text_file)
    try:
        original, tokenizer = loader.load(source)
    except FileNotFoundError:
        raise ValueError(f"{source} is not there: name the original with --against") from None
    described = loading.describe(original, source)
    if described["weights"] != weights:
        raise ValueError(
            f"{described['id']} is not the model that became {folder}: name it with --against"
        )
    # one more is decoded
    length = cutting.fitting_length(original, tokenizer, timing["length"] + 1) - 1
    windows = cutting.spread_windows(text.report(), tokenizer, length, tokens=max(tokens, length))
    say(f"running {folder} in every engine that is installed")
    settings = EngineSettings(**timing | {"length": length}, trust=loader.trust_remote_code)
    if length < 2 or cutting.fitting_length(original, tokenizer, settings.most) < settings.most:
        raise ValueError(
            f"windows of {length} tokens, and {settings.most} in all, do not suit this model: change "
            "--max-length or --new-tokens"
        )
    result = run_engines(folder, original, source, windows["input_ids"], settings)
    result.about.update(model=described, text=text.name)
    return result


def _origin(folder: str, against: str | None) -> tuple[str | None, str]:
    """What `loading.load` takes for the original of an export, and the hash of its weights."""
    from howlinear.export.engines import exported_kind

    recorded = exported_kind(folder)["model"]
    source = flags.named(against) if against else str(recorded["id"])
    return None if source and "(built-in, GGUF" in source else source, str(recorded["weights"])


# -- tables


def _rate(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 1 if spread["median"] < 100 else 0
    low, middle, high = (f"{spread[k]:.{digits}f}" for k in ("q25", "median", "q75"))
    return f"{middle} ({low}-{high})"


def _middle(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else number(spread["median"], 0)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _same_texts(row: dict[str, Any]) -> str | None:
    made = row.get("continuations")
    return None if made is None else f"{row['continuations_same']} of {made}"


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


ENGINE_COLUMNS = (
    Column("engine", "engine", words=True),
    Column("model", "model", words=True),
    Column("on disk", "bytes", size),
    Column("perplexity", lambda row: row.get("perplexity"), perplexity),
    Column("ours", lambda row: row.get("perplexity_ours"), perplexity),
    Column("difference", lambda row: row.get("largest_difference"), digits(4), above="largest"),
    Column("top-1", lambda row: row.get("top1"), _percent, above="same"),
    Column("texts", _same_texts, or_dash, above="same"),
    Column("tokens/s", lambda row: row.get("prefill"), _middle, above="prefill"),
    Column("tokens/s", lambda row: row.get("decode"), _middle, above="decode"),
)


def show_engines(console: Console, data: dict[str, Any]) -> None:
    """The table that `howlinear bench --engines` prints."""
    s = data["settings"]
    write(
        console,
        f"{s['tokens']} tokens of {data['text']} in windows of {s['window']}; "
        f"{s['length']} tokens of prefill, {s['new_tokens']} decoded, {s['repeats']} times; "
        f"{plural(s['threads'], 'thread')}",
    )
    if data["rows"]:
        print_table(console, ENGINE_COLUMNS, data["rows"])
        write(
            console,
            "largest difference: of a token's log-probability from ours, in nats; same texts: "
            "prompts that both continue by the same 32 tokens",
        )
    for row in data["rows"]:
        if row.get("largest_margin") is not None:
            write(
                console,
                f"{row['engine']}, {row['model']}: at the first other token it prefers its own by "
                f"{row['largest_margin']:.4f} nats at most",
            )
    for engine in data["engines"]:
        version = f" {engine['version']}" if engine["version"] else ""
        result = engine["problem"] or engine["verdict"] or "loads and runs"
        write(console, f"{engine['name']}{version}: {result}")
