"""Training maps in the place of blocks, and nothing but them: one map by `probe`, all by `compress`."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

import tiny
from howlinear import Affine, blocks, compare, load, profile, swapped
from howlinear.compression import compress, healing
from howlinear.compression.compress import CompressSettings, compress_model
from howlinear.compression.healing import Recipe
from howlinear.compression.healing import heal as heal_all
from howlinear.compression.plan import Budget
from howlinear.compression.refitting import Refitter
from howlinear.export import hf
from howlinear.export.install import install_maps
from howlinear.export.stock import with_one_width
from howlinear.linear.affine import Factored, UnitMap
from howlinear.linear.trainable import TrainableMap, tensors_of
from howlinear.models import cutting
from howlinear.models.families import call_options
from howlinear.models.hooks import as_module
from howlinear.models.units import taken
from howlinear.probing.healing import heal
from howlinear.run.work import Ranks, Work
from test_swap import drawn


def test_a_bad_map_is_healed_and_nothing_else_moves():
    torch.manual_seed(0)
    model = tiny.model("llama")
    for p in as_module(model, blocks(model)[1]).parameters():
        p.data *= 6
    block = blocks(model)[1]
    windows = drawn(model, 200, 0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.model.embed_tokens.weight.requires_grad_(False)
    start = TrainableMap(Affine(torch.zeros(16, 16), torch.zeros(16), 16))
    healed, record = heal(model, block, start, windows, steps=300)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    assert not wanted.pop("model.embed_tokens.weight")
    assert all(wanted.values())
    assert record["tokens"] == 300 * 2 * 8
    assert len(record["losses"]) == 10
    assert not start.weights["weight"].any()  # a copy was trained
    test = drawn(model, 200, 1)
    costs = [
        compare(model, lambda layer=layer: swapped(model, {block: layer}), test).delta_nll
        for layer in (start, healed)
    ]
    assert costs[1] < costs[0]


def test_kept_units_stay_as_they_are():
    model = tiny.model("llama")
    block = blocks(model)[0]
    joint = Affine(torch.randn(16, 18), torch.zeros(16), 18)
    layer = UnitMap.split(joint, (3, 5), taken(model, block, [3, 5]))
    start = TrainableMap(layer)
    x = torch.randn(4, 16)
    torch.testing.assert_close(start(x), layer(x))
    healed, _ = heal(model, block, start, torch.randint(3, 49, (10, 8)), steps=3)
    same = zip(start.hidden.parameters(), healed.hidden.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(start.weights["write"], healed.weights["write"])
    assert not torch.equal(start.weights["weight"], healed.weights["weight"])


# -- all maps at once, on the original's predictions


@pytest.fixture(scope="module")
def trained():
    """A small trained model and its tokenizer."""
    return load(Path(__file__).parent / "models" / "llama")


@pytest.fixture(scope="module")
def texts(trained, wikitext):
    """Windows to fit on, to stop by and to report on."""
    parts = (wikitext.fit, 6000), (wikitext.choose(), 1024), (wikitext.report(), 2048)
    cut = [cutting.spread_windows(text, trained[1], 32, tokens=n) for text, n in parts]
    return [windows["input_ids"] for windows in cut]


@pytest.fixture(scope="module")
def squeezed(trained, texts):
    """Maps of every kind, in the place of most of the model's blocks: it is much worse."""
    at, shapes = blocks(trained[0]), [(None, 0), (4, 0), (0, 16), (4, 8), (None, 4), (0, 16)]
    return Refitter(trained[0], at, texts[0]).refit(dict(zip(at, shapes, strict=False)))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(healing, "TOKENS", 128)
    monkeypatch.setattr(healing, "HELD_OUT", 512)


def recipe(**options):
    return Recipe(**{"steps": 24, "learning_rate": 3e-3, "every": 8} | options)


@pytest.fixture
def healed(trained, texts, squeezed, short):
    def call(maps=None, where=None, progress=None, **options):
        return heal_all(
            trained[0],
            squeezed if maps is None else maps,
            *texts[:2],
            recipe(**options),
            work=Work(progress=progress),
            folder=where,
            save_every=0,
        )

    return call


