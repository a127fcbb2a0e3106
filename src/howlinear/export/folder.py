"""The folder of an export: whole or not there, with its card, its source's terms and its tokenizer.

with new_folder("out") as folder:              # nothing is at out until all went well
    ...                                        # the weights, by hf, narrow or nemotron_nas
    found = origin("org/name")
    text = card("narrow", found, auto="AutoModelForCausalLM", summary=..., table=..., command=...)
    add_files(folder, found, tokenizer, {"README.md": text})
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from howlinear.models import ggufs, loading
from howlinear.models.ggufs import one_line

# Beside the weights of the source: terms that bind whoever passes them on, and how inputs are made.
TERMS = re.compile(r"(licen[cs]e|notice|copying|use_policy)[\w.-]*", re.IGNORECASE)
INPUTS = re.compile(r"(video_)?(pre)?processor_config\.json")
LICENSE_KEYS = ("license", "license_name", "license_link")


# ------------------------------------------------------------------------- the folder, or nothing


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A hidden folder beside `path`, which gets that name when the block ends well.

    An exception or Ctrl-C removes it. A process that is killed leaves the hidden one at most.
    """
    path = Path(path)
    check_free(path)
    path = path.resolve()  # a link stays, what it points to is filled
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        _settle(temporary)
        check_free(path)
        if path.is_dir():
            path.rmdir()
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(path: str | Path) -> None:
    """Refuse a destination that has something in it: nothing is overwritten, nothing is mixed."""
    path = Path(path)
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        kind = "is not empty" if path.is_dir() else "exists and is no folder"
        raise ValueError(f"{path} {kind}: remove it, or name another folder (-o)")


def _settle(folder: Path) -> None:
    """On the disk, and with the rights that new files have."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------- where the model is from


@dataclass(frozen=True)
class Origin:
    """What the export says of its source and takes along from it."""

    base_model: str  # a hub id where one is known, else the name of the folder or file
    license: dict[str, str] = field(default_factory=dict)  # keys of a model card's front matter
    files: tuple[Path, ...] = ()  # licence texts, notices, preprocessor settings


def origin(source: str | Path | None) -> Origin:
    """What is known of a source as `loading.load` takes it: hub id, folder, .gguf file or None."""
    path = loading.builtin_path() if source is None else Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(path, builtin=source is None)
    if path.is_dir():
        return Origin(_folder_name(path), _license(_front_matter(path)), _passengers(path))
    return _of_hub(str(source))


def _of_gguf(path: Path, builtin: bool) -> Origin:
    header = ggufs.read_header(path)
    name = path.stem
    if builtin:
        name = f"{header['general.organization']}/{loading.BUILTIN_NAME}"
    for key in ("general.source.url", "general.repo_url", "general.url"):
        if match := re.fullmatch(
            r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?", str(header.get(key))
        ):
            name = match[1]
    named = {key: header.get(f"general.{key.replace('_', '.')}") for key in LICENSE_KEYS}
    return Origin(name, _license(named), _passengers(path.parent))


def _of_hub(name: str) -> Origin:
    """One request; without network only the name is known."""
    import huggingface_hub as hub

    try:
        info = hub.model_info(name, timeout=10)
        wanted = [s.rfilename for s in info.siblings or () if TERMS.fullmatch(s.rfilename)]
        files = tuple(Path(hub.hf_hub_download(name, file)) for file in wanted)
        return Origin(name, _license(info.card_data.to_dict() if info.card_data else {}), files)
    except Exception:  # the types of transport errors change with the hub's version
        return Origin(name)


def _folder_name(path: Path) -> str:
    """The hub's cache keeps org/name in models--org--name/snapshots/COMMIT."""
    path = path.resolve()
    parts = path.parts[-3:]
    if len(parts) == 3 and parts[1] == "snapshots" and parts[0].startswith("models--"):
        return parts[0].removeprefix("models--").replace("--", "/")
    return path.name


def _front_matter(folder: Path) -> Mapping[str, Any]:
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except Exception:  # no card, or one that is not YAML: nothing is known
        return {}


