"""Language-model loss under a stated protocol, and what a change to the model does to it.

    loss = text_loss(model, ids, "windows-128")        # ids: one stream (n,), or windows (n, length)
    print(loss)                                        # perplexity ± standard error, and the protocol
    change = compare(model, lambda: swapped(model, {block: layer}), ids, "windows-128")
    change.delta_nll, change.delta_nll_se, change.kl, change.top1

    for batch in batches(ids, PROTOCOLS["windows-128"]):    # by hand, for many variants at once
        states = batch.rows(readout.states(batch.inputs))
        for part in chunks(len(states), readout.vocabulary):
            original = reference(readout.logits(states[part]), batch.targets[part], batch.window[part])
            scores.update(original, changed_logits)    # once per variant; scores = TokenScores()

A token's loss is -log p in nats, from log_softmax in float32; sums are float64. Every estimate is a
ratio of sums over windows, r = sum_w s_w / sum_w c_w, with s_w what window w scored in c_w tokens.
Its standard error, sqrt(K/(K-1) sum_w (s_w - r c_w)^2) / sum_w c_w over K windows, allows tokens of
one window to be alike, and takes windows as independent: neighbours in a text are not quite.

Logits of n tokens are n x vocabulary numbers, so the model runs in two steps: the backbone gives
states (n, d), and what follows it (head, scaling, soft cap) runs on a chunk of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from howlinear import bfloat16
from howlinear.families import backbone, call_options
from howlinear.records import clean
from howlinear.resuming import answering

CHUNK = 2**22  # logits at a time: 16 MB in float32, which the scores then find near
EMPTY = "the text is empty: there is no token to predict"

Batches = Tensor | Iterable[Tensor | Mapping[str, Tensor]]
Context = Callable[[], AbstractContextManager[Any]]


# -- protocols ------------------------------------------------------------------------------------

# A protocol's name is its kind and its numbers: how many numbers, and the kind in words. GPTQ (and
# wanda, and most papers on quantisation) averages the windows' means; full windows weigh the same,
# so that this is the mean over tokens, and only the text (documents joined by blank lines) is its own.
KINDS = {
    ("windows", 1): "windows of {length}, first token not predicted",
    ("stride", 2): "windows of {length} every {stride} tokens, each token counted once",
    ("gptq", 1): "GPTQ convention: windows of {length}, first token not predicted",
}


@dataclass(frozen=True)
class Protocol:
    """How a text is cut into windows, and which tokens of each are predicted.

    A window starts every `stride` tokens, and the tokens that no window before it held are counted,
    but for the window's first, which nothing predicts. Where windows overlap the last one may be
    shorter, so that all tokens count, as in Hugging Face's guide to perplexity (whose loop weighs
    windows by their tokens less one; here each token weighs the same). Else a rest is left out.
    """

    name: str
    length: int
    stride: int

    @classmethod
    def parse(cls, text: str) -> Protocol:
        """From "windows-128", "stride-1024-512" (length, stride) or "gptq-2048"."""
        kind, *numbers = text.split("-")
        if not all(map(str.isdecimal, numbers)) or (kind, len(numbers)) not in KINDS:
            raise ValueError(
                f"unknown protocol {text!r}, expected windows-N, stride-LENGTH-STRIDE or gptq-2048"
            )
        return cls(text, int(numbers[0]), int(numbers[-1]))

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"{self.name}: windows need 2 tokens or more to predict one")
        if not 1 <= self.stride < self.length + (not self.name.startswith("stride")):
            raise ValueError(f"{self.name}: the stride must be at least 1 and less than the length")

    def __str__(self) -> str:
        kind, *numbers = self.name.split("-")
        return KINDS[kind, len(numbers)].format(length=self.length, stride=self.stride)

    def cut(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(start, end, first counted token) of each window of n tokens."""
        end = 0
        for start in range(0, n, self.stride):
            if end == n or (self.stride == self.length and start + self.length > n):
                return
            seen, end = end, min(start + self.length, n)
            yield start, end, max(seen, start + 1)


PROTOCOLS = {n: Protocol.parse(n) for n in ("windows-128", "stride-1024-512", "gptq-2048")}


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of one length: B windows of L tokens, n of them predicted."""

    inputs: dict[str, Tensor]
    counted: Tensor = field(repr=False)  # (B, L - 1) bool: is token t + 1 predicted, from state t?
    first: int  # number of the first window

    @property
    def targets(self) -> Tensor:
        """(n,) the tokens to predict."""
        return self.inputs["input_ids"][:, 1:][self.counted]

    @property
    def window(self) -> Tensor:
        """(n,) the number of each one's window."""
        return self.first + self.counted.nonzero()[:, 0]

    def rows(self, states: Tensor) -> Tensor:
        """(n, d), the states that predict, of states (B, L, d)."""
        return states[:, :-1][self.counted.to(states.device)]


