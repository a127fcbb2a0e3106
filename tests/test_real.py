"""Real weights and real text: our numbers beside an independent float64 least squares."""

import contextlib

import numpy as np
import pytest
import torch
from scipy.linalg import lstsq

from howlinear import blocks, load, profile, windows

pytestmark = pytest.mark.real


class Enough(Exception):  # noqa: N818
    """The last module has been heard: the rest of a forward is time."""


def rows_of(model, paths, ids):
    """(x, y) of modules by plain hooks in a plain forward: (n, d) each, float32."""
    seen = {path: [] for path in paths}

    def listen(path):
        def hook(_, args, out):
            seen[path].append((args[0].flatten(0, 1).clone(), out.flatten(0, 1).clone()))
            if path == paths[-1]:
                raise Enough

        return hook

    handles = [model.get_submodule(p).register_forward_hook(listen(p)) for p in paths]
    try:
        with torch.no_grad():
            for batch in ids.split(8):
                with contextlib.suppress(Enough):
                    model.base_model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        p: tuple(torch.cat(t).numpy() for t in zip(*parts, strict=True))
        for p, parts in seen.items()
    }


def by_qr(x, y):
    """Least squares of full rank by Householder reflections: no sums of squares anywhere."""
    Q, R = np.linalg.qr(x)
    return np.linalg.solve(R, Q.T @ y)


def independent(x, y, cond=None):
    """The paper's numbers by numpy and scipy: (r2_scalar, r2, per-feature median).

    With `cond`, singular values of the scaled, centred inputs below it are left out.
    """
    cut = int(0.8 * len(x))
    x, y = x.astype(np.float64), y.astype(np.float64)
    mean, sd = x[:cut].mean(0), x[:cut].std(0)
    ones = np.column_stack([(x - mean) / sd, np.ones(len(x))])
    if cond is None:
        B = by_qr(ones[:cut], y[:cut])
    else:
        B = lstsq(ones[:cut], y[:cut], cond=cond, lapack_driver="gelsd", check_finite=False)[0]
    v = y[cut:]
    res, tot = ((v - ones[cut:] @ B) ** 2).sum(0), ((v - v.mean(0)) ** 2).sum(0)
    scalar = 1 - res.sum() / ((v - v.mean()) ** 2).sum()
    return scalar, 1 - res.sum() / tot.sum(), np.median(1 - res / tot)


def test_paper_protocol_is_independent_least_squares(builtin, wikitext):
    """Three blocks, a sink among them; the forward ends after the last."""
    model, tokenizer = builtin
    ids = windows(wikitext.fit, tokenizer, 128, tokens=15_000, bos="never")
    assert ids.shape == (117, 128)
    which = (0, 5, 11)
    paths = [f"model.layers.{i}.mlp" for i in which]
    result = profile(model, ids, at=",".join(map(str, which)), protocol="paper")
    rows = rows_of(model, paths, ids)
    found = {b.index: b for b in result.blocks}
    assert [b.path for b in result.blocks] == paths
    bodies = {i: body_r2(*rows[f"model.layers.{i}.mlp"]) for i in (5, 11)}
    for b in result.blocks:
        expected = independent(*rows.pop(b.path))
        got = (b.r2_scalar, b.r2, b.r2_feature["median"])
        # float32 rows, both fits in float64: far closer than the 1e-4 that we promise
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=b.path)
    for i, body in bodies.items():
        assert found[i].r2_body == pytest.approx(body, abs=1e-6)
    # what the first position hides in block 11, and does not in block 5
    assert found[11].kind == "first-position only"
    assert found[11].r2 - found[11].r2_body > 0.2
    assert abs(found[5].r2 - found[5].r2_body) < 0.01


def body_r2(x, y):
    """R2 of the same split, first positions left out, by numpy."""
    first = np.arange(len(x)) % 128 == 0
    fit = np.arange(len(x)) < int(0.8 * len(x))
    ones = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    y = y.astype(np.float64)
    B = by_qr(ones[fit & ~first], y[fit & ~first])
    u, v = ones[~fit & ~first], y[~fit & ~first]
    return 1 - ((v - u @ B) ** 2).sum() / ((v - v.mean(0)) ** 2).sum()


def test_a_real_encoder(minilm, wikitext):
    model, tokenizer = load(str(minilm))
    ids = windows(wikitext.fit, tokenizer, 128, tokens=8192)
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    at = blocks(model)
    assert len(at) == 6
    seen = []
    layer = model.encoder.layer[2]
    hooks = [
        layer.intermediate.register_forward_pre_hook(lambda _, a: seen.append(a[0].flatten(0, 1))),
        layer.output.dense.register_forward_hook(lambda _, a, out: seen.append(out.flatten(0, 1))),
    ]
    with torch.no_grad():
        for batch in ids.split(8):
            model(batch)
    for hook in hooks:
        hook.remove()
    b = profile(model, ids, protocol="paper").blocks[2]
    x, y = torch.cat(seen[::2]).numpy(), torch.cat(seen[1::2]).numpy()
    # a LayerNorm's output lacks one direction: both leave out what only rounding makes of it
    assert b.input_rank == 383
    got = (b.r2_scalar, b.r2, b.r2_feature["median"])
    np.testing.assert_allclose(got, independent(x, y, cond=384 * 2**-23), atol=1e-5)
    np.testing.assert_allclose(got[:2], independent(x, y)[:2], atol=1e-4)  # hardly a difference
    assert b.stream_error > 0
