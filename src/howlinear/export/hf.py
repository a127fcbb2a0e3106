"""A model with replaced blocks -> a folder that `transformers` loads, without howlinear.

    install_maps(model, maps)
    round_weights(model, torch.bfloat16)
    write(model, folder, torch.bfloat16)          # code, config, weights
    verify(folder, model, {"input_ids": ids}, "hf")

The folder brings one short file of code: `linear_blocks.py` as it is here, and classes that build
the family's own model and then put `LinearMLP` layers in it. It has its own `model_type`, so that
the Auto classes of transformers refuse it without `trust_remote_code`: under the old name they
would build the original blocks and fill them with random weights.

A class that is called by its name (`LlamaForCausalLM.from_pretrained`) does not look at
`model_type`. For its sake config.json names an attention implementation that does not exist
(`GUARD`): every stock class stops there, and the export's own config class removes it. The guard has
two gaps, where only the load report mentions the missing weights: `attn_implementation=` passed to a
stock class, and a loaded model that is saved again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export import linear_blocks
from howlinear.export.folder import settings, write_generation, write_json
from howlinear.models.families import backbone

MODULE = "modeling_howlinear"
PREFIX = "howlinear_"
# Relies on transformers reading `attn_implementation` from config.json before it builds a model, and
# refusing a name that it does not know. tests/test_export_hf.py loads every family by its stock class.
GUARD = "none: load it by an Auto class with trust_remote_code=True"
SHARD = "5GB"


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


def auto_class(model: nn.Module) -> str:
    """The Auto class that loads a model of this class."""
    return _Classes.of(model).auto


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


def write(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Fill a folder: code, config, weights in `dtype`.

    Tensors are cast shard by shard: beside the model there is one shard in memory.
    """
    check_exportable(model)
    write_generation(model, folder)
    write_json(folder / "config.json", _config(model, dtype))
    _write_weights(_saved(model), folder, dtype)
    code = _code(_Classes.of(model), _family(model))
    (folder / f"{MODULE}.py").write_text(code, encoding="utf-8")


def _family(model: nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type).removeprefix(PREFIX)


def _linear_blocks(model: nn.Module) -> list[dict[str, Any]]:
    config: Any = backbone(model).config
    return getattr(config, "linear_blocks", None) or []


def _config(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    classes, source = _Classes.of(model), model.config
    config = settings(source)
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
        write_json(folder / "model.safetensors.index.json", index)
