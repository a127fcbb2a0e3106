"""Where the rest sits, and what the linear part computes.

where(affine, report, decode)        # positions and tokens that carry what the map leaves
directions(model, affine, fit, decode)          # what the map reads and writes, in tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.affine import Affine
from howlinear.models.families import backbone
from howlinear.probing.samples import CHUNK, Sample, errors

TOKENS = 8  # listed
COUNT = 10  # occurrences that a token needs before its mean means something
DIRECTIONS = 4

Decode = Callable[[int], str]


def where(affine: Affine, report: Sample, decode: Decode | None = None) -> dict[str, Any]:
    """Shares of the squared error by position and by token, beside their shares of the rows."""
    error, _ = errors(affine, report)
    total = float(error.sum())
    if total <= 0:
        return {"positions": [], "tokens": []}
    # 0, 1, 2-3, 4-7, ...: an octave each
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
    found: dict[str, Any] = {"positions": positions, "tokens": []}
    if report.token is None:
        return found
    ids, which, counts = report.token.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, which, error)
    means = torch.where(counts >= COUNT, sums / counts, 0.0)
    for i in means.argsort(descending=True)[:TOKENS].tolist():
        if counts[i] >= COUNT:
            own = {"token": int(ids[i]), "count": int(counts[i])}
            own["text"] = decode(int(ids[i])) if decode else None  # type: ignore[assignment]
            share = float(sums[i]) / total
            found["tokens"].append(
                own | {"share": share, "times_mean": share * len(report) / int(counts[i])}
            )
    return found


def directions(
    model: nn.Module, affine: Affine, fit: Sample, decode: Decode | None = None
) -> list[dict[str, Any]]:
    """The output directions in which the map writes most variance, and what it reads for each.

    u are the leading eigenvectors of W S_xx W'; the map's output along u is (W'u) x. Tokens are those
    that the unembedding, less its mean, reads furthest along: of u through the final norm's weights,
    and of W'u as it stands. Empty where the model has no unembedding of that width.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    E = getattr(head, "weight", None)
    W = affine.weight.double()
    mean = fit.x.double().mean(0)
    C = sum((x.double() - mean).t() @ (x.double() - mean) for x in fit.x.split(CHUNK)) / len(fit)
    assert isinstance(C, Tensor)
    values, U = torch.linalg.eigh(W @ C @ W.t())
    gamma = _final_norm(model, len(W))
    found = []
    for k in range(1, min(DIRECTIONS, len(W)) + 1):
        u = U[:, -k]
        own: dict[str, Any] = {"share": float(values[-k] / values.sum())}
        for name, vector in (("writes", u if gamma is None else u * gamma), ("reads", W.t() @ u)):
            own[name] = None
            if isinstance(E, Tensor) and E.shape[1] == len(vector):
                score = E.detach().float() @ vector.to(E.device).float()
                score -= score.mean()
                own[name] = {
                    side: [_token(i, decode) for i in (sign * score).topk(TOKENS).indices.tolist()]
                    for side, sign in (("up", 1), ("down", -1))
                }
        found.append(own)
    return found


def _token(index: int, decode: Decode | None) -> Any:
    return decode(index) if decode else index


@torch.no_grad()
def _final_norm(model: nn.Module, width: int) -> Tensor | None:
    """What the norm before the unembedding multiplies each feature by, as it does it.

    It is the last module outside the stack of layers with one weight a feature. Some families
    multiply by the weight, some by one more than it: so plus and minus one are sent through.
    """
    found = None
    for path, module in backbone(model).named_modules():
        weight = getattr(module, "weight", None)
        inside = any(part.isdigit() for part in path.split("."))
        if isinstance(weight, Tensor) and tuple(weight.shape) == (width,) and not inside:
            found = module
    if found is None:
        return None
    v = torch.ones(1, width).to(next(found.parameters()))
    v[:, 1::2] = -1
    gain: Tensor = (found(v) - found(-v)) / (2 * v)
    return gain[0].double().cpu()
