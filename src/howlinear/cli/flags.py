"""Flags that several commands share, and how the values of flags are read.

A flag is a type with its help text: `device: Device = "cpu"` in a command's signature adds
`--device`. Defaults stand in the commands.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

# -- models, runs and results


def named(model: str | None) -> str | None:
    """A model as `loading.load` names it: None is the built-in one."""
    return None if model == "built-in" else model


ModelName = Annotated[
    str | None,
    Argument(
        help="A hub id, a folder, a .gguf file or built-in, which is the default.", callback=named
    ),
]
RunPath = Annotated[Path, Argument(help="A run folder that `howlinear profile` wrote.")]
RunModel = Annotated[
    str | None,
    Option(
        "--model", help="Where the run's model is now, if it has moved; checked by its weights."
    ),
]
RunText = Annotated[
    str | None,
    Option("--text-file", help="Where the run's text is now, if it has moved; checked too."),
]
Dtype = Annotated[
    str, Option(help="Precision of the weights: float32, bfloat16, float16 or float64.")
]
Device = Annotated[str, Option(help="Where the model runs: cpu, cuda, cuda:1 or mps.")]
DeviceMap = Annotated[
    Literal["auto"] | None,
    Option(help="auto: divide the model among GPUs, memory and disk (accelerate)."),
]
Layerwise = Annotated[
    bool,
    Option("--layerwise", help="Keep one layer's weights and moments in memory at a time."),
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
AllowPickle = Annotated[
    bool, Option("--allow-pickle", help="Load weights that are not in safetensors files.")
]
Overwrite = Annotated[
    bool,
    Option(
        "--overwrite",
        help="Write into a folder that holds files; results of the run in it are removed.",
    ),
]
AsJson = Annotated[
    bool, Option("--json", help="Print the result as one JSON document and nothing else.")
]

# -- what is measured

TextFile = Annotated[
    str | None,
    Option(help="A utf-8 file, - for stdin, python-docs or python-code; WikiText-2 if omitted."),
]
Tokens = Annotated[
    int | None, Option(help="Tokens to read; max(30000, 40 x width) by default.", min=1)
]
Folds = Annotated[int, Option(help="Folds of the cross-validation.", min=2)]
Blocks = Annotated[
    str | None,
    Option(help="Blocks: indices such as 3,5,9-12, or a regular expression on paths."),
]
BatchSize = Annotated[int, Option(help="Windows in each forward pass.", min=1)]
Seed = Annotated[int, Option(help="Seed of everything that is drawn at random.")]


# -- arguments of Python as flags

RENAMED = {  # arguments whose flags have other names
    "at": "--blocks",
    "column": "--text-column",
    "config": "--dataset-config",
    "id": "--dataset",
    "kind": "--export",
    "kinds": "--kind",
    "length": "--max-length",
    "out": "-o",
    "parameters": "--remove-params",
    "path": "--text-file",
    "perplexity": "--max-ppl-increase",
}


def with_flags(message: str, known: Container[str]) -> str:
    """A message of the library with its arguments as flags: `bos="auto"` becomes --bos auto.

    Only names of `known` flags: messages of other libraries have words in backquotes too.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        option = RENAMED.get(name, f"--{name.replace('_', '-')}")
        if option not in known:
            return match[0]
        return option if value in (None, "True") else f"{option} {value}"

    return re.sub(r'`([a-z_]+)(?:="?([\w-]+)"?)?`', flag, message)


# -- values


def check_placement(layerwise: bool, device_map: str | None) -> None:
    if layerwise and device_map:
        raise ValueError("--layerwise places weights itself: drop --device-map")


def share_of(text: str, flag: str, most: float = 10) -> float:
    """A share written as 5%, 5 % or 0.05, below `most`."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < most:
        raise ValueError(
            f"{flag} {text!r} is not a share above 0 and below {most:.0%}: write 5% or 0.05"
        )
    return value


def bytes_of(text: str, flag: str) -> int:
    """A size written as 200MB, 1.5 GB or 180MiB."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([kMG]?)(i?)B?", text.strip())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{flag} {text!r} is not a size: write 200MB or 1.5GB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMG".index(match[2] or " "))


def number_or(text: str, flag: str, *words: str) -> int | str:
    """A whole number, or one of some words."""
    if text in words:
        return text
    if not text.isdecimal():
        raise ValueError(f"{flag} {text!r} is neither {', '.join(words)} nor a number")
    return int(text)


def shard_of(text: str | None) -> tuple[int, int]:
    """ "2/8" -> (2, 8), parts counted from 0."""
    if text is None:
        return 0, 1
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard {text}: write I/N with I from 0 to N - 1, such as 0/8 to 7/8")
    return int(part), int(parts)


def slug(model: str | None) -> str:
    """A model's name as the name of a folder."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    name = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name).strip(".") or "model"
