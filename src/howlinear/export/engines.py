"""Run an export in the engines that are installed, beside the original: predictions, speed, bytes.

    result = run_engines("small", original, source, windows, EngineSettings(repeats=7))
    result.rows[0]["largest_difference"]            # in nats, of any token's log-probability from ours

transformers and vLLM run in processes of their own (`engine_worker`), llama.cpp as a server (`llama_cpp`). An
engine reads the export and the original in the same format and type. Ours are the predictions of the
stored values in float32. For GGUF files both are also run in q8_0 and q4_0: a smaller type is what a user
might choose instead of fewer parameters. Speeds are measured by turns, as in `losses.speed`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from howlinear.export import (
    engine_worker,
    gguf_family,
    gguf_read,
    gguf_write,
    llama_cpp,
    nemotron_nas,
    stock,
)
from howlinear.export.llama_cpp import LlamaCpp, Prediction
from howlinear.export.weights import file_bytes, round_weights, stored_as
from howlinear.losses.speed import (
    PROMPT,
    WARM_UP,
    Speed,
    SpeedComparison,
    decode,
    generates,
    multiply_adds,
    prefill,
)
from howlinear.models import loading
from howlinear.models.families import parameter_count
from howlinear.models.ggufs import one_line
from howlinear.records import files
from howlinear.report.results import Result

PROMPTS, CONTINUED = 5, 32  # continuations that are compared, and their tokens
PEERS = ("q8_0", "q4_0")  # further types of both models beside a GGUF file
FLOATS = ("float32", "bfloat16", "float16")
DTYPES = {"hf": FLOATS, "stock": FLOATS, "nemotron-nas": FLOATS, "gguf": gguf_write.TYPES}


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of what is timed; `trust` runs code that comes with the export."""

    length: int = 512  # tokens of a prefill
    new_tokens: int = 32
    repeats: int = 5
    trust: bool = False

    @property
    def most(self) -> int:
        """Tokens that an engine must have room for."""
        return max(self.length, PROMPT + max(self.new_tokens + 1, CONTINUED)) + 1


class Engine(Protocol):
    """A model in a running engine."""

    def score(self, ids: Sequence[int]) -> list[Prediction | None]:
        """What is predicted for each token after the first; None where the engine does not say."""

    def speed(
        self, ids: Sequence[int], prompt: Sequence[int], new_tokens: int
    ) -> tuple[float, float]:
        """Seconds of reading `ids`, and of writing new tokens after `prompt`."""


@dataclass(frozen=True)
class Stored:
    """A model on disk, and the same values in memory."""

    name: str
    path: Path
    model: Any

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else file_bytes(self.path)


@dataclass(frozen=True, repr=False)
class EngineBench(Result):
    """`engines` says of each engine whether it ran; `rows` has one entry for each model in it."""

    engines: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def _file(self) -> tuple[str, dict[str, Any]]:
        return "engines", {"settings": self.settings, "engines": self.engines, "rows": self.rows}

    def _line(self) -> str:
        ran = [engine["name"] for engine in self.engines if engine["problem"] is None]
        return f"ran in {', '.join(ran) or 'no engine'}"


# ----------------------------------------------------------------------------------- what is run


def exported_kind(folder: str | Path) -> dict[str, Any]:
    """compress.json of an export; ValueError for any other folder."""
    path = Path(folder) / "compress.json"
    data = files.read_json(path, "compress") if path.is_file() else {}
    parts = (data.get("exported"), data.get("model"))
    exported, model = (part if isinstance(part, dict) else {} for part in parts)
    known = exported.get("dtype") in DTYPES.get(str(exported.get("kind")), ())
    if (
        not known
        or not {"id", "weights"} <= model.keys()
        or path.with_name("profile.json").exists()
    ):
        raise ValueError(f"{folder} is no folder with a model that `howlinear compress` wrote")
    return data


