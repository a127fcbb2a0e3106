"""Published methods of benchmarks/field.py on a tiny trained model: sizes, closed forms, planted solutions."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from command import inside
from howlinear.losses.perplexity import text_loss
from howlinear.models.families import parameter_count

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: its signal.py would hide the standard library's

from field import layers, llama, lowrank, slicing, table, units  # noqa: E402

METHODS = {
    "wanda": units.wanda,
    "flap": units.flap,
    "obs": units.obs,
    "modegpt": units.modegpt,
    "olica": units.olica,
    "svd": lowrank.svd_llm,
    "sleb": layers.sleb,
    "shortgpt": layers.shortgpt,
    "angle": layers.angle,
    "replaceme": layers.replaceme,
    "slicegpt": slicing.slicegpt,
}


@pytest.fixture(scope="module")
def model():
    folder = Path(__file__).parent / "models" / "llama"
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def calibration(model):
    """Text that the model writes itself."""
    torch.manual_seed(0)
    start = torch.randint(3, 2000, (48, 1))
    ids = model.generate(
        start, do_sample=True, min_new_tokens=31, max_new_tokens=31, pad_token_id=0
    )
    return llama.Calibration(model, ids)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_nothing_removed_leaves_the_logits(method, calibration):
    small, ids = method(calibration, 0).model, calibration.ids[:4]
    assert parameter_count(small) == parameter_count(calibration.model)
    assert torch.allclose(logits(small, ids), logits(calibration.model, ids), atol=1e-4)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sizes_are_true_and_the_original_stays(method, calibration):
    model, ids = calibration.model, calibration.ids[:4]
    before, wanted = parameter_count(model), logits(model, ids)
    target = before // 10
    small = method(calibration, target).model
    stored = sum(t.numel() for t in {id(t): t for t in small.state_dict().values()}.values())
    stored -= small.lm_head.weight.numel() * (
        "lm_head.weight" in small.state_dict() and "model.embed_tokens.weight" in small.state_dict()
    )
    assert parameter_count(small) == sum(p.numel() for p in small.parameters()) == stored
    slack = parameter_count(model.model.layers[0]) if len(small.model.layers) < 8 else 0.01 * before
    assert target <= before - parameter_count(small) < target + slack
    assert torch.equal(logits(model, ids), wanted)
    assert not torch.allclose(logits(small, ids), wanted, atol=1e-2)
    assert logits(small, ids).isfinite().all()


def test_obs_with_refit_fits_better_than_wanda(calibration):
    """The squared error of one block on its own inputs, by the sums and by the rows."""
    block, sums = calibration.layers[3].mlp, calibration.sums[3]
    W = block.down_proj.weight.double()
    count = len(sums.hh) - 64
    kept = units.eliminated(sums.hh, W, 64)
    by_wanda = units.most(W.abs().mean(0) * sums.hh.diagonal().sqrt(), count)

    def error(chosen, down):
        full = torch.zeros_like(W)
        full[:, chosen] = down
        return float(((W - full) @ sums.hh * (W - full)).sum())

    obs, wanda_refit = (error(k, units.solve_down(sums.hh, W, k)) for k in (kept, by_wanda))
    assert obs < wanda_refit < error(by_wanda, W[:, by_wanda])


def test_one_unit_less_is_the_best_of_all_units(calibration):
    """OBS against trying every unit with a refit of its own."""
    sums, W = calibration.sums[2], calibration.layers[2].mlp.down_proj.weight.double()
    S, W = sums.hh[:40, :40] + 1e-3 * torch.eye(40), W[:, :40]

    def error(j):
        units_left = torch.tensor([i for i in range(40) if i != j])
        full = torch.zeros_like(W)
        full[:, units_left] = units.solve_down(S, W, units_left)
        return float(((W - full) @ S * (W - full)).sum())

    (gone,) = set(range(40)) - set(units.eliminated(S, W, 1).tolist())
    assert gone == min(range(40), key=error)


def test_the_bias_of_flap_keeps_the_mean_output(calibration):
    layer, sums = calibration.layers[5], calibration.sums[5]
    kept = torch.arange(0, calibration.hidden, 3)
    small = llama.clone(calibration.model)
    W = layer.mlp.down_proj.weight
    mean = sums.h / sums.n
    llama.keep_units(small.model.layers[5].mlp, kept, bias=units.left_out(W, mean, kept))
    rows = [[], []]
    for state, options in llama_states(calibration, 5):
        for model, into in zip((calibration.model, small), rows, strict=True):
            with llama.inputs_of({"x": model.model.layers[5].mlp}) as inputs:
                llama.through(model.model.layers[5], state, options)
            with torch.no_grad():
                into.append(model.model.layers[5].mlp(inputs["x"]))
    full, pruned = (torch.cat(r).double().mean(0) for r in rows)
    assert torch.allclose(full, pruned, atol=1e-4)
    assert not torch.allclose(full, (W[:, kept].double() @ mean[kept]), atol=1e-4)


def llama_states(calibration, i):
    walk = llama.Walk(calibration.model, calibration.ids)
    for j in range(i):
        walk.step(j)
    return walk.batches


def test_fluctuation_is_the_sample_variance_times_the_column():
    h, W = torch.randn(50, 7).double() + 5, torch.randn(3, 7).double()
    score = units.fluctuation(50, h.sum(0), h.square().sum(0), W)
    assert torch.allclose(score, h.var(0) * W.square().sum(0))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_decomposition_is_exact_at_full_rank_and_the_best_below(shape):
    matrix = torch.nn.Linear(shape[1], shape[0], bias=False).double()
    x = torch.randn(300, shape[1]).double() @ torch.randn(shape[1], shape[1]).double()
    with torch.no_grad():
        whole = lowrank.factored(matrix, x.t() @ x, 12)
        assert torch.allclose(whole(x), matrix(x))
        y = matrix(x)
        error = float((lowrank.factored(matrix, x.t() @ x, 5)(x) - y).square().sum())
    assert math.isclose(error, float(torch.linalg.svdvals(y)[5:].square().sum()), rel_tol=1e-6)


def test_layers_that_are_linear_become_one_matrix_exactly(model, calibration):
    """Two layers without attention and with linear blocks of M, the output of the block before them."""
    planted = llama.clone(model)
    cut = planted.model.layers

    class Linear(torch.nn.Module):
        def __init__(self, T):
            super().__init__()
            self.T = T

        def forward(self, hidden_states, **_):
            return hidden_states @ self.T

    T = torch.eye(96) + 0.1 * torch.randn(96, 96, generator=torch.Generator().manual_seed(1))
    cut[3] = Linear(T)
    # before the cut nothing but M is in the stream: the layer returns its block's output alone
    before = cut[2]

    class Alone(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.mlp, self.self_attn = layer.mlp, layer.self_attn

        def forward(self, hidden_states, **_):
            return self.mlp(hidden_states)

    cut[2] = Alone(before)
    planted.model.layers[3].self_attn = before.self_attn
    small = layers.folded(llama.Calibration(planted, calibration.ids), 3, 1, ridge=1e-9)
    ids = calibration.ids[:4]
    assert len(small.model.layers) == 7
    assert torch.allclose(logits(small, ids), logits(planted, ids), atol=1e-3)
    dropped = layers.without(llama.Calibration(planted, ids), [3])
    assert not torch.allclose(logits(dropped, ids), logits(planted, ids), atol=1e-1)


def test_a_rotated_stream_of_full_width_computes_the_same(calibration):
    small, ids = slicing.sliced(calibration, calibration.width), calibration.ids[:4]
    assert torch.allclose(logits(small, ids), logits(calibration.model, ids), atol=1e-3)
    less = slicing.sliced(calibration, calibration.width // 2)
    assert not torch.allclose(logits(less, ids), logits(calibration.model, ids), atol=1e-1)


def test_sleb_removes_the_layer_that_costs_least(calibration):
    ids = llama.spread_rows(calibration.ids, layers.SLEB_TOKENS // calibration.ids.shape[1])
    losses = [text_loss(layers.without(calibration, [i]), ids).nats for i in range(8)]
    assert layers.next_one(calibration, []) == losses.index(min(losses))


def test_leverage_is_that_of_the_ridge_regression():
    h = torch.randn(60, 9).double()
    S = h.t() @ h
    level = 0.5 * float(S.diagonal().median())
    by_definition = (S @ torch.linalg.inv(S + level * torch.eye(9))).diagonal()
    assert torch.allclose(units.leverage(S, 0.5), by_definition)


def test_the_calibration_of_olica_finds_a_planted_map():
    """Lost output that is linear in x, of low rank: found; noise: not."""
    x = torch.randn(4000, 8).double()
    B = torch.randn(6, 2).double() @ torch.randn(2, 8).double()
    h = torch.cat([x @ B.t(), torch.randn(4000, 6).double()], 1)
    sums = llama.Sums(10**9, xx=x.t() @ x, xh=x.t() @ h, hh=h.t() @ h)
    W = torch.cat([torch.eye(6), torch.eye(6)], 1).double()
    share, into, out = units.linear_calibration(sums, W, torch.arange(6), 2)
    assert share > 0.999
    assert torch.allclose(out @ into, B, atol=1e-3)
    assert units.linear_calibration(sums, W, torch.arange(6, 12), 2)[0] < 0.05


@pytest.mark.parametrize(("total", "shares"), [(10, [1, 1, 1]), (25, [0, 1, 9]), (0, [1, 2, 3])])
def test_units_are_spread_in_proportion_and_add_up(total, shares):
    counts = llama.spread(total, shares, 12)
    assert sum(counts) == total
    assert max(counts) <= 12
    assert counts == sorted(counts, reverse=shares == [1, 1, 1])
    with pytest.raises(ValueError, match="cannot go"):
        llama.spread(37, shares, 12)


def test_seconds_count_what_another_method_had_computed(calibration):
    fresh = llama.Calibration(calibration.model, calibration.ids[:8])
    first = fresh.timed(lambda: units.nystrom(fresh, 10**4, 1.0, None))[1]
    again = fresh.timed(lambda: units.nystrom(fresh, 10**4, 1.0, None))[1]
    shared = fresh.kept["sums"][1]
    assert again > shared > 0
    assert first > shared


def test_the_lowest_of_each_size_is_bold_and_what_was_not_measured_a_dash():
    def row(method, size, nats):
        return {
            "method": method,
            "size": size,
            "texts": {"own": {"delta_nll": nats, "delta_nll_se": 0.01}},
        }

    rows = [row("slow", 0.05, 0.3), row("fast", 0.05, 0.2), row("slow", 0.1, 0.4)]
    *_, first, last = table.summary(rows, "own").splitlines()
    assert first == "| fast | **+0.200 ± 0.010** | - |"
    assert last == "| slow | +0.300 ± 0.010 | **+0.400 ± 0.010** |"


def test_the_command_goes_on_where_it_was_and_refuses_other_settings(short_text, tmp_path, capsys):
    """Ours and a method that removes layers, on a run of the tiny model."""
    spec = importlib.util.spec_from_file_location("field_command", BENCHMARKS / "field.py")
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    text = ("--text-file", short_text, "--tokens", "4096", "--max-length", "64")
    folder = Path(__file__).parent / "models" / "llama"
    done = inside("profile", folder, *text, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    out, drawn = tmp_path / "field.json", tmp_path / "field.svg"
    common = [str(tmp_path / "run"), "--out", str(out), "--sizes", "10%", "--tokens", "512"]
    command.main([*common, "--methods", "shortgpt"])
    first = json.loads(out.read_text())["rows"]
    command.main([*common, "--methods", "shortgpt,ours", "--figure", str(drawn)])
    rows = json.loads(out.read_text())["rows"]
    assert rows[:1] == first  # not measured again
    assert [row["method"] for row in rows] == ["shortgpt", "ours"]
    for row in rows:
        assert row["removed"] >= 0.1
        assert row["bytes"] == 2 * row["parameters"]
        assert row["texts"]["its own text"]["delta_nll_se"] > 0
    assert rows[0]["feed_forward_removed"] == pytest.approx(1 / 8)  # one layer is 10.2 % of all
    printed = capsys.readouterr().out.split("At 10% of all parameters:")[-1]
    assert "| ours |" in printed
    assert "ours: 1" in drawn.read_text()  # the title of its dot
    with pytest.raises(ValueError, match="other settings"):
        command.main([*common, "--methods", "shortgpt", "--tokens", "256"])
    command.main([*common, "--methods", "shortgpt-generated"])
    assert json.loads(out.read_text())["rows"][-1]["method"] == "shortgpt-generated"
    options = {"run": common[0], "out": None, "join": [], "tokens": 512, "threads": 1}
    field = command.Field(argparse.Namespace(**options, fit_tokens=1024))
    both = field.calibration, field.written[0]
    read = []
    field.methods["note"] = lambda calibration, _: (
        read.append(calibration) or llama.Made(llama.clone(calibration.model))
    )
    field.measure("note", 0.1)
    field.measure("note-generated", 0.1)
    assert tuple(read) == both
    own, more = ({tuple(row) for row in calibration.ids.tolist()} for calibration in both)
    assert own < more
    assert len(more) == 2 * len(own) == 32  # windows: the model has written the others
