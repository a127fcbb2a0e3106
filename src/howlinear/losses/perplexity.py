"""Language-model loss under a stated protocol, and what a change to the model does to it.

    loss = text_loss(model, ids, "windows-128")        # ids: one stream (n,), or windows (n, length)
    print(loss)                                        # perplexity ± standard error, and the protocol
    change = compare(model, lambda: swapped(model, {block: layer}), ids, "windows-128")
    change.delta_nll, change.delta_nll_se, change.kl, change.top1

    for batch in scored_batches(ids, PROTOCOLS["windows-128"]):    # for many variants at once
        states = batch.rows(readout.states(batch.inputs))
        for part in chunks(len(states), readout.vocabulary):
            original = reference(readout.logits(states[part]), batch.targets[part], batch.cluster[part])
            scores.update(original, changed_logits)    # once per variant; scores = TokenScores()

A token's loss is -log p in nats, from log_softmax in float32; sums are float64. Every estimate is a
ratio of sums over windows, r = sum_w s_w / sum_w c_w, with s_w what window w scored in c_w tokens.
Its standard error is sqrt(K/(K-1) sum_d e_d^2) / sum_w c_w, e_d the sum of s_w - r c_w over the
windows of document d, of K. It allows tokens of one document to be alike, and takes documents as
independent. Where documents are not known, each window counts as one.

Logits of n tokens are n x vocabulary numbers, so the model runs in two steps: the backbone gives
states (n, d), and what follows it (head, scaling, soft cap) runs on a chunk of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from howlinear.losses.protocols import EMPTY, EvalProtocol, as_tokens, protocol_of, scored_batches
from howlinear.losses.readout import Context, Readout, chunks
from howlinear.models.forward import WindowsLike
from howlinear.records.files import clean
from howlinear.records.statistics import ratio_se
from howlinear.run.work import Advance, Work


@dataclass(frozen=True, eq=False)
class Reference:
    """The unchanged model's predictions of a chunk of n tokens, to compare variants with."""

    log_p: Tensor  # (n, vocabulary), float32
    p: Tensor  # (n, vocabulary)
    top: Tensor  # (n,) the likeliest token
    nll: Tensor  # (n,)
    targets: Tensor  # (n,)
    cluster: Tensor  # (n,) number of each token's document, or of its window


def reference(logits: Tensor, targets: Tensor, cluster: Tensor) -> Reference:
    """Of logits (n, vocabulary) for target tokens (n,) in numbered documents or windows (n,)."""
    log_p = logits.float().log_softmax(-1)
    nll = _nll(log_p, targets, cluster)
    return Reference(log_p, log_p.exp(), log_p.max(-1).indices, nll, targets, cluster)


class TokenScores:
    """Scores of one variant and of the original, summed by cluster: update, then comparison()."""

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 5, dtype=torch.float64)  # (clusters, fields of Comparison)

    def update(self, original: Reference, logits: Tensor) -> TokenScores:
        """Add the variant's logits (n, vocabulary) of the tokens that `original` is about."""
        if logits.shape != original.log_p.shape:
            shapes = f"{tuple(original.log_p.shape)} and {tuple(logits.shape)}"
            raise ValueError(f"logits of {shapes} cannot be compared: another vocabulary?")
        log_q = logits.to(original.log_p.device, torch.float32).log_softmax(-1)
        nll = _nll(log_q, original.targets, original.cluster)
        agree = log_q.max(-1).indices == original.top  # on a CPU faster than argmax
        kl = _divergence(original, log_q)
        values = torch.stack([torch.ones_like(nll), original.nll, nll, kl, agree], 1)
        self.sums = _added(self.sums, original.cluster, values)
        return self

    def comparison(self, protocol: EvalProtocol) -> Comparison:
        return Comparison(protocol, *self.sums.unbind(1))


def _divergence(original: Reference, log_q: Tensor) -> Tensor:
    """(n,) KL of each token, in nats; the memory of log_q (n, vocabulary) is used again.

    The difference comes first: equal logits give exactly 0. Few passes over the vocabulary are made:
    where p and q rule the same token out, the difference is NaN, and only then is it left out.
    """
    terms = torch.sub(original.log_p, log_q, out=log_q).mul_(original.p)
    kl = terms.sum(-1)
    if bool(kl.isnan().any()):  # a token that p rules out adds nothing
        kl = terms.masked_fill_(original.p == 0, 0).sum(-1)
    return kl


