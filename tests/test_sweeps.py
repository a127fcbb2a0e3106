"""Sweeps: resumed forwards are the obvious loop to the bit, at a fraction of its work."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiny
from howlinear import Affine, Profile, blocks, compare, profile, swap_costs, swapped
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import map_errors, sweep
from howlinear.models.families import backbone
from howlinear.models.hooks import as_module
from howlinear.models.recording import Recording
from howlinear.run.work import Work

CAUSAL = [n for n, row in tiny.TINY.items() if row.auto == "AutoModelForCausalLM"] + ["gemma3"]


@functools.cache
def cached(name):
    return tiny.model(name)


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY - 1, shape, generator=generator)


def linears(at, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        b.index: Affine(torch.randn(b.d_out, b.d_in, generator=g) / 4, torch.zeros(b.d_out), b.d_in)
        for b in at
    }


@pytest.mark.parametrize("name", CAUSAL)
def test_an_exact_copy_of_a_block_changes_nothing_to_the_bit(name):
    model = cached(name)
    copies = {b.index: as_module(model, b) for b in blocks(model)}
    for cost in swap_costs(model, copies, tokens(5, 12)):
        change = cost.change
        assert (change.delta_nll, change.delta_ppl, change.kl, change.top1) == (0, 0, 0, 1)
        assert torch.equal(change.nll, change.nll_changed)
        assert cost.rmse == 0
        assert cost.cosine == pytest.approx(1)


def test_a_profiles_map_replaces_the_module_that_it_was_fitted_on(tmp_path):
    """Not the feed-forward block of the same index."""
    model, ids = cached("llama"), tokens(3, 12)
    result = profile(model, tokens(170, 32), at=r"model\.layers\.[12]\.self_attn", signal=False)
    result.save(tmp_path)
    for maps in (result.maps, Profile.load(tmp_path).maps):
        (cost,) = swap_costs(model, {1: maps[1]}, ids)
        attention = blocks(model, r"model\.layers\.2\.self_attn")[0]
        want = compare(model, functools.partial(swapped, model, {attention: maps[1]}), ids)
        assert (cost.block.index, cost.block.path) == (1, "model.layers.2.self_attn")
        assert cost.change.delta_nll == pytest.approx(want.delta_nll, rel=1e-5)
    with pytest.raises(ValueError, match="map 1 was fitted on model") as error:
        swap_costs(cached("gpt2"), {1: result.maps[1]}, ids)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CAUSAL)
def test_resumed_sweeps_are_the_obvious_loop(name):
    model, ids = cached(name), tokens(5, 12)
    at = blocks(model)
    maps = linears(at)
    variants = [(b, maps[b.index]) for b in at]
    fast = sweep(model, variants, ids, work=Work(batch_size=3))
    slow = sweep(model, variants, ids, work=Work(batch_size=3), resume=False)
    assert (fast.resumed, slow.resumed) == (True, False)
    for b, a, c in zip(at, fast.costs, slow.costs, strict=True):
        assert torch.equal(a.change.nll_changed, c.change.nll_changed)
        assert torch.equal(a.change.divergence, c.change.divergence)
        obvious = compare(model, functools.partial(swapped, model, {b: maps[b.index]}), ids)
        assert a.change.delta_nll == pytest.approx(obvious.delta_nll, rel=1e-5, abs=1e-7)
        assert a.change.delta_nll_se == pytest.approx(obvious.delta_nll_se, rel=1e-4)
        assert a.change.delta_nll != 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "falcon", "gemma2", "opt", "phi3"])
def test_a_sweep_costs_half_the_layers_of_the_obvious_loop(name):
    """(L + 1) / 2 passes through the layers and L + 1 through the head, counted; maps come on top."""
    depth = 4
    model = tiny.model(name, **{DEPTH.get(name, "num_hidden_layers"): depth})
    at, ids = blocks(model), tokens(4, 16)
    assert len(at) == depth
    copies = [(b, nn.Linear(b.d_in, b.d_out)) for b in at]
    readout = Readout(model)
    once = flops(lambda: backbone(model)(input_ids=ids))
    head = flops(lambda: readout.logits(torch.zeros(4 * 15, 16)))
    maps = sum(2 * ids.numel() * b.d_in * b.d_out for b in at)
    swept = flops(lambda: sweep(model, copies, ids))
    apart = flops(lambda: Readout(model)) + flops(lambda: probe(model, at))  # on a few tokens, once
    assert swept - apart <= (depth + 1) / 2 * once + (depth + 1) * head + maps
    assert swept - apart > (depth - 1) / 2 * once  # the count sees the work
    obvious = flops(lambda: sweep(model, copies, ids, resume=False))
    assert obvious > depth * once


DEPTH = {"gpt2": "n_layer"}


def flops(run):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def probe(model, at):
    readout = Readout(model)
    ids = {"input_ids": torch.arange(10, 14)[None]}
    return Recording(model, at).problem(lambda: readout.states(ids))


@pytest.mark.parametrize("pattern", ["q_proj", "o_proj", "gate_proj"])
def test_what_comes_after_a_module_in_its_own_layer_is_run_again(pattern):
    """Not only feed-forward blocks can be named, and attention comes before them."""
    model, ids = cached("llama"), tokens(5, 12)
    at = blocks(model, rf".*\.{pattern}")
    assert len(at) == 3
    variants = [(b, linears([b])[b.index]) for b in at]
    fast, slow = (sweep(model, variants, ids, resume=resume) for resume in (True, False))
    assert fast.resumed
    for a, c in zip(fast.costs, slow.costs, strict=True):
        assert torch.equal(a.change.nll_changed, c.change.nll_changed)
        assert a.change.delta_nll != 0


class Talking(nn.Module):
    """A layer that hands something to the next one behind the model's back, as shared caches do."""

    def __init__(self, layer, board):
        super().__init__()
        self.mlp, self.rest, self.board = layer.mlp, layer, board

    def forward(self, hidden_states, *args, **kwargs):
        said = self.board.pop("said", 0)
        out = self.rest(hidden_states, *args, **kwargs)
        self.board["said"] = out.mean()
        return out + said


