"""A model with replaced blocks -> a folder that `transformers` loads, without howlinear.

    install_maps(model, maps)
    round_weights(model, torch.bfloat16)            # what is checked is what is saved
    with new_folder("out") as folder:               # nothing is at out until all went well
        found = origin("org/name")
        text = card(model, found, table=measured, command="howlinear compress ...")
        write(model, tokenizer, folder, dtype=torch.bfloat16, origin=found, card=text)
        verify(folder, model, {"input_ids": ids})   # a new process loads it and must agree

The folder brings one short file of code: `linear_blocks.py` as it is here, and classes that build
the family's own model and then put `LinearMLP` layers in it. It has its own `model_type`, so that
the Auto classes of transformers refuse it without `trust_remote_code`: under the old name they
would build the original blocks and fill them with random weights.

A class that is called by its name (`LlamaForCausalLM.from_pretrained`) does not look at
`model_type`. For its sake config.json names an attention implementation that does not exist
(`GUARD`): every stock class stops there, and the class of our own config takes it away. Somebody
who passes `attn_implementation=` to a stock class gets past the guard, as does somebody who saves
the loaded model again: then only the load report tells of the missing weights.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear import ggufs, models
from howlinear.export import linear_blocks
from howlinear.families import backbone, blocks
from howlinear.ggufs import one_line

logger = logging.getLogger(__name__)

MODULE = "modeling_howlinear"
PREFIX = "howlinear_"
GUARD = "none: load it by an Auto class with trust_remote_code=True"
SHARD = "5GB"

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
    """What is known of a source as `models.load` takes it: hub id, folder, .gguf file or None."""
    path = models.builtin_path() if source is None else Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(path, builtin=source is None)
    if path.is_dir():
        return Origin(_folder_name(path), _license(_front_matter(path)), _passengers(path))
    return _of_hub(str(source))


def _of_gguf(path: Path, builtin: bool) -> Origin:
    header = ggufs.read_header(path)
    name = path.stem
    if builtin:
        name = f"{header['general.organization']}/{models.BUILTIN_NAME}"
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


# ------------------------------------------------------------------------------------ the card

CARD = """\
---
{front}---

# {title}

{count} of the {total} feed-forward blocks of {base} are replaced by affine maps, fitted to what the
blocks computed. `linear_blocks` in `config.json` lists them.

{table}

## Load

```python
from transformers import {auto}{and_tokenizer}
model = {auto}.from_pretrained(".", trust_remote_code=True)
{tokenizer}```

`.` is the folder of this file. `trust_remote_code` is needed because no class of transformers has
such blocks: `{module}.py` is the code, one short file.

## How it was made

{fence}
{command}
{fence}
"""


def card(
    model: nn.Module, origin: Origin, *, table: str, command: str, has_tokenizer: bool = True
) -> str:
    """README.md. `table` is markdown and goes in as it is; names and the command are escaped."""
    from huggingface_hub.utils import yaml_dump

    front: dict[str, Any] = {"base_model": one_line(origin.base_model), **origin.license}
    front |= {"library_name": "transformers", "tags": ["howlinear", "custom_code"]}
    auto = _Classes.of(model).auto
    base, command = _markdown(origin.base_model), one_line(command, limit=10_000)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return CARD.format(
        front=yaml_dump(front),
        title=f"{base.rpartition('/')[2]} with linear blocks",
        count=len({block["index"] for block in _linear_blocks(model)}),
        total=len(blocks(model)),
        base=base,
        table=table.strip(),
        auto=auto,
        and_tokenizer=", AutoTokenizer" if has_tokenizer else "",
        tokenizer='tokenizer = AutoTokenizer.from_pretrained(".")\n' if has_tokenizer else "",
        module=MODULE,
        fence=fence,
        command=command,
    )


def _markdown(text: str) -> str:
    """Somebody else's name as plain text in Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]{}<>()#|!&~])", r"\\\1", one_line(text))


# -------------------------------------------------------------------------------- classes and code

CODE = """
# What config.json asks of attention, so that classes which do not know of linear_blocks stop.
GUARD = "{guard}"


class {new_config}({config}):
    model_type = "{model_type}"
    linear_blocks = None

    def __init__(self, **kwargs):
        if kwargs.get("attn_implementation") == GUARD:
            del kwargs["attn_implementation"]
        super().__init__(**kwargs)
"""

