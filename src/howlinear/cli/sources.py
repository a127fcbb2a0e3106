"""Models and texts that commands read: by name, or those of a run.

source = RunSource(run)                             # refused if its text has changed
net, tokenizer = source.load(Loader("cuda"))        # refused if its model has changed
windows = source.fit_windows(tokenizer)             # those that the run was fitted on
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howlinear.cli.output import made_by
from howlinear.cli.progress import say
from howlinear.run.folder import RunFolder

PARTS = ("fit", "choose", "report")


@dataclass(frozen=True)
class Loader:
    """Where a model's weights go, and what may be loaded."""

    device: str = "cpu"
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def load(self, model: str | None, label: str | None = None, **options: Any) -> tuple[Any, Any]:
        """The model and its tokenizer. Each process of a machine has a GPU of its own."""
        from howlinear.models import loading

        device = self.device
        if device == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ:
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        say(f"loading {label or model or 'the built-in model'}")
        code: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "allow_pickle": self.allow_pickle,
        }
        return loading.load(model, device=device, **code, **options)


class RunSource:
    """The text and the model of a run, refused if they are not what the run was made of."""

    def __init__(self, run: Path) -> None:
        from howlinear.models import corpus

        self.folder = RunFolder(run)
        self.asked, self.profile = self.folder.request()
        self.settings = self.profile["settings"]
        self.bos = self.settings.get("bos", "auto")
        self.text = corpus.open_text(*self.asked["text"])
        self.folder.check_text(self.text.fingerprint(), self.text.name)

    def load(self, loader: Loader) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        from howlinear.models import loading

        model, revision = self.asked["model"], self.asked["revision"]
        net, tokenizer = loader.load(model, revision=revision, dtype=self.asked["dtype"])
        self.folder.check_model(loading.describe(net, model, revision))
        return net, tokenizer

    def fit_windows(self, tokenizer: Any) -> Any:
        """The windows that the run was fitted on."""
        from howlinear.models import corpus

        length, tokens = self.settings["window"], self.settings["tokens"]
        return corpus.windows(self.text.fit, tokenizer, length, tokens=tokens, bos=self.bos)

    def about(self, *parts: str) -> dict[str, Any]:
        """What a result records: model, text and these parts of it, command, versions."""
        named = dict(zip(PARTS, self.text.parts, strict=True))
        corpus = {"name": self.text.name} | {part: named[part] for part in parts}
        return {"model": self.profile["model"], "corpus": corpus, **made_by()}


def window_length(net: Any, tokenizer: Any, length: int) -> int:
    """The window length, shortened to the model's positions with a message."""
    from howlinear.models.corpus import fitting_length

    most = fitting_length(net, tokenizer, length)
    if most < length:
        say(f"windows of {most} tokens instead of {length}: the model has no more positions")
    return most


def model_inputs(net: Any, ids: Any, batch_size: int = 8) -> Any:
    """Windows as they are; an encoder-decoder reads each of them on both sides."""
    if net.main_input_name != "input_ids":
        raise ValueError(
            f"{type(net).__name__} reads {net.main_input_name}, not text: "
            "call howlinear.profile from Python with batches of model inputs"
        )
    if not net.config.is_encoder_decoder:
        return ids
    return [{"input_ids": b, "decoder_input_ids": b} for b in ids.split(batch_size)]
