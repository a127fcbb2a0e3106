"""How fast a model runs, alone and beside another: tokens a second in prefill and decode, and sizes.

    speed = measure(model)                       # speed.prefill.median, .q25, .q75 tokens a second
    both = compare_speeds(smaller, model)        # how many times as fast is the first?
    both.prefill.median, both.promised, both.reached
    print(both.verdict)

Prefill is one forward over a prompt, with the logits of its last position, as before generation.
Decode is greedy, one token at a time, with a key-value cache. Other programs slow a machine down for
seconds at a time. So two models take turns, prefill after prefill and decode after decode, the order
alternates, and each ratio is of two runs that are neighbours in time.

`promised` is the ratio of multiply-adds in prefill, `reached` the measured ratio of times over it. A
model that gained nothing has reached 1 / promised, which may be close to 1; `saved_share` is the share
of the promised saving of time that was measured: 0 for no gain.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from howlinear.models.hooks import evaluating
from howlinear.models.offload import device_of
from howlinear.records.words import count, number
from howlinear.report.results import Result

PROMPT = 16  # tokens before decoding: short, so that decode is about weights, not about attention
WARM_UP = 2  # steps of decoding before the clock runs
# Attention kernels that skip masked products when `is_causal` is set: its place in their arguments.
CAUSAL = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
}


@dataclass(frozen=True)
class SpeedSettings:
    """Sizes of what is timed, and the number of repeats."""

    length: int = 512
    batch: int = 1
    new_tokens: int = 32
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "batch", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")

    @property
    def prompt(self) -> int:
        return min(PROMPT, self.length)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some repeats, and an interval for the median.

    `low` and `high` are order statistics. The interval holds the median of the distribution with
    probability 0.9 or more, without assumptions: the range of 5 to 7 repeats (0.94 to 0.98). With
    fewer than 5 repeats the probability is lower.
    """

    median: float
    q25: float
    q75: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        n, out = len(ordered), 0  # how many to leave out at each end
        while 1 - 2 * sum(math.comb(n, i) for i in range(out + 2)) / 2**n >= 0.9:
            out += 1
        q25, median, q75 = (
            statistics.quantiles(ordered, n=4, method="inclusive") if n > 1 else ordered * 3
        )
        return cls(median, q25, q75, ordered[out], ordered[n - 1 - out])


@dataclass(frozen=True, repr=False)
class Speed(Result):
    """One model's speed and size. Seconds are those of each repeat, in the order they were run."""

    parameters: int  # tied weights count once
    bytes: int  # of parameters and buffers, in memory
    bytes_on_disk: int | None  # of the safetensors files, where there is a folder
    multiply_adds: int  # of one prefill
    prefill_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...] | None  # None: the model does not generate
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill(self) -> Spread:
        """Tokens a second."""
        tokens = self.settings["batch"] * self.settings["length"]
        return Spread.of([tokens / s for s in self.prefill_seconds])

    @property
    def decode(self) -> Spread | None:
        """Tokens a second."""
        tokens = self.settings["batch"] * self.settings["new_tokens"]
        seconds = self.decode_seconds
        return None if seconds is None else Spread.of([tokens / s for s in seconds])

    def fields(self) -> dict[str, Any]:
        """The fields of this model in bench.json."""
        names = "parameters bytes bytes_on_disk multiply_adds prefill_seconds decode_seconds"
        return _rates(self) | {name: getattr(self, name) for name in names.split()}

    def _file(self) -> tuple[str, dict[str, Any]]:
        speeds = [self.fields()]
        return "bench", {"settings": self.settings, "speeds": speeds, "comparison": None}

    def _line(self) -> str:
        decode = f", decode {number(self.decode.median, 1)}" if self.decode else ""
        prefill = f"prefill {number(self.prefill.median, 1)}"
        return f"{prefill}{decode} tokens/s, {count(self.parameters)} parameters"


@dataclass(frozen=True, repr=False)
class SpeedComparison(Result):
    """How many times as fast `model` is as `other`: ratios of neighbouring runs."""

    model: Speed
    other: Speed
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill(self) -> Spread:
        return _ratio(self.other.prefill_seconds, self.model.prefill_seconds)

    @property
    def decode(self) -> Spread | None:
        before, after = self.other.decode_seconds, self.model.decode_seconds
        return None if before is None or after is None else _ratio(before, after)

    @property
    def promised(self) -> float:
        """How many times as fast prefill would be if multiply-adds were all that takes time."""
        return self.other.multiply_adds / self.model.multiply_adds

    @property
    def reached(self) -> float:
        return self.prefill.median / self.promised

    @property
    def saved_share(self) -> float | None:
        """Share of the promised saving of time; None where less than 1 % was promised."""
        promised = 1 - 1 / self.promised
        return None if abs(promised) < 0.01 else (1 - 1 / self.prefill.median) / promised

    @property
    def verdict(self) -> str:
        prefill = f"prefill: {_in_words(self.prefill)}; multiply-adds promise {self.promised:.2f}"
        if self.prefill.low > 1 and self.promised > 1:
            prefill += f", of which it reached {self.reached:.2f}"
        return prefill if self.decode is None else f"{prefill}. Decode: {_in_words(self.decode)}"

    def _file(self) -> tuple[str, dict[str, Any]]:
        names = ("promised", "reached", "saved_share", "verdict")
        compared = _rates(self) | {name: getattr(self, name) for name in names}
        speeds = [self.model.fields(), self.other.fields()]
        return "bench", {
            "settings": self.model.settings,
            "speeds": speeds,
            "comparison": compared,
        }

    def _line(self) -> str:
        return self.verdict