def _license(found: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(found.get("license"), str):
        return {}
    return {key: one_line(found[key]) for key in LICENSE_KEYS if isinstance(found.get(key), str)}


def _passengers(folder: Path) -> tuple[Path, ...]:
    wanted = (p for p in folder.iterdir() if TERMS.fullmatch(p.name) or INPUTS.fullmatch(p.name))
    return tuple(sorted(p for p in wanted if p.is_file() and p.stat().st_size < 1 << 20))


# ------------------------------------------------------------------------------------ files


def add_files(folder: Path, origin: Origin, tokenizer: Any, texts: Mapping[str, str]) -> None:
    """What goes beside the weights: terms of the source, the tokenizer if there is one, texts."""
    for path in origin.files:
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, text in texts.items():
        if Path(name).name != name or (folder / name).exists():
            raise ValueError(f"file {name!r}: its name has a path or is taken")
        (folder / name).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def settings(config: Any) -> dict[str, Any]:
    """What transformers would save of a config, without its notes on where it had it from."""
    return {n: v for n, v in json.loads(config.to_json_string()).items() if not n.startswith("_")}


def write_generation(model: Any, folder: Path) -> None:
    """Its own save_pretrained refuses settings that came with the source."""
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_json(folder / "generation_config.json", settings(generation))


# ------------------------------------------------------------------------------------ the card

CARD = """\
---
{front}---

# {title}

{count} of the {total} feed-forward blocks of {base} are replaced by maps that were fitted to what
the blocks computed.

{table}

## Load

{load}
## How it was made

{fence}
{command}
{fence}
"""
TRANSFORMERS = """\
```python
from transformers import {auto}{and_tokenizer}
model = {auto}.from_pretrained("."{trust})
{tokenizer}```

`.` is the folder of this file. """
LOAD = {
    "hf": TRANSFORMERS
    + """`trust_remote_code` is needed because no class of transformers has
such blocks: `modeling_howlinear.py` is the code, one short file, and `linear_blocks` in
`config.json` lists the blocks.
""",
    "narrow": TRANSFORMERS
    + """It loads with plain transformers and brings no code: the maps are
written as hidden units of the model's own kind.
""",
    "nemotron-nas": """\
The format is `nemotron-nas`, and `block_configs` in `config.json` says which blocks are linear.
TensorRT-LLM reads it as it is (`--trust_remote_code`), mlx-lm once `mlp.linear_mlp` is renamed
`mlp.linear`. vLLM and llama.cpp know the format, not its linear blocks.

```python
from howlinear.export.nemotron_nas import read_back
model = read_back(".")
```

`.` is the folder of this file; this model is for checking.
""",
}
FRONT: dict[str, dict[str, Any]] = {
    "hf": {"library_name": "transformers", "tags": ["howlinear", "custom_code"]},
    "narrow": {"library_name": "transformers", "tags": ["howlinear"]},
    "nemotron-nas": {"tags": ["howlinear", "nemotron-nas"]},
}


def card(
    kind: str,
    origin: Origin,
    *,
    auto: str,
    count: int,
    total: int,
    table: str,
    command: str,
    has_tokenizer: bool = True,
) -> str:
    """README.md: `count` of `total` blocks are replaced, and the Auto class `auto` loads it.

    `table` is markdown and goes in as it is; names and the command are escaped.
    """
    from huggingface_hub.utils import yaml_dump

    front = {"base_model": one_line(origin.base_model), **origin.license, **FRONT[kind]}
    base, command = markdown(origin.base_model), one_line(command, limit=10_000)
    trust = ", trust_remote_code=True" if kind == "hf" else ""  # tokenizers ask for it too
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("."{trust})\n'
    load = LOAD[kind].format(
        auto=auto,
        trust=trust,
        and_tokenizer=", AutoTokenizer" if has_tokenizer else "",
        tokenizer=tokenizer if has_tokenizer else "",
    )
    return CARD.format(
        front=yaml_dump(front),
        title=f"{base.rpartition('/')[2]} with linear blocks",
        base=base,
        count=count,
        total=total,
        table=table.strip(),
        load=load,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0)),
        command=command,
    )


def markdown(text: str) -> str:
    """Somebody else's name as plain text in Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]{}<>()#|!&~])", r"\\\1", one_line(text))
