"""Train the maps of all replaced blocks at once to predict what the original model predicts.

    healed = heal(model, maps, windows, held_out, Recipe(steps=200))
    healed.maps                                 # the same kinds of maps; the model is unchanged
    healed.record["kl_before"], healed.record["kl_after"]

The loss is KL(original, changed) of the predictions at every position: labels of the text are not used. So
a model that is not changed has exactly no gradient, and nothing is gained by learning the text. AdamW without
weight decay takes one step for each 512 tokens, with gradients clipped to norm 1; the learning rate rises
linearly, then falls along a cosine. Every few steps KL is measured on text that is not trained on; the
weights with the lowest KL are kept, and training ends when it no longer falls. Where it never
falls below that of the maps at the start, these are kept.

Windows are dealt to batches once, and batches are taken in a new order in each epoch. Both orders and the
learning rate follow from the seed and the step, so that an interrupted training goes on to the same
bits. The original's last hidden states of a batch are kept for the next epoch, d numbers a token,
where memory allows. Logits exist for a few rows at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Map
from howlinear.linear.trainable import TrainableMap
from howlinear.losses.perplexity import compare_all
from howlinear.losses.readout import KeptReadout, Readout, chunks
from howlinear.models.families import Block, backbone, call_options
from howlinear.models.hooks import evaluating, frozen, swapped
from howlinear.run import room
from howlinear.run.tensors import checksum
from howlinear.run.training import TrainingState
from howlinear.run.work import Advance, Work

TOKENS = 512  # of one step
HELD_OUT = 2048  # tokens on which KL is measured, about
PATIENCE = 5  # measurements without a lower KL before training ends
NORM = 1.0  # of gradients, at most
SHARE = 8  # of the free memory: hidden states that are kept take one part


@dataclass(frozen=True)
class Recipe:
    """How maps are trained."""

    steps: int = 200
    learning_rate: float = 1e-4
    warm_up: float = 0.1  # share of the steps in which the learning rate rises
    every: int = 20  # steps between measurements of KL
    units: bool = True  # train the weights of kept hidden units, too
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: linear to its height, then half a cosine to 0."""
        warm = max(1, round(self.warm_up * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, eq=False)
class Healed:
    """Maps, trained or as they were; and a record of the training for a result's file."""

    maps: dict[Block, Map]
    record: dict[str, Any]


def check_healable(windows: Tensor, held_out: Tensor, parameters: int, work: Work) -> None:
    """Refuse, before the work, short texts, several processes, and too little memory to train so many
    parameters: weights and the best of them, gradients, and two means of the optimiser."""
    if len(held_out) < 2:
        raise ValueError(
            f"healing is stopped by held-out text, and the text for choosing has {len(held_out)} "
            "windows: raise `tokens` or profile a longer text"
        )
    if not windows.numel():
        raise ValueError("the text to fit on is empty: there is nothing to heal on")
    if work.ranks.count > 1:
        raise ValueError("healing runs in one process: do not start it by torchrun")
    room.check_memory(5 * 4 * parameters, "healing needs up to", "leave out `heal`")


def heal(
    model: nn.Module,
    maps: Mapping[Block, Map],
    windows: Tensor,
    held_out: Tensor,
    recipe: Recipe | None = None,
    *,
    work: Work | None = None,
    folder: Path | None = None,
    save_every: float = 60,
) -> Healed:
    """Distil the model's predictions on `windows` (n, length) into the maps of its replaced blocks.

    ValueError for a model without a next-token loss. With a `folder` the state is saved there every
    `save_every` seconds, at a measurement; the folder is removed at the end.
    """
    recipe, work = recipe or Recipe(), work or Work()
    check_healable(windows, held_out, sum(fitted.parameters for fitted in maps.values()), work)
    healing = _Healing(model, maps, windows, held_out, recipe)
    state = TrainingState(folder, healing.request(), save_every)
    if (saved := state.read()) is not None:
        healing.restore(*saved)
    healing.run(work, state)
    state.remove()
    record = healing.record() | ({"note": state.problem} if state.problem else {})
    return Healed(healing.best_maps() if record["kept"] else dict(maps), record)


class _Healing:
    """One training: the maps as modules, the optimiser, and what was measured so far."""

    def __init__(
        self,
        model: nn.Module,
        maps: Mapping[Block, Map],
        windows: Tensor,
        held_out: Tensor,
        recipe: Recipe,
    ) -> None:
        self.model, self.recipe = model, recipe
        self.layers = {b: TrainableMap(m, units=recipe.units) for b, m in maps.items()}
        every = [p for layer in self.layers.values() for p in layer.parameters()]
        self.weights = [p for p in every if p.requires_grad and p.numel()]
        self.adam = torch.optim.AdamW(self.weights, weight_decay=0.0, fused=True)
        step = max(1, len(held_out) * held_out.shape[1] // HELD_OUT)
        self.held_out, self.windows = held_out[::step], windows
        self.original = _readout(model, windows)
        self.judge = KeptReadout(model)
        self.batches = _batches(windows, recipe.seed)
        self.curve: list[tuple[int, float]] = []  # step, KL on held-out text
        self.best: list[Tensor] = []
        self.best_at, self.seconds, self.diverged = 0, 0.0, False

    # -- training

    def run(self, work: Work, state: TrainingState) -> None:
        """Train to the end, from the last measurement."""
        began = time.perf_counter() - self.seconds
        if not self.curve:
            self._measure(0)
        done = self.curve[-1][0]
        advance = self._announce(work)
        while done < self.recipe.steps and not self._ended():
            ids = self._batch(done)
            self._step(done, ids)
            advance(ids.numel())
            done += 1
            if done % self.recipe.every and done != self.recipe.steps and not self.diverged:
                continue
            self._measure(done)
            self.seconds = time.perf_counter() - began
            if state.due and not self._ended():
                state.write(done, *self._state())
            advance = self._announce(work)
        self.seconds = time.perf_counter() - began

    def _announce(self, work: Work) -> Advance:
        done, kl = self.curve[-1]
        left = (self.recipe.steps - done) * self.batches[0].numel()
        return work.begin(f"healing, KL {kl:.4f}", left)

    def _ended(self) -> bool:
        since = [kl for step, kl in self.curve if step > self.best_at]
        return self.diverged or len(since) >= PATIENCE

    def _batch(self, step: int) -> Tensor:
        """The windows of a step: each batch once in an epoch, in an order of the epoch's own."""
        epoch, place = divmod(step, len(self.batches))
        g = torch.Generator().manual_seed(self.recipe.seed + 1 + epoch)
        return self.batches[int(torch.randperm(len(self.batches), generator=g)[place])]

    def _step(self, number: int, ids: Tensor) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.rate(number)
        wanted = self.original.states({"input_ids": ids})
        with torch.enable_grad(), frozen(self.model), evaluating(self.model):
            with swapped(self.model, self.layers):
                states = self._states(ids)
            states.backward(self._gradient(states.detach(), wanted))
        norm = torch.nn.utils.clip_grad_norm_(self.weights, NORM)
        self.diverged = not bool(norm.isfinite())
        if not self.diverged:
            self.adam.step()
        self.adam.zero_grad()

    def _states(self, ids: Tensor) -> Tensor:
        """What `Readout.states` gives, with gradients."""
        whole = self.original.whole
        net = self.model if whole else backbone(self.model)
        out = net(input_ids=ids.to(self.original.device), **call_options(net))
        states: Tensor = out.logits if whole else out[0]
        return states

    def _gradient(self, states: Tensor, wanted: Tensor) -> Tensor:
        """Of the mean KL, by hidden states (B, L, d); by logits it is q - p, exactly 0 where q is p."""
        leaf = states.reshape(-1, states.shape[-1]).requires_grad_()
        rows = wanted.reshape(leaf.shape)
        for part in chunks(len(leaf), self.original.vocabulary):
            p = self.original.logits(rows[part]).softmax(-1)
            logits = self.original.logits(leaf[part])
            q = logits.detach().softmax(-1)
            logits.backward(q.sub_(p).div_(len(leaf)))
        assert leaf.grad is not None
        return leaf.grad.reshape(states.shape)

    # -- measuring

    def _measure(self, step: int) -> None:
        """KL on held-out text; the best weights are copied. Logits that are not finite: diverged."""
        kl = math.nan
        if not self.diverged:
            changed = partial(swapped, self.model, self.layers)
            try:
                kl = compare_all(self.judge, [changed], self.held_out)[0].kl
            except ValueError:
                if not step:  # the maps at the start, or the original
                    raise
        self.diverged = not math.isfinite(kl)
        if not self.diverged and (not self.curve or kl < self._lowest()):
            self.best, self.best_at = [p.detach().clone() for p in self.weights], step
        self.curve.append((step, kl))

    def _lowest(self) -> float:
        return min(kl for _, kl in self.curve if math.isfinite(kl))

    def best_maps(self) -> dict[Block, Map]:
        with torch.no_grad():
            for p, best in zip(self.weights, self.best, strict=True):
                p.copy_(best)
        return {block: layer.as_map() for block, layer in self.layers.items()}

    def record(self) -> dict[str, Any]:
        """The record of a training that has ended."""
        steps = self.curve[-1][0]
        before, after, kept = self.curve[0][1], self._lowest(), self.best_at > 0
        return {
            **asdict(self.recipe),
            "steps_run": steps,
            "steps_kept": self.best_at,
            "tokens": steps * self.batches[0].numel(),
            "tokens_held_out": self.held_out.numel(),
            "trained": sum(p.numel() for p in self.weights),
            "seconds": self.seconds,
            "kl_before": before,
            "kl_after": after,
            "kept": kept,
            "stopped_early": steps < self.recipe.steps,
            "diverged": self.diverged,
            "curve": self.curve,
        }

    # -- going on

    def request(self) -> dict[str, Any]:
        """What must be the same for a saved state to be gone on from."""
        start = {str(i): p.detach().cpu().contiguous() for i, p in enumerate(self.weights)}
        texts = {"windows": self.windows, "held_out": self.held_out}
        sums = {n: checksum({n: t.cpu().contiguous()}, {}) for n, t in texts.items()}
        return {"recipe": asdict(self.recipe), "maps": checksum(start, {}), **sums}

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors). The best weights are left out where they are the present ones."""
        tensors: dict[str, Tensor] = {}
        for i, p in enumerate(self.weights):
            tensors[f"weight.{i}"] = p
            for name in ("exp_avg", "exp_avg_sq", "step"):
                tensors[f"{name}.{i}"] = self.adam.state[p][name]
            if self.best_at != self.curve[-1][0]:
                tensors[f"best.{i}"] = self.best[i]
        facts = {"curve": self.curve, "best_at": self.best_at, "seconds": self.seconds}
        return facts, tensors

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.curve = [(int(step), float(kl)) for step, kl in facts["curve"]]
        self.best_at, self.seconds = int(facts["best_at"]), float(facts["seconds"])
        with torch.no_grad():
            for i, p in enumerate(self.weights):
                p.copy_(tensors[f"weight.{i}"])
                names = ("exp_avg", "exp_avg_sq")
                self.adam.state[p] = {n: tensors[f"{n}.{i}"].to(p).clone() for n in names}
                self.adam.state[p]["step"] = tensors[f"step.{i}"].to(p.device).clone()
                self.best.append(tensors.get(f"best.{i}", p).detach().clone())


def _readout(model: nn.Module, windows: Tensor) -> Readout:
    """The original: it keeps the states of its batches where they take little of the memory."""
    readout = KeptReadout(model)
    width = readout.states({"input_ids": windows[:1]}).shape[-1]
    readout.kept.clear()
    free = room.available_memory()
    little = free is None or 4 * width * windows.numel() <= free // SHARE
    return readout if little else Readout(model)


def _batches(windows: Tensor, seed: int) -> list[Tensor]:
    """Windows in batches of about TOKENS tokens; the rest of less than a batch is left out."""
    size = min(max(1, TOKENS // windows.shape[1]), len(windows))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    count = len(windows) // size
    return list(windows[order[: count * size]].split(size))