def _rates(result: Speed | SpeedComparison) -> dict[str, Any]:
    decode = result.decode
    return {"prefill": asdict(result.prefill), "decode": asdict(decode) if decode else None}


def _ratio(before: Sequence[float], after: Sequence[float]) -> Spread:
    return Spread.of([b / a for b, a in zip(before, after, strict=True)])


def _in_words(ratio: Spread) -> str:
    """A ratio with its interval; an interval that holds 1 shows no gain."""
    numbers = f"{ratio.median:.2f} times as fast ({ratio.low:.2f} to {ratio.high:.2f})"
    if ratio.low <= 1 <= ratio.high:
        return f"no gain that stands out of the noise, {numbers}"
    return numbers if ratio.low > 1 else f"slower, {numbers}"


# -- measuring ------------------------------------------------------------------------------------


def measure(model: nn.Module, *, folder: str | Path | None = None, **settings: int) -> Speed:
    """Tokens a second of one model, and its size.

    `settings` are those of `SpeedSettings`; `folder` is where the model's files are, if anywhere.
    """
    return _measured([model], [folder], SpeedSettings(**settings))[0]


def compare_speeds(
    model: nn.Module,
    other: nn.Module,
    *,
    folders: tuple[str | Path | None, str | Path | None] = (None, None),
    **settings: int,
) -> SpeedComparison:
    """How many times as fast `model` is as `other`: both in one run, by turns, on the same tokens."""
    first, second = _measured([model, other], folders, SpeedSettings(**settings))
    return SpeedComparison(first, second)


def _measured(
    models: list[nn.Module], folders: Sequence[str | Path | None], settings: SpeedSettings
) -> list[Speed]:
    for model in models:
        _check(model, settings)
    ids = _tokens(models, settings)
    with torch.no_grad(), ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        counts = [multiply_adds(partial(prefill, m, ids.to(device_of(m)))) for m in models]
        seconds = _by_turns(models, ids, settings)
    return [
        Speed(
            parameters=sum(p.numel() for p in model.parameters()),
            bytes=model.get_memory_footprint(),  # type: ignore[operator]
            bytes_on_disk=bytes_on_disk(folder),
            multiply_adds=count,
            prefill_seconds=tuple(seconds[filling][i]),
            decode_seconds=tuple(seconds[decoding][i]) if generates(model) else None,
            settings=_settings(model, settings),
        )
        for i, (model, folder, count) in enumerate(zip(models, folders, counts, strict=True))
    ]


def _by_turns(
    models: list[nn.Module], ids: Tensor, settings: SpeedSettings
) -> dict[Callable[..., float], list[list[float]]]:
    """Seconds by phase and model: in each round all prefills, then all decodes."""
    for model in models:  # first runs start threads and fill caches: not timed
        filling(model, ids, settings)
        if generates(model):
            decoding(model, ids, replace(settings, new_tokens=WARM_UP))
    seconds: dict[Callable[..., float], list[list[float]]] = {
        phase: [[] for _ in models] for phase in (filling, decoding)
    }
    for turn in range(settings.repeats):
        order = list(enumerate(models))[:: -1 if turn % 2 else 1]
        for phase, by_model in seconds.items():
            for i, model in order:
                if phase is filling or generates(model):
                    by_model[i].append(phase(model, ids, settings))
    return seconds


def filling(model: nn.Module, ids: Tensor, settings: SpeedSettings) -> float:
    """Seconds of one prefill."""
    device = device_of(model)
    prompt, start = ids.to(device), _now(device)
    prefill(model, prompt)
    return _now(device) - start


def decoding(model: nn.Module, ids: Tensor, settings: SpeedSettings) -> float:
    """Seconds of one decode."""
    prompt = ids[:, : settings.prompt].to(device_of(model))
    return decode(model, prompt, settings.new_tokens)[1]


# -- prefill and decode ---------------------------------------------------------------------------


def prefill(model: nn.Module, ids: Tensor) -> Any:
    """The model's output on a prompt (B, L), with the logits of the last position only."""
    takes = inspect.signature(model.forward).parameters
    cached = generates(model)
    options: dict[str, Any] = {"use_cache": cached} if cached or "use_cache" in takes else {}
    if "logits_to_keep" in takes:
        options["logits_to_keep"] = 1
    if _config(model, "is_encoder_decoder"):
        start = _config(model, "decoder_start_token_id") or 0  # speed does not depend on it
        options["decoder_input_ids"] = ids.new_full((len(ids), 1), start)
    return model(input_ids=ids, **options)


