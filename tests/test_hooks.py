"""What the tricks that patch a model rely on: each test fails when torch or transformers changes it."""

import types

import pytest
import torch
from torch import nn

import tiny
from howlinear import blocks, swapped
from howlinear.models.recording import Recording, answering


class Two(nn.Module):
    """Calls its child by keyword, as some families do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(input=x)


def test_torch_calls_pre_hooks_with_keywords_and_hooks_after_an_exception():
    module, seen = Two(), []
    module.inner.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((args, list(kwargs))), with_kwargs=True
    )
    module.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
    with pytest.raises(RuntimeError):
        module(torch.zeros(2, 5))  # another width
    assert seen == [((), ["input"]), None]


def test_a_forward_of_the_instance_takes_precedence_and_hooks_still_run():
    module, seen = nn.Linear(3, 3), []
    module.register_forward_hook(lambda m, args, out: seen.append(out))
    answer = torch.ones(1)
    with answering({module: answer}):
        assert module(torch.zeros(2, 3)) is answer
        assert module("anything", at="all") is answer
    assert seen[0] is answer
    assert "forward" not in module.__dict__
    assert module(torch.zeros(2, 3)).shape == (2, 3)


def test_a_forward_that_was_wrapped_before_is_put_back():
    """accelerate keeps its wrapper in the instance too."""
    module = nn.Linear(3, 3)
    wrapper = types.MethodType(lambda self, x: x + 1, module)
    module.forward = wrapper
    with answering({module: torch.zeros(1)}):
        assert module(torch.zeros(1)) == 0
    assert module.__dict__["forward"] is wrapper
    assert module(torch.zeros(1)) == 1


def test_a_module_is_looked_up_in_its_parent_at_each_call():
    module = Two()
    original, module._modules["inner"] = module.inner, nn.Identity()
    assert torch.equal(module(torch.ones(2, 3)), torch.ones(2, 3))
    module._modules["inner"] = original
    assert not torch.equal(module(torch.ones(2, 3)), torch.ones(2, 3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "qwen2_moe"])
def test_layers_are_a_list_called_in_order(name):
    """`Recording` skips the layers before a block's own by their place in the list."""
    model = tiny.model(name)
    at = blocks(model)[-1]
    recording = Recording(model, [at])
    with recording.recording(), torch.no_grad():
        model(**tiny.inputs(name))
    skipped = recording.before[at]
    assert len(skipped) >= len(blocks(model)) - 1
    assert recording.done[at] == set(skipped)  # all of them had returned when the block began


def test_a_swap_reaches_a_block_through_whatever_wraps_its_layer():
    model, ids = tiny.model("llama"), tiny.inputs("llama")["input_ids"]
    at = blocks(model)[0]
    ran = []

    def zero(x):
        ran.append(x.shape)
        return torch.zeros_like(x)

    with torch.no_grad(), swapped(model, {at: zero}):
        model(ids)
    assert ran == [(*ids.shape, at.d_in)]