def protocol_of(ids: Batches, protocol: Protocol | str | None) -> Protocol:
    """The protocol meant; a tensor of windows (n, length) tells it by its shape."""
    if protocol is None and isinstance(ids, Tensor) and ids.ndim == 2:
        protocol = f"windows-{ids.shape[1]}"
    if protocol is None:
        raise ValueError("these tokens need a protocol, such as windows-128 or gptq-2048")
    return Protocol.parse(protocol) if isinstance(protocol, str) else protocol


def batches(ids: Batches, how: Protocol, batch_size: int = 8) -> Iterator[Batch]:
    """Batches of a stream of tokens (n,), cut by the protocol; or of windows that are cut already.

    Those are a tensor (n, length) or batches: tensors, or dicts of model inputs. Of dicts, padding
    (attention_mask 0) is not counted, nor the token after it, nor labels of -100.
    """
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size} (--batch-size)")
    if isinstance(ids, Tensor) and ids.numel() == 0:
        raise ValueError(EMPTY)
    if isinstance(ids, Tensor) and ids.ndim == 1:
        yield from _from_stream(ids, how, batch_size)
        return
    first = 0
    for given in _checked(ids).split(batch_size) if isinstance(ids, Tensor) else ids:
        batch = _as_batch(given, how, first)
        yield batch
        first += len(batch.counted)


def _from_stream(ids: Tensor, how: Protocol, batch_size: int) -> Iterator[Batch]:
    if len(ids) < how.length:
        raise ValueError(
            f"the text has {len(ids)} tokens and one window takes {how.length} ({how.name}): "
            f"give more text (--text-file) or take shorter windows"
        )
    cuts = list(how.cut(len(ids)))
    full = [c for c in cuts if c[1] - c[0] == how.length]  # a shorter one comes last, alone
    groups = [full[i : i + batch_size] for i in range(0, len(full), batch_size)]
    first = 0
    for group in [*groups, *([c] for c in cuts[len(full) :])]:
        windows = _checked(torch.stack([ids[start:end] for start, end, _ in group]))
        skipped = torch.tensor([[counted - start] for start, _, counted in group])
        yield Batch({"input_ids": windows}, torch.arange(1, windows.shape[1]) >= skipped, first)
        first += len(group)


def _as_batch(given: Any, how: Protocol, first: int) -> Batch:
    inputs = {"input_ids": given} if isinstance(given, Tensor) else given
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise ValueError(
            f"expected token ids, or batches of them with input_ids, got {type(given).__name__}"
        )
    ids = _checked(inputs["input_ids"])
    mask = inputs.get("attention_mask", torch.ones_like(ids)).cpu() != 0
    short = "attention_mask" in inputs and ids.shape[1] < how.length
    if how.stride < how.length or (ids.shape[1] != how.length and not short):
        raise ValueError(
            f"{how.name} does not fit windows of shape {tuple(ids.shape)}: "
            f"give one stream of tokens, of shape (n,), or windows-{ids.shape[1]}"
        )
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    counted = mask[:, 1:] & mask[:, :-1]
    if "labels" in inputs:
        counted &= inputs["labels"][:, 1:].cpu() != -100
    rest = {k: v for k, v in inputs.items() if k not in ("input_ids", "labels")}
    return Batch({"input_ids": ids, **rest}, counted, first)