def every_tensor(fitted):
    hidden = fitted.hidden.state_dict() if isinstance(fitted, UnitMap) else {}
    return tensors_of(fitted) | hidden


def assert_same(one, other):
    for a, b in zip(one.values(), other.values(), strict=True):
        for x, y in zip(every_tensor(a).values(), every_tensor(b).values(), strict=True):
            assert torch.equal(x, y)


def test_maps_of_all_kinds_are_healed_and_nothing_else_moves(trained, texts, squeezed, healed):
    model = trained[0]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    start = copy.deepcopy(squeezed)
    result = healed()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert_same(squeezed, start)
    record = result.record
    assert record["kept"] is True
    assert record["kl_after"] < 0.9 * record["kl_before"]
    assert (record["steps_run"], record["stopped_early"]) == (24, False)
    assert [step for step, _ in record["curve"]] == [0, 8, 16, 24]
    for old, new in zip(squeezed.values(), result.maps.values(), strict=True):
        assert type(old) is type(new)
        assert old.parameters == new.parameters
        for name, tensor in every_tensor(old).items():
            other = every_tensor(new)[name]
            assert not other.requires_grad
            assert not tensor.numel() or not torch.equal(tensor, other), name
    costs = [  # on a text that neither trained nor stopped
        compare(model, lambda maps=maps: swapped(model, maps), texts[2])
        for maps in (squeezed, result.maps)
    ]
    assert costs[1].kl < costs[0].kl
    assert costs[1].delta_nll < costs[0].delta_nll


