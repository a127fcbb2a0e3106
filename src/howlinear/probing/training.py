"""Layers trained by gradient descent in a block's place: depth controls, and trained linear layers.

    fitted = train(dense(fit, seed=0), fit, choose)
    fitted.layer, fitted.converged, fitted.curve

    baselines(fit, report)      # a linear layer by SGD, Adam and AdamW against least squares

Networks see inputs and outputs at unit scale. The learning rate shrinks when R2 on the rows kept for
stopping no longer rises, and the best state by these rows is kept. Training has converged when the
learning rate has shrunk three times.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.linear.moments import Moments
from howlinear.linear.solving import fit as least_squares
from howlinear.probing.bilinear import Bilinear, as_linear
from howlinear.probing.fitting import Fitted, best_of, descend
from howlinear.probing.samples import CHUNK, Layer, Sample, outcome, r2_of, size_of

BATCH = 256
EVERY = 250  # steps between checks on the rows kept for stopping
PATIENCE = 3  # checks without gain before the learning rate shrinks
GAIN = 5e-4  # of R2, that counts as a gain
SHRINK = 0.3
POINTS = 30  # of a baseline's loss curve
OPTIMISERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
}


class Scaled(nn.Module):
    """A network on inputs and outputs of zero mean and unit scale; the scales are not trained."""

    shift_x: Tensor
    shift_y: Tensor
    scale_x: Tensor
    scale_y: Tensor

    def __init__(self, inner: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.inner = inner
        for name, value in (("shift_x", x.mean(0)), ("shift_y", y.mean(0))):
            self.register_buffer(name, value)
        self.register_buffer("scale_x", _nonzero(x.std(0)))
        self.register_buffer("scale_y", _nonzero((y - y.mean(0)).square().mean().sqrt()))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner((x - self.shift_x) / self.scale_x)
        return inner * self.scale_y + self.shift_y


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def dense(fit: Sample, seed: int) -> nn.Module:
    """The paper's dense (2x): Linear-GELU-Linear of width d."""
    d, d_out = fit.x.shape[1], fit.y.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d_out))
    return Scaled(inner, fit.x, fit.y)


def poly(fit: Sample, seed: int, rank: int = 16) -> nn.Module:
    """The paper's poly (2x): two bilinear layers, one after the other."""
    d, d_out = fit.x.shape[1], fit.y.shape[1]
    g = torch.Generator().manual_seed(seed)
    first, second = (
        _gated(Affine(as_linear(out, d, g), torch.zeros(out), d), rank, g) for out in (d, d_out)
    )
    return Scaled(nn.Sequential(first, second), fit.x, fit.y)


def seeded(affine: Affine, seed: int, rank: int = 16) -> nn.Module:
    """The paper's seeded poly: one bilinear layer that starts at the least-squares map, all trained."""
    return _gated(affine, rank, torch.Generator().manual_seed(seed))


def _gated(affine: Affine, rank: int, g: torch.Generator) -> Bilinear:
    """Products drawn as the paper draws them, gated by e^-2."""
    left, right = as_linear(rank, affine.d_in, g), as_linear(rank, affine.d_in, g)
    return Bilinear(affine, left, right, math.exp(-2) * as_linear(affine.d_out, rank, g))