def _checked(ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"expected token ids: whole numbers of shape (n,) or (windows, length), "
            f"got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    return ids.long().cpu()


# -- tokens -> states -> logits -------------------------------------------------------------------


class Readout:
    """How logits come out of a language model, in two steps so that few of them exist at once.

    `during` makes a context in which the model is changed, such as `lambda: swapped(...)`. Then
    states are computed inside and logits outside it. A short run when this is made shows whether
    both steps give what the whole model gives; else (`whole`) the whole model gives the states.
    """

    def __init__(self, model: nn.Module, during: Context = nullcontext) -> None:
        self.model, self.during, self.whole = model, during, False
        bfloat16.check(next(model.parameters()).dtype, self.device)
        name = type(model).__name__
        config: Any = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name} reads one text to write another: no perplexity of one text")
        head: Any = getattr(model, "get_output_embeddings", lambda: None)
        if head() is None:
            raise ValueError(
                f"{name} has no language-model head, so it predicts no tokens and has no "
                f"perplexity: load it with AutoModelForCausalLM if it was trained as one"
            )
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.positions = getattr(text, "max_position_embeddings", None)
        size = getattr(model.get_input_embeddings(), "num_embeddings", 18)  # type: ignore[operator]
        ids = torch.arange(10, 18).repeat(2, 1) % size  # any tokens do
        ids[1, -1] = (ids[0, -1] + 1) % size
        with torch.no_grad(), during(), evaluating(model):
            want = model(input_ids=ids.to(self.device)).logits
        if not _close(want[0, :-1], want[1, :-1]):
            raise ValueError(
                f"{name} sees the tokens that follow, as masked language models do, so it has no "
                f"next-token loss and no perplexity"
            )
        self.vocabulary = int(want.shape[-1])
        try:
            self.whole = not _close(self.logits(self.states({"input_ids": ids})), want)
        except (AttributeError, TypeError, RuntimeError):  # its forward is of another kind
            self.whole = True

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(B, L, d), the backbone's last hidden states."""
        length = inputs["input_ids"].shape[1]
        if self.positions is not None and length > self.positions:
            raise ValueError(
                f"windows of {length} tokens are longer than the {self.positions} positions of "
                f"{type(self.model).__name__}: take shorter windows"
            )
        net = self.model if self.whole else backbone(self.model)
        given = {key: value.to(self.device) for key, value in inputs.items()}
        with torch.no_grad(), self.during(), evaluating(self.model):
            out = net(**given, **call_options(net))
        return out.logits if self.whole else out[0]

    def logits(self, states: Tensor) -> Tensor:
        """(..., vocabulary) in float32, of states (..., d)."""
        return states.float() if self.whole else head_logits(self.model, states)


def head_logits(model: nn.Module, states: Tensor) -> Tensor:
    """(..., vocabulary) in float32: what `model` makes of its backbone's last hidden states.

    The model's own forward runs with a backbone that answers at once, so that whatever a family
    does to its logits (soft cap in gemma2, scaling in cohere and granite) is done here too.
    """
    flat = states.reshape(1, -1, states.shape[-1])
    ids = torch.zeros(flat.shape[:2], dtype=torch.long, device=states.device)
    decoder: Any = getattr(model, "get_decoder", lambda: model)  # what opt calls
    nets = {backbone(model), decoder()} - {model}
    with torch.no_grad(), answering(dict.fromkeys(nets, _Answer((flat,)))), evaluating(model):
        logits = model(input_ids=ids).logits
    return logits.float().reshape(*states.shape[:-1], -1)


class _Answer(tuple[Tensor]):
    """A backbone's output with nothing but the states: by index, by name, all else None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, and on again afterwards where it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, beside the largest of b. What is not finite is found elsewhere."""
    slack = max(1e-4, 2 * torch.finfo(b.dtype).eps) * float(b.nan_to_num(0, 0, 0).abs().max())
    return a.shape == b.shape and torch.allclose(a.to(b), b, 0, slack, equal_nan=True)


# -- logits -> scores -----------------------------------------------------------------------------


def chunks(n: int, vocabulary: int) -> Iterator[slice]:
    """Slices of n rows whose logits stay small."""
    rows = max(1, CHUNK // vocabulary)
    return (slice(start, start + rows) for start in range(0, n, rows))


@dataclass(frozen=True, eq=False)
class Reference:
    """What the unchanged model says of a chunk of n tokens, to hold variants against."""

    log_p: Tensor  # (n, vocabulary), float32
    p: Tensor  # (n, vocabulary)
    top: Tensor  # (n,) the likeliest token
    nll: Tensor  # (n,)
    targets: Tensor  # (n,)
    window: Tensor  # (n,) number of each token's window


def reference(logits: Tensor, targets: Tensor, window: Tensor) -> Reference:
    """Of logits (n, vocabulary) for target tokens (n,) in numbered windows (n,)."""
    log_p = logits.float().log_softmax(-1)
    nll = _nll(log_p, targets, window)
    return Reference(log_p, log_p.exp(), log_p.argmax(-1), nll, targets, window)


class TokenScores:
    """One variant's scores beside the original's, summed by window: update, then comparison()."""

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 5, dtype=torch.float64)  # (windows, fields of Comparison)

    def update(self, original: Reference, logits: Tensor) -> TokenScores:
        """Add the variant's logits (n, vocabulary) of the tokens that `original` is about."""
        if logits.shape != original.log_p.shape:
            shapes = f"{tuple(original.log_p.shape)} and {tuple(logits.shape)}"
            raise ValueError(f"logits of {shapes} cannot be compared: another vocabulary?")
        log_q = logits.to(original.log_p.device, torch.float32).log_softmax(-1)
        nll = _nll(log_q, original.targets, original.window)
        agree = log_q.argmax(-1) == original.top
        # The difference first: equal logits give exactly 0. A token that p rules out adds nothing.
        kl = log_q.neg_().add_(original.log_p).mul_(original.p)
        kl = kl.masked_fill_(original.p == 0, 0).sum(-1)
        values = torch.stack([torch.ones_like(nll), original.nll, nll, kl, agree], 1)
        self.sums = _added(self.sums, original.window, values)
        return self

    def comparison(self, protocol: Protocol) -> Comparison:
        return Comparison(protocol, *self.sums.unbind(1))


