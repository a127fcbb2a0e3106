"""A model with replaced blocks -> a folder that `transformers` loads, without howlinear.

    install_maps(model, maps)
    round_weights(model, torch.bfloat16)
    write(model, folder, torch.bfloat16)          # code, config, weights
    verify(folder, model, {"input_ids": ids}, "hf")

The folder contains one short file of code: a copy of `linear_blocks.py`, and classes that build the
family's own model and then install `LinearMLP` layers. It has its own `model_type`, so the Auto
classes of transformers refuse it without `trust_remote_code`; under the original `model_type` they
would build the original blocks with random weights.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export import linear_blocks
from howlinear.export.folder import settings, write_generation, write_json
from howlinear.export.weights import dtype_name, write_weights
from howlinear.models.families import backbone
from howlinear.models.offload import value_of

MODULE = "modeling_howlinear"
PREFIX = "howlinear_"
# A stock class that is called by name (LlamaForCausalLM.from_pretrained) does not compare model_type and
# would load an export with random blocks. This value of `attn_implementation` in config.json stops it.
# That relies on two habits of transformers: PreTrainedConfig takes `attn_implementation` from config.json,
# and PreTrainedModel.__init__ refuses a value that it does not know, with the value in its message (a value
# with a slash would be taken for a kernel on the hub).
# test_the_guard_of_stock_classes_works_as_described fails when either changes. The guard does not stop a
# stock class that is called with `attn_implementation=`, nor one that reads a folder to which the loaded
# export was saved again: there only the load report mentions the missing weights.
GUARD = "none: load it by an Auto class with trust_remote_code=True"


# -------------------------------------------------------------------------------- classes and code

CODE = """
# The value of attn_implementation in config.json: it stops classes that do not know linear_blocks.
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
# Heads such as LlamaForSequenceClassification get their backbone from AutoModel, so the backbone with
# replaced blocks is registered there.
REGISTER = """

AutoModel.register({new_config}, {new}, exist_ok=True)
{new}.register_for_auto_class("AutoModel")
"""


@dataclass(frozen=True)
class _Classes:
    """Names of the transformers classes of a model, and of the Auto classes that load it."""

    config: str
    model: str
    base: str  # the class that AutoModel returns
    autos: tuple[str, ...]  # Auto classes that return `model`, other than AutoModel
    asks_auto: bool  # the head gets its backbone from AutoModel

    @classmethod
    def of(cls, model: nn.Module) -> _Classes:
        from transformers.models.auto import modeling_auto

        config, head, base = _public(type(model.config)), _public(type(model)), backbone(model)
        names = sorted(name for name in vars(modeling_auto) if name.startswith("AutoModelFor"))
        autos = tuple(name for name in names if head in _classes_of(name, config))
        asks = any(c.__name__.startswith("GenericFor") for c in head.__mro__)
        bare = _public(type(base)) if base is not model else _headless(model, config) or head
        return cls(config.__name__, head.__name__, bare.__name__, autos, asks)

    @property
    def auto(self) -> str:
        """The Auto class that loads the model."""
        if self.model == self.base:
            return "AutoModel"
        known = [name for name in self.autos if name != "AutoModelForPreTraining"]
        if "AutoModelForCausalLM" in known:
            return "AutoModelForCausalLM"
        return (known or self.autos or ("AutoModel",))[0]

    @property
    def auto_map(self) -> dict[str, str]:
        classes = {"AutoConfig": self.config, "AutoModel": self.base if self.autos else self.model}
        classes |= dict.fromkeys(self.autos, self.model)
        return {auto: f"{MODULE}.{_new(name)}" for auto, name in classes.items()}


def check_exportable(model: nn.Module) -> None:
    """Refuse a model that `write` would refuse, before hours of work."""
    _Classes.of(model)
    check_dense(model)


def check_dense(model: nn.Module) -> None:
    """Refuse quantised weights."""
    if getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"{type(model).__name__} is quantised and cannot be exported: load dense weights"
        )


def auto_class(model: nn.Module) -> str:
    """The Auto class that loads a model of this class."""
    return _Classes.of(model).auto


def _public(cls: type) -> type:
    """The class of transformers: for a loaded export, the class that it derives from."""
    import transformers

    while cls.__name__.startswith("Howlinear"):
        cls = cls.__bases__[0]
    if getattr(transformers, cls.__name__, None) is not cls:
        raise ValueError(
            f"{cls.__name__} is not a class of transformers: a model that brings its own code "
            "cannot be exported"
        )
    return cls


def _classes_of(auto: str, config: type) -> tuple[type, ...]:
    """The classes that an Auto class of transformers has for a config."""
    import transformers

    mapping = getattr(transformers, auto)._model_mapping
    classes = mapping[config] if config in mapping else ()  # noqa: SIM401
    return classes if isinstance(classes, tuple) else (classes,)


def _headless(model: nn.Module, config: type) -> type | None:
    """The headless class whose children the model has under the same names.

    T5ForConditionalGeneration has those of T5Model; T5EncoderModel does not.
    """
    for cls in _classes_of("AutoModel", config):
        with torch.device("meta"):
            parts = {name for name, _ in cls(copy.deepcopy(model.config)).named_children()}
        if parts <= {name for name, _ in model.named_children()}:
            return cls
    return None


def _new(name: str) -> str:
    return f"Howlinear{name}"


def _code(classes: _Classes, model_type: str) -> str:
    """The file of code: linear_blocks.py, the config and one or two models."""
    new = _new(classes.config)
    imported = {classes.config, classes.model, classes.base}
    imported |= {"AutoModel"} if classes.asks_auto else set()
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
    """Fill a folder: code, config, weights in `dtype`."""
    check_exportable(model)
    write_generation(model, folder)
    write_json(folder / "config.json", _config(model, dtype))
    state = saved(model)
    write_weights(state, folder, dtype, lambda name: value_of(model, name, state[name]))
    code = _code(_Classes.of(model), _family(model))
    (folder / f"{MODULE}.py").write_text(code, encoding="utf-8")


def _family(model: nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type).removeprefix(PREFIX)


def _config(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    classes, config = _Classes.of(model), settings(model.config)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part is config or "dtype" in part:
            part["dtype"] = dtype_name(dtype)
    return config | {
        "model_type": PREFIX + _family(model),
        "architectures": [_new(classes.model)],
        "auto_map": classes.auto_map,
        "attn_implementation": GUARD,
        "linear_blocks": getattr(backbone(model).config, "linear_blocks", None) or [],
    }


def saved(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint. Tied tensors appear once, under the name that transformers ties to.

    Offloaded ones have no pointers (0): the ties of transformers are taken as they are.
    """
    state = model.state_dict()
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        one, other = state.get(name), state.get(source)
        if one is None or other is None or one.shape != other.shape:
            continue
        if one.data_ptr() == other.data_ptr():
            del state[name]
    return state