def test_kl_on_held_out_text_is_that_of_an_independent_formula(trained, texts, squeezed, healed):
    """By torch's own divergence, of all logits at once."""
    model, record = trained[0], healed(steps=1).record
    ids = texts[1][:: len(texts[1]) * 32 // 512]
    with torch.no_grad():
        p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        with swapped(model, squeezed):
            q = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    assert record["kl_before"] == pytest.approx(float(kl), rel=1e-4)


def test_gradients_are_those_of_autograd(trained, texts, squeezed, short):
    """Of the mean KL, computed in chunks by hand, against the whole loss differentiated by torch."""
    model, ids = trained[0], texts[0][:4]
    training = healing._Healing(model, squeezed, *texts[:2], recipe())
    with swapped(model, training.layers):
        logits = model(input_ids=ids, **call_options(model)).logits
    with torch.no_grad():
        p = model(input_ids=ids).logits.log_softmax(-1)
    terms = torch.nn.functional.kl_div(logits.log_softmax(-1), p, log_target=True, reduction="none")
    loss = terms.sum(-1).mean()
    wanted = torch.autograd.grad(loss, training.weights)
    taken_from = training._batch(0)
    assert taken_from.shape == ids.shape
    training.adam.step = lambda: None
    training.adam.zero_grad = lambda: None
    norm = torch.stack([g.norm() for g in wanted]).norm()
    training._step(0, ids)
    for weight, gradient in zip(training.weights, wanted, strict=True):
        scale = min(1.0, healing.NORM / float(norm))
        torch.testing.assert_close(weight.grad, scale * gradient, rtol=1e-3, atol=1e-6)


def test_a_model_that_is_not_changed_has_exactly_no_gradient(trained, texts, healed):
    """Each block in its own place, all its weights trained: the control of the original model."""
    model = trained[0]
    maps = {}
    for block in blocks(model):
        mlp = model.get_submodule(block.entry)
        every = range(mlp.down_proj.in_features)
        hidden = taken(model, block, every)
        nothing = Factored(torch.zeros(0, 96), torch.zeros(96, 0), torch.zeros(96))
        maps[block] = UnitMap(nothing, tuple(every), mlp.down_proj.weight.detach(), hidden)
    result = healed(maps, steps=3, every=1)
    assert result.record["curve"] == [(step, 0.0) for step in range(4)]
    assert result.record["kept"] is False
    assert_same(result.maps, maps)


def test_an_interrupted_training_goes_on_to_the_same_bits(healed, tmp_path):
    whole = healed()
    where = tmp_path / "healing"

    def stop(label, left):
        done = 24 * 128 - left

        def advance(tokens):
            nonlocal done
            done += tokens
            if done > 19 * 128:
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        healed(where=where, progress=stop)
    assert {p.name for p in where.iterdir()} == {"state.json", "16.safetensors"}
    labels = []

    def note(label, left):
        labels.append((label, left))
        return lambda tokens: None

    again = healed(where=where, progress=note)
    assert [left for _, left in labels] == [8 * 128, 0]  # 8 of 24 steps were left
    assert labels[0][0].startswith("healing, KL ")
    assert_same(whole.maps, again.maps)
    assert again.record["curve"] == whole.record["curve"]
    assert not where.exists()


@pytest.mark.parametrize("change", ["steps", "maps", "damage"])
def test_a_state_of_something_else_is_not_used(squeezed, healed, tmp_path, change):
    where = tmp_path / "healing"

    def stop(label, left):
        if left == 8 * 128:
            raise KeyboardInterrupt
        return lambda tokens: None

    with pytest.raises(KeyboardInterrupt):
        healed(where=where, progress=stop, steps=16)
    maps, steps = squeezed, 16
    if change == "maps":
        maps = dict(list(squeezed.items())[1:])
    elif change == "steps":
        steps = 17
    else:
        (tensors,) = where.glob("*.safetensors")
        tensors.write_bytes(tensors.read_bytes()[:-4] + b"oops")
    result = healed(maps, where=where, steps=steps)
    fresh = healed(maps, steps=steps)
    assert_same(result.maps, fresh.maps)
    cause = {"steps": "other recipe", "maps": "other maps", "damage": "damaged"}[change]
    assert cause in result.record["note"]
    assert "note" not in fresh.record


def test_a_disk_that_is_full_does_not_end_a_training(healed, tmp_path):
    (tmp_path / "healing").write_text("in the way")
    result = healed(where=tmp_path / "healing", steps=9)
    assert_same(result.maps, healed(steps=9).maps)
    assert "no state was saved" in result.record["note"]


@pytest.mark.parametrize("rate", [100.0, float("inf")])
def test_a_training_that_diverges_leaves_the_maps_as_they_were(squeezed, healed, rate):
    result = healed(learning_rate=rate, every=2)
    assert result.record["kept"] is False
    assert result.record["stopped_early"] is True
    assert result.record["kl_after"] == result.record["kl_before"]
    assert_same(result.maps, squeezed)


def test_kept_units_stay_where_only_maps_are_trained(squeezed, healed):
    result = healed(units=False)
    changed = 0
    for old, new in zip(squeezed.values(), result.maps.values(), strict=True):
        if isinstance(old, UnitMap):
            a, b = old.hidden.state_dict(), new.hidden.state_dict()
            assert all(torch.equal(a[name], b[name]) for name in a)
            changed += not torch.equal(old.write, new.write)
    assert changed == 4


def test_a_map_without_intercept_gets_none():
    affine = Affine(torch.randn(4, 4), torch.zeros(4), 4)
    layer = TrainableMap(affine)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["weights.weight"]


def test_maps_in_half_precision_are_trained_in_float32_and_come_back_in_half():
    model = tiny.model("llama").to(torch.bfloat16)
    block = blocks(model)[0]
    joint = Affine(torch.randn(16, 18), torch.ones(16), 18).to(torch.empty(0, dtype=torch.bfloat16))
    fitted = UnitMap.split(joint, (3, 5), taken(model, block, [3, 5]))
    layer = TrainableMap(fitted, units=True)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    x = torch.randn(4, 16).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    back = layer.as_map()
    assert_same({0: back}, {0: fitted})
    assert {t.dtype for t in every_tensor(back).values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "phi3", "bert"])
