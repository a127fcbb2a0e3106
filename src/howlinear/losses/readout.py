"""Logits of a language model in two steps, so that only a few of them exist at once.

    readout = Readout(model)                        # ValueError where a model has no next-token loss
    states = readout.states({"input_ids": ids})     # (B, L, d), the backbone's last hidden states
    for part in chunks(len(rows), readout.vocabulary):
        logits = readout.logits(rows[part])         # (n, vocabulary) in float32, of some rows

Logits of a text are tokens x vocabulary numbers, most often more than all activations together. The
second step is the model's own forward with a backbone that returns the states at once
(`recording.answering`), so scaling and soft caps are those of the family. Whether both steps together
give what the whole model gives is tested when a Readout is made; where they do not, the whole model
runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.models.families import backbone
from howlinear.models.forward import Forward
from howlinear.models.hooks import evaluating
from howlinear.models.recording import answering

# Logits at a time: 32 MB in float32. glibc takes larger pieces of memory from the system anew each
# time, which clears them; with fewer rows the product with the head is slower.
CHUNK = 2**23
Context = Callable[[], AbstractContextManager[Any]]


class Readout:
    """Runs a model's backbone and its head apart.

    `during` makes a context in which the model is changed, such as `lambda: swapped(...)`: states
    are computed inside it, logits outside. `whole` says that the states are the logits already.
    """

    def __init__(self, model: nn.Module, during: Context = nullcontext) -> None:
        self.model, self.during, self.whole = model, during, False
        self._backbone, self._model = Forward(model), Forward(model, head=True)
        self.device = self._model.device
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
        with during():
            want = self._model({"input_ids": ids}).logits
        if not _close(want[0, :-1], want[1, :-1]):
            raise ValueError(
                f"{name} sees the tokens that follow, as masked language models do, so it has no "
                f"next-token loss and no perplexity"
            )
        self.vocabulary = int(want.shape[-1])
        try:
            self.whole = not _close(self.logits(self.states({"input_ids": ids})), want)
        except (AttributeError, TypeError, RuntimeError):  # its head reads more than the states
            self.whole = True

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(B, L, d), the backbone's last hidden states."""
        length = inputs["input_ids"].shape[1]
        if self.positions is not None and length > self.positions:
            raise ValueError(
                f"windows of {length} tokens are longer than the {self.positions} positions of "
                f"{type(self.model).__name__}: take shorter windows"
            )
        with self.during():
            out = (self._model if self.whole else self._backbone)(inputs)
        return out.logits if self.whole else out[0]

    def logits(self, states: Tensor) -> Tensor:
        """(..., vocabulary) in float32, of states (..., d)."""
        return states.float() if self.whole else head_logits(self.model, states)


class KeptReadout(Readout):
    """A readout that runs each batch of tokens once and keeps its states: d numbers a token."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[tuple[torch.Size, bytes], Tensor] = {}
        super().__init__(model)
        self.kept.clear()  # of the tokens it was tried on

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        ids = inputs["input_ids"]
        key = (ids.shape, ids.cpu().numpy().tobytes())
        if key in self.kept:
            return self.kept[key]
        states = super().states(inputs)
        if not self.whole and set(inputs) == {"input_ids"}:  # logits are too many to keep
            self.kept[key] = states
        return states


def head_logits(model: nn.Module, states: Tensor) -> Tensor:
    """(..., vocabulary) in float32: what `model` makes of its backbone's last hidden states.

    The model's own forward runs with a backbone that returns at once, so that the soft cap of
    gemma2 and the scaling of cohere and granite apply here too. Gradients go back to states that
    require them.
    """
    flat = states.reshape(1, -1, states.shape[-1])
    ids = torch.zeros(flat.shape[:2], dtype=torch.long, device=states.device)
    decoder: Any = getattr(model, "get_decoder", lambda: model)  # what opt calls
    nets = {backbone(model), decoder()} - {model}
    with (
        torch.set_grad_enabled(states.requires_grad),
        answering(dict.fromkeys(nets, _Answer((flat,)))),
        evaluating(model),
    ):
        logits = model(input_ids=ids).logits
    return logits.float().reshape(*states.shape[:-1], -1)


class _Answer(tuple[Tensor]):
    """A backbone's output with nothing but the states: by index, by name, all else None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding of the largest b. Values that are not finite are reported by scoring."""
    slack = max(1e-4, 2 * torch.finfo(b.dtype).eps) * float(b.nan_to_num(0, 0, 0).abs().max())
    return a.shape == b.shape and torch.allclose(a.to(b), b, 0, slack, equal_nan=True)


def chunks(n: int, vocabulary: int) -> Iterator[slice]:
    """Slices of n rows whose logits stay small."""
    rows = max(1, CHUNK // vocabulary)
    return (slice(start, start + rows) for start in range(0, n, rows))
