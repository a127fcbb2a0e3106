"""Controls against what must come out: themselves, linear blocks, closed forms."""

import copy

import pytest
import torch

import tiny
from howlinear import blocks, profile
from howlinear.controls import feeding
from howlinear.controls.checkpoints import read_training
from howlinear.controls.cross_feed import cross_feed, depth_pairs
from howlinear.controls.matched import matched
from howlinear.controls.random_init import drawn_tokens, random_init, untrained
from howlinear.linear.folds import Folds
from howlinear.models import loading
from howlinear.models.hooks import as_module
from howlinear.probing.samples import Cast
from howlinear.run.folder import RunFolder


def ids(n=96, length=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (n, length), generator=generator)


@pytest.fixture(scope="module")
def net():
    """Weights so large that a fresh model is told from it at a glance."""
    return tiny.model("llama").requires_grad_(False)


@pytest.fixture(scope="module")
def other(net):
    """The same shape, other weights."""
    return untrained(net, 7)


# -- fresh weights


def test_the_same_seed_draws_the_same_weights_and_leaves_random_numbers_alone(net):
    before = torch.get_rng_state()
    a, b, c = untrained(net, 1), untrained(net, 1), untrained(net, 2)
    assert torch.equal(torch.get_rng_state(), before)
    at = "model.layers.0.mlp.up_proj"
    w = [m.get_submodule(at).weight for m in (a, b, c, net)]
    assert torch.equal(w[0], w[1])
    assert not torch.equal(w[0], w[2])
    assert not torch.equal(w[0], w[3])
    assert not any(p.requires_grad for p in a.parameters())


