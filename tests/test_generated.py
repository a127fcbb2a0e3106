"""Text that a model writes itself, beside the model's own predictions."""

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

import tiny
from howlinear.models import generated
from howlinear.models.generated import generated_windows, why_no_text


@pytest.fixture(scope="module")
def writer():
    folder = Path(__file__).parent / "models" / "llama"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def surplus(model, ids, special):
    """Mean of loss less entropy over the tokens, 0 for samples of the predictions, and its standard error."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    logits[..., special] = -1e9
    log_p = logits.log_softmax(-1)
    loss = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    differences = (loss - entropy)[:, 1:].flatten()
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))


def test_tokens_are_samples_of_the_predictions(writer):
    model, tokenizer = writer
    told = []
    ids = generated_windows(model, tokenizer, 40, 48, bos="never", progress=told.append)
    special = tokenizer.all_special_ids
    assert ids.shape == (40, 48)
    assert sum(told) == ids.numel()
    assert not bool(torch.isin(ids, torch.tensor(special)).any())
    mean, se = surplus(model, ids, special)
    assert abs(mean) < 4 * se
    mean, se = surplus(model, ids[:, torch.randperm(48)], special)  # negative control
    assert mean > 4 * se


def test_a_window_holds_several_texts_each_written_by_itself(writer, monkeypatch):
    model, tokenizer = copy.deepcopy(writer)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    monkeypatch.setattr(generated, "DOCUMENT", 8)
    whole = generated_windows(model, tokenizer, 6, 9, bos="always")  # one text each
    windows = generated_windows(model, tokenizer, 2, 25, bos="always")
    assert windows.shape == (2, 25)
    for i, window in enumerate(windows):
        texts = whole[3 * i : 3 * i + 3, 1:].flatten()
        assert window.tolist() == [5, *texts.tolist()]
    cut = generated_windows(model, tokenizer, 2, 22, bos="always")  # three texts of 7
    assert cut.shape == (2, 22)
    assert generated_windows(model, tokenizer, 2, 2, bos="always").shape == (2, 2)


def test_a_draw_follows_the_predictions_and_leaves_out_what_they_exclude():
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    draws = generated._drawn(p.log().expand(20_000, -1), torch.Generator().manual_seed(0))
    counts = draws.flatten().bincount(minlength=6)
    assert counts[p == 0].sum() == 0
    expected = 20_000 * p[p > 0]
    chi2 = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    assert chi2 < 13.8  # 0.999 of chi-squared with 2 degrees of freedom
    wrong = 20_000 * torch.tensor([0.48, 0.32, 0.2])  # negative control
    assert float(((counts[p > 0] - wrong) ** 2 / wrong).sum()) > 13.8


def test_predictions_that_are_not_finite_are_refused(writer):
    model, tokenizer = copy.deepcopy(writer)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="predictions are not finite"):
        generated_windows(model, tokenizer, 2, 8)


def test_a_cache_with_room_gives_the_same_text(writer, monkeypatch):
    made, roomy = [], generated._roomy

    def note(cache, length):
        made.append([type(layer) for layer in roomy(cache, length).layers])
        return cache

    monkeypatch.setattr(generated, "_roomy", note)
    with_room = generated_windows(*writer, 3, 24)
    assert made == [[generated._Roomy] * writer[0].config.num_hidden_layers]
    monkeypatch.setattr(generated, "_roomy", lambda cache, length: cache)
    assert torch.equal(generated_windows(*writer, 3, 24), with_room)


def test_windows_follow_from_the_seed_alone(writer):
    state, (model, tokenizer) = torch.get_rng_state(), copy.deepcopy(writer)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    first, same, other = (
        generated_windows(model, tokenizer, 3, 8, bos="always", seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first[:, 0].tolist() == [5] * 3


def test_a_model_that_does_not_write_is_refused(writer):
    with pytest.raises(ValueError, match="does not write text: name another text with `also_fit`"):
        generated_windows(tiny.model("bert"), writer[1], 2, 8)


def test_a_model_without_a_cache_is_refused(writer, monkeypatch):
    model, tokenizer = writer
    assert why_no_text(model) == ""
    forward = type(model).forward

    def without(self, *args, **options):
        out = forward(self, *args, **options | {"use_cache": False})
        out.past_key_values = None
        return out

    monkeypatch.setattr(type(model), "forward", without)
    with pytest.raises(ValueError, match="keeps no keys and values"):
        generated_windows(model, tokenizer, 2, 12)


def test_a_head_narrower_than_the_embedding_is_not_overrun(writer):
    model, tokenizer = copy.deepcopy(writer)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:1500].clone())
    assert int(generated_windows(model, tokenizer, 4, 12).max()) < 1500


def test_no_token_that_stands_for_no_text_is_written(writer):
    model, tokenizer = copy.deepcopy(writer)
    gone = list(range(100, len(tokenizer)))
    words = tokenizer.convert_ids_to_tokens(gone)
    tokenizer.add_tokens([AddedToken(word, special=True) for word in words], special_tokens=False)
    assert not set(gone) <= set(tokenizer.all_special_ids)
    assert int(generated_windows(model, tokenizer, 4, 12, bos="never").max()) < 100


def test_tokens_are_those_that_model_and_tokenizer_both_have(writer):
    model, tokenizer = copy.deepcopy(writer)
    model.resize_token_embeddings(len(tokenizer) + 64)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 10.0  # padding of the embedding
    assert int(generated_windows(model, tokenizer, 4, 12).max()) < len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(100)]})
    assert int(generated_windows(model, tokenizer, 4, 12).max()) < len(model.lm_head.weight)


def test_few_windows_are_written_at_once_where_keys_and_values_are_large(writer, monkeypatch):
    seen, (model, tokenizer) = [], writer
    forward = type(model).forward

    def note(self, *args, **options):
        seen.append(len(options["input_ids"]))
        return forward(self, *args, **options)

    monkeypatch.setattr(type(model), "forward", note)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    monkeypatch.setattr(generated, "CACHE", 3 * 2 * layers * width * 6 * 4)  # three windows of 6
    assert generated_windows(model, tokenizer, 7, 6).shape == (7, 6)
    assert set(seen) == {3, 1}