MODEL = """

class {new}({stock}):
    config_class = {new_config}

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
"""
INSTALL = """\
        install(self.base_model, config.linear_blocks or [])
"""
# Heads such as LlamaForSequenceClassification ask AutoModel for their backbone: it must know ours,
# which then comes with its blocks replaced.
REGISTER = """

AutoModel.register({new_config}, {new}, exist_ok=True)
{new}.register_for_auto_class("AutoModel")
"""


@dataclass(frozen=True)
class _Classes:
    """Names of transformers' classes that a model is built from, and of the Auto classes."""

    config: str
    model: str
    base: str  # what AutoModel gives
    autos: tuple[str, ...]  # Auto classes that give `model`, AutoModel aside
    asks_auto: bool  # the head has its backbone from AutoModel

    @classmethod
    def of(cls, model: nn.Module) -> _Classes:
        from transformers.models.auto import modeling_auto

        config, head, base = _public(type(model.config)), _public(type(model)), backbone(model)
        names = sorted(name for name in vars(modeling_auto) if name.startswith("AutoModelFor"))
        autos = tuple(name for name in names if head in _given_by(name, config))
        asks = any(c.__name__.startswith("GenericFor") for c in head.__mro__)
        under = _public(type(base)) if base is not model else _inside(model, config) or head
        return cls(config.__name__, head.__name__, under.__name__, autos, asks)

    @property
    def auto(self) -> str:
        """The Auto class to load by."""
        if self.model == self.base:
            return "AutoModel"
        known = [name for name in self.autos if name != "AutoModelForPreTraining"]
        if "AutoModelForCausalLM" in known:
            return "AutoModelForCausalLM"
        return (known or self.autos or ("AutoModel",))[0]

    @property
    def auto_map(self) -> dict[str, str]:
        whole = dict.fromkeys(self.autos, self.model)
        given = {"AutoConfig": self.config, "AutoModel": self.base if self.autos else self.model}
        return {auto: f"{MODULE}.{_new(name)}" for auto, name in (given | whole).items()}


def check_exportable(model: nn.Module) -> None:
    """Refuse, before hours of work, what `write` would refuse after them."""
    _Classes.of(model)
    if getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"{type(model).__name__} is quantised and cannot be exported: load dense weights"
        )


def _public(cls: type) -> type:
    """The class that everybody can import: of an export that was loaded, what it is made from."""
    import transformers

    while cls.__name__.startswith("Howlinear"):
        cls = cls.__bases__[0]
    if getattr(transformers, cls.__name__, None) is not cls:
        raise ValueError(
            f"{cls.__name__} is not a class of transformers: a model that brings its own code "
            "cannot be exported"
        )
    return cls


def _given_by(auto: str, config: type) -> tuple[type, ...]:
    """The classes that an Auto class of transformers has for a config."""
    import transformers

    known = getattr(transformers, auto)._model_mapping
    given = known[config] if config in known else ()  # noqa: SIM401
    return given if isinstance(given, tuple) else (given,)


def _inside(model: nn.Module, config: type) -> type | None:
    """The headless class whose parts are all here under the same names, as T5Model's are in
    T5ForConditionalGeneration but not in T5EncoderModel."""
    for cls in _given_by("AutoModel", config):
        with torch.device("meta"):
            parts = {name for name, _ in cls(copy.deepcopy(model.config)).named_children()}
        if parts <= {name for name, _ in model.named_children()}:
            return cls
    return None


def _new(name: str) -> str:
    return f"Howlinear{name}"


def _code(classes: _Classes, model_type: str) -> str:
    """linear_blocks.py, the config and one or two models."""
    new = _new(classes.config)
    imported = {classes.config, classes.model, classes.base} | (
        {"AutoModel"} if classes.asks_auto else set()
    )
    text = inspect.getsource(linear_blocks).rstrip() + "\n\n\n"
    text += f"from transformers import {', '.join(sorted(imported))}  # noqa: E402\n"
    text += CODE.format(
        new_config=new, config=classes.config, model_type=PREFIX + model_type, guard=GUARD
    )
    for name in dict.fromkeys((classes.base, classes.model)):
        text += MODEL.format(new=_new(name), stock=name, new_config=new)
        if not (classes.asks_auto and name == classes.model):
            text += INSTALL
    if classes.asks_auto:
        text += REGISTER.format(new_config=new, new=_new(classes.base))
    return text


