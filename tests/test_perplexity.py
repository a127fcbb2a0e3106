"""Losses against Hugging Face's own, plain softmaxes in float64, statsmodels and the bootstrap."""

import functools
import math
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.special import log_softmax
from torch import nn
from torch.nn.functional import cross_entropy

import tiny
from howlinear.losses import readout
from howlinear.losses.perplexity import (
    Comparison,
    Loss,
    TokenScores,
    compare,
    compare_all,
    reference,
    text_loss,
)
from howlinear.losses.protocols import PROTOCOLS, EvalProtocol, scored_batches
from howlinear.losses.readout import KeptReadout, Readout, head_logits
from howlinear.models.families import blocks
from howlinear.models.hooks import as_module, swapped
from howlinear.run.work import Work

# Families that do something to their logits, and much of it.
SCALED = {
    "cohere-scaled": tiny.Tiny("cohere", tiny.GQA | {"logit_scale": 0.3}),
    "granite-scaled": tiny.Tiny("granite", tiny.GQA | {"logits_scaling": 7.0}),
    "gemma2-capped": tiny.Tiny("gemma2", tiny.GEMMA | {"final_logit_softcapping": 2.0}),
}
CAUSAL = [n for n, row in tiny.TINY.items() if row.auto == "AutoModelForCausalLM"] + ["gemma3"]
MASKED = [n for n, row in tiny.TINY.items() if row.auto == "AutoModelForMaskedLM"]


@functools.cache
def cached(name):
    with mock.patch.dict(tiny.TINY, SCALED):
        return tiny.model(name)


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY - 1, shape, generator=generator)


def full(model, ids):
    """(B, L - 1, V) log-probabilities in float64, by scipy."""
    with torch.no_grad():
        return log_softmax(model(ids).logits[:, :-1].double().numpy(), axis=-1)


def noisy(model, scale=0.05):
    """A copy of the model with other weights."""
    other = tiny.model("llama")
    other.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape))
    return other


@pytest.fixture
def llama():
    return cached("llama")


# -- protocols ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "length", "stride", "said"),
    [
        ("windows-128", 128, 128, "windows of 128, first token not predicted"),
        ("stride-1024-512", 1024, 512, "windows of 1024 every 512 tokens, each token counted once"),
        ("gptq-2048", 2048, 2048, "GPTQ convention: windows of 2048, first token not predicted"),
    ],
)
def test_protocols_have_names_and_say_what_they_do(text, length, stride, said):
    protocol = EvalProtocol.parse(text)
    assert protocol == EvalProtocol(text, length, stride) == PROTOCOLS[text]
    assert str(protocol) == said


@pytest.mark.parametrize(
    "text",
    [
        *("", "windows", "windows-", "windows-1", "windows-x", "windows--5", "windows-128-64"),
        *("stride-1024", "stride-8-0", "stride-8-9", "stride-8-8", "gptq", "perplexity-128"),
    ],
)
def test_what_is_no_protocol_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        EvalProtocol.parse(text)