def decode(model: nn.Module, prompt: Tensor, new_tokens: int) -> tuple[Tensor, float]:
    """Tokens (B, 1 + new_tokens) that follow a prompt, greedily, and the seconds for all but the
    first, which the prefill gives."""
    out = prefill(model, prompt)
    to_text = _config(model, "is_encoder_decoder")
    beside = {"encoder_outputs": (out.encoder_last_hidden_state,)} if to_text else {}
    name = "decoder_input_ids" if to_text else "input_ids"
    tokens = [out.logits[:, -1:].argmax(-1)]
    start = _now(prompt.device)
    for _ in range(new_tokens):
        inputs = {name: tokens[-1], "past_key_values": out.past_key_values}
        out = model(**inputs, **beside, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1), _now(prompt.device) - start


def generates(model: nn.Module) -> bool:
    """Does it generate with a cache? Encoders and models without a head do not."""
    able: Any = getattr(model, "can_generate", lambda: False)
    return able() and "past_key_values" in inspect.signature(model.forward).parameters


def _now(device: torch.device) -> float:
    """The time in seconds, after the work that is queued on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _check(model: nn.Module, settings: SpeedSettings) -> None:
    name, reads = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise ValueError(f"{name} reads {reads}, not text: its speed is not measured here")
    needs = max(settings.length, settings.prompt + settings.new_tokens if generates(model) else 0)
    most = _config(model, "max_position_embeddings")
    if isinstance(most, int) and needs > most:
        raise ValueError(
            f"{name} has {most} positions and {needs} are asked for: lower `length` or `new_tokens`"
        )


def _tokens(models: list[nn.Module], settings: SpeedSettings) -> Tensor:
    """Random tokens (B, L) in all vocabularies, none special: padding moves positions in some
    families, and a placeholder for an image needs an image."""
    sizes = [m.get_input_embeddings().num_embeddings for m in models]  # type: ignore[operator]
    special = {token for model in models for token in _special(model)}
    plain = torch.tensor([i for i in range(min(sizes)) if i not in special])
    generator = torch.Generator().manual_seed(settings.seed)
    return plain[torch.randint(len(plain), (settings.batch, settings.length), generator=generator)]


def _special(model: nn.Module) -> Iterator[int]:
    config: Any = model.config
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                yield from value if isinstance(value, list) else [value]


def _config(model: nn.Module, name: str) -> Any:
    config: Any = model.config
    return getattr(config.get_text_config(), name, None)


def _settings(model: nn.Module, settings: SpeedSettings) -> dict[str, Any]:
    first = next(model.parameters())
    return asdict(settings) | {
        "prompt": settings.prompt,
        "device": str(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def bytes_on_disk(folder: str | Path | None) -> int | None:
    """Bytes of the weights in a folder; None where there are no safetensors."""
    files = list(Path(folder).glob("*.safetensors")) if folder is not None else []
    return sum(f.stat().st_size for f in files) or None


# -- multiply-adds ----------------------------------------------------------------------------------


def multiply_adds(run: Callable[[], Any]) -> int:
    """Multiply-adds of what `run` computes, attention and experts included.

    torch's own counter knows no attention kernels on the CPU and no experts, and counts all of a
    causal kernel's square. This relies on names of torch's operators and on where `is_causal` stands
    in their arguments; an operator that is renamed counts nothing, which tests/test_speed.py notices
    by formula.
    """
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        run()
    return int(counter.get_total_flops()) // 2


def prefill_multiply_adds(model: nn.Module, length: int) -> int:
    """Multiply-adds of one prefill of random tokens, no more than the model has positions."""
    most = _config(model, "max_position_embeddings")
    length = min(length, most) if isinstance(most, int) else length
    settings = SpeedSettings(length=length, new_tokens=1)
    _check(model, settings)
    ids = _tokens([model], settings).to(device_of(model))
    with torch.no_grad(), evaluating(model):
        return multiply_adds(partial(prefill, model, ids))


def _formulas() -> dict[Any, Callable[..., int]]:
    aten = torch.ops.aten
    formulas = {
        getattr(aten, name): _attention(position)
        for name, position in CAUSAL.items()
        if hasattr(aten, name)
    }
    return formulas | ({aten._grouped_mm: _grouped} if hasattr(aten, "_grouped_mm") else {})


def _attention(position: int) -> Callable[..., int]:
    def flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
        batch, heads, n, width = q  # (B, H, L, d)
        m = k[2]
        causal = options.get("is_causal", len(rest) > position - 3 and rest[position - 3])
        pairs = n * (n + 1) // 2 if causal and n == m else n * m
        return int(2 * batch * heads * pairs * (width + v[3]))

    return flops


def _grouped(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """(rows, d) by (experts, d, e): each row is multiplied by one expert's matrix."""
    return int(2 * weights[-1] * math.prod(rows))
