"""GGUF files converted once: the dense model is kept in the user's cache folder and loaded from there.

    model, tokenizer = through_cache(path, read)    # read(None): the GGUF file; read(folder): a kept copy

Unpacking the built-in model takes 5 to 9 s, reading its copy 1 to 2 s. A copy is a folder of safetensors
and JSON files, named after the hash of the GGUF file and the versions of the packages that converted it. It
is kept only if it loads as the same model to the bit, and used only if every file has the hash in its
manifest; otherwise it is made again. No problem with the cache is an error: then the GGUF file is read.

The folder is $HOWLINEAR_CACHE, else $XDG_CACHE_HOME/howlinear, else ~/.cache/howlinear; HOWLINEAR_CACHE=off
keeps nothing. It may be deleted at any time.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from howlinear.models.ggufs import one_line
from howlinear.records.words import size

logger = logging.getLogger(__name__)

FORMAT = 1  # of the files in a copy
LARGEST = 2**29  # bytes of a GGUF file; with 4 bits a weight, its copy has 8 times as many
ABANDONED = 24 * 3600  # seconds after which an unfinished copy belongs to a process that was killed
MANIFEST = "manifest.json"

# transformers reads some of these beside a GGUF file, and a copy does not depend on them
SETTINGS = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")

Parts = tuple[Any, Any]  # the model and its tokenizer


def through_cache(path: Path, read: Callable[[Path | None], Parts]) -> Parts:
    """What `read` returns for a GGUF file, from its kept copy where there is one.

    A model that was read in float32 is kept for the next time; a copy serves every dtype.
    """
    try:
        key, place = _address(path)
        if _is_intact(place, key):
            return _as_unpacked(*read(place), path.parent)
    except Exception as err:  # whatever is wrong with it, the file itself is still there
        logger.debug("no converted copy of %s is used: %s", path.name, one_line(err))
        return read(None)
    parts = read(None)
    try:
        _keep(path, place, key, parts, read)
    except Exception as err:  # a full disk raises safetensors' own type
        logger.debug("no converted copy of %s is kept: %s", path.name, one_line(err))
    return parts


def cache_folder() -> Path:
    """The folder that the environment names; ValueError where it is switched off."""
    named = os.environ.get("HOWLINEAR_CACHE")
    if named is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        return base.expanduser().absolute() / "howlinear"
    if named.strip().lower() in ("", "off"):
        raise ValueError("HOWLINEAR_CACHE switches it off")
    return Path(named).expanduser().absolute()


def _address(path: Path) -> tuple[dict[str, Any], Path]:
    """What a copy depends on, and its folder. ValueError for a file that is not kept."""
    root = cache_folder()
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it is larger than {size(LARGEST)}")
    if any(file for pattern in SETTINGS for file in path.parent.glob(pattern)):
        raise ValueError("settings are beside it")
    key: dict[str, Any] = {"format": FORMAT, "sha256": _sha256(path)}
    for package in ("transformers", "tokenizers", "gguf"):
        key[package] = importlib.metadata.version(package)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return key, root / "converted" / digest[:32]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST}


def _is_intact(place: Path, key: dict[str, Any]) -> bool:
    """Is a copy complete, for this key, and as it was written?"""
    try:
        manifest = json.loads((place / MANIFEST).read_text())
        return bool(manifest == {**key, "files": _hashes(place)})
    except (OSError, ValueError):
        return False


def _keep(
    path: Path, place: Path, key: dict[str, Any], parts: Parts, read: Callable[[Path], Parts]
) -> None:
    """Write a copy beside its place, load it, compare, and rename it: it is there whole or not at all."""
    import torch

    weights = _weights(parts[0])
    if any(w.dtype != torch.float32 for w in weights.values() if w.is_floating_point()):
        raise ValueError("it was not read in float32")
    root = place.parent
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".*"):
        if time.time() - left.stat().st_mtime > ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    needed = sum(w.nbytes for w in weights.values())
    if shutil.disk_usage(root).free < 2 * needed:
        raise ValueError("too little disk is free")
    with tempfile.TemporaryDirectory(dir=root, prefix=".") as work:
        copy = Path(work, "copy")
        _write(copy, weights, parts)
        if not _is_same(parts, _as_unpacked(*read(copy), path.parent)):
            raise ValueError("its copy loads as another model")
        (copy / MANIFEST).write_text(json.dumps({**key, "files": _hashes(copy)}, indent=1))
        if place.exists() and not _is_intact(place, key):
            place.rename(Path(work, "damaged"))
        copy.rename(place)  # OSError where another process was first
    told = "%s is converted and kept in %s (%s), to load faster; HOWLINEAR_CACHE=off keeps nothing"
    logger.info(told, path.name, place, size(needed))


def _weights(model: Any) -> dict[str, Any]:
    """Parameters and buffers of the checkpoint, tied ones once."""
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()
    return {name: w for name, w in model.state_dict().items() if name not in tied}


def _write(folder: Path, weights: dict[str, Any], parts: Parts) -> None:
    from safetensors.torch import save_file

    model, tokenizer = parts
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads(model.config.to_json_string())
    for absent in ("dtype", "transformers_version"):  # a GGUF file has neither
        settings.pop(absent, None)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def _as_unpacked(model: Any, tokenizer: Any, folder: Path) -> Parts:
    """A model that was read from its copy, with the names and settings that the GGUF file gives it."""
    model.name_or_path = model.config.name_or_path = str(folder)
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    if model.can_generate():  # from_pretrained takes them from config.json, which GGUF files lack
        model.generation_config = type(model.generation_config).from_model_config(model.config)
    # Weights in a mapped file start at multiples of 8 bytes. Products of one row are rounded in another
    # order there than at multiples of 16, where memory that is allocated starts.
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model, tokenizer


def _is_same(one: Parts, other: Parts) -> bool:
    """The same classes, settings, tokens, and weights and buffers to the bit?"""
    import torch

    if _settings(*one) != _settings(*other):
        return False
    a, b = ({**dict(m.named_buffers()), **m.state_dict()} for m, _ in (one, other))
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def _settings(model: Any, tokenizer: Any) -> list[Any]:
    generation = model.generation_config.to_dict() if model.can_generate() else None
    # strings in one, the same strings with their flags in the other: `to_str` has the flags
    flagged = ("_tokenizer", "_special_tokens_map", "init_kwargs")
    named = {name: value for name, value in vars(tokenizer).items() if name not in flagged}
    names = dict(tokenizer.special_tokens_map)
    return [
        *(type(model), model.config.to_dict(), generation),
        *(type(tokenizer), named, names, tokenizer.backend_tokenizer.to_str()),
    ]