@pytest.mark.parametrize("n", [16, 17, 23, 24, 25, 64, 65])
@pytest.mark.parametrize("text", ["stride-16-8", "stride-16-5", "stride-16-1", "windows-16"])
def test_every_token_is_counted_once(text, n):
    counted = [t for _, end, first in EvalProtocol.parse(text).cut(n) for t in range(first, end)]
    if text == "windows-16":
        assert counted == [t for t in range(n // 16 * 16) if t % 16]
    else:
        assert counted == list(range(1, n))


# -- one model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CAUSAL, *SCALED])
def test_windows_are_the_loss_of_hugging_face(name):
    model, ids = cached(name), tokens(6, 12)
    loss = text_loss(model, ids, batch_size=4)
    with torch.no_grad():
        want = float(model(input_ids=ids, labels=ids).loss)
    assert loss.nats == pytest.approx(want, rel=1e-5)
    assert loss.perplexity == pytest.approx(math.exp(want), rel=1e-4)
    assert loss.tokens == 6 * 11


def test_labels_shifted_by_one_more_give_another_loss(llama):
    ids = tokens(6, 12)
    with torch.no_grad():
        logits = llama(ids).logits
    wrong = cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
    assert abs(text_loss(llama, ids).nats - float(wrong)) > 0.05


def guide(model, ids, length, stride, less):
    """Hugging Face's guide to perplexity; it weighs windows by their targets less one."""
    nll = n = before = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        labels = ids[None, begin:end].clone()
        labels[:, : -(end - before)] = -100
        count = int((labels != -100).sum()) - less if begin else int((labels != -100).sum()) - 1
        with torch.no_grad():
            nll += float(model(ids[None, begin:end], labels=labels).loss) * count
        n, before = n + count, end
        if end == len(ids):
            return nll / n, n


@pytest.mark.parametrize("n", [16, 50, 51])
@pytest.mark.parametrize("stride", [4, 5, 15])
def test_stride_is_the_loop_of_hugging_faces_guide(llama, n, stride):
    ids = tokens(n)
    loss = text_loss(llama, ids, f"stride-16-{stride}", batch_size=3)
    want, count = guide(llama, ids, 16, stride, less=0)
    assert loss.tokens == count == n - 1
    assert loss.nats == pytest.approx(want, rel=1e-5)
    if (n - 16) % stride != 1:  # where the guide would divide 0 tokens by 0
        literal, _ = guide(llama, ids, 16, stride, less=1)
        assert loss.nats == pytest.approx(literal, rel=0.1)


def test_gptq_is_the_mean_over_full_windows(llama):
    ids, want = tokens(100), []
    for i in range(100 // 16):
        window = ids[None, i * 16 : (i + 1) * 16]
        with torch.no_grad():
            logits = llama(window).logits
        want.append(cross_entropy(logits[0, :-1], window[0, 1:]).float() * 16)
    perplexity = float(torch.exp(torch.stack(want).sum() / (6 * 16)))
    loss = text_loss(llama, ids, "gptq-16")
    assert loss.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert (loss.tokens, len(loss.counts)) == (6 * 15, 6)


def test_a_stream_and_its_windows_are_the_same_text(llama):
    ids, seen = tokens(8, 16), []
    want = text_loss(llama, ids, "windows-16")
    streamed = text_loss(llama, ids.flatten(), "windows-16", batch_size=3, progress=seen.append)
    assert (sum(seen), len(seen)) == (128, 3)
    for loss in (streamed, text_loss(llama, ids.split(3), "windows-16")):
        torch.testing.assert_close(loss.sums, want.sums, rtol=1e-6, atol=0)
        assert loss.protocol == want.protocol == EvalProtocol("windows-16", 16, 16)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_counted(llama, side):
    batch = tiny.inputs("llama", side)
    loss = text_loss(llama, [batch], "windows-7")
    assert loss.counts.tolist() == [tiny.SHORT - 1, tiny.LENGTH - 1]
    for window in range(2):
        ids = tiny.alone(batch, window)["input_ids"]
        assert float(loss.sums[window]) == pytest.approx(
            float(text_loss(llama, ids).sums), rel=1e-5
        )


def test_labels_that_hugging_face_ignores_are_not_counted(llama):
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[:, :5] = -100
    loss = text_loss(llama, [{"input_ids": ids, "labels": labels}], "windows-12")
    with torch.no_grad():
        assert loss.nats == pytest.approx(float(llama(ids, labels=labels).loss), rel=1e-5)


def test_small_chunks_change_nothing(llama, monkeypatch):
    ids = tokens(5, 12)
    want, change = text_loss(llama, ids), compare(llama, noisy(llama), ids)
    monkeypatch.setattr(readout, "CHUNK", 7 * tiny.VOCABULARY)
    seen = []
    monkeypatch.setattr(
        readout, "head_logits", lambda m, s: (seen.append(s.shape[-2]), head_logits(m, s))[1]
    )
    torch.testing.assert_close(text_loss(llama, ids).sums, want.sums, rtol=1e-6, atol=0)
    again = compare(llama, noisy(llama), ids)
    torch.testing.assert_close(again.divergence, change.divergence, rtol=1e-4, atol=0)
    assert max(seen[1:]) <= 8  # the first is the check of two windows of 8


def test_answers_carry_their_protocol_and_bytes(llama):
    loss = text_loss(llama, tokens(100), "windows-16", n_bytes=321)
    assert f"({loss.protocol}, 90 tokens)" in str(loss)
    said = loss.to_dict()
    assert said["protocol"] == "windows-16"
    assert (said["tokens"], said["clusters"]) == (90, 6)
    assert said["bits_per_byte"] == pytest.approx(90 * loss.nats / math.log(2) / 321)
    assert text_loss(llama, tokens(100), "windows-16").bits_per_byte is None
    assert math.isnan(text_loss(llama, tokens(1, 16)).nats_se)
    assert Loss(loss.protocol, loss.counts, loss.sums * 1000).perplexity == math.inf


def test_dropout_is_off_meanwhile_and_on_again_afterwards():
    model = tiny.model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    ids = tokens(4, 12)
    want = text_loss(model, ids).nats
    model.train()
    model.transformer.h[0].eval()
    assert text_loss(model, ids).nats == want
    assert model.training
    assert not model.transformer.h[0].mlp.training


# -- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CAUSAL, *SCALED])
def test_the_head_alone_gives_the_models_logits(name):
    model, ids = cached(name), tokens(2, 9)
    readout = Readout(model)
    assert not readout.whole
    with torch.no_grad():
        want = model(ids).logits
    states = readout.states({"input_ids": ids})
    torch.testing.assert_close(readout.logits(states), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head_logits(model, states[1, 3:5]), want[1, 3:5])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_half_precision_is_scored_from_float32_logits():
    model, ids = tiny.model("llama").bfloat16(), tokens(6, 12)
    assert not Readout(model).whole
    with torch.no_grad():
        logits = model(ids).logits.double()
    want = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert text_loss(model, ids).nats == pytest.approx(float(want), rel=2e-3)
    with pytest.raises(ValueError, match="sees the tokens that follow"):
        Readout(tiny.model("bert").bfloat16())


@pytest.mark.parametrize("name", SCALED)
def test_the_output_embeddings_alone_would_not(name):
    model, ids = cached(name), tokens(2, 9)
    with torch.no_grad():
        plain = model.get_output_embeddings()(model.model(ids)[0])
        assert float((plain - model(ids).logits).abs().max()) > 0.1


def test_a_head_of_another_kind_runs_whole():
    model, ids = tiny.model("llama"), tokens(4, 12)
    forward = model.forward

    def odd(input_ids=None, **given):  # logits that depend on more than the states
        out = forward(input_ids=input_ids, **given)
        out.logits = out.logits + input_ids[..., None] / 10 * torch.arange(tiny.VOCABULARY)
        return out

    model.forward = odd
    assert Readout(model).whole
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    want = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert text_loss(model, ids).nats == pytest.approx(float(want), rel=1e-5)


def test_a_change_of_the_head_is_seen(llama):
    @contextmanager
    def louder():
        llama.lm_head.weight.data *= 2
        try:
            yield
        finally:
            llama.lm_head.weight.data /= 2

    ids = tokens(4, 12)
    change = compare(llama, louder, ids)
    with louder():
        want = text_loss(llama, ids).nats
    assert change.changed.nats == pytest.approx(want, rel=1e-6)
    assert abs(change.delta_nll) > 0.01


# -- two models -----------------------------------------------------------------------------------


def test_comparison_is_what_full_logits_say(llama):
    other, ids = noisy(llama), tokens(6, 12)
    change = compare(llama, other, ids, batch_size=4)
    log_p, log_q = full(llama, ids), full(other, ids)
    at = ids[:, 1:, None].numpy()
    delta = np.take_along_axis(log_p - log_q, at, -1)
    assert change.delta_nll == pytest.approx(delta.mean(), rel=1e-4)
    assert change.kl == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), rel=1e-4)
    assert change.top1 == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).mean())
    a, b = text_loss(llama, ids), text_loss(other, ids)
    assert change.delta_ppl == pytest.approx(b.perplexity - a.perplexity, rel=1e-4)
    assert 0 < change.top1 < 1
    backwards = compare(other, llama, ids)
    assert backwards.delta_nll == pytest.approx(-change.delta_nll)
    assert backwards.kl != pytest.approx(change.kl, rel=0.01)