def _nll(log_p: Tensor, targets: Tensor, cluster: Tensor) -> Tensor:
    nll = -log_p.gather(1, targets.to(log_p.device)[:, None])[:, 0]
    if bool((bad := nll.isnan()).any()):
        at = int(cluster[bad.cpu()][0])
        raise ValueError(
            f"the model's logits are not finite in window or document {at}: is its dtype too small?"
        )
    return nll


def _added(sums: Tensor, cluster: Tensor, values: Tensor) -> Tensor:
    """sums (clusters, k) and values (n, k), row by row, where each one's cluster is."""
    missing = int(cluster.max()) + 1 - len(sums) if len(cluster) else 0
    grown = pad(sums, (0, 0, 0, max(missing, 0)))
    return grown.index_add(0, cluster.cpu(), values.cpu().double())


# -- scores -> answers ----------------------------------------------------------------------------


def _ratio(sums: Tensor, counts: Tensor) -> float:
    return float(sums.sum() / counts.sum())


def _spread(rest: Tensor, counts: Tensor) -> float:
    """Standard error of a ratio whose clusters are off by `rest`; nan for fewer than 2 clusters."""
    return ratio_se(rest[counts > 0].tolist(), float(counts.sum()))


def _rest(sums: Tensor, counts: Tensor) -> Tensor:
    return sums - _ratio(sums, counts) * counts


