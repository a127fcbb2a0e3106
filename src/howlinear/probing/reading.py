"""Where in the text the residual is large, and what the linear part computes.

where(affine, report, decode)           # squared residual by position and by token
directions(model, affine, fit, decode)  # what the map reads and writes, in tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.models.families import backbone
from howlinear.probing.samples import CHUNK, Layer, Sample, errors

TOKENS = 8  # listed
COUNT = 10  # occurrences that a token needs to be listed
DIRECTIONS = 4

Decode = Callable[[int], str]


def where(affine: Affine, report: Sample, decode: Decode | None = None) -> dict[str, Any]:
    """Shares of the squared error by position and by token, beside their shares of the rows."""
    error, _ = errors(affine, report)
    total = float(error.sum())
    if total <= 0:
        return {"positions": [], "tokens": []}
    # octaves of positions: 0, 1, 2-3, 4-7, ...
    octave = torch.where(report.position > 0, (report.position + 0.5).log2().floor() + 1, 0).long()
    positions = []
    for number in octave.unique().tolist():
        rows = octave == number
        first = 2 ** (number - 1) if number else 0
        positions.append(
            {
                "from": first,
                "to": max(first, min(2 * first - 1, int(report.position[rows].max()))),
                "rows": float(rows.double().mean()),
                "share": float(error[rows].sum()) / total,
            }
        )
    tokens: list[dict[str, Any]] = []
    if report.token is None:
        return {"positions": positions, "tokens": tokens}
    ids, which, counts = report.token.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, which, error)
    means = torch.where(counts >= COUNT, sums / counts, 0.0)
    for i in means.argsort(descending=True)[:TOKENS].tolist():
        if counts[i] >= COUNT:
            token, count, share = int(ids[i]), int(counts[i]), float(sums[i]) / total
            tokens.append(
                {
                    "token": token,
                    "count": count,
                    "text": decode(token) if decode else None,
                    "share": share,
                    "times_mean": share * len(report) / count,
                }
            )
    return {"positions": positions, "tokens": tokens}


def directions(
    model: nn.Module, affine: Affine, fit: Sample, decode: Decode | None = None
) -> list[dict[str, Any]]:
    """The output directions in which the map writes most variance, and what it reads for each.

    u are the leading eigenvectors of W S_xx W'; the map's output along u is (W'u) x. Tokens are those
    with the largest unembedding, minus its mean, along a direction: for `writes` along u times the
    final norm's weights, for `reads` along W'u. None if the model has no unembedding of that width.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    E = getattr(head, "weight", None)
    W = affine.weight.double()
    mean = fit.x.double().mean(0)
    C = sum((x.double() - mean).t() @ (x.double() - mean) for x in fit.x.split(CHUNK)) / len(fit)
    assert isinstance(C, Tensor)
    values, U = torch.linalg.eigh(W @ C @ W.t())
    gamma = _final_norm(model, len(W))
    listed = []
    for k in range(1, min(DIRECTIONS, len(W)) + 1):
        u = U[:, -k]
        direction: dict[str, Any] = {"share": float(values[-k] / values.sum())}
        for name, vector in (("writes", u if gamma is None else u * gamma), ("reads", W.t() @ u)):
            direction[name] = None
            if isinstance(E, Tensor) and E.shape[1] == len(vector):
                score = E.detach().float() @ vector.to(E.device).float()
                score -= score.mean()
                direction[name] = {
                    side: [_token(i, decode) for i in (sign * score).topk(TOKENS).indices.tolist()]
                    for side, sign in (("up", 1), ("down", -1))
                }
        listed.append(direction)
    return listed


def probe_residual(
    model: nn.Module, affine: Affine, fit: Sample, report: Sample, decode: Decode | None
) -> tuple[dict[str, Any], dict[str, Layer]]:
    read = {"directions": directions(model, affine, fit, decode)}
    return where(affine, report, decode) | read, {}


def _token(index: int, decode: Decode | None) -> Any:
    return decode(index) if decode else index


@torch.no_grad()
def _final_norm(model: nn.Module, width: int) -> Tensor | None:
    """The factor by which the norm before the unembedding multiplies each feature.

    The norm is the last module outside the stack of layers with one weight per feature. Some families
    multiply by the weight, some by 1 + weight: so inputs of plus and minus one are run through it.
    """
    norm = None
    for path, module in backbone(model).named_modules():
        weight = getattr(module, "weight", None)
        inside = any(part.isdigit() for part in path.split("."))
        if isinstance(weight, Tensor) and tuple(weight.shape) == (width,) and not inside:
            norm = module
    if norm is None:
        return None
    v = torch.ones(1, width).to(next(norm.parameters()))
    v[:, 1::2] = -1
    gain: Tensor = (norm(v) - norm(-v)) / (2 * v)
    return gain[0].double().cpu()