def run_engines(
    folder: str | Path,
    original: Any,
    source: str | Path | None,
    windows: Tensor,
    settings: EngineSettings,
) -> EngineBench:
    """Compare each engine's predictions of windows (n, length) with ours, and time it.

    `original` is the model that was compressed, `source` what `loading.load` took.
    """
    kind = exported_kind(folder)["exported"]["kind"]
    engines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        stored: list[Stored] = []
        for name, row in ENGINES.items():
            problem = row.missing() or (None if kind in row.kinds else f"does not run {kind}")
            if problem is None and kind in row.code and not settings.trust:
                problem = "needs the code in the folder, and trust_remote_code is off"
            if problem is None and not generates(original):
                problem = "is compared by generated text, and this model generates none"
            facts = {"name": name, "version": None, "problem": problem, "verdict": None}
            engines.append(facts)
            if problem is None:
                stored = stored or _stored(
                    Path(folder), original, source, Path(work), settings.trust
                )
                rows += _in_engine(name, row, stored, windows, settings, facts)
    shape = {"tokens": int(windows.numel()), "window": windows.shape[1]}
    shape["threads"] = torch.get_num_threads()
    return EngineBench(engines, rows, asdict(settings) | shape)


def engine_notes(folder: Path, kind: str, model: Any, windows: Tensor) -> list[str]:
    """What engines other than transformers make of an export that was just written: a line for each.

    Only engines that are installed run; transformers loads exports in `reload`.
    """
    notes: list[str] = []
    for name, row in ENGINES.items() if generates(model) else ():
        if name == "transformers" or kind not in row.kinds or row.missing():
            continue
        settings = EngineSettings(length=windows.shape[1], trust=True)  # the code is ours
        path = folder / gguf_write.FILE if kind == "gguf" else folder
        try:
            with row.start(Stored("export", path, model), settings) as (version, engine):
                found = _agreement(engine, model, windows)
        except Exception as problem:  # of other programs: the export is good without them
            notes.append(f"does not run in {name} here: {one_line(problem)}")
            continue
        notes.append(
            f"ran in {name} {version}: log-probabilities of {found['scored']} tokens differ from those of "
            f"the stored values by at most {found['largest_difference']:.2g} nats"
        )
    return notes


def _stored(
    folder: Path, original: Any, source: str | Path | None, work: Path, trust: bool
) -> list[Stored]:
    """The export, the original in the same type, and for GGUF files the original in smaller types."""
    exported = exported_kind(folder)["exported"]
    kind, dtype = exported["kind"], exported["dtype"]
    if kind != "gguf":
        if kind == "nemotron-nas":
            model = nemotron_nas.read_back(folder).float()
        else:  # stock exports need no code
            model, _ = loading.load(str(folder), trust_remote_code=trust and kind == "hf")
        place, stored = work / "original", getattr(torch, dtype)
        round_weights(original.float(), stored)
        with loading.quiet(), stored_as(original, stored):
            stock.save(original, place)
        return [Stored("export", folder, model), Stored("original", place, original)]
    path, before = folder / gguf_write.FILE, gguf_write.source_of(source)
    export = gguf_read.read_back(path)
    models = [Stored(f"export {dtype}", path, export)]
    for name in dict.fromkeys((dtype, *PEERS)):
        if name == "source":
            models.append(Stored("original source", before.path, original))
            continue
        models.append(_stored_gguf("original", original, before, name, work))
        if name != dtype:
            models.append(_stored_gguf("export", export, gguf_write.Source.of(path), name, work))
    return models


def _stored_gguf(
    title: str, model: Any, source: gguf_write.Source, name: str, work: Path
) -> Stored:
    """A model as a GGUF file of another type, with the metadata of its source."""
    path = work / f"{title}-{name}" / gguf_write.FILE
    path.parent.mkdir()
    if gguf_write.why_not_deci(model, source):  # the family's own architecture
        gguf_family.write_family(model, path, name, source)
    else:
        gguf_write.write_gguf(copy.deepcopy(model).float(), path, name, source)
    return Stored(f"{title} {name}", path, gguf_read.read_back(path))


# -------------------------------------------------------------------------------------- engines