def _estimates(sums: Callable[[Any], Tensor]) -> tuple[property, property]:
    """An answer's property, a ratio of sums over clusters, and the property of its standard error."""
    return (
        property(lambda answer: _ratio(sums(answer), answer.counts)),
        property(lambda answer: _spread(_rest(sums(answer), answer.counts), answer.counts)),
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Answer:
    """Sums by cluster (document, else window), and the protocol that windows were cut by."""

    protocol: EvalProtocol
    counts: Tensor  # (clusters,) predicted tokens, float64

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def clusters(self) -> int:
        """How many documents or windows have tokens."""
        return int((self.counts > 0).sum())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def _fields(self, names: str) -> dict[str, Any]:
        about = {"protocol": self.protocol.name, "tokens": self.tokens}
        values = clean({name: getattr(self, name) for name in names.split()})
        return about | {"clusters": self.clusters} | values


@dataclass(frozen=True, eq=False, repr=False)
class Loss(_Answer):
    """A model's loss on a text; `nats` is the mean of a token's negative log-likelihood."""

    sums: Tensor  # (clusters,) their negative log-likelihood in nats, float64
    n_bytes: int | None = None  # utf-8 bytes of the predicted tokens

    nats, nats_se = _estimates(lambda loss: loss.sums)

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

    def to_dict(self) -> dict[str, Any]:
        return self._fields("nats nats_se perplexity perplexity_se bits_per_byte")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(_Answer):
    """Two models on the same tokens: tokens that are hard for both cancel. Sums are by cluster.

    Comparisons of the same two models on different windows add up with `+`.
    """

    nll: Tensor  # (clusters,) sums of the original's negative log-likelihood
    nll_changed: Tensor
    divergence: Tensor  # (clusters,) sums of KL(original || changed), in nats
    agreement: Tensor  # (clusters,) tokens where both find the same token likeliest

    delta_nll, delta_nll_se = _estimates(lambda both: both.nll_changed - both.nll)  # nats a token
    kl, kl_se = _estimates(lambda both: both.divergence)  # nats a token
    top1, top1_se = _estimates(lambda both: both.agreement)  # share of the tokens

    def __add__(self, other: Comparison) -> Comparison:
        a, b = self.sums, other.sums
        most = max(len(a), len(b))
        padded = (pad(sums, (0, 0, 0, most - len(sums))) for sums in (a, b))
        return Comparison(self.protocol, *sum(padded).unbind(1))  # type: ignore[union-attr]

    @property
    def sums(self) -> Tensor:
        """(clusters, 5) the fields, as `TokenScores` sums them."""
        parts = (self.counts, self.nll, self.nll_changed, self.divergence, self.agreement)
        return torch.stack(parts, 1)

    @property
    def original(self) -> Loss:
        return Loss(self.protocol, self.counts, self.nll)

    @property
    def changed(self) -> Loss:
        return Loss(self.protocol, self.counts, self.nll_changed)

    def gain_over(self, other: Comparison, by: str = "nll_changed") -> tuple[float, float]:
        """How many nats a token this change is better than another, on the same tokens; and its
        standard error, paired by cluster. By loss, or by="divergence" from the original."""
        gain = getattr(other, by) - getattr(self, by)
        return _ratio(gain, self.counts), _spread(_rest(gain, self.counts), self.counts)

    @property
    def delta_ppl(self) -> float:
        return self.changed.perplexity - self.original.perplexity

    @property
    def delta_ppl_se(self) -> float:
        """By the delta method, cluster by cluster, since both share the clusters."""
        a, b = (x.perplexity * _rest(x.sums, x.counts) for x in (self.original, self.changed))
        return _spread(b - a, self.counts)

    def __str__(self) -> str:
        shown = {"Δnll": "delta_nll", "Δppl": "delta_ppl", "KL": "kl", "top-1": "top1"}.items()
        parts = [f"{k} {getattr(self, v):.4g} ± {getattr(self, v + '_se'):.2g}" for k, v in shown]
        return f"{', '.join(parts)} ({self.protocol}, {self.tokens} tokens)"

    def to_dict(self) -> dict[str, Any]:
        names = "delta_nll delta_nll_se delta_ppl delta_ppl_se kl kl_se top1 top1_se"
        both = {"original": self.original.to_dict(), "changed": self.changed.to_dict()}
        return self._fields(names) | both


# -- loss and comparison --------------------------------------------------------------------------


def text_loss(
    model: nn.Module,
    ids: WindowsLike,
    protocol: EvalProtocol | str | None = None,
    *,
    batch_size: int = 8,
    n_bytes: int | None = None,
    progress: Advance | None = None,
) -> Loss:
    """The model's loss on tokens: one stream (n,), windows (n, length), or batches of windows.

    `n_bytes` is how many utf-8 bytes the predicted tokens stand for. `progress` is called with the
    number of tokens of each batch done.
    """
    ids = as_tokens(ids)
    protocol, sums = protocol_of(ids, protocol), torch.zeros(0, 2, dtype=torch.float64)
    every = _scored([Readout(model)], ids, protocol, Work(batch_size=batch_size), progress)
    for (logits,), targets, cluster in every:
        nll = _nll(logits.log_softmax(-1), targets, cluster)
        sums = _added(sums, cluster, torch.stack([torch.ones_like(nll), nll], 1))
    return Loss(protocol, sums[:, 0], sums[:, 1], n_bytes)


def compare(
    model: nn.Module,
    changed: nn.Module | Context,
    ids: WindowsLike,
    protocol: EvalProtocol | str | None = None,
    *,
    batch_size: int = 8,
    progress: Advance | None = None,
) -> Comparison:
    """What a change costs: `changed` is another model with the same vocabulary, or a function that
    makes a context in which `model` is changed, such as `lambda: swapped(model, {block: layer})`.
    """
    work = Work(batch_size=batch_size)
    return compare_all(model, [changed], ids, protocol, work=work, progress=progress)[0]


def compare_all(
    model: nn.Module | Readout,
    changes: Sequence[nn.Module | Context],
    ids: WindowsLike,
    protocol: EvalProtocol | str | None = None,
    *,
    work: Work | None = None,
    progress: Advance | None = None,
) -> list[Comparison]:
    """Several changes beside the one original: see `compare`. A `KeptReadout` runs it once.

    Of several ranks each runs some of the batches; all get the result.
    """
    work, ids = work or Work(), as_tokens(ids)
    protocol = protocol_of(ids, protocol)
    first = model if isinstance(model, Readout) else Readout(model)
    others = [Readout(c) if isinstance(c, nn.Module) else Readout(first.model, c) for c in changes]
    scores = [TokenScores() for _ in others]
    every = _scored([first, *others], ids, protocol, work, progress)
    for (logits, *logits_changed), targets, cluster in every:
        original = reference(logits, targets, cluster)
        for score, changed in zip(scores, logits_changed, strict=True):
            score.update(original, changed)
    for score in scores:
        score.sums = work.ranks.sum(score.sums)
    return [score.comparison(protocol) for score in scores]


def _scored(
    readouts: list[Readout],
    ids: WindowsLike,
    protocol: EvalProtocol,
    work: Work,
    progress: Advance | None,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Chunk by chunk: each readout's logits (n, vocabulary), the targets (n,), their clusters (n,)."""
    predicted = 0
    for number, batch in enumerate(scored_batches(ids, protocol, work.batch_size)):
        predicted += len(batch.targets)
        if not work.ranks.mine(number):
            continue
        states = [batch.rows(readout.states(batch.inputs)) for readout in readouts]
        targets, cluster = batch.targets, batch.cluster
        for part in chunks(len(targets), readouts[0].vocabulary):
            logits = [r.logits(rows[part]) for r, rows in zip(readouts, states, strict=True)]
            yield logits, targets[part], cluster[part]
        if progress is not None:
            progress(batch.tokens)
    if not predicted:
        raise ValueError(EMPTY)
