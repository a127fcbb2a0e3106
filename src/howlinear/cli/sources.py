"""Models and texts that commands read: by name, or those of a run.

source = RunSource(run, model, text_file)           # where they are now; None: where they were
net = source.load(Loader("cuda"))                   # refused if it is not the run's model
windows = source.fit_windows()                      # those that the run was fitted on
ids, n_bytes = source.held_out("report", source.protocol(), 4096)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from howlinear.cli.output import Progress, made_by, progress_bars, say
from howlinear.run.folder import RunFolder

PARTS = ("fit", "choose", "report")
Follow = Callable[[Progress], Progress]  # a function that sees progress and passes it on
GENERATED = "generated"  # in place of a text: what the model writes itself
NONE = "none"  # no text beside the run's


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


def _unchanged(progress: Progress) -> Progress:
    return progress


def _each(windows: Any, others: Sequence[Any]) -> int:
    """Windows of each other text, beside these of the run's."""
    return max(1, len(windows) // (len(others) or 1))


class RunSource:
    """The text and the model of a run, refused if they are not what the run was made of."""

    net: Any  # loaded by `load`
    tokenizer: Any
    generated: Any = None  # windows that the model has written
    fitted: Any = None  # windows of `fit_windows`: the whole text is cut once

    def __init__(self, run: Path, model: str | None = None, text_file: str | None = None) -> None:
        self.folder = RunFolder(run)
        self.asked, self.profile = self.folder.request()
        self.settings = self.profile["settings"]
        self.bos = self.settings.get("bos", "auto")
        self.model, self.revision = model or self.asked["model"], self.asked["revision"]
        if model is not None:
            self.revision = None
        self.text = self._open(text_file)
        self.folder.check_text(self.text.fingerprint(), self.text.name)

    def _open(self, text_file: str | None) -> Any:
        """The text in its new place, or where the run read it."""
        from howlinear.models import corpus

        if text_file is not None:
            return corpus.open_text(text_file)
        if self.asked["text"][0] == "-":
            raise ValueError(
                f"{self.folder.folder} read its text from stdin: save it, name it with --text-file"
            )
        try:
            return corpus.open_text(*self.asked["text"])
        except FileNotFoundError:
            raise self._gone("text", self.asked["text"][0], "--text-file") from None

    def other_texts(self, names: Sequence[str]) -> list[Any]:
        """Texts to fit on beside the run's, by name or file; the run's own is refused. GENERATED stays a name."""
        from howlinear.models import corpus

        if NONE in names:
            if len(names) > 1:
                raise ValueError(f"--also-fit {NONE} stands alone: leave it out to name texts")
            return []
        texts: list[Any] = []
        seen = {self.text.fingerprint()}
        for name in names:
            if name == GENERATED and name not in texts:
                texts.append(name)
                continue
            if name in texts:
                raise ValueError(f"{name} is fitted on already: leave out this --also-fit")
            try:
                text = corpus.open_text(name)
            except (ValueError, FileNotFoundError) as problem:
                raise ValueError(str(problem).replace("`path`", "`also_fit`")) from None
            if text.fingerprint() in seen:
                raise ValueError(f"{name} is fitted on already: leave out this --also-fit")
            seen.add(text.fingerprint())
            texts.append(text)
        return texts

    def _gone(self, what: str, place: str, flag: str) -> ValueError:
        return ValueError(
            f"the {what} of {self.folder.folder} was {place}, which does not exist: name its new "
            f"place with {flag}"
        )

    def load(self, loader: Loader, check: Any = None, **placed: Any) -> Any:
        """The model; for `check` and where weights are `placed` see `loading.load`."""
        from howlinear.models import loading

        options = {"revision": self.revision, "dtype": self.asked["dtype"], "check": check}
        try:
            self.net, self.tokenizer = loader.load(self.model, **options, **placed)
        except FileNotFoundError:
            if self.model != self.asked["model"]:
                raise
            raise self._gone("model", self.model, "--model") from None
        self.folder.check_model(loading.describe(self.net, self.model, self.revision))
        return self.net

    def check_blocks(self, at: str | None, every: bool = False) -> None:
        """Refuse blocks that the run has not measured, before the model is loaded; or fewer than `every`."""
        from howlinear.models.naming import indices_of

        paths = self._paths()
        if len(indices_of(at, paths)) < len(paths) and every:
            raise ValueError(f"a stock model has one width: replace all {len(paths)} blocks")

    def check_plan(self, plan: Sequence[Any]) -> None:
        """Refuse a plan with blocks that the run has not measured, before the model is loaded."""
        from howlinear.compression.plan import check_blocks

        check_blocks(plan, self._paths())

    def check_plan_units(self, plan: Sequence[Any]) -> None:
        """Refuse a plan that keeps more hidden units than a block has."""
        from howlinear.compression.plan import check_units
        from howlinear.models.units import hidden_count

        if plan:
            check_units(plan, {b.index: hidden_count(self.net, b) for b in self.blocks()})

    def indices(self, text: str | None, argument: str) -> tuple[int, ...]:
        """Blocks that an argument names by indices, such as 3,5,9-12; refused if the run has others."""
        from howlinear.models.naming import depth_indices

        return () if text is None else tuple(depth_indices(text, list(self._paths()), argument))

    def _paths(self) -> dict[int, str]:
        return {b["index"]: b["path"] for b in self.profile["blocks"]}

    def blocks(self, at: str | None = None) -> list[Any]:
        """The model's blocks that the run has measured, or those `at`."""
        from howlinear.profiling.profiler import Profile
        from howlinear.swapping.maps import match

        return [b for b, _ in match(self.net, Profile.load(self.folder.folder), at)]

    def fit_windows(self) -> Any:
        """The windows that the run was fitted on, with their documents: `Windows`."""
        from howlinear.models.forward import as_windows
        from howlinear.profiling.merging import fit_windows

        if self.fitted is not None:
            return self.fitted
        windows = as_windows(fit_windows(self.text.fit, self.tokenizer, self.settings))
        if windows.tokens != self.settings["tokens"]:
            raise ValueError(
                f"{self.folder.folder} was fitted on {self.settings['tokens']} tokens and its text "
                f"gives {windows.tokens}: profile again"
            )
        self.fitted = windows
        return windows

    def heal_windows(self, others: Sequence[Any], steps: int, tokens: int) -> Any:
        """Windows of the run's text and of other texts for so many steps, each of so many tokens or one window.

        Fewer where the texts are shorter; GENERATED has no more than for fitting, and the run's text has the rest.
        """
        windows = self.fit_windows().ids
        share = wanted = steps * max(tokens, windows.shape[1])
        if others:
            share = wanted // 2
        if GENERATED in others:
            share = max(share, wanted - windows[::2].numel() // len(others))
        if share > windows.numel():
            windows = self.short_windows(windows.shape[1], share)
        return self.mixed_windows(others, windows)[0]

    def mixed_windows(
        self, others: Sequence[Any], windows: Any = None, follow: Follow = _unchanged
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Windows of the run's text and of other texts, and how many tokens each has.

        Those of the run's text are, unless given, its fit windows; beside others every second one. The others
        together have as many tokens, or all they have. `follow` sees the progress of writing.
        """
        from howlinear.models import cutting

        if windows is None:
            windows = self._own_windows(others)
        parts, names = [windows], [self.text.name]
        for text in others:
            names.append(getattr(text, "name", text))
            cut = (_each(windows, others), windows.shape[1])
            parts.append(
                self._written(*cut, follow)
                if text == GENERATED
                else cutting.spread_windows(
                    text.fit, self.tokenizer, cut[1], tokens=cut[0] * cut[1], bos=self.bos
                )["input_ids"]
            )
        read = [{"name": n, "tokens": p.numel()} for n, p in zip(names, parts, strict=True)]
        return cutting.mixed(parts), read

    def _own_windows(self, others: Sequence[Any]) -> Any:
        """The windows of the run's text that are fitted on beside other texts."""
        return self.fit_windows().ids[:: 2 if others else 1]

    def to_write(self, others: Sequence[Any]) -> int:
        """Tokens that the model has to write before `mixed_windows` has them all."""
        windows = self._own_windows(others)
        count, length = _each(windows, others), windows.shape[1]
        if GENERATED not in others or self._kept_text(count, length) is not None:
            return 0
        return int(count * length)

    def _written(self, count: int, length: int, follow: Follow) -> Any:
        """Windows that the model writes once; the run keeps them for later commands."""
        from howlinear.models.generated import generated_windows, why_no_text
        from howlinear.run.tensors import write_tensors

        if self.generated is not None:
            return self.generated[:count]
        self.generated = None if why_no_text(self.net) else self._kept_text(count, length)
        if self.generated is not None:
            say(f"reading the text that the model wrote before: {self.folder.written}")
            return self.generated
        with progress_bars() as begin:
            advance = follow(begin)("the model writes text", count * length)
            cut = {"bos": self.bos, "progress": advance}
            self.generated = generated_windows(self.net, self.tokenizer, count, length, **cut)
        with suppress(OSError):  # a full disk keeps nothing
            about = self._about_text(count, length)
            write_tensors(self.folder.written, {"ids": self.generated}, **about)
        return self.generated

    def _kept_text(self, count: int, length: int) -> Any:
        """Windows that an earlier command wrote; None where the run has none like these."""
        import torch

        from howlinear.run.tensors import read_tensors

        with suppress(ValueError, KeyError):
            ids = read_tensors(self.folder.written, **self._about_text(count, length))["ids"]
            known = self.net.get_input_embeddings().num_embeddings
            if ids.dtype == torch.int64 and ids.shape == (count, length):
                return ids if bool(((ids >= 0) & (ids < known)).all()) else None
        return None

    def _about_text(self, count: int, length: int) -> dict[str, str]:
        """What the text that the model writes depends on."""
        from howlinear.models.cutting import first_ids
        from howlinear.models.generated import VERSION, special_ids

        tokenizer, special = self.tokenizer, special_ids(self.tokenizer)
        return {
            "kind": "written",
            "version": VERSION,
            "weights": str(self.profile["model"]["weights"]),
            "windows": f"{count} of {length} tokens, first {first_ids(tokenizer, self.bos)}",
            "vocabulary": f"{len(tokenizer)}, special {sorted(special)}",
        }

    def short_windows(self, length: int, tokens: int) -> Any:
        """Windows of this length from the text that the run was fitted on."""
        from howlinear.models import cutting

        if self.settings.get("shards"):  # beginnings of the run's windows: others lie between
            return self.fit_windows().ids[: max(1, tokens // length), :length]
        cut = {"tokens": tokens, "bos": self.bos}
        return cutting.spread_windows(self.text.fit, self.tokenizer, length, **cut)["input_ids"]

    def protocol(self, name: str = "windows-128") -> Any:
        """How held-out text is cut; windows are shortened to the model's positions."""
        from howlinear.losses.protocols import EvalProtocol

        cut = EvalProtocol.parse(name)
        if not name.startswith("windows"):
            return cut
        return EvalProtocol.parse(f"windows-{window_length(self.net, self.tokenizer, cut.length)}")

    def held_out(self, part: str, protocol: Any, tokens: int, **order: Any) -> tuple[Any, int]:
        """Tokens of the text to choose by or to report on, and their bytes; see `held_out_tokens`."""
        from howlinear.losses.protocols import held_out_tokens

        text = getattr(self.text, part)()
        return held_out_tokens(text, self.tokenizer, protocol, tokens, self.bos, **order)

    def about(self, *parts: str) -> dict[str, Any]:
        """What a result records: model, text and these parts of it, command, versions."""
        named = dict(zip(PARTS, self.text.parts, strict=True))
        corpus = {"name": self.profile["corpus"]["name"]} | {part: named[part] for part in parts}
        return {"model": self.profile["model"], "corpus": corpus, **made_by()}


def in_full(request: dict[str, Any]) -> dict[str, Any]:
    """A request with its local files and folders in full, so that they are found from anywhere."""
    from howlinear.models.corpus import BUILTIN

    source, dataset, *rest = request["text"]
    if source not in (None, "-", *BUILTIN):
        source = absolute(source)
    model, dataset = (name and absolute(name) for name in (request["model"], dataset))
    return {**request, "model": model, "text": [source, dataset, *rest]}


def is_packed(model: str | None) -> bool:
    """Is it a GGUF file, as the built-in model is? Its weights are read whole."""
    return model is None or str(model).endswith(".gguf")


def absolute(name: str) -> str:
    """A path from the root; a name on the hub as it is."""
    path = Path(name).expanduser()
    return os.path.abspath(path) if path.exists() else name


def window_length(net: Any, tokenizer: Any, length: int) -> int:
    """The window length, shortened to the model's positions with a message."""
    from howlinear.models.cutting import fitting_length

    most = fitting_length(net, tokenizer, length)
    if most < length:
        say(f"windows of {most} tokens instead of {length}: the model has no more positions")
    return most