def _nll(log_p: Tensor, targets: Tensor, window: Tensor) -> Tensor:
    nll = -log_p.gather(1, targets.to(log_p.device)[:, None])[:, 0]
    if bool((bad := nll.isnan()).any()):
        at = int(window[bad.cpu()][0])
        raise ValueError(
            f"the model's logits are not finite in window {at}: is its dtype too small?"
        )
    return nll


def _added(sums: Tensor, window: Tensor, values: Tensor) -> Tensor:
    """sums (windows, k) and values (n, k), row by row, where each one's window is."""
    missing = int(window.max()) + 1 - len(sums) if len(window) else 0
    grown = pad(sums, (0, 0, 0, max(missing, 0)))
    return grown.index_add(0, window.cpu(), values.cpu().double())


# -- scores -> answers ----------------------------------------------------------------------------


def _ratio(sums: Tensor, counts: Tensor) -> float:
    return float(sums.sum() / counts.sum())


def _spread(rest: Tensor, counts: Tensor) -> float:
    """Standard error of a ratio whose windows are off by `rest`; nan for fewer than 2 windows."""
    K = int((counts > 0).sum())
    if K < 2:
        return math.nan
    return math.sqrt(K / (K - 1) * float(rest.square().sum())) / float(counts.sum())


def _rest(sums: Tensor, counts: Tensor) -> Tensor:
    return sums - _ratio(sums, counts) * counts


def _estimates(sums: Callable[[Any], Tensor]) -> tuple[property, property]:
    """An answer's property, a ratio of sums over windows, and the property of its standard error."""
    return (
        property(lambda answer: _ratio(sums(answer), answer.counts)),
        property(lambda answer: _spread(_rest(sums(answer), answer.counts), answer.counts)),
    )


def _fields(answer: Loss | Comparison, names: str) -> dict[str, Any]:
    about = {"protocol": answer.protocol.name, "tokens": answer.tokens}
    values = clean({name: getattr(answer, name) for name in names.split()})
    return about | {"windows": len(answer.counts)} | values


