"""Where the stream before a block can be read, and that it is found by trying."""

import pytest
import torch

import tiny
from howlinear import blocks
from howlinear.models.streams import inlets

PARALLEL = {"gptj", "gpt_neox", "phi", "cohere", "stablelm-parallel", "falcon", "falcon-new"}
POST_NORM = {"opt-350m", "bert", "roberta", "xlm-roberta", "electra", "distilbert", "mpnet"}
POST_NORM |= {"olmo2", "olmo3"}  # the block reads the stream itself


@pytest.mark.parametrize("name", tiny.TINY)
def test_the_inlet_of_every_family(name):
    model = tiny.model(name)
    found = set(inlets(model, blocks(model), tiny.inputs(name)).values())
    if name in PARALLEL:
        assert found == {None}
    elif name in POST_NORM:
        assert found == {""}
    else:
        assert None not in found
        assert all("norm" in path or "ln_2" in path for path in found)


def test_what_comes_in_and_what_the_block_gives_add_up():
    model = tiny.model("llama")
    block = blocks(model)[1]
    path = inlets(model, [block], tiny.inputs("llama"))[block]
    heard = {}
    model.get_submodule(path).register_forward_pre_hook(lambda _, a: heard.update(before=a[0]))
    model.get_submodule(block.exit).register_forward_hook(lambda _, a, y: heard.update(y=y))
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda _, a, h: heard.update(h=h))
    with torch.no_grad():
        model(**tiny.inputs("llama"))
    torch.testing.assert_close(heard["before"] + heard["y"], heard["h"])


def test_no_hooks_are_left():
    model = tiny.model("llama")
    inlets(model, blocks(model), tiny.inputs("llama"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