def test_a_model_beside_itself_differs_in_nothing(llama):
    change = compare(llama, llama, tokens(6, 12))
    assert (change.delta_nll, change.delta_ppl, change.kl, change.top1) == (0, 0, 0, 1)
    assert (change.delta_nll_se, change.delta_ppl_se, change.kl_se, change.top1_se) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "bloom"])
def test_a_swap_inside_a_context(name):
    model, ids = cached(name), tokens(4, 12)
    block = blocks(model)[1]
    layer = nn.Linear(block.d_in, block.d_out)
    same = compare(model, lambda: swapped(model, {block: as_module(model, block)}), ids)
    assert (same.kl, same.top1) == (0, 1)
    change = compare(model, lambda: swapped(model, {block: layer}), ids)
    with swapped(model, {block: layer}):
        want = text_loss(model, ids).nats
    assert change.changed.nats == pytest.approx(want, rel=1e-6)
    assert change.original.nats == pytest.approx(text_loss(model, ids).nats, rel=1e-6)
    assert change.kl > 0.001


def test_many_variants_share_one_reference(llama):
    ids, others = tokens(6, 12), [noisy(llama, scale) for scale in (0.01, 0.1)]
    original, *readouts = [Readout(model) for model in (llama, *others)]
    scores = [TokenScores() for _ in others]
    for batch in scored_batches(ids, EvalProtocol.parse("windows-12"), 4):
        held = reference(
            original.logits(batch.rows(original.states(batch.inputs))), batch.targets, batch.cluster
        )
        for changed, variant in zip(readouts, scores, strict=True):
            variant.update(held, changed.logits(batch.rows(changed.states(batch.inputs))))
    for other, variant in zip(others, scores, strict=True):
        change, want = variant.comparison(PROTOCOLS["windows-128"]), compare(llama, other, ids)
        torch.testing.assert_close(change.divergence, want.divergence, rtol=1e-4, atol=1e-9)


