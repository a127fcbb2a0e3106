"""The run folder: its files, and whether a run belongs to a model, a text and a request.

    run = RunFolder("runs/demo")
    run.read("profile")["corpus"]               # checked for kind and schema
    run.blocks("swap", BlockSwap)[3].delta_ppl  # records by block index
    run.write(result.to_dict())                 # to the file of its kind, written whole
    run.add(result.to_dict())                   # the same; what the file held stays in `earlier`
    run.newest("swap", BlockSwap)[3]            # whichever settings block 3 was measured with last
    asked, profile = run.request()              # how the model and the text were loaded
    run.check_model(now); run.check_text(fingerprint, name)
    run.finished(asked, corpus, now)            # is this measured already?

A file is called after its kind: swap.json is of kind "swap". It holds the result of one set of
settings; results of other settings are whole documents in its list `earlier`, newest first.
`moments/` and `maps/` hold one file of tensors for each block (`run.tensors`); progress.json and
`partial/` are what a profile that was interrupted resumes from (`run.saving`), `healing/` what the
healing of maps goes on from (`run.training`), written.safetensors is text that the model wrote. Each command writes
its own file and no other's: what is known of a block is combined when it is read (`costs_in_words`). No
torch here.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from howlinear.records.fields import BlockProfile, BlockSwap, Record
from howlinear.records.files import (
    blocks_of,
    check_writable,
    clean,
    read_json,
    read_monitor,
    write_json,
)
from howlinear.records.verdicts import cost_in_words

#: What a profile leaves, whole or of one shard.
MEASURED = ("profile", "shard")
#: What other commands add. A new profile in the same folder removes it, with --overwrite alone.
DERIVED = ("swap", "swap-experts", "probe", "plan", "compress", "control-*")
#: Settings that change how fast or how long a result is measured, or its words: not its numbers.
COURSE = ("batch_size", "resumed", "ceiling", "safe")
#: What a result says about its making, beside its settings.
MADE_BY = ("command", "versions")
#: What must be the same for a model to be the run's.
MODEL = ("family", "revision", "parameters", "weights")

R = TypeVar("R", bound=Record)


class RunFolder:
    """One run folder, which need not exist yet."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    # -- files ------------------------------------------------------------------------------------

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}.json"

    def has(self, kind: str) -> bool:
        return self.path(kind).is_file()

    def read(self, kind: str) -> dict[str, Any]:
        """The file of this kind; ValueError in one line if it is missing, damaged or another's."""
        return read_json(self.path(kind), kind)

    def blocks(self, kind: str, record: type[R]) -> dict[int, R]:
        """The records that a file lists, by block index in depth order; each block once."""
        return records_of(self.path(kind), self.read(kind), record)

    def write(self, data: Mapping[str, Any]) -> Path:
        """Write a result to the file of its kind; the path."""
        path = self.path(data["kind"])
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, data)
        return path

    # -- results of several settings in one file ---------------------------------------------------

    def sets(self, kind: str) -> list[dict[str, Any]]:
        """Results of this kind, newest first, each with the settings that it was measured with."""
        if not self.has(kind):
            return []
        data = self.read(kind)
        earlier = data.pop("earlier", [])
        sets: list[Any] = [data, *earlier] if isinstance(earlier, list) else [None]
        if not all(map(_is_result, sets)):
            raise ValueError(f"{self.path(kind)} is damaged: move it away")
        return sets

    def alike(self, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result in the folder that was measured as `data` was, on the same tokens; or None."""
        return next((each for each in self.sets(data["kind"]) if _alike(each, data)), None)

    def add(
        self,
        data: Mapping[str, Any],
        replaced: Mapping[str, Any] | None = None,
        left: Sequence[Mapping[str, Any]] = (),
    ) -> Path:
        """Write a result; others of its kind stay in `earlier`, unless it has all they say.

        `left` are results to keep of the one that is replaced.
        """
        others = [*left, *(each for each in self.sets(data["kind"]) if each != replaced)]
        earlier = [each for each in others if not _says_all(data, each)]
        return self.write({**data, "earlier": earlier} if earlier else data)

    def check_addable(self, *kinds: str, way_out: str = "") -> None:
        """Refuse, before the work, a folder that results of these kinds cannot be added to."""
        for kind in kinds:
            check_writable(self.path(kind), way_out)
            self.sets(kind)
            if self.has(kind) and self.has("profile"):
                self.check_same_weights(kind)

    def newest(self, kind: str, record: type[R]) -> dict[int, R]:
        """The newest record of each block, of whichever settings, by block index in depth order."""
        records: dict[int, R] = {}
        for each in self.sets(kind):
            if each.get("blocks"):
                records = records_of(self.path(kind), each, record) | records
        return dict(sorted(records.items()))

    @property
    def healing(self) -> Path:
        """The state of maps under training, while `howlinear compress --heal` runs."""
        return self.folder / "healing"

    @property
    def written(self) -> Path:
        """Text that the model wrote to fit on: a later `howlinear compress` reads it again."""
        return self.folder / "written.safetensors"

    @property
    def monitor(self) -> Path:
        """The log of a training."""
        return self.folder / "monitor.jsonl"

    def training(self) -> list[dict[str, Any]]:
        """Rows of the log of a training; none without a log."""
        return read_monitor(self.monitor)[1] if self.monitor.exists() else []

    def costs_in_words(self) -> dict[int, str]:
        """For each block the cost of a swap: measured if `howlinear swap` ran, else expected."""
        swaps = self.newest("swap", BlockSwap)
        profiles = self.blocks("profile", BlockProfile)
        return {i: cost_in_words(b, swaps.get(i)) for i, b in profiles.items()}

    # -- belonging to a model and a text ----------------------------------------------------------

    def request(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `howlinear profile` was asked for (model, revision, dtype, text), and profile.json."""
        profile = self.read("profile")
        asked, wanted = profile.get("asked"), ("model", "revision", "dtype", "text")
        parts = [profile.get(name) for name in ("model", "corpus", "settings")]
        if not isinstance(asked, dict) or not all(name in asked for name in wanted):
            raise ValueError(
                f"{self.folder} does not say how its model and text were loaded, as `howlinear "
                "profile` would: call howlinear.swap_costs from Python"
            )
        if not all(isinstance(part, dict) for part in parts) or len(asked["text"]) != 5:
            raise ValueError(
                f"{self.path('profile')} lacks model, corpus or settings: profile again"
            )
        return asked, profile

    def check_model(self, now: Mapping[str, Any], kind: str = "profile") -> None:
        """Refuse a model, as `models.loading.describe` gives it, that is not the run's."""
        if difference := model_difference(self.read(kind)["model"], now):
            raise ValueError(
                f"{self.folder} was made with another model: {difference}: profile again, in "
                "another folder (`out`) or with `overwrite=True`"
            )

    def check_text(self, fingerprint: str, name: str, kind: str = "profile") -> None:
        """Refuse a text that has changed since the run read it."""
        if self.read(kind)["corpus"]["fingerprint"] != fingerprint:
            raise ValueError(
                f"{name} is not the text of {self.folder}, or has changed since: profile again, in "
                "another folder (`out`) or with `overwrite=True`"
            )

    def check_same_weights(self, kind: str) -> dict[str, Any]:
        """A file beside the profile, refused if it is about other weights."""
        data, profile = self.read(kind), self.read("profile") if self.has("profile") else {}
        weights = [
            d["model"].get("weights") for d in (data, profile) if isinstance(d.get("model"), dict)
        ]
        if len(set(map(str, weights))) > 1:
            raise ValueError(
                f"{self.path(kind)} is about other weights than {self.path('profile')}: "
                "move it away, and make it again"
            )
        return data

    # -- beginning, resuming, beginning again -----------------------------------------------------

    def holds(self, asked: Mapping[str, Any]) -> bool:
        """Is there a complete profile or shard of this request?"""
        with contextlib.suppress(ValueError):
            return bool(self.read(_kind(asked)).get("asked") == clean(asked))
        return False

    def finished(
        self, asked: Mapping[str, Any], text: Mapping[str, Any], model: Mapping[str, Any]
    ) -> bool:
        """Is this request measured already? Refused if its text or its model has changed since.

        `text` has a name and a fingerprint, `model` is as `models.loading.describe` gives it.
        """
        if self.has("progress") or not self.holds(asked):
            return False
        kind = _kind(asked)
        self.check_text(text["fingerprint"], text["name"], kind)
        self.check_model(model, kind)
        return True

    def check_free(self, asked: Mapping[str, Any], overwrite: bool = False) -> None:
        """Refuse a folder with anything in it but this request's run, complete or interrupted.

        A folder that cannot be written to is refused, too.
        """
        out = self.folder
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file: name a folder with `out`")
        check_writable(self.path("profile"), "name another folder with `out`")
        if self.has("progress"):
            try:
                self.check_resumable(self.read("progress").get("asked"), asked)
                return
            except ValueError:
                if not overwrite:
                    raise
        if overwrite:
            self.remove_progress()
            return
        left = [p for p in out.iterdir() if not _is_trace(p)] if out.exists() else []
        if left and not self.holds(asked):
            raise ValueError(
                f"{out} is not empty: name another folder with `out`, or pass `overwrite=True`"
            )

    def check_resumable(self, before: Any, asked: Mapping[str, Any]) -> None:
        """Refuse to resume an interrupted profile that was asked for something else; name it."""
        if not isinstance(before, dict):
            raise ValueError(
                f"{self.path('progress')} is damaged: pass `overwrite=True` to start again"
            )
        now = clean(asked)
        for name in now:
            if before.get(name) != now[name]:
                raise ValueError(
                    f"{self.folder} holds an unfinished profile with another {name} "
                    f"({before.get(name)}, now {now[name]}): ask for the same to go on, or pass "
                    "`overwrite=True` to start again"
                )

    def check_unmeasured(self) -> None:
        """Refuse a folder with a run in it, or with results that a run's maps gave."""
        kinds = (*MEASURED, "progress", *(kind for kind in DERIVED if "*" not in kind))
        if names := [self.path(kind).name for kind in kinds if self.has(kind)]:
            raise ValueError(
                f"{self.folder} holds a run already ({', '.join(names)}): name another folder, or "
                "pass overwrite=True to remove it"
            )

    def remove_results(self) -> None:
        """Remove everything measured, first the files that mark it as complete."""
        for kind in (*MEASURED, *DERIVED):
            for path in self.folder.glob(f"{kind}.json"):
                path.unlink()
        for name in ("moments", "maps", "healing"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.written.unlink(missing_ok=True)

    def remove_progress(self) -> None:
        """Remove everything that an interrupted profile would resume from."""
        self.path("progress").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "partial", ignore_errors=True)


def records_of(path: Path, data: Mapping[str, Any], record: type[R]) -> dict[int, R]:
    """Records of a file that is already read, by block index in depth order; each block once."""
    records: list[Any] = sorted(blocks_of(path, data, record), key=lambda b: b.index)
    by_index = {b.index: b for b in records}
    if len(by_index) < len(records):
        raise ValueError(f"{path} lists a block twice")
    return by_index


def with_blocks(before: Mapping[str, Any], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks or experts of two results that were measured alike; `data` has the newer ones."""

    def place(block: Mapping[str, Any]) -> tuple[Any, ...]:
        expert = str(block.get("expert", ""))
        return block["index"], not expert.isdecimal(), expert.zfill(8)

    by_place = {place(block): block for each in (before, data) for block in each["blocks"]}
    return [by_place[at] for at in sorted(by_place)]


def _alike(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """The same settings, text, weights and version; the same loss of the unchanged model, where both
    know it on as many tokens."""
    if _measured_with(one) != _measured_with(two):
        return False
    bases = [d["base"] for d in (one, two) if isinstance(d.get("base"), Mapping)]
    nats, tokens = ([base.get(name) for base in bases] for name in ("nats", "tokens"))
    if len(bases) < 2 or None in nats or tokens[0] != tokens[1]:
        return True
    return math.isclose(*nats, rel_tol=1e-5)


def _says_all(data: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Does a result say everything that an earlier one says, with the same settings?"""
    if _measured_with(data) != _measured_with(before):
        return False
    now = clean(data)
    if "settings" in now and "blocks" in now:
        exported = before.get("exported") in (None, now.get("exported"))
        lists = [(now.get(name, []), before.get(name, [])) for name in ("blocks", "curve")]
        return exported and all(item in ours for ours, theirs in lists for item in theirs)
    return all(now.get(name) == before[name] for name in before if name not in MADE_BY)


def _measured_with(data: Mapping[str, Any]) -> dict[str, Any]:
    names = ("settings", "model", "model_b", "versions")
    settings, model, other, versions = (data.get(name) or {} for name in names)
    return {
        "settings": clean({k: v for k, v in settings.items() if k not in COURSE}),
        "corpus": data.get("corpus"),
        "weights": (model.get("weights"), other.get("weights")),
        "howlinear": versions.get("howlinear"),
    }


def _is_result(data: Any) -> bool:
    """Has it blocks (a bench has none), and the parts that say how it was measured?"""
    if not isinstance(data, dict):
        return False
    blocks = data.get("blocks", [] if data.get("kind") == "bench" else None)
    if not isinstance(blocks, list):
        return False
    names = ("settings", "model", "model_b", "versions", "base")
    parts = all(isinstance(data.get(name), dict | None) for name in names)
    return parts and all(isinstance(b, dict) and type(b.get("index")) is int for b in blocks)


def _kind(asked: Mapping[str, Any]) -> str:
    """What a request to profile leaves: a profile, or a shard of one."""
    return "shard" if asked.get("shard", (0, 1))[1] > 1 else "profile"


def model_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two models, as `models.loading.describe` gives them; empty if nothing does.

    A copy of a hub model in a folder has no revision: there weights decide.
    """
    for name in MODEL:
        known = name != "revision" or (before.get(name) and now[name])
        if known and before.get(name) != now[name]:
            return f"{name} was {before.get(name)}, {now['id']} has {now[name]}"
    return ""


def _is_trace(path: Path) -> bool:
    """Something that an interruption at the very beginning leaves."""
    return path.name == "partial" or (path.name.startswith(".") and path.name.endswith(".tmp"))
