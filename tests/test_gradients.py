"""Gradients of predictions by block outputs, against autograd by hand and Fisher's information."""

import pytest
import torch

import tiny
from howlinear import blocks, profile
from howlinear.linear.gradients import LENGTH, WINDOWS, GradientSample
from howlinear.models.forward import as_windows
from howlinear.profiling import gradients
from howlinear.profiling.gradients import (
    _drawn,
    gradient_products,
    gradients_on,
    why_no_gradients,
)
from howlinear.profiling.needs import gradient_rows
from howlinear.profiling.passes import Course


def tokens(*shape, seed=0):
    return torch.randint(3, 49, shape, generator=torch.Generator().manual_seed(seed))


def sample_of(name, block=-1, windows=None, **options):
    """The gradient sample of one block of a tiny model, and the model."""
    model = tiny.model(name)
    windows = tokens(40, 24) if windows is None else windows
    return profile(model, windows, **options).stores[block].gradients, model


def test_random_signs_have_the_covariance_of_drawn_labels():
    """Over labels drawn from p, one-hot less p has the covariance diag(p) - p p' and mean 0."""
    p = torch.tensor([0.7, 0.2, 0.06, 0.04], dtype=torch.float64)
    n = 40_000
    v = _drawn(p.expand(n + 1, 4), torch.Generator().manual_seed(0))
    assert bool((v[-1] == 0).all())  # the last position predicts nothing
    v = v[:-1]
    products = v[:, :, None] * v[:, None]
    se = products.std(0) / n**0.5
    want = p.diag() - p[:, None] * p
    assert bool(((products.mean(0) - want).abs() < 5 * se + 1e-12).all())
    assert bool(((p.diag() - want).abs() > 5 * se).any())  # without centring it is another one
    assert bool((v.mean(0).abs() < 5 * v.std(0) / n**0.5).all())
    assert torch.allclose(v.sum(1), torch.zeros(n, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt"])
def test_gradients_say_how_predictions_move(name):
    """The derivative of v . logits along a random change of the block's output, by one scalar."""
    windows = tokens(40, 24)
    sample, model = sample_of(name, windows=windows)
    block, key = blocks(model)[-1], int(sample.key[0])
    (at,) = (i for i in range(len(windows)) if _key(windows, i) == key)
    direction = torch.randn(1, 24, block.d_out, generator=torch.Generator().manual_seed(1))
    direction[:, -1] = 0
    step = torch.zeros((), requires_grad=True)

    def add(_, args, out):
        moved = (out[0] if isinstance(out, tuple) else out) + step * direction
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    handle = model.get_submodule(block.out_norm or block.exit).register_forward_hook(add)
    logits = model(windows[at : at + 1]).logits[0]
    handle.remove()
    v = _drawn(logits.detach().softmax(-1), torch.Generator().manual_seed(key))
    (want,) = torch.autograd.grad((v * logits).sum(), step)
    g = sample.gradient[sample.key == key]
    got, scale = (g * direction[0, :-1]).sum(), float(g.norm() * direction.norm())
    assert float(got) == pytest.approx(float(want), abs=1e-5 * scale)  # of about 100 roundings
    assert abs(float(want)) > 1e-3 * scale  # another direction would differ


def _key(windows, i):
    """As the sample makes it: of tokens, offset and seed."""
    import zlib

    from howlinear.linear.rows import hashed

    place = zlib.crc32(windows[i].numpy().tobytes(), i * windows.shape[1])
    return int(hashed(torch.tensor([place]), 0))


def test_products_are_those_of_the_gradients_of_all_windows(monkeypatch):
    model, windows = tiny.model("llama"), tokens(5, 24)
    at = blocks(model)
    samples = gradients_on(model, at, windows)
    for logits in (gradients.LOGITS, 2 * 24 * model.config.vocab_size):  # all at once; two windows
        monkeypatch.setattr(gradients, "LOGITS", logits)
        products = gradient_products(model, at, windows)
        for block in at:
            g = samples[block].gradient.double()
            assert len(g) == 5 * 23
            torch.testing.assert_close(products[block].double(), g.t() @ g, rtol=1e-5, atol=1e-7)


def test_the_sample_is_bounded_and_of_the_smallest_keys():
    windows = tokens(50, 24)
    sample, _ = sample_of("llama", windows=windows)
    keys = sorted(_key(windows, i) for i in range(50))[:WINDOWS]
    assert sample.key.unique().tolist() == keys
    assert len(sample) == WINDOWS * 23  # each window without its last token
    assert LENGTH >= 24


def test_batches_and_batch_sizes_change_nothing():
    windows = tokens(40, 24)
    want, _ = sample_of("llama", windows=windows)
    for other in (windows.split(8), windows):
        got, _ = sample_of("llama", windows=other, batch_size=5)
        assert torch.equal(got.key, want.key)
        assert torch.equal(got.group, want.group)
        assert torch.allclose(got.gradient, want.gradient, rtol=1e-4, atol=1e-6)


def test_samples_of_parts_merge_to_the_sample_of_the_whole():
    def part(keys):
        sample = GradientSample(3, 2)
        for k in keys:
            x, y, g = (torch.full(shape, float(k)) for shape in ((4, 3), (4, 2), (4, 2)))
            sample.add(k, x, y, g, group=k % 5, cluster=k // 2)
        return sample

    whole = part(range(2 * WINDOWS))
    odd, even = part(range(1, 2 * WINDOWS, 2)), part(range(0, 2 * WINDOWS, 2))
    odd.merge(even)
    assert odd.key.unique().tolist() == whole.key.unique().tolist() == list(range(WINDOWS))
    assert bool((odd.x[:, 0] == odd.key).all() and (odd.group == odd.key % 5).all())
    again = GradientSample(3, 2)
    again.load_state_dict(odd.state_dict())
    assert torch.equal(again.gradient, odd.gradient)
    for name in ("key", "x", "gradient"):
        damaged = {k: v[:-1] if k == name else v for k, v in odd.state_dict().items()}
        with pytest.raises(ValueError, match="gradient sample"):
            GradientSample(3, 2).load_state_dict(damaged)
    with pytest.raises(ValueError, match="has no x as expected"):
        GradientSample(4, 2).load_state_dict(odd.state_dict())


def test_the_model_is_as_it_was():
    model = tiny.model("falcon").train()
    profile(model, tokens(40, 8))
    assert not any(m._forward_hooks for m in model.modules())
    assert all(m.training for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("name", "why"), [("bert", "masked language"), ("t5", "reads one text")])
def test_models_that_predict_no_next_token_say_so(name, why):
    model, text = tiny.model(name), as_windows(tokens(40, 8))
    assert why in why_no_gradients(model, text, Course())
    result = profile(model, tokens(60, 8))
    assert all(b.expected_kl is None and b.expected_kl_se is None for b in result.blocks)
    assert any("no expected cost" in note and why in note for note in result.notes)


@pytest.mark.parametrize(
    "name", [n for n, r in tiny.TINY.items() if r.auto == "AutoModelForCausalLM"]
)
def test_every_causal_family_has_gradients(name):
    model = tiny.model(name)
    windows = tokens(30, 8)
    assert why_no_gradients(model, as_windows(windows), Course()) == ""
    result = profile(model, windows)
    assert len(result.stores) == tiny.TINY[name].blocks
    for store, b in zip(result.stores, result.blocks, strict=True):
        assert len(store.gradients) == min(30, WINDOWS) * 7 == gradient_rows(model, 30, 8)
        assert bool(store.gradients.gradient.isfinite().all())
        assert 0 <= b.expected_kl < 100
    assert any(b.expected_kl > 0 for b in result.blocks)
