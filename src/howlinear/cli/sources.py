"""Models and texts that commands read: by name, or those of a run.

source = RunSource(run)                             # refused if its text has changed
net = source.load(Loader("cuda"))                   # refused if its model has changed
windows = source.fit_windows()                      # those that the run was fitted on
ids, n_bytes = source.held_out("report", source.protocol(), 4096)
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from howlinear.cli.output import made_by, say
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

        options = asdict(self) | options
        if self.device == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ:
            options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        say(f"loading {label or model or 'the built-in model'}")
        return loading.load(model, **options)


class RunSource:
    """The text and the model of a run, refused if they are not what the run was made of."""

    net: Any  # loaded by `load`
    tokenizer: Any

    def __init__(self, run: Path) -> None:
        from howlinear.models import corpus

        self.folder = RunFolder(run)
        self.asked, self.profile = self.folder.request()
        self.settings = self.profile["settings"]
        self.bos = self.settings.get("bos", "auto")
        self.text = corpus.open_text(*self.asked["text"])
        self.folder.check_text(self.text.fingerprint(), self.text.name)

    def load(self, loader: Loader) -> Any:
        """The model."""
        from howlinear.models import loading

        model, revision = self.asked["model"], self.asked["revision"]
        options = {"revision": revision, "dtype": self.asked["dtype"]}
        self.net, self.tokenizer = loader.load(model, **options)
        self.folder.check_model(loading.describe(self.net, model, revision))
        return self.net

    def blocks(self, at: str | None = None) -> list[Any]:
        """The model's blocks that the run has measured, or those `at`."""
        from howlinear.profiling.profiler import Profile
        from howlinear.swapping.maps import match

        return [b for b, _ in match(self.net, Profile.load(self.folder.folder), at)]

    def fit_windows(self) -> Any:
        """The windows that the run was fitted on."""
        from howlinear.profiling.merging import fit_windows

        ids = fit_windows(self.text.fit, self.tokenizer, self.settings)
        if ids.numel() != self.settings["tokens"]:
            raise ValueError(
                f"{self.folder.folder} was fitted on {self.settings['tokens']} tokens and its text "
                f"gives {ids.numel()}: profile again"
            )
        return ids

    def short_windows(self, length: int, tokens: int) -> Any:
        """Windows of this length from the text that the run was fitted on."""
        from howlinear.models import corpus

        if self.settings.get("shards"):  # beginnings of the run's windows: others lie between
            return self.fit_windows()[: max(1, tokens // length), :length]
        return corpus.windows(self.text.fit, self.tokenizer, length, tokens=tokens, bos=self.bos)

    def protocol(self, name: str = "windows-128") -> Any:
        """How held-out text is cut; windows are shortened to the model's positions."""
        from howlinear.losses.protocols import EvalProtocol

        cut = EvalProtocol.parse(name)
        if not name.startswith("windows"):
            return cut
        return EvalProtocol.parse(f"windows-{window_length(self.net, self.tokenizer, cut.length)}")

    def held_out(self, part: str, protocol: Any, tokens: int) -> tuple[Any, int]:
        """Tokens of the text to choose by or to report on, and their bytes."""
        from howlinear.losses.protocols import held_out_tokens

        text = getattr(self.text, part)()
        return held_out_tokens(text, self.tokenizer, protocol, tokens, self.bos)

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
