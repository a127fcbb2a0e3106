"""Speeds: what is run is what is said, counts agree with formulas; how long it takes is not tested."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

import tiny
from howlinear import Affine, blocks
from howlinear.cli.bench import show_bench
from howlinear.export.install import install_maps
from howlinear.losses import speed
from howlinear.losses.speed import (
    Speed,
    SpeedComparison,
    SpeedSettings,
    Spread,
    compare_speeds,
    measure,
)
from howlinear.models.hooks import as_module
from howlinear.records import files

CAUSAL = [n for n, row in tiny.TINY.items() if row.auto == "AutoModelForCausalLM"] + ["gemma3"]
ENCODERS = [n for n, row in tiny.TINY.items() if row.auto == "AutoModelForMaskedLM"]
LITTLE = {"length": 12, "batch": 2, "new_tokens": 3, "repeats": 3}


def smaller(model, count=None):
    """The same model with its blocks replaced by one matrix each."""
    maps = {
        b: Affine(torch.randn(b.d_out, b.d_in) / 4, torch.zeros(b.d_out), b.d_in)
        for b in blocks(model)[:count]
    }
    install_maps(model, maps)
    return model


# -- what is run


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_writes_what_generate_writes(name):
    model = tiny.model(name)
    prompt = torch.randint(3, 49, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens, _ = speed.decode(model, prompt, 5)
        options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        mask = torch.ones_like(prompt)
        want = model.generate(prompt, attention_mask=mask, eos_token_id=None, **options)
    assert torch.equal(tokens, want[:, 8:])


def test_an_encoder_decoder_writes_what_generate_writes():
    model = tiny.model("t5", num_decoder_layers=2)  # generate's cache has as many as the encoder
    prompt = torch.randint(3, 49, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens, _ = speed.decode(model, prompt, 4)
        want = model.generate(prompt, do_sample=False, max_new_tokens=5, min_new_tokens=5)
    eos = model.config.eos_token_id
    assert eos not in tokens  # else generate would have been kept from it
    assert torch.equal(tokens, want[:, 1:])


def test_prefill_asks_for_one_positions_logits():
    model = tiny.model("llama")
    with torch.no_grad():
        out = speed.prefill(model, torch.arange(3, 15).view(2, 6))
    assert out.logits.shape == (2, 1, 50)
    assert out.past_key_values.get_seq_length() == 6


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_prefill_only(name):
    found = measure(tiny.model(name), **LITTLE)
    assert found.decode is None
    assert found.decode_seconds is None
    assert found.prefill.median > 0


def test_models_take_turns_and_who_goes_first_alternates(monkeypatch):
    a, b = tiny.model("llama"), tiny.model("llama", seed=1)
    run = []
    name = {a: "a", b: "b"}.get
    original = speed.prefill

    def noted(model, ids):
        run.append(f"{name(model)}{'' if ids.shape[1] == 24 else ' decodes'}")
        return original(model, ids)

    monkeypatch.setattr(speed, "prefill", noted)
    found = compare_speeds(a, b, length=24, new_tokens=2, repeats=3)
    first, second = ["a", "b", "a decodes", "b decodes"], ["b", "a", "b decodes", "a decodes"]
    assert run[-12:] == [*first, *second, *first]
    assert len(found.model.prefill_seconds) == len(found.other.decode_seconds) == 3


def test_models_are_left_as_they_were():
    model = tiny.model("llama").train()
    measure(model, **LITTLE)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_tokens_are_seeded_known_to_both_and_not_special():
    small, large = tiny.model("llama"), tiny.model("llama", vocab_size=80)

    def drawn(seed):
        return speed._tokens([small, large], SpeedSettings(length=2000, seed=seed))

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert set(drawn(0).flatten().tolist()) == set(range(3, 50))


# -- sizes


def test_multiply_adds_of_a_llama_are_those_of_its_formula():
    model, n, batch = tiny.model("llama"), 12, 2
    c = model.config
    d, kv = c.hidden_size, c.num_key_value_heads * c.head_dim
    projections = d * (2 * d + 2 * kv)
    attention = 2 * d * (n + 1) / 2  # scores and sums, over the tokens so far
    layer = projections + attention + 3 * d * c.intermediate_size
    want = batch * (n * c.num_hidden_layers * layer + c.vocab_size * d)
    assert measure(model, **LITTLE).multiply_adds == want
    linear = measure(smaller(tiny.model("llama")), **LITTLE).multiply_adds
    assert want - linear == batch * n * c.num_hidden_layers * (3 * d * c.intermediate_size - d * d)


def test_multiply_adds_of_eager_attention_are_those_of_the_whole_square():
    model, n, batch = tiny.model("llama"), 12, 2
    fused = measure(model, **LITTLE).multiply_adds
    model.set_attn_implementation("eager")
    c = model.config
    masked = c.num_hidden_layers * batch * 2 * c.hidden_size * n * (n - 1) / 2
    beside = measure(model, **LITTLE).multiply_adds - fused - masked
    # eager rotary frequencies are the same in both; nothing else may differ
    assert beside == 0


def test_experts_are_counted():
    model, c = tiny.model("mixtral"), tiny.model("mixtral").config
    with torch.no_grad():
        count = speed.multiply_adds(
            lambda: as_module(model, blocks(model)[0])(torch.randn(1, 10, c.hidden_size))
        )
    expert = 3 * c.hidden_size * c.intermediate_size
    router = c.hidden_size * c.num_local_experts
    assert count == 10 * (c.num_experts_per_tok * expert + router)


def test_sizes_count_tied_weights_once_and_files_as_they_are(tmp_path):
    model = tiny.model("llama", tie_word_embeddings=True)
    apart = tiny.model("llama", tie_word_embeddings=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    (tmp_path / "other.bin").write_bytes(b"not ours")
    found, other = measure(model, folder=tmp_path, **LITTLE), measure(apart, **LITTLE)
    assert other.parameters - found.parameters == 50 * 16
    assert found.parameters == sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert found.bytes == 4 * found.parameters + buffers
    assert found.bytes_on_disk == (tmp_path / "model.safetensors").stat().st_size
    assert other.bytes_on_disk is None
    assert measure(model, folder=tmp_path / "nothing", **LITTLE).bytes_on_disk is None


# -- what is made of the times


def of_times(prefill, multiply_adds=1000, decode=None):
    settings = {"batch": 1, "length": 100, "new_tokens": 10}
    return Speed(1, 4, None, multiply_adds, tuple(prefill), decode and tuple(decode), settings)


@pytest.mark.parametrize(
    ("n", "low", "high"),
    # order statistics of the sign test's interval: scipy.stats.binom.ppf(0.05, n, 0.5)
    [(1, 0, 0), (2, 0, 1), (5, 0, 4), (7, 0, 6), (8, 1, 6), (10, 1, 8), (13, 3, 9), (40, 14, 25)],
)
def test_the_interval_holds_the_median_nine_times_in_ten(n, low, high):
    found = Spread.of([float(i) for i in range(n)][::-1])
    assert (found.low, found.high) == (low, high)
    assert found.median == (n - 1) / 2
    assert found.low <= found.q25 <= found.median <= found.q75 <= found.high or n > 7
    inside = sum(math.comb(n, i) for i in range(low + 1, n - low)) / 2**n
    assert inside >= 0.9 or n < 5
    narrower = sum(math.comb(n, i) for i in range(low + 2, n - low - 1)) / 2**n
    assert narrower < 0.9


def test_ratios_are_of_neighbours_in_time():
    """A machine that slows down fourfold half-way changes neither the ratio nor its spread."""
    busy = [1, 1, 1, 4, 4]
    both = SpeedComparison(
        of_times([2.0 * b for b in busy], 500), of_times([3.0 * b for b in busy])
    )
    assert both.prefill == Spread(1.5, 1.5, 1.5, 1.5, 1.5)
    assert both.model.prefill.median == 50
    assert both.promised == 2
    assert both.reached == 0.75
    assert both.saved_share == pytest.approx((1 / 3) / (1 / 2))
    assert both.decode is None


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], "prefill: 2.00 times as fast (2.00 to 2.00); multiply-adds "
         "promise 2.50, of which it reached 0.80"),
        ([2.1, 2.0, 1.9, 2.2, 1.8], "prefill: no gain that stands out of the noise, 1.00 times as "
         "fast (0.91 to 1.11); multiply-adds promise 2.50"),
        ([4.0, 4.0, 4.0, 4.0, 2.5], "prefill: slower, 0.50 times as fast (0.50 to 0.80); "
         "multiply-adds promise 2.50"),
    ],
)  # fmt: skip
def test_the_verdict_says_when_nothing_was_gained(seconds, told):
    both = SpeedComparison(of_times(seconds, 400), of_times([2.0] * 5))
    assert both.verdict == told


def test_no_gain_saves_nothing_whatever_share_it_reached():
    both = SpeedComparison(of_times([2.0] * 5, 800), of_times([2.0] * 5))
    assert both.reached == 0.8
    assert both.saved_share == 0
    same = SpeedComparison(of_times([2.0] * 5), of_times([2.0] * 5))
    assert same.saved_share is None


# -- records and tables


def test_records_are_json_of_a_known_kind(tmp_path):
    found = compare_speeds(smaller(tiny.model("llama")), tiny.model("llama"), **LITTLE)
    found.about.update(command="howlinear bench")
    files.write_json(tmp_path / "bench.json", found.to_dict())
    data = files.read_json(tmp_path / "bench.json", "bench")
    assert data == json.loads(files.dumps(found.to_dict()))
    assert data["command"] == "howlinear bench"
    assert data["settings"] | LITTLE == data["settings"]
    fast, slow = data["speeds"]
    assert fast["parameters"] < slow["parameters"]
    assert set(data["comparison"]) == {
        *("prefill", "decode", "promised", "reached", "saved_share", "verdict")
    }
    assert data["comparison"]["promised"] == slow["multiply_adds"] / fast["multiply_adds"] > 1
    alone = measure(tiny.model("bert"), **LITTLE).to_dict()
    assert alone["comparison"] is None
    assert len(alone["speeds"]) == 1


def shown(data):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show_bench(console, data)
    return console.file.getvalue()


def test_the_table_fits_and_names_both_models():
    model, other = smaller(tiny.model("llama")), tiny.model("llama")
    found = compare_speeds(model, other, **LITTLE)
    found.about.update(model={"id": "runs/small" * 20}, against={"id": "org/[red]large\x1b[31m"})
    text = shown(files.clean(found.to_dict()))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert r"org/[red]large\x1b[31m" in text
    assert "3 times; float32, cpu, 1 thread" in " ".join(text.split())
    assert " ".join(found.verdict.split()) in " ".join(text.split())
    alone = shown(measure(tiny.model("bert"), **LITTLE).to_dict())
    assert "prefill" in alone
    assert "times as fast" not in alone


# -- mistakes


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("llama", {"repeats": 0}, "repeats is 0, expected 1 or more"),
        ("llama", {"length": 0}, "length is 0, expected 1 or more"),
        (
            "opt",
            {"length": 33, "new_tokens": 1},
            "OPTForCausalLM has 32 positions and 33 are asked for",
        ),
        ("opt", {"length": 20, "new_tokens": 20}, "has 32 positions and 36 are asked for"),
        ("vit", {}, "ViTForImageClassification reads pixel_values, not text"),
    ],
)
def test_mistakes_are_one_line(name, options, told):
    with pytest.raises(ValueError, match=told) as caught:
        measure(tiny.model(name), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.real
def test_a_real_encoder_is_measured(minilm):
    from howlinear import load

    model, _ = load(str(minilm))
    found = measure(model, length=128, repeats=1, folder=minilm)
    assert found.parameters == 22_713_216
    assert found.bytes_on_disk == (minilm / "model.safetensors").stat().st_size
    c = model.config
    d = c.hidden_size
    layer = 4 * d * d + 2 * d * 128 + 2 * d * c.intermediate_size
    pooler = d * d
    assert found.multiply_adds == 128 * c.num_hidden_layers * layer + pooler