# ------------------------------------------------------------------------------------- writing


def write(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    origin: Origin,
    card: str,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Fill an empty folder: code, config, weights in `dtype`, tokenizer, card, terms, extra texts.

    Tensors are cast shard by shard: beside the model there is one shard in memory.
    """
    check_exportable(model)
    classes, config = _Classes.of(model), _config(model, dtype)
    for path in origin.files:
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:  # its own save_pretrained refuses settings that came with the source
        _write_json(folder / "generation_config.json", _settings(generation))
    _write_json(folder / "config.json", config)
    _write_weights(_saved(model), folder, dtype)
    code = _code(classes, _family(model))
    (folder / f"{MODULE}.py").write_text(code, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
    for name, text in (extra_files or {}).items():
        if Path(name).name != name or (folder / name).exists():
            raise ValueError(f"extra file {name!r}: its name has a path or is taken")
        (folder / name).write_text(text, encoding="utf-8")


def _family(model: nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type).removeprefix(PREFIX)


def _linear_blocks(model: nn.Module) -> list[dict[str, Any]]:
    config: Any = backbone(model).config
    return getattr(config, "linear_blocks", None) or []


def _config(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    classes, source = _Classes.of(model), model.config
    config = _settings(source)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part is config or "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    return config | {
        "model_type": PREFIX + _family(model),
        "architectures": [_new(classes.model)],
        "auto_map": classes.auto_map,
        "attn_implementation": GUARD,
        "linear_blocks": _linear_blocks(model),
    }


def _settings(config: Any) -> dict[str, Any]:
    """What transformers would save, without its notes on where it had it from."""
    return {n: v for n, v in json.loads(config.to_json_string()).items() if not n.startswith("_")}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _saved(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint: of tied ones, the one that transformers ties the others to."""
    state = model.state_dict()
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if name in state and source in state and _same(state[name], state[source]):
            del state[name]
    return state


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own, since safetensors refuses shared memory; integers stay integers."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True).contiguous()


def _write_weights(state: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shapes = {
        name: t.to("meta", dtype if t.is_floating_point() else t.dtype) for name, t in state.items()
    }
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD)
    for file, names in plan.filename_to_tensors.items():
        shard = {name: _cast(state[name], dtype) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


# ------------------------------------------------------------------------------------- checking


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round all that is saved to `dtype`, in place, and leave the model in float32.

    A checkpoint in bfloat16 is another model than the one in memory; after this they are the same,
    and can be compared to the rounding of float32.
    """
    model.float()
    state = model.state_dict()
    tensors = {name: t for name, t in state.items() if t.is_floating_point() and t.numel()}
    for name, tensor in tensors.items():
        low, high = (float(end) for end in tensor.aminmax())  # isfinite takes 20 times longer
        if not -torch.finfo(dtype).max <= low <= high <= torch.finfo(dtype).max:
            raise ValueError(f"{name} does not fit in {dtype}: use --dtype bfloat16")
    for tensor in tensors.values():
        tensor.copy_(tensor.to(dtype))


def verify(folder: Path, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Load the folder in a new process that has no howlinear, and compare; ValueError if it differs.

    `model` is what was written, after `round_weights`, in eval mode; `inputs` are a few short windows, as the
    model takes them. Every tensor on the disk must be the model's, bit for bit. In float32, the
    first output (logits, or hidden states without a head) must agree to 1e-4 of its largest value:
    another order of summation changes it by 1e-6 to 1e-5, a layer in bfloat16 by 1e-3 or more. Greedy
    generation must choose the same 16 tokens, up to a choice between equals.
    """
    _verify_disk(folder, model)
    auto = _Classes.of(model).auto
    try:
        want = _results(model, dict(inputs))
    except (LookupError, TypeError, ValueError, RuntimeError) as err:  # transformers' own limits
        logger.warning("only outputs are compared: the model does not generate: %s", one_line(err))
        want = _results(model, dict(inputs), generate=False)
    with tempfile.TemporaryDirectory() as work:
        got, told = _in_new_process(folder, auto, inputs, Path(work), "tokens" in want)
    count = sum(p.numel() for p in model.parameters())
    if told["parameters"] != count:
        raise ValueError(f"{folder} loads with {told['parameters']} parameters, expected {count}")
    if wrong := [*told["missing"], *told["unexpected"]]:
        raise ValueError(f"{folder} loads with missing or unknown weights, first {wrong[0]}")
    _compare(folder, want, got)


def _verify_disk(folder: Path, model: nn.Module) -> None:
    """What is on the disk is the model's tensors and nothing else, bit for bit."""
    from safetensors import safe_open

    kind = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
    left = _saved(model)
    for path in sorted(folder.glob("*.safetensors")):
        size = 0
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                size += tensor.nbytes
                if name not in left or not torch.equal(_cast(left.pop(name), kind), tensor):
                    raise ValueError(f"{path}: {name} is not what the model has: write it again")
        with path.open("rb") as raw:
            header = 8 + int.from_bytes(raw.read(8), "little")
        if path.stat().st_size != header + size:
            raise ValueError(
                f"{path} has {path.stat().st_size - header} bytes of weights, not {size}"
            )
    if left:
        raise ValueError(f"{folder} lacks {len(left)} weights, first {next(iter(left))}")


def _compare(folder: Path, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    close = 1e-4 * float(want["output"].abs().max())
    if got.keys() != want.keys():
        raise ValueError(f"{folder} loads as a model that does not generate, or does")
    if got["output"].shape != want["output"].shape:
        shapes = f"{tuple(got['output'].shape)}, expected {tuple(want['output'].shape)}"
        raise ValueError(f"{folder} gives an output of shape {shapes}")
    apart = float((got["output"] - want["output"]).abs().max())
    if not apart <= close:  # NaN is not
        raise ValueError(
            f"{folder} gives other outputs when loaded: {apart:.3g} apart, {close:.3g} at most"
        )
    for step, (a, b) in enumerate(zip(want.get("tokens", ()), got.get("tokens", ()), strict=True)):
        differ = a != b
        if not bool(differ.any()):
            continue
        two = want["scores"][step][differ].topk(2).values
        if bool((two[:, 0] - two[:, 1] > 2 * close).any()):
            raise ValueError(f"{folder} generates other text when loaded, from token {step} on")
        return  # a choice between equals: what follows may differ


def _results(model: Any, inputs: dict[str, Tensor], generate: bool = True) -> dict[str, Tensor]:
    """The first output, and 16 greedy tokens with their logits where the model writes text."""
    import torch

    with torch.no_grad():
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        found = {"output": model(**inputs)[0].cpu().contiguous()}
        if generate and model.can_generate() and "input_ids" in inputs:
            prompt = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
            options = {"output_logits": True, "return_dict_in_generate": True, "num_beams": 1}
            made = model.generate(**prompt, **options, max_new_tokens=16, do_sample=False)
            found["scores"] = torch.stack(made.logits).float().cpu()  # (steps, B, vocabulary)
            found["tokens"] = made.sequences[:, -len(made.logits) :].t().cpu().contiguous()
    return found


def _reload(folder: str, auto: str, work: str, generate: str) -> None:
    """What the new process does. Like `_results`, it is sent there as text: it needs no name here."""
    import json
    import sys
    from pathlib import Path

    class NoHowlinear:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "howlinear":
                raise ModuleNotFoundError("an export must load without howlinear", name=name)

    sys.meta_path.insert(0, NoHowlinear())
    import transformers
    from safetensors.torch import load_file, save_file

    model, info = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, dtype="float32", output_loading_info=True
    )
    given = load_file(Path(work, "inputs"))
    save_file(_results(model.eval(), given, bool(generate)), Path(work, "got"))
    told = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
    }
    Path(work, "told").write_text(json.dumps(told))


def _in_new_process(
    folder: Path, auto: str, inputs: Mapping[str, Tensor], work: Path, generate: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors.torch import load_file, save_file

    save_file({n: _cast(v, v.dtype) for n, v in inputs.items()}, work / "inputs")
    parts = [inspect.getsource(part) for part in (_results, _reload)]
    program = "\n".join(
        ["from __future__ import annotations", *parts, "import sys", "_reload(*sys.argv[1:])"]
    )
    given = (str(folder.resolve()), auto, str(work), "generate" if generate else "")
    own = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *given],
        env={**os.environ, **own},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        why = one_line((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        raise ValueError(f"{folder} does not load in a new process: {why}")
    return load_file(work / "got"), json.loads((work / "told").read_text())