def test_a_model_that_cannot_be_resumed_falls_back_to_the_obvious_loop():
    model, ids = tiny.model("llama"), tokens(3, 10)
    board = {}
    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = Talking(layers[i], board)
    model.model.register_forward_pre_hook(lambda *_: board.clear())
    at = blocks(model)
    swept = sweep(model, [(b, linears(at)[b.index]) for b in at], ids)
    assert not swept.resumed
    assert "block 1 (model.layers.1.mlp): resumed there, states differ by up to" in swept.note
    obvious = compare(model, lambda: swapped(model, {at[0]: linears(at)[0]}), ids)
    assert swept.costs[0].change.delta_nll == pytest.approx(obvious.delta_nll, rel=1e-5)


def test_the_note_carries_what_a_resumed_forward_raised():
    """A layer that counts on its neighbour having run raises; the sweep says so and goes on."""
    model, ids = tiny.model("llama"), tokens(3, 10)
    ran = []
    model.model.register_forward_pre_hook(lambda *_: ran.clear())
    first, second = model.model.layers[0].mlp, model.model.layers[1]
    first.register_forward_hook(lambda *_: ran.append(0))

    def needs_the_first(*_):
        if not ran:
            raise ZeroDivisionError("layer 0 has\nnot run")

    second.register_forward_pre_hook(needs_the_first)
    at = blocks(model)
    swept = sweep(model, [(at[1], linears(at)[1])], ids)
    assert not swept.resumed
    assert swept.note.endswith("ZeroDivisionError: layer 0 has not run")
    assert swept.note.startswith("every swap ran the whole model, since")
    assert sweep(model, [(at[1], linears(at)[1])], ids, resume=False).note == ""


def test_the_model_is_as_it_was_after_an_error_in_the_middle():
    model = tiny.model("llama")
    at = blocks(model)
    before = list(model.modules())

    def broken(x):
        raise OverflowError("in the middle")

    with pytest.raises(OverflowError):
        swap_costs(model, {1: broken}, tokens(2, 8))
    assert list(model.modules()) == before
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(at) == 3


def test_errors_of_a_map_are_those_of_its_rows():
    model, ids = tiny.model("gemma2"), tokens(4, 9)  # a norm between block and stream
    block = blocks(model)[1]
    guess = linears([block])[1]
    seen = {}
    layer = model.model.layers[1]
    hooks = [
        layer.mlp.register_forward_hook(lambda _, a, out: seen.update(x=a[0], y=out)),
        layer.register_forward_hook(lambda _, a, out: seen.update(h=out)),
    ]
    with torch.no_grad():
        model(ids)
        for hook in hooks:
            hook.remove()
        y, z, h = seen["y"], guess(seen["x"]), seen["h"]
        norm = layer.post_feedforward_layernorm
        off = (norm(y) - norm(z)).square().sum(-1) / h.square().sum(-1)
    for cost in (
        swap_costs(model, {1: guess}, ids)[0],
        map_errors(model, [(block, guess)], ids)[0],
    ):
        assert cost.cosine == pytest.approx(
            float(torch.cosine_similarity(y, z, -1).mean()), rel=1e-5
        )
        assert cost.rmse == pytest.approx(float((y - z).square().mean().sqrt()), rel=1e-5)
        assert cost.stream_error == pytest.approx(float(off.mean()), rel=1e-4)


def test_bad_input_is_one_line():
    model, ids = cached("llama"), tokens(2, 8)
    with pytest.raises(
        ValueError, match=r"^the map of block 0 .* takes 8 to 16, the block 16 to 16"
    ):
        swap_costs(model, {0: Affine(torch.zeros(16, 8), torch.zeros(16), 8)}, ids)
    with pytest.raises(ValueError, match="no block 7: the model has 3"):
        swap_costs(model, {7: nn.Identity()}, ids)
    with pytest.raises(ValueError, match="returned shape"):
        swap_costs(model, {0: nn.Linear(16, 4)}, ids)
    with pytest.raises(ValueError, match="the text is empty"):
        swap_costs(model, {0: nn.Linear(16, 16)}, ids[:0])