def test_exports_have_the_weights_of_healed_units(name):
    """Units whose own weights were trained: installed, and as units of a stock model."""
    model, stock = tiny.model(name), ("llama-bias", "gpt2")
    maps = {}
    for block in blocks(model):
        rank = 0 if name in stock else 2
        low = Factored(torch.randn(rank, 16) / 4, torch.randn(16, rank), torch.randn(16))
        k = (3, 1, 30)
        fitted = UnitMap(low, k, torch.randn(16, 3), taken(model, block, k))
        layer = TrainableMap(fitted, units=True)
        trained = [p for p in layer.hidden.parameters() if p.requires_grad]
        assert trained
        with torch.no_grad():
            for p in trained:
                p.add_(torch.randn_like(p) / 4)
        maps[block] = layer.as_map()
    inputs = tiny.inputs(name)
    with torch.no_grad(), swapped(model, maps):
        want = model(**inputs)[0]
    if name in stock:
        with torch.no_grad():
            torch.testing.assert_close(with_one_width(model, maps)(**inputs)[0], want)
    install_maps(model, maps)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], want)


def test_a_healed_model_is_written_and_loads(trained, texts, squeezed, healed, tmp_path, alone):
    model = copy.deepcopy(trained[0])
    maps = healed(steps=4, every=4).maps
    with torch.no_grad(), swapped(model, maps):
        want = model(input_ids=texts[2][:2]).logits
    install_maps(model, maps)
    hf.write(model, tmp_path, torch.float32)
    again, _ = load(tmp_path, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=texts[2][:2]).logits, want)


def test_what_cannot_be_healed_is_refused_in_one_line(trained, texts, squeezed, monkeypatch):
    fit, choose, _ = texts
    with pytest.raises(ValueError, match="raise `tokens`"):
        heal_all(trained[0], squeezed, fit, choose[:1])
    with pytest.raises(ValueError, match="to fit on is empty"):
        heal_all(trained[0], squeezed, fit[:0], choose)
    with pytest.raises(ValueError, match="do not start it by torchrun"):
        heal_all(trained[0], squeezed, fit, choose, work=Work(Ranks(0, 2)))
    monkeypatch.setattr("howlinear.run.room.available_memory", lambda: 10**5)
    with pytest.raises(ValueError, match=r"leave out `heal`$"):
        heal_all(trained[0], squeezed, fit, choose)


def test_a_model_without_predictions_is_refused_before_the_search(texts, tmp_path):
    model = tiny.model("bert")
    ids = texts[0] % 49
    profile(model, ids).save(tmp_path)
    named = dict.fromkeys(("fit", "choose", "report"), ids)
    with pytest.raises(ValueError, match="`heal` trains maps on predictions, but "):
        compress_model(model, tmp_path, **named, at="0", settings=CompressSettings(heal=2))


def test_the_learning_rate_rises_and_falls():
    rates = [Recipe(steps=100, learning_rate=1.0).rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-3


def test_compress_reports_the_plan_healed_and_unhealed(
    trained, texts, tmp_path, short, monkeypatch
):
    monkeypatch.setattr(compress, "Recipe", partial(Recipe, learning_rate=1e-3))
    model, (fit, choose, report) = trained[0], texts
    profile(model, fit, batch_size=50).save(tmp_path)
    found = compress_model(
        model,
        tmp_path,
        Budget(parameters=0.9),
        fit=fit,
        choose=choose,
        report=report,
        settings=CompressSettings(heal=20),
    )
    data = found.to_dict()
    assert data["settings"]["heal"] == 20
    after, before = found.curve
    assert (after.method, before.method) == ("healed", "ours")
    assert after.removed == before.removed == found.removed
    assert after.change.kl < before.change.kl
    again = compare(model, lambda: swapped(model, found.maps), report)
    assert found.change.delta_nll == pytest.approx(again.delta_nll, abs=1e-6)
    record = data["healed"]
    names = {"steps_run", "seconds", "kl_before", "kl_after", "learning_rate", "seed", "kept"}
    assert names <= set(record)
    assert not (tmp_path / "healing").exists()