def test_tokens_that_are_ruled_out_add_nothing():
    logits = torch.randn(4, 9)
    logits[:, 5] = -torch.inf
    targets, window = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])
    held = reference(logits, targets, window)
    same = TokenScores().update(held, logits).comparison(PROTOCOLS["windows-128"])
    assert same.kl == 0
    with pytest.raises(ValueError, match="not finite in window or document 1"):
        TokenScores().update(held, torch.where(targets[:, None] == 2, torch.nan, logits))
    with pytest.raises(ValueError, match="another vocabulary"):
        TokenScores().update(held, logits[:, :8])


# -- standard errors ------------------------------------------------------------------------------

ESTIMATES = ("delta_nll", "delta_ppl", "kl", "top1")


@pytest.fixture(scope="module")
def heavy():
    """Tokens (windows, 5 scores) with heavy tails, windows of their own difficulty and length."""
    g, made = np.random.default_rng(0), []
    for _ in range(300):
        n = g.integers(60, 128)
        nll = g.lognormal(0.5 + 0.2 * g.standard_normal(), 1.0, n)
        kl = g.lognormal(-3 + 0.3 * g.standard_normal(), 1.2, n)
        changed = nll + kl + 0.3 * g.standard_t(4, n) * np.sqrt(kl)
        made.append(np.stack([np.ones(n), nll, changed, kl, g.random(n) > 2 * kl], 1))
    return made


def comparison(sums):
    return Comparison(PROTOCOLS["windows-128"], *torch.tensor(np.asarray(sums)).unbind(1))


def test_standard_errors_agree_with_the_bootstrap(heavy):
    sums, g = np.stack([window.sum(0) for window in heavy]), np.random.default_rng(1)
    draws = [comparison(sums[g.integers(0, len(sums), len(sums))]) for _ in range(1500)]
    change = comparison(sums)
    for name in ESTIMATES:
        spread = np.std([getattr(draw, name) for draw in draws])
        assert getattr(change, name + "_se") == pytest.approx(spread, rel=0.2), name
    spread = np.std([draw.original.perplexity for draw in draws])
    assert change.original.perplexity_se == pytest.approx(spread, rel=0.2)
    assert change.delta_nll_se < change.original.nats_se / 3  # what pairing is for


def test_standard_errors_are_the_cluster_robust_ones_of_statsmodels(heavy):
    rows = np.concatenate(heavy)
    groups = np.repeat(np.arange(len(heavy)), [len(window) for window in heavy])
    change = comparison([window.sum(0) for window in heavy])
    columns = {"delta_nll": rows[:, 2] - rows[:, 1], "kl": rows[:, 3], "top1": rows[:, 4]}
    for name, values in columns.items():
        fitted = sm.OLS(values, rows[:, :1]).fit(cov_type="cluster", cov_kwds={"groups": groups})
        assert getattr(change, name) == pytest.approx(fitted.params[0])
        assert getattr(change, name + "_se") == pytest.approx(fitted.bse[0])
    naive = (rows[:, 2] - rows[:, 1]).std() / math.sqrt(len(rows))
    assert abs(change.delta_nll_se / naive - 1) > 0.02  # tokens of a window are alike