@contextmanager
def _worker(
    python: Callable[[], str], name: str, stored: Stored, settings: EngineSettings
) -> Iterator[tuple[str, Engine]]:
    """transformers or vLLM in a process of its own."""
    place, trust = str(stored.path.resolve()), "trust" if settings.trust else ""
    command = [python(), "-P", engine_worker.__file__, name, place, str(settings.most), trust]
    variables = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **variables},
        )
        try:
            worker = _Worker(process, errors)
            yield worker.answer(), worker
        finally:
            process.kill()
            process.communicate()


@dataclass
class _Worker:
    process: Any
    errors: Any

    def answer(self, **request: Any) -> Any:
        """The answer to a request, or the first line that a worker writes."""
        try:
            if request:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            self.process.wait()
            self.errors.seek(0)
            raise ValueError(_reason(self.errors.read())) from None

    def score(self, ids: Sequence[int]) -> list[Prediction | None]:
        return [Prediction(*each) for each in self.answer(score=list(ids))]

    def speed(
        self, ids: Sequence[int], prompt: Sequence[int], new_tokens: int
    ) -> tuple[float, float]:
        read, wrote = self.answer(speed=list(ids), prompt=list(prompt), new_tokens=new_tokens)
        return read, wrote


def _reason(errors: str) -> str:
    """The line of a process's last words that names the error."""
    lines = [line for line in errors.splitlines() if line.strip()] or ["it ended without a word"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return one_line((named or lines)[-1])


@contextmanager
def _llama_cpp(stored: Stored, settings: EngineSettings) -> Iterator[tuple[str, Engine]]:
    way = llama_cpp.installed()
    version = importlib.metadata.version("xllamacpp") if way == "xllamacpp" else str(way)
    with LlamaCpp.start(stored.path, settings.most, torch.get_num_threads()) as engine:
        yield version, engine


def _vllm_python() -> str:
    """The Python that has vLLM: this one, or that of the program `vllm` on the path."""
    if importlib.util.find_spec("vllm"):
        return sys.executable
    program = shutil.which("vllm")
    python = Path(program).resolve().parent / "python" if program else None
    return str(python) if python and python.is_file() else ""


@dataclass(frozen=True)
class _Row:
    kinds: tuple[str, ...]  # exports that it runs
    code: tuple[str, ...]  # of these, those that come with code
    missing: Callable[[], str | None]
    start: Callable[[Stored, EngineSettings], AbstractContextManager[tuple[str, Engine]]]


ENGINES: Mapping[str, _Row] = {
    "transformers": _Row(
        ("hf", "stock"),
        ("hf",),
        lambda: None,
        partial(_worker, lambda: sys.executable, "transformers"),
    ),
    "llama.cpp": _Row(
        ("gguf",),
        (),
        lambda: None if llama_cpp.installed() else "is not there: pip install xllamacpp",
        _llama_cpp,
    ),
    "vLLM": _Row(
        ("stock", "nemotron-nas"),
        ("nemotron-nas",),
        lambda: None if _vllm_python() else "is not there: no vllm on the path",
        partial(_worker, _vllm_python, "vllm"),
    ),
}


# ------------------------------------------------------------------------------------ measuring


def _in_engine(
    name: str,
    row: _Row,
    stored: Sequence[Stored],
    windows: Tensor,
    settings: EngineSettings,
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    """A row for each model. Facts get the version, and the problem if the export does not run."""
    rows, running = [], []
    with ExitStack() as stack:
        for each in stored:
            found = {"engine": name, "model": each.name, "bytes": each.bytes, "problem": None}
            rows.append(found | {"parameters": parameter_count(each.model)})
            try:
                facts["version"], engine = stack.enter_context(row.start(each, settings))
                rows[-1] |= _agreement(engine, each.model, windows)
                running.append((rows[-1], each, engine))
            except Exception as error:  # what the engine says
                rows[-1]["problem"] = one_line(error)
        timed = _timed(running, windows, settings)
    if len(timed) > 1 and rows[0]["problem"] is None and rows[1]["problem"] is None:
        facts["verdict"] = SpeedComparison(timed[0], timed[1]).verdict
    facts["problem"] = rows[0]["problem"]
    return rows


@torch.no_grad()
def _agreement(engine: Engine, model: Any, windows: Tensor) -> dict[str, Any]:
    """How the engine's predictions of the windows and of continuations differ from ours."""
    pairs: list[tuple[float, int, Prediction]] = []
    for ids in windows:
        ours = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        own = ours.gather(1, ids[1:, None])[:, 0].tolist()
        answers = zip(own, ours.argmax(-1).tolist(), engine.score(ids.tolist()), strict=True)
        pairs += [(value, best, answer) for value, best, answer in answers if answer is not None]
    theirs = [answer.log_probability for _, _, answer in pairs]
    text = windows.flatten()
    prompts = [text[i * len(text) // (PROMPTS + 1) :][:PROMPT] for i in range(PROMPTS)]
    margins = [m for m in (_margin(engine, model, ids) for ids in prompts) if m == m]
    return {
        "scored": len(pairs),
        "perplexity": math.exp(-sum(theirs) / len(pairs)),
        "perplexity_ours": math.exp(-sum(own for own, _, _ in pairs) / len(pairs)),
        "largest_difference": max(abs(own - answer[0]) for own, _, answer in pairs),
        "top1": sum(best == answer.most_likely for _, best, answer in pairs) / len(pairs),
        "continuations": len(margins),
        "continuations_same": sum(margin == 0 for margin in margins),
        "largest_margin": max((m for m in margins if m), default=None),
    }


def _margin(engine: Engine, model: Any, ids: Tensor) -> float:
    """0 if the engine would continue a prompt with the 32 tokens that we do, greedily.

    Else by how many nats it prefers another token at the first difference; small for a tie. NaN where
    it does not say what it predicts. It is asked for the probabilities of our continuation.
    """
    prompt = ids[None]
    ours = torch.cat([prompt, decode(model, prompt, CONTINUED - 1)[0]], 1)[0].tolist()
    answers = engine.score(ours)[-CONTINUED:]
    for token, answer in zip(ours[-CONTINUED:], answers, strict=True):
        if answer is None:
            return math.nan
        if answer.most_likely != token:
            return max(answer.highest - answer.log_probability, 1e-9)
    return 0.0


def _timed(
    running: Sequence[tuple[dict[str, Any], Stored, Engine]],
    windows: Tensor,
    settings: EngineSettings,
) -> list[Speed]:
    """Speeds by turns, which the rows get too."""
    ids = windows.flatten()[: settings.length].tolist()
    for _, _, engine in running:
        engine.speed(ids, ids[:PROMPT], WARM_UP)
    turns: list[list[tuple[float, float]]] = [[] for _ in running]
    for turn in range(settings.repeats):
        for i in list(range(len(running)))[:: -1 if turn % 2 else 1]:
            turns[i].append(running[i][2].speed(ids, ids[:PROMPT], settings.new_tokens))
    return [
        _speed(row, stored, ids, seconds, settings.new_tokens)
        for (row, stored, _), seconds in zip(running, turns, strict=True)
    ]


def _speed(
    row: dict[str, Any],
    stored: Stored,
    ids: list[int],
    seconds: list[tuple[float, float]],
    new_tokens: int,
) -> Speed:
    """The speed by the seconds of each turn, prefill and decode; its rates go into the row."""
    with torch.no_grad():
        count = multiply_adds(partial(prefill, stored.model, torch.tensor([ids])))
    reads, writes = zip(*seconds, strict=True)
    speed = Speed(
        parameters=row["parameters"],
        bytes=row["bytes"],
        bytes_on_disk=row["bytes"],
        multiply_adds=count,
        prefill_seconds=reads,
        decode_seconds=writes,
        settings={"batch": 1, "length": len(ids), "new_tokens": new_tokens},
    )
    rates = speed.fields()
    row |= {name: rates[name] for name in ("prefill", "decode", "multiply_adds")}
    return speed