def test_shuffled_weights_are_the_same_numbers_elsewhere(net):
    mixed = untrained(net, 0, shuffled=True)
    for p, q in zip(net.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(p.flatten().sort().values, q.flatten().sort().values)
    assert not torch.equal(net.lm_head.weight, mixed.lm_head.weight)


def test_the_range_is_that_of_profiles_of_untrained_models():
    net = tiny.model("gpt2")
    found = random_init(net, ids(), seeds=2)
    drawn = [drawn_tokens(net, ids(), seed) for seed in (0, 1)]
    trained = profile(net, ids())
    fresh = [profile(untrained(net, seed), drawn[seed]) for seed in (0, 1)]
    for i, row in enumerate(found.blocks):
        assert row["r2"] == pytest.approx(trained.blocks[i].r2, abs=1e-12)
        values = [p.blocks[i].r2 for p in fresh]
        assert (row["low"], row["high"]) == pytest.approx((min(values), max(values)), abs=1e-12)
        assert row["outside"]
    # small fresh weights keep GELU where it is all but straight
    assert (found.summary["below"], found.summary["above"]) == (2, 0)


def test_untrained_blocks_are_measured_and_not_the_number_of_their_rows():
    """A fresh SwiGLU block is nearly a product, of R2 0. Its rows in long windows are alike."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    net = tiny.model("llama", **shape, vocab_size=3000, initializer_range=0.04)
    text = torch.randint(0, 3000, (20, 512), generator=torch.Generator().manual_seed(0))
    assert profile(untrained(net, 0), text, at="5", signal=False).blocks[0].r2 < -0.3
    found = random_init(net, text, seeds=1, at="5")
    assert abs(found.blocks[0]["mean"]) < 0.15
    assert found.notes == []


def test_too_few_untrained_rows_are_told():
    net = tiny.model("gpt2", vocab_size=18)
    found = random_init(net, ids() % 18, seeds=1)
    assert (
        "count for about 14 independent ones (384 windows, 18 different tokens)" in found.notes[0]
    )


def test_an_untrained_model_is_inside_a_range_that_holds_it(other):
    """The negative control: a model made the same way stands out nowhere but by its draw."""
    fresh = untrained(other, 0)
    found = random_init(fresh, drawn_tokens(fresh, ids(), 0), seeds=2)
    assert found.summary["above"] + found.summary["below"] == 0


# -- whose weights, whose inputs


def test_a_model_that_feeds_itself_has_its_own_profile(net):
    found = cross_feed(net, net, ids(), ids())
    own = profile(net, ids())
    for row, b in zip(found.blocks, own.blocks, strict=True):
        four = [row["cells"][name]["value"] for name in ("aa", "ab", "ba", "bb")]
        assert len(set(four)) == 1  # to the bit
        assert four[0] == pytest.approx(b.r2, abs=1e-12)
        assert row["cells"]["a_moved"]["value"] == pytest.approx(b.r2, abs=1e-5)  # float32 rows
        assert row["split"]["weights"]["value"] == row["split"]["inputs"]["value"] == 0


def test_the_split_adds_up_and_turns_round(net, other):
    there, back = (cross_feed(a, b, ids(), ids()) for a, b in ((net, other), (other, net)))
    for one, two in zip(there.blocks, back.blocks, strict=True):
        split = {name: found["value"] for name, found in one["split"].items()}
        assert split["weights"] + split["inputs"] == pytest.approx(split["difference"], abs=1e-12)
        for name, value in split.items():
            assert two["split"][name]["value"] == pytest.approx(-value, abs=1e-9)
        assert one["cells"]["ab"]["value"] == pytest.approx(two["cells"]["ba"]["value"], abs=1e-9)
        assert one["split"]["weights"]["low"] < split["weights"] < one["split"]["weights"]["high"]


def test_a_linear_block_is_linear_whoever_feeds_it(net, other):
    straight = copy.deepcopy(other)
    for layer in straight.model.layers:
        layer.mlp = torch.nn.Linear(16, 16).requires_grad_(False)
    # one projection is no network to the structural search, so its family must find it
    found = cross_feed(straight, net, ids(), ids())
    for row in found.blocks:
        assert row["cells"]["aa"]["value"] == pytest.approx(1, abs=1e-9)
        assert row["cells"]["ab"]["value"] == pytest.approx(1, abs=1e-9)
        assert row["cells"]["a_moved"]["value"] == pytest.approx(1, abs=1e-9)
        assert row["cells"]["bb"]["value"] < 0.99


def test_moved_inputs_have_the_other_models_moments(net, other):
    """Where only mean and covariance differ, moving makes the inputs' share vanish: a Gaussian text
    has no such thing, so feed one model scaled copies of the other's inputs instead."""
    scaled = copy.deepcopy(net)
    for layer in scaled.model.layers:
        layer.post_attention_layernorm.weight.data.mul_(3)
    found = cross_feed(net, scaled, ids(), ids(), pairs="0:0")
    cells = found.blocks[0]["cells"]
    assert cells["a_moved"]["value"] == pytest.approx(cells["ab"]["value"], abs=1e-4)
    assert abs(cells["aa"]["value"] - cells["ab"]["value"]) > 0.01


def test_other_widths_are_refused_in_one_line(net):
    wide = tiny.model("llama", hidden_size=32)
    with pytest.raises(ValueError, match=r"reads 16 features .* 32: only models of one width"):
        cross_feed(net, wide, ids(), ids())


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("same", [(0, 0), (1, 1)]),
        ("all", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ("1:2, 0:0,1:2", [(1, 2), (0, 0)]),
    ],
)
def test_pairs_of_depths(text, pairs):
    assert depth_pairs(text, 2, 3) == pairs


@pytest.mark.parametrize("text", ["", "1", "1-2", "2:0", "0:3", "a:b"])
def test_pairs_that_are_none(text):
    with pytest.raises(ValueError, match="`pairs`"):
        depth_pairs(text, 2, 3)


# -- where a block is asked


def test_own_inputs_give_the_profile_and_scaled_ones_the_profile_of_scaled_blocks(net):
    found = matched(net, ids())
    own = profile(net, ids())
    doubled = copy.deepcopy(net)
    for layer in doubled.model.layers:  # f(2x) is the block with its first projections doubled
        layer.mlp.gate_proj.weight.data.mul_(2)
        layer.mlp.up_proj.weight.data.mul_(2)
    by_hand = cross_feed(doubled, net, ids(), ids())
    for row, b, fed in zip(found.blocks, own.blocks, by_hand.blocks, strict=True):
        assert row["r2"]["own"]["value"] == pytest.approx(b.r2, abs=1e-10)
        assert row["r2"]["x2"]["value"] == pytest.approx(fed["cells"]["ab"]["value"], abs=1e-6)
        assert abs(row["r2"]["x4"]["value"] - row["r2"]["x0.5"]["value"]) > 0.05


