"""Where the rest sits and what the map computes, on rows with a known answer."""

import pytest
import torch

import tiny
from howlinear import Affine
from howlinear.probing.reading import _final_norm, directions, where
from howlinear.probing.samples import Sample


def rows(n=400, d=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    row = torch.arange(n)
    token = torch.randint(5, 9, (n,), generator=g)
    return Sample(x, x.clone(), row // 20, row % 20, token)


def test_shares_go_to_the_positions_and_tokens_that_carry_them():
    sample = rows()
    y = sample.x.clone()
    y[sample.position == 0] += 3
    y[sample.token == 7] += 1
    sample = Sample(sample.x, y, sample.cluster, sample.position, sample.token)
    affine = Affine(torch.eye(16), torch.zeros(16), 16)
    found = where(affine, sample, decode=lambda i: f"<{i}>")
    positions = found["positions"]
    assert [(p["from"], p["to"]) for p in positions] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 19),
    ]
    assert sum(p["share"] for p in positions) == pytest.approx(1)
    assert sum(p["rows"] for p in positions) == pytest.approx(1)
    error = (y - sample.x).double().square().sum(1)
    first = float(error[sample.position == 0].sum() / error.sum())
    assert positions[0]["share"] == pytest.approx(first)
    assert positions[0]["rows"] == pytest.approx(0.05)
    assert found["tokens"][0]["token"] == 7
    assert found["tokens"][0]["text"] == "<7>"
    count = int((sample.token == 7).sum())
    assert found["tokens"][0]["count"] == count
    mine = float(error[sample.token == 7].sum() / error.sum())
    assert found["tokens"][0]["times_mean"] == pytest.approx(mine * 400 / count)


def test_rare_tokens_are_not_listed():
    sample = rows()
    sample.token[:3] = 40
    shifted = Affine(torch.eye(16), torch.ones(16), 16)
    assert 40 not in [t["token"] for t in where(shifted, sample)["tokens"]]


def test_nothing_left_is_nowhere():
    found = where(Affine(torch.eye(16), torch.zeros(16), 16), rows())
    assert found == {"positions": [], "tokens": []}


def test_a_map_that_writes_a_tokens_unembedding_is_read_so():
    model = tiny.model("llama")
    gamma = torch.linspace(0.5, 2, 16)
    model.model.norm.weight.data.copy_(gamma)
    E = model.get_output_embeddings().weight.detach()
    E = E - E.mean(0)
    token = int(E.norm(dim=1).argmax())  # no other lies further along its direction
    affine = Affine(torch.outer(E[token] / gamma, E[token]), torch.zeros(16), 16)
    top = directions(model, affine, rows())[0]
    assert top["share"] == pytest.approx(1)
    side = "up" if top["writes"]["up"][0] == token else "down"
    assert top["writes"][side][0] == token
    assert top["reads"][side][0] == token
    back = Affine(torch.outer(-E[token] / gamma, E[token]), torch.zeros(16), 16)
    turned = directions(model, back, rows())[0]
    side = "up" if turned["writes"]["up"][0] == token else "down"
    assert turned["reads"]["down" if side == "up" else "up"][0] == token  # read for, write against


@pytest.mark.parametrize("name", ["gemma2", "opt", "gpt2", "gpt_neox"])
def test_the_final_norm_is_found_and_its_gain_is_what_it_does(name):
    model = tiny.model(name)
    norms = {"gemma2": "model.norm", "opt": "model.decoder.final_layer_norm"}
    norms |= {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm"}
    norm = model.get_submodule(norms[name])
    norm.weight.data = torch.linspace(0.5, 2, 16)
    want = norm.weight.double() + (1 if name == "gemma2" else 0)
    torch.testing.assert_close(_final_norm(model, 16), want.detach(), rtol=1e-4, atol=1e-4)


def test_a_model_without_unembedding_reads_nothing():
    import transformers

    model = transformers.AutoModel.from_config(tiny.model("llama").config)
    found = directions(model, Affine(torch.eye(16), torch.zeros(16), 16), rows())
    assert all(d["writes"] is None and d["reads"] is None for d in found)