def test_empty_windows_are_no_evidence(heavy):
    sums = np.stack([window.sum(0) for window in heavy])
    change = comparison(np.concatenate([sums, np.zeros((50, 5))]))
    assert change.kl_se == pytest.approx(comparison(sums).kl_se, rel=1e-12)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "protocol", "said"),
    [
        (tokens(0), "windows-16", "the text is empty"),
        (torch.zeros(0, 16).long(), None, "the text is empty"),
        ([], "windows-16", "the text is empty"),
        (tokens(15), "windows-16", "15 tokens and one window takes 16"),
        (tokens(15), "stride-16-8", "15 tokens and one window takes 16"),
        (tokens(2000), "gptq-2048", "2000 tokens and one window takes 2048"),
        (tokens(32), None, "needs a protocol"),
        (tokens(2, 16), "windows-8", r"windows-8 does not fit windows of shape \(2, 16\)"),
        (tokens(2, 16), "stride-16-8", "does not fit"),
        (tokens(2, 16, 1), "windows-16", r"torch.int64 of shape \(2, 16, 1\)"),
        (torch.tensor(3), "windows-16", "expected token ids"),
        (tokens(2, 16).float(), "windows-16", "torch.float32"),
        (tokens(64).float(), "windows-16", "torch.float32"),
        ("some text", "windows-16", "got str"),
        ([{"pixel_values": tokens(2, 16)}], "windows-16", "got dict"),
        (
            [{"input_ids": tokens(2, 16), "attention_mask": torch.ones(2, 9)}],
            "windows-16",
            r"attention_mask is \(2, 9\)",
        ),
        (
            [{"input_ids": tokens(2, 16), "attention_mask": torch.zeros(2, 16)}],
            "windows-16",
            "the text is empty",
        ),
        (tokens(2, 40000), None, "longer than the 2048 positions of LlamaForCausalLM"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(llama, ids, protocol, said):
    with pytest.raises(ValueError, match=said) as error:
        text_loss(llama, ids, protocol)
    assert "\n" not in str(error.value)


def test_a_batch_has_at_least_one_window(llama):
    with pytest.raises(ValueError, match="`batch_size`"):
        text_loss(llama, tokens(2, 16), batch_size=0)


@pytest.mark.parametrize("name", [*MASKED, "t5", "whisper", "vit"])
def test_models_without_a_next_token_loss_are_refused(name):
    said = "sees the tokens that follow" if name in MASKED else "no perplexity"
    with pytest.raises(ValueError, match=said):
        text_loss(cached(name), tokens(2, 16))


def test_models_without_a_head_are_refused(llama):
    for model in (llama.model, nn.Linear(3, 3)):
        with pytest.raises(ValueError, match="no language-model head"):
            text_loss(model, tokens(2, 16))


def test_other_vocabularies_are_refused(llama):
    with pytest.raises(ValueError, match="another vocabulary"):
        compare(llama, tiny.model("llama", vocab_size=60), tokens(2, 16))


def test_models_that_overflow_are_refused():
    model = tiny.model("llama")
    model.lm_head.weight.data[7] = torch.nan
    with pytest.raises(ValueError, match="not finite in window or document 0"):
        text_loss(model, tokens(2, 16))


def test_a_kept_readout_runs_each_batch_once_and_changes_nothing():
    model = tiny.model("llama")
    windows = torch.randint(3, 49, (6, 16), generator=torch.Generator().manual_seed(0))
    zero = {blocks(model)[0]: lambda x: torch.zeros_like(x)}
    changes = [lambda: swapped(model, zero)]
    want = compare_all(model, changes, windows, work=Work(batch_size=2))[0]
    kept, ran = KeptReadout(model), []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    for runs in (6, 3):  # the original's three batches and the changed model's, then the latter
        ran.clear()
        again = compare_all(kept, changes, windows, work=Work(batch_size=2))[0]
        assert torch.equal(again.sums, want.sums)
        assert len(ran) - 2 == runs  # a new readout of the changed model tries itself twice