def test_the_predicted_map_is_as_good_as_any_on_gaussian_inputs_and_not_on_others(net):
    for row in matched(net, ids()).blocks:
        fitted, told = row["r2"]["gaussian"]["value"], row["predicted"]
        # held-out R2 of a fit is low by about (1 - R2) d / n; the prediction pays nothing
        assert told["r2_gaussian"] >= fitted - 1e-3
        assert told["r2"]["value"] <= row["r2"]["own"]["value"] + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gaussian_rows_and_outputs_of_a_float64_block_are_float64(monkeypatch, dtype):
    seen = set()

    class Recording(feeding.Moments):
        def update(self, x, y, *rest):
            seen.update((x.dtype, y.dtype))
            super().update(x, y, *rest)

    monkeypatch.setattr(feeding, "Moments", Recording)
    net = tiny.model("gpt2").to(dtype)
    block, stats = blocks(net)[0], (torch.zeros(16).double(), torch.eye(16).double())
    run = Cast(as_module(net, block))
    feeding.on_gaussian(run, block, stats, ids(), Folds(5), seed=0)
    assert seen == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_blocks_without_a_prediction_are_told():
    model = tiny.model("mixtral")
    found = matched(model, ids())
    assert [row["predicted"] for row in found.blocks] == [None, None]
    assert "no Gaussian map" in found.notes[0]


def test_rows_that_do_not_fit_into_memory_are_read_again_to_the_same_bits(net, other, monkeypatch):
    runs = []
    hook = net.model.layers[0].register_forward_hook(lambda *_: runs.append(0))

    def measure():
        runs.clear()
        found = matched(net, ids(24), at="0-1"), cross_feed(net, other, ids(24), ids(24))
        return [control.to_dict() for control in found], len(runs)

    kept, once = measure()
    monkeypatch.setattr(feeding.room, "available_memory", lambda: 1000)
    again, twice = measure()
    hook.remove()
    assert again == kept
    # 3 batches: once for each control, or twice; and one window before, where forwards end early
    assert (once, twice) == (3 + 1 + 3, 6 + 2 + 6)


# -- over training


def test_checkpoints_are_kept_and_gone_on_with(net, other, tmp_path):
    run, asked = RunFolder(tmp_path), {"folds": 5}
    first = read_training(run, asked)
    about = loading.describe(net, "org/net", "0a1b")
    first.measure(net, ids(), "step1", about)
    path = run.write(first.to_dict())
    again = read_training(run, asked)
    assert again.measured == ["step1"]
    assert again.commit("step1") == "0a1b"  # needs no loading
    assert again.holds("step1", about)
    assert not again.holds("step0", about)
    with pytest.raises(ValueError, match="step1 has changed since it was measured: weights was"):
        again.holds("step1", loading.describe(other, "org/net", "0a1b"))
    again.measure(other, ids(), "step0", loading.describe(other, "org/net"))
    again.sort(["step0", "step1"])
    assert [c["name"] for c in again.checkpoints] == ["step0", "step1"]
    assert again.blocks[0]["r2"][1] == profile(net, ids().split(8)).blocks[0].r2
    del again.checkpoints[0]["cells"]  # as a file of a version that cut other folds
    with pytest.raises(ValueError, match="step2 is held out in other folds than step0 was"):
        again.measure(net, ids(), "step2", about)
    with pytest.raises(ValueError, match="measured with other settings"):
        read_training(run, {"folds": 4})
    path.write_text(path.read_text().replace('"r2_body"', '"r2_soul"'))
    with pytest.raises(ValueError, match="damaged"):
        read_training(run, asked)


def test_a_model_in_train_mode_is_measured_without_dropout():
    model, donor = (tiny.model("t5", seed, dropout_rate=0.5) for seed in (0, 1))
    windows = ids()

    def measure():
        fed = cross_feed(model, donor, windows, windows, pairs="0:1").blocks
        return matched(model, windows).blocks, fed, profile(model, windows).to_dict()["blocks"]

    want = measure()
    model.train(), donor.train()
    same = measure() == want  # a diff of them takes half a minute
    assert same
    assert all(module.training for net in (model, donor) for module in net.modules())