def train(
    layer: nn.Module,
    fit: Sample,
    choose: Sample,
    *,
    seed: int = 0,
    steps: int = 8000,
    lr: float = 1e-3,
) -> Fitted:
    """AdamW on batches of 256 rows until R2 on the rows kept for stopping no longer rises."""
    fitted = Fitted(seed)
    g = torch.Generator().manual_seed(seed)
    scale = float((fit.y - fit.y.mean(0)).square().mean()) or 1.0
    adam = torch.optim.AdamW(layer.parameters(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        adam, mode="max", factor=SHRINK, patience=PATIENCE - 1, threshold=GAIN, threshold_mode="abs"
    )
    fitted.check(0, r2_of(layer, choose), copy.deepcopy(layer))
    for step in range(1, steps + 1):
        rows = torch.randint(len(fit), (BATCH,), generator=g)
        descend(adam, (layer(fit.x[rows]) - fit.y[rows]).square().mean() / scale)
        if step % EVERY and step != steps:
            continue
        r2 = r2_of(layer, choose)
        fitted.check(step, r2, copy.deepcopy(layer))
        schedule.step(r2)
        fitted.converged = adam.param_groups[0]["lr"] < lr * SHRINK**2.5
        if fitted.converged:
            break
    fitted.layer.requires_grad_(False)
    return fitted


def probe_network(
    networks: Iterable[tuple[int, nn.Module]],
    fit: Sample,
    choose: Sample,
    report: Sample,
    affine: Affine,
    **options: Any,
) -> tuple[dict[str, Any], nn.Module]:
    """Train each (seed, network); the record of all, and the best by `choose`."""
    tried = [train(layer, fit, choose, seed=seed, **options) for seed, layer in networks]

    def scores(layer: Any) -> dict[str, Any]:
        return {"parameters": size_of(layer), **outcome(layer, affine, report).to_dict()}

    return best_of(tried, scores)


# -- a linear layer by gradient descent -----------------------------------------------------------


def baselines(
    fit: Sample, report: Sample, *, train_steps: int = 3000, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """A linear layer by SGD, Adam and AdamW, on raw and on whitened inputs, and least squares.

    All see the same rows; training takes `train_steps` batches of 256 in the same order. The learning rate
    falls linearly to zero: Adam's from 1e-3, SGD's from the largest that does not diverge,
    256 / (max |x|^2 + 255 lambda_max), lambda_max of the inputs' mean square (Ma, Bassily, Belkin
    2018, arXiv 1712.06559).
    """
    whitened, (mean, root), condition = _whitened(fit.x)
    rows = Moments(fit.x.shape[1], fit.y.shape[1])
    rows.update(fit.x, fit.y)
    runs: list[dict[str, Any]] = []
    layers: dict[str, Layer] = {}
    for inputs, x in (("raw", fit.x), ("whitened", whitened)):
        for name in OPTIMISERS:
            began = time.perf_counter()
            layer, lr, curve = _descend(name, x, fit.y, train_steps, seed)
            if inputs == "whitened":
                folded = layer.weight.double() @ root.t()
                layer = Affine(folded, layer.bias.double() - folded @ mean, layer.rank)
            layers[f"{name} {inputs}"] = layer
            scores = {"lr": lr, "r2": r2_of(layer, report)}
            scores |= {"seconds": time.perf_counter() - began}
            runs.append({"optimiser": name, "inputs": inputs, **scores, "loss": curve})
    return {
        "steps": train_steps,
        "batch": BATCH,
        "input_condition": condition,
        "r2_closed_form": r2_of(least_squares(rows), report),
        "runs": runs,
    }, layers


def _whitened(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], float]:
    """x with unit covariance, the (mean, root) that whiten it, and the condition number of x."""
    mean = x.double().mean(0)
    S = sum((part.double() - mean).t() @ (part.double() - mean) for part in x.split(CHUNK))
    assert isinstance(S, Tensor)
    sd = (S.diagonal() / len(x)).sqrt()
    scale = torch.where(sd > 0, sd, torch.inf)  # to unit variance first, as the closed form does
    values, vectors = torch.linalg.eigh(S / len(x) / scale / scale[:, None])
    keep = values > (len(values) * torch.finfo(torch.float32).eps) ** 2 * values[-1]
    root = vectors[:, keep] / values[keep].sqrt() / scale[:, None]
    z = torch.cat([((part.double() - mean) @ root).float() for part in x.split(CHUNK)])
    spectrum = torch.linalg.eigvalsh(S)[-int(keep.sum()) :].clamp_min(0)
    return z, (mean, root), math.sqrt(float(spectrum[-1] / spectrum[0]))


def _descend(
    name: str, x: Tensor, y: Tensor, steps: int, seed: int
) -> tuple[Affine, float, list[tuple[int, float]]]:
    """(map, first learning rate, [(step, mean loss since the last point / variance)])"""
    g = torch.Generator().manual_seed(seed)
    n, d, d_out = len(x), x.shape[1], y.shape[1]
    weight, bias = nn.Parameter(torch.zeros(d_out, d)), nn.Parameter(torch.zeros(d_out))
    lr = _sgd_rate(x) if name == "sgd" else 1e-3
    optimiser = OPTIMISERS[name]([weight, bias], lr=lr)
    variance = float((y - y.mean(0)).double().square().sum() / n)
    curve, loss = [], 0.0
    every = max(1, steps // POINTS)
    with torch.no_grad():
        for step in range(1, steps + 1):
            rows = torch.randint(n, (BATCH,), generator=g)
            a = x[rows]
            error = torch.addmm(bias, a, weight.t()) - y[rows]
            loss += float(error.square().sum()) / BATCH / variance
            weight.grad = error.t() @ a / BATCH  # of half the mean squared norm
            bias.grad = error.mean(0)
            optimiser.param_groups[0]["lr"] = lr * (1 - (step - 1) / steps)
            optimiser.step()
            if step % every == 0:
                curve.append((step, loss / every))
                loss = 0.0
    return Affine(weight.detach(), bias.detach(), d), lr, curve


def _sgd_rate(x: Tensor) -> float:
    """The largest learning rate at which SGD on batches of these rows does not diverge."""
    # with a constant feature for the bias
    top = float(torch.linalg.eigvalsh((x.t() @ x).double() / len(x))[-1]) + 1
    largest = float(x.square().sum(1).max()) + 1
    return BATCH / (largest + (BATCH - 1) * top)
