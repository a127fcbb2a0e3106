"""From a run to what swaps cost: units chosen on one text, costs measured on another."""

import json
import shutil

import numpy as np
import pytest
import torch

import tiny
from howlinear import Affine, blocks, compare, profile, swapped
from howlinear.models.hooks import as_module
from howlinear.models.recording import Recording
from howlinear.records.fields import BlockSwap
from howlinear.records.files import read_json
from howlinear.report.runs import read_run
from howlinear.run.folder import RunFolder
from howlinear.run.work import Work
from howlinear.swapping.maps import weighted_moments
from howlinear.swapping.swaps import SwapOptions, measure_swaps, multiply_adds
from test_units import planted, rows_of

PLAIN, EVERYTHING = SwapOptions(0), SwapOptions(baselines=True, all_tokens=True)


def tokens(*shape, seed=0):
    ids = torch.randint(3, 49, shape, generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 1
    return ids


def drawn(model, n, seed):
    """Windows of 8 tokens that the model itself writes: only there does a change always cost."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.ones(n, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(7):
            p = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=g)], 1)
    return ids


@pytest.fixture(scope="module")
def sunk(tmp_path_factory):
    """A tiny model with a planted sink in block 1, and its run."""
    torch.manual_seed(0)
    model = tiny.model("llama")
    unit = planted(model, 1)
    folder = tmp_path_factory.mktemp("runs") / "sunk"
    profile(model, drawn(model, 1500, 0), batch_size=64).save(folder)
    return model, unit, folder


@pytest.fixture(scope="module")
def measured(sunk):
    model, _, folder = sunk
    return measure_swaps(
        model, folder, choose=drawn(model, 90, 1), report=drawn(model, 90, 2), options=EVERYTHING
    )


def test_the_planted_unit_is_kept_and_pays(sunk, measured):
    _, unit, _ = sunk
    block = measured.blocks[1]
    assert block.units[0] == unit
    assert block.delta_nll < 0.5 * block.delta_nll_plain
    assert block.kl < 0.5 * measured.blocks[1].delta_nll_plain
    assert [b.index for b in measured.blocks] == [0, 1, 2]


def test_every_number_is_that_of_the_obvious_comparison(sunk, measured):
    model, _, _ = sunk
    ids = drawn(model, 90, 2)
    for block, record in zip(blocks(model), measured.blocks, strict=True):
        fitted = measured.maps[block.index]
        change = compare(model, lambda b=block, m=fitted: swapped(model, {b: m}), ids)
        for name in ("delta_nll", "delta_ppl", "kl", "top1"):
            for end in ("", "_se"):
                got, want = getattr(record, name + end), getattr(change, name + end)
                assert got == pytest.approx(want, rel=1e-3, abs=1e-6)
        zero = compare(model, lambda b=block: swapped(model, {b: torch.zeros_like}), ids)
        assert record.delta_ppl_zero == pytest.approx(zero.delta_ppl, rel=1e-3, abs=1e-6)
        x, y = rows_of(model, block, drawn(model, 1500, 0))
        mean = y.mean(0)
        change = compare(model, lambda b=block, m=mean: swapped(model, {b: m.expand_as}), ids)
        assert record.delta_ppl_mean == pytest.approx(change.delta_ppl, rel=1e-2, abs=1e-4)
        assert record.params_saved == 3 * 16 * 40 - fitted.parameters
        assert record.multiply_adds_saved == 3 * 16 * 40 - fitted.multiply_adds
        columns = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
        W = np.linalg.lstsq(columns, y.double().numpy(), rcond=None)[0]
        plain = Affine(torch.tensor(W[:-1].T), torch.tensor(W[-1]), 16)
        change = compare(model, lambda b=block, m=plain: swapped(model, {b: m}), ids)
        assert record.delta_ppl_plain == pytest.approx(change.delta_ppl, rel=1e-2, abs=1e-4)


def assert_errors_agree_with_a_bootstrap(measured):
    rng = np.random.default_rng(0)
    for block in measured.blocks:
        change = measured.costs[block.index].change
        gain, n = (change.nll_changed - change.nll).numpy(), change.counts.numpy()
        draws = rng.integers(0, len(n), (4000, len(n)))
        spread = (gain[draws].sum(1) / n[draws].sum(1)).std()
        assert block.delta_nll == pytest.approx(gain.sum() / n.sum())
        assert block.delta_nll_se == pytest.approx(spread, rel=0.2)


def test_standard_errors_agree_with_a_bootstrap_over_windows(measured):
    assert_errors_agree_with_a_bootstrap(measured)


def test_the_file_says_everything_and_reads_back(sunk, measured):
    _, _, folder = sunk
    measured.save(folder)
    data = read_json(folder / "swap.json", "swap")
    assert [BlockSwap.from_dict(b) for b in data["blocks"]] == measured.blocks
    assert data["base"]["protocol"] == data["settings"]["protocol"] == "windows-8"
    assert data["base"]["tokens"] == data["settings"]["ceiling"] == 90 * 7
    assert data["settings"]["resumed"] is True
    after = json.loads((folder / "profile.json").read_text())["blocks"]
    words = RunFolder(folder).costs_in_words()
    for block, cost in zip(after, measured.blocks, strict=True):
        assert block["expected_kl"] > 0  # a swap writes its own file and no other's
        assert words[block["index"]] == f"measured {cost.kl:.4f} nats, {cost.verdict}"
    assert len(measured.blocks) < 8
    assert data["signals"]["1 - r2"]["value"] is None
    assert set(data["signals"]) >= {"stream_error", "expected_kl", "1 - r2_body"}


def test_blocks_add_up_in_the_file_with_their_settings(sunk, tmp_path):
    model, _, folder = sunk
    shutil.copytree(folder, tmp_path / "run")
    run, windows = RunFolder(tmp_path / "run"), drawn(model, 20, 1)
    run.path("swap").unlink(missing_ok=True)

    def measured(report=windows, **options):
        result = measure_swaps(
            model, run.folder, choose=windows, report=report, options=PLAIN, **options
        )
        result.save(run.folder)
        return result

    whole = measured()
    run.path("swap").unlink()
    measured(at="0")
    measured(at="1-2", work=Work(batch_size=3))
    assert [b["index"] for b in run.read("swap")["blocks"]] == [0, 1, 2]
    assert run.read("swap")["signals"].keys() == whole.signals.keys()
    few = measured(drawn(model, 10, 1), at="1")
    newest, earlier = run.sets("swap")
    assert newest["settings"]["ceiling"] == 70 >= few.base.tokens
    assert [b["index"] for b in earlier["blocks"]] == [0, 1, 2]
    costs = {i: b.delta_nll for i, b in run.newest("swap", BlockSwap).items()}
    assert costs[1] == few.blocks[0].delta_nll
    assert costs[2] == pytest.approx(whole.blocks[2].delta_nll, abs=1e-5)
    (note,) = read_run(run.folder).left_out
    assert note.startswith("swap of blocks 0,2 with other settings: protocol windows-8, units 0")


def test_the_file_says_why_a_model_could_not_be_resumed(sunk, monkeypatch, tmp_path):
    model, _, folder = sunk
    monkeypatch.setattr(
        Recording, "problem", lambda *_: "block 1: resumed there, KeyError: 'cache'"
    )
    windows = drawn(model, 20, 1)
    result = measure_swaps(model, folder, choose=windows, report=windows, options=PLAIN)
    result.save(tmp_path)
    data = read_json(tmp_path / "swap.json", "swap")
    assert data["settings"]["resumed"] is False
    (note,) = data["notes"]
    assert "every swap ran the whole model" in note
    assert note.endswith("KeyError: 'cache'")


@pytest.mark.parametrize("units", [0, 1, 2, 4])
def test_units_can_be_fixed(sunk, units):
    model, _, folder = sunk
    few = tokens(4, 8)
    got = measure_swaps(
        model, folder, choose=few[:0], report=few, options=SwapOptions(units), at="1"
    )
    assert len(got.blocks[0].units) == units
    if not units:
        assert got.blocks[0].delta_ppl == got.blocks[0].delta_ppl_plain


@pytest.mark.parametrize("weighting", ["body", "stream", "output"])
def test_weighted_fits_are_weighted_least_squares(sunk, weighting):
    model, _, folder = sunk
    few, fit = tokens(4, 8), drawn(model, 1500, 0)
    got = measure_swaps(
        model, folder, choose=few, report=few, fit=fit, options=SwapOptions(0, weighting), at="1"
    )
    block = blocks(model)[1]
    h = []
    hook = model.model.layers[1].register_forward_hook(lambda _, a, out: h.append(out))
    x, y = rows_of(model, block, fit)
    hook.remove()
    w = {
        "body": (torch.arange(len(x)) % 8 > 0).double(),
        "stream": h[0].flatten(0, 1).double().norm(dim=1).reciprocal(),
        "output": y.double().square().sum(1).reciprocal(),
    }[weighting]
    root = w.sqrt().numpy()[:, None]
    columns = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    want = np.linalg.lstsq(columns * root, y.double().numpy() * root, rcond=None)[0]
    np.testing.assert_allclose(got.maps[1].weight.numpy(), want[:-1].T, rtol=1e-3, atol=1e-3)
    assert got.blocks[0].weighting == weighting
    assert got.blocks[0].delta_ppl != got.blocks[0].delta_ppl_plain


def test_a_weighting_needs_the_text_or_the_stream(sunk):
    model, _, folder = sunk
    few = tokens(4, 8)
    with pytest.raises(ValueError, match="needs the text"):
        measure_swaps(
            model, folder, choose=few, report=few, options=SwapOptions(weighting="stream")
        )
    with pytest.raises(ValueError, match="`weighting`"):
        measure_swaps(model, folder, choose=few, report=few, options=SwapOptions(weighting="best"))
    with pytest.raises(ValueError, match="`units`"):
        SwapOptions(units=3)
    unknown = blocks(model, r"model\.layers\.\d\.mlp\.gate_proj")
    with pytest.raises(ValueError, match='not known: use `weighting="output"`'):
        weighted_moments(model, unknown, few, "stream", {b.index: [] for b in unknown})


def test_models_without_a_head_get_errors_and_are_told_why(tmp_path):
    model = tiny.model("bert")
    ids = torch.randint(3, 49, (700, 8))
    profile(model, ids).save(tmp_path)
    got = measure_swaps(model, tmp_path, choose=ids[:4], report=ids[:40])
    assert got.base is None
    assert got.notes[0].startswith("no perplexity: ")
    for b in got.blocks:
        assert b.delta_nll is b.kl is b.delta_ppl_plain is None
        assert 0 < b.cosine <= 1
        assert b.rmse > 0
        assert b.stream_error > 0
    got.save(tmp_path)
    assert RunFolder(tmp_path).costs_in_words()[0] == "unknown"
    derived = ("swap.json", "probe.json", "plan.json", "compress.json", "control-matched.json")
    for name in derived:
        (tmp_path / name).touch()
    profile(model, ids).save(tmp_path, overwrite=True)  # everything derived goes
    assert not any((tmp_path / name).exists() for name in derived)


def test_a_run_of_another_model_is_refused(sunk):
    _, _, folder = sunk
    few = tokens(4, 8)
    for other in (tiny.model("gpt2"), tiny.model("llama", hidden_size=24), tiny.model("mistral")):
        with pytest.raises(ValueError, match=r"^the run was made with another model: [^\n]*$"):
            measure_swaps(other, folder, choose=few, report=few)


def test_runs_of_modules_that_somebody_named_can_be_swapped(tmp_path):
    model, ids = tiny.model("llama"), tokens(700, 8)
    at = blocks(model, r"model\.layers\.[12]\.self_attn\.o_proj")
    profile(model, ids, at=at).save(tmp_path)
    got = measure_swaps(model, tmp_path, choose=ids[:4], report=ids[:4], at="0-1")
    assert [b.path for b in got.blocks] == [b.path for b in at]
    assert all(b.rmse < 1e-4 and b.units == [] for b in got.blocks)  # a projection is linear
    assert all(abs(b.delta_nll) < 1e-4 for b in got.blocks)
    one = measure_swaps(model, tmp_path, choose=ids[:4], report=ids[:4], at=r"layers\.2")
    assert [b.index for b in one.blocks] == [1]
    with pytest.raises(ValueError, match="chooses no block"):
        measure_swaps(model, tmp_path, choose=ids[:4], report=ids[:4], at="nothing")


def test_units_from_a_file_are_not_trusted(sunk, tmp_path):
    model, _, folder = sunk
    data = json.loads((folder / "profile.json").read_text())
    for name in ("maps", "moments"):
        (tmp_path / name).symlink_to(folder / name)
    for units, said in (
        ([40, 1, 2, 3], "has 40 hidden units"),
        (["a", 1, 2, 3], "sink_units"),
        ([-1, 1, 2, 3], "sink_units"),
    ):
        data["blocks"][1]["sink_units"] = units
        (tmp_path / "profile.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=said):
            measure_swaps(model, tmp_path, choose=tokens(4, 8), report=tokens(4, 8))


def test_multiply_adds_are_counted_where_they_can_be():
    model = tiny.model("gpt2")
    block = blocks(model)[0]
    assert multiply_adds(as_module(model, block), block, torch.zeros(1)) == 2 * 16 * 64
    model = tiny.model("mixtral")  # what experts run depends on the token
    block = blocks(model)[0]
    assert multiply_adds(as_module(model, block), block, torch.zeros(1)) is None