@dataclass(frozen=True, eq=False, repr=False)
class Loss:
    """A model's loss on a text; `nats` is the mean of a token's negative log-likelihood."""

    protocol: Protocol
    counts: Tensor  # (windows,) predicted tokens, float64
    sums: Tensor  # (windows,) their negative log-likelihood in nats, float64
    n_bytes: int | None = None  # utf-8 bytes of the predicted tokens

    nats, nats_se = _estimates(lambda loss: loss.sums)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf

    @property
    def perplexity_se(self) -> float:
        """By the delta method: d exp(nats) = exp(nats) d nats."""
        return self.perplexity * self.nats_se

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None where the number of bytes is not known."""
        return float(self.sums.sum()) / math.log(2) / self.n_bytes if self.n_bytes else None

    def __str__(self) -> str:
        value = f"perplexity {self.perplexity:.2f} ± {self.perplexity_se:.2f}"
        return f"{value} ({self.protocol}, {self.tokens} tokens)"

    def __repr__(self) -> str:
        return f"<Loss: {self}>"

    def to_dict(self) -> dict[str, Any]:
        return _fields(self, "nats nats_se perplexity perplexity_se bits_per_byte")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Two models on the same tokens, so that what both find hard cancels. Sums are by window."""

    protocol: Protocol
    counts: Tensor  # (windows,) predicted tokens, float64
    nll: Tensor  # (windows,) sums of the original's negative log-likelihood
    nll_changed: Tensor
    divergence: Tensor  # (windows,) sums of KL(original || changed), in nats
    agreement: Tensor  # (windows,) tokens where both find the same token likeliest

    delta_nll, delta_nll_se = _estimates(lambda both: both.nll_changed - both.nll)  # nats a token
    kl, kl_se = _estimates(lambda both: both.divergence)  # nats a token
    top1, top1_se = _estimates(lambda both: both.agreement)  # share of the tokens

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def original(self) -> Loss:
        return Loss(self.protocol, self.counts, self.nll)

    @property
    def changed(self) -> Loss:
        return Loss(self.protocol, self.counts, self.nll_changed)

    def gain_over(self, other: Comparison) -> tuple[float, float]:
        """How many nats a token this change is better than another, on the same tokens; and its
        standard error, paired by window."""
        gain = other.nll_changed - self.nll_changed
        return _ratio(gain, self.counts), _spread(_rest(gain, self.counts), self.counts)

    @property
    def delta_ppl(self) -> float:
        return self.changed.perplexity - self.original.perplexity

    @property
    def delta_ppl_se(self) -> float:
        """By the delta method, window by window, since both share the windows."""
        a, b = (x.perplexity * _rest(x.sums, x.counts) for x in (self.original, self.changed))
        return _spread(b - a, self.counts)

    def __str__(self) -> str:
        shown = {"Δnll": "delta_nll", "Δppl": "delta_ppl", "KL": "kl", "top-1": "top1"}.items()
        parts = [f"{k} {getattr(self, v):.4g} ± {getattr(self, v + '_se'):.2g}" for k, v in shown]
        return f"{', '.join(parts)} ({self.protocol}, {self.tokens} tokens)"

    def __repr__(self) -> str:
        return f"<Comparison: {self}>"

    def to_dict(self) -> dict[str, Any]:
        names = "delta_nll delta_nll_se delta_ppl delta_ppl_se kl kl_se top1 top1_se"
        both = {"original": self.original.to_dict(), "changed": self.changed.to_dict()}
        return _fields(self, names) | both


# -- the two questions ----------------------------------------------------------------------------


def text_loss(
    model: nn.Module,
    ids: Batches,
    protocol: Protocol | str | None = None,
    *,
    batch_size: int = 8,
    n_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Loss:
    """The model's loss on tokens: see `batches` for what they may be.

    `n_bytes` is how many utf-8 bytes the predicted tokens stand for. `progress` is called with the
    number of tokens of each batch done.
    """
    how, sums = protocol_of(ids, protocol), torch.zeros(0, 2, dtype=torch.float64)
    for (logits,), targets, window in _scored([Readout(model)], ids, how, batch_size, progress):
        nll = _nll(logits.log_softmax(-1), targets, window)
        sums = _added(sums, window, torch.stack([torch.ones_like(nll), nll], 1))
    return Loss(how, sums[:, 0], sums[:, 1], n_bytes)


def compare(
    model: nn.Module,
    changed: nn.Module | Context,
    ids: Batches,
    protocol: Protocol | str | None = None,
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """What a change costs: `changed` is another model with the same vocabulary, or a function that
    makes a context in which `model` is changed, such as `lambda: swapped(model, {block: layer})`.
    """
    return compare_all(model, [changed], ids, protocol, batch_size=batch_size, progress=progress)[0]


def compare_all(
    model: nn.Module,
    changes: Sequence[nn.Module | Context],
    ids: Batches,
    protocol: Protocol | str | None = None,
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> list[Comparison]:
    """Several changes beside the one original: see `compare`."""
    how = protocol_of(ids, protocol)
    others = [Readout(c) if isinstance(c, nn.Module) else Readout(model, c) for c in changes]
    scores = [TokenScores() for _ in others]
    every = _scored([Readout(model), *others], ids, how, batch_size, progress)
    for (logits, *logits_changed), targets, window in every:
        original = reference(logits, targets, window)
        for score, own in zip(scores, logits_changed, strict=True):
            score.update(original, own)
    return [score.comparison(how) for score in scores]


def _scored(
    readouts: list[Readout],
    ids: Batches,
    how: Protocol,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Chunk by chunk: each readout's logits (n, vocabulary), the targets (n,), their windows (n,)."""
    predicted = 0
    for batch in batches(ids, how, batch_size):
        states = [batch.rows(readout.states(batch.inputs)) for readout in readouts]
        targets, window = batch.targets, batch.window
        for part in chunks(len(targets), readouts[0].vocabulary):
            logits = [r.logits(rows[part]) for r, rows in zip(readouts, states, strict=True)]
            yield logits, targets[part], window[part]
        predicted += len(targets)
        if progress is not None:
            progress(batch.inputs["input_ids"].numel())
    if not predicted:
        raise ValueError(EMPTY)
