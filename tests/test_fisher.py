"""The diagonal of Fisher's information of block outputs, against plain autograd and against swaps."""

import pytest
import torch

import tiny
from howlinear import blocks, swap_costs
from howlinear.models.hooks import as_module
from howlinear.profiling.fisher import fisher


def tokens(*shape, seed=0):
    return torch.randint(3, 49, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(model, block, ids):
    """E[g_j^2] exactly: every token that could be drawn, weighted by its probability.

    Draws of different positions are independent with mean zero, so that only squares of one
    position's gradient remain: sum over positions s and tokens v of p_s(v) (d log p_s(v) / dy)^2.
    """
    kept = {}

    def hook(_, args, out):
        kept["y"] = out.detach().requires_grad_()
        return kept["y"]

    handle = model.get_submodule(block.exit).register_forward_hook(hook)
    log_p = model(ids).logits[:, :-1].log_softmax(-1)
    handle.remove()
    total = torch.zeros(block.d_out, dtype=torch.float64)
    for w in range(log_p.shape[0]):
        for s in range(log_p.shape[1]):
            for v in range(log_p.shape[2]):
                (g,) = torch.autograd.grad(log_p[w, s, v], kept["y"], retain_graph=True)
                p = float(log_p[w, s, v].detach().exp())
                total += p * g[w].double().square().sum(0)
    return total / ids.numel()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_drawn_gradients_are_fishers_information_on_average(name):
    model, ids = tiny.model(name), tokens(2, 4)
    block = blocks(model)[-1]  # detaching its output cuts nothing above
    want = by_hand(model, block, ids)
    draws = torch.stack([fisher(model, [block], ids, seed=s)[block.index] for s in range(300)])
    se = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - want) / se).abs().max() < 4.5  # of 16 features, 300 draws each
    assert bool((want > 0).all())


def test_for_small_errors_the_signal_is_the_divergence():
    """Random errors of a size that second order suffices for: what the formula promises."""
    model, ids = tiny.model("llama"), tokens(24, 16)
    at = blocks(model)
    care, size = fisher(model, at, ids), 0.02
    g = torch.Generator().manual_seed(0)

    def noisy(block):
        module = as_module(model, block)
        return lambda x: (y := module(x)) + size * torch.randn(y.shape, generator=g)

    for block in at:
        cost = swap_costs(model, {block.index: noisy(block)}, ids)[0]
        expected = 0.5 * size**2 * float(care[block.index].sum())
        assert cost.change.kl == pytest.approx(expected, rel=0.35)


def test_the_model_is_as_it_was():
    model = tiny.model("falcon").train()
    fisher(model, blocks(model), tokens(2, 8))
    assert not any(m._forward_hooks for m in model.modules())
    assert all(m.training for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_models_that_predict_no_next_token_have_none(name):
    model = tiny.model(name)
    assert fisher(model, blocks(model), tokens(2, 8)) is None


@pytest.mark.parametrize(
    "name", [n for n, r in tiny.TINY.items() if r.auto == "AutoModelForCausalLM"]
)
def test_every_causal_family_has_one(name):
    model = tiny.model(name)
    care = fisher(model, blocks(model), tokens(3, 8))
    assert all(c.isfinite().all() and c.sum() > 0 for c in care.values())
    assert len(care) == tiny.TINY[name].blocks


def test_small_vocabularies_are_enough():
    model = tiny.model("llama", vocab_size=7)
    care = fisher(model, blocks(model), torch.randint(3, 7, (3, 8)))
    assert all(c.sum() > 0 for c in care.values())
