"""The folder of an export: complete or absent, with the licence of its source and its tokenizer.

with new_folder("out") as folder:              # `out` appears when the block ends without an error
    ...                                        # the weights, by hf, stock or nemotron_nas
    add_files(folder, origin("org/name"), tokenizer, {"README.md": text})
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

# Files beside the weights of the source that an export copies: terms of use, and how inputs are made.
TERMS = re.compile(r"(licen[cs]e|notice|copying|use_policy)[\w.-]*", re.IGNORECASE)
INPUTS = re.compile(r"(video_)?(pre)?processor_config\.json")
HUB_URL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
LICENSE_KEYS = ("license", "license_name", "license_link")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A hidden folder beside `path` that is renamed to it when the block ends without an error.

    An exception or Ctrl-C removes it. A killed process leaves at most the hidden folder.
    """
    from safetensors import SafetensorError

    try:
        with _renamed(Path(path)) as folder:
            yield folder
    except (OSError, SafetensorError) as err:  # a full disk
        raise OSError(f"{path} cannot be written ({one_line(err)})") from err


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    check_free(path)
    path = path.resolve()  # a link stays a link; its target is filled
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
    """Refuse a destination that is not empty: an export overwrites nothing."""
    path = Path(path)
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        kind = "is not empty" if path.is_dir() else "exists and is no folder"
        raise ValueError(f"{path} {kind}: remove it, or name another folder (`out`)")


def _settle(folder: Path) -> None:
    """Write everything to the disk, and give files the permissions of new files."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------- where the model is from


@dataclass(frozen=True)
class Origin:
    """The source of an export: its name, its licence and the files to copy."""

    base_model: str  # a hub id where one is known, else the name of the folder or file
    license: dict[str, str] = field(default_factory=dict)  # keys of a model card's front matter
    files: tuple[Path, ...] = ()  # licence texts, notices, preprocessor settings


def origin(source: str | Path | None) -> Origin:
    """The origin of a model that `loading.load` takes: hub id, folder, .gguf file or None."""
    path = loading.builtin_path() if source is None else Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(path, builtin=source is None)
    if path.is_dir():
        return Origin(_folder_name(path), _license(_front_matter(path)), _files_to_copy(path))
    return _of_hub(str(source))


def _of_gguf(path: Path, builtin: bool) -> Origin:
    header = ggufs.read_header(path)
    name = path.stem
    if builtin:
        name = f"{header['general.organization']}/{loading.BUILTIN_NAME}"
    for key in ("general.source.url", "general.repo_url", "general.url"):
        if match := HUB_URL.fullmatch(str(header.get(key))):
            name = match[1]
    named = {key: header.get(f"general.{key.replace('_', '.')}") for key in LICENSE_KEYS}
    return Origin(name, _license(named), _files_to_copy(path.parent))


def _of_hub(name: str) -> Origin:
    """Asks the hub once; without network only the name is known."""
    import huggingface_hub as hub

    try:
        info = hub.model_info(name, timeout=10)
        wanted = [s.rfilename for s in info.siblings or () if TERMS.fullmatch(s.rfilename)]
        files = tuple(Path(hub.hf_hub_download(name, file)) for file in wanted)
        return Origin(name, _license(info.card_data.to_dict() if info.card_data else {}), files)
    except Exception:  # the types of transport errors change with the hub's version
        return Origin(name)


def _folder_name(path: Path) -> str:
    """org/name for a folder of the hub's cache (models--org--name/snapshots/COMMIT), else its name."""
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


def _license(facts: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(facts.get("license"), str):
        return {}
    return {key: one_line(facts[key]) for key in LICENSE_KEYS if isinstance(facts.get(key), str)}


def _files_to_copy(folder: Path) -> tuple[Path, ...]:
    wanted = (p for p in folder.iterdir() if TERMS.fullmatch(p.name) or INPUTS.fullmatch(p.name))
    return tuple(sorted(p for p in wanted if p.is_file() and p.stat().st_size < 1 << 20))


# ------------------------------------------------------------------------------------ files


def add_files(folder: Path, origin: Origin, tokenizer: Any, texts: Mapping[str, str]) -> None:
    """Add the files beside the weights: the source's terms, the tokenizer if there is one, texts."""
    for path in origin.files:
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, text in texts.items():
        if Path(name).name != name or (folder / name).exists():
            raise ValueError(f"file {name!r}: its name has a path or is taken")
        (folder / name).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    text = json.dumps(value, indent=2, allow_nan=False, sort_keys=sort_keys)
    path.write_text(text + "\n", encoding="utf-8")


def settings(config: Any) -> dict[str, Any]:
    """The settings of a config that transformers would save, without its private ones."""
    return {n: v for n, v in json.loads(config.to_json_string()).items() if not n.startswith("_")}


def write_generation(model: Any, folder: Path) -> None:
    """Write generation_config.json; its save_pretrained refuses some settings that sources have."""
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_json(folder / "generation_config.json", settings(generation))
