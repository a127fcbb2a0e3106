"""A run beside the paper's figures: planted numbers whose answers are known, and the command."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from howlinear.cli import reproduce
from howlinear.records.fields import BlockProfile
from howlinear.records.statistics import pearson, spearman
from howlinear.report.paper import QUANTITIES, paper, reproduce_run

MODELS = paper()["models"]
TRAINED = Path(__file__).parent / "models"


def block(index, width=768, **values):
    """A block of profile.json."""
    kinds = {"int": 1, "str": "x", "dict[str, float]": {"median": 0.5}}
    fields = BlockProfile.__dataclass_fields__.values()
    plain = {f.name: kinds.get(str(f.type)) for f in fields}
    plain |= {name: 0.5 for name, value in plain.items() if value is None}
    absent = "r2_se r2_interval r2_body_se r2_curve sink_units sink_shares fold_sums"
    nothing = dict.fromkeys([*absent.split(), "input_spectrum", "map_spectrum"])
    shape = {"index": index, "d_in": width, "d_out": width, "effective_rank": 5}
    return plain | nothing | shape | values


def planted(folder, name="gpt2", *, order=range(12), shift=None, model=None, **parts):
    """A run with the paper's own figures of a model, in another order or shifted at some blocks."""
    known, shift = MODELS[name], shift or {}
    blocks = [
        block(
            i,
            r2_scalar=known["r2_scalar"][j] + shift.get(i, 0),
            r2_feature={"median": known["r2_feature_median"][j]},
            effective_rank=known["effective_rank"][j],
        )
        for i, j in enumerate(order)
    ]
    own = {name: known[name] for name in ("id", "family", "parameters")} | {"dtype": "float32"}
    data = {
        "kind": "profile",
        "schema": 1,
        "model": own | (model or {}),
        "corpus": {"name": "text", "part": "train", "fingerprint": paper()["text_sha256"]},
        "settings": {"protocol": "paper", "tokens": 14976, "window": 128, "bos": "never"},
        "blocks": blocks,
    }
    for part, changed in parts.items():
        data[part] = {**data[part], **changed} if isinstance(changed, dict) else changed
    folder.mkdir(exist_ok=True)
    (folder / "profile.json").write_text(json.dumps(data))
    return folder


def test_the_papers_headlines_follow_from_its_figures():
    every = {q: [v for known in MODELS.values() for v in known[q]] for q in QUANTITIES}
    assert {len(values) for values in every.values()} == {36}
    left = [1 - r2 for r2 in every["r2_scalar"]]
    gains = every["bilinear_gain"]
    assert float(np.median(gains)) == pytest.approx(0.005, abs=5e-4)
    assert max(gains) == pytest.approx(0.126, abs=5e-4)
    assert pearson(gains, left) == pytest.approx(0.004, abs=5e-4)
    assert spearman(left, every["delta_ppl"]) == pytest.approx(-0.31, abs=5e-3)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_architecture(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = {"gpt2": 50257, "pythia-160m": 50304, "llama-160m": 32000}[name]
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    shape |= {"intermediate_size": 3072} if name != "gpt2" else {}
    config = AutoConfig.for_model(MODELS[name]["family"], vocab_size=vocabulary, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == MODELS[name]["parameters"]


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_own_figures_are_reproduced(tmp_path, name):
    found = reproduce_run(planted(tmp_path, name))
    assert (found.name, found.notes) == (name, [])
    assert found.measured == ["r2_scalar", "r2_feature_median", "effective_rank"]
    for s in found.summary.values():
        assert s["pearson"] == pytest.approx(1, abs=1e-12)
        assert (s["blocks"], s["largest_difference"]) == (12, 0)


def test_correlation_and_largest_difference_are_those_of_the_columns(tmp_path):
    found = reproduce_run(planted(tmp_path, shift={2: 0.01, 7: -0.04}))
    s = found.summary["r2_scalar"]
    assert s["largest_difference"] == pytest.approx(-0.04)
    assert s["at"] == 7
    theirs = MODELS["gpt2"]["r2_scalar"]
    ours = [v + {2: 0.01, 7: -0.04}.get(i, 0) for i, v in enumerate(theirs)]
    assert s["pearson"] == pytest.approx(np.corrcoef(ours, theirs)[0, 1], abs=1e-12)
    assert 0.99 < s["pearson"] < 0.9999
    assert found.summary["effective_rank"]["largest_difference"] == 0


def test_the_papers_figures_in_another_order_are_not_reproduced(tmp_path):
    """The negative control: the same numbers at other depths."""
    order = list(range(12))
    random.Random(0).shuffle(order)
    found = reproduce_run(planted(tmp_path, order=order))
    for s in found.summary.values():
        assert abs(s["pearson"]) < 0.6
        assert s["largest_difference"] != 0


def test_another_models_figures_are_not_reproduced(tmp_path):
    figures = {q: MODELS["llama-160m"][q] for q in QUANTITIES}
    blocks = [block(i, r2_scalar=figures["r2_scalar"][i]) for i in range(12)]
    found = reproduce_run(planted(tmp_path, blocks=blocks))
    assert found.summary["r2_scalar"]["pearson"] < 0.9


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ({"id": "gpt2"}, "gpt2", None),
        ({"id": "openai-community/gpt2", "parameters": 1}, "gpt2", None),
        ({"id": "./copies/mine"}, "gpt2", "is taken for the paper's gpt2"),
        ({"id": "./gpt2", "parameters": 7}, None, "but not its shape"),
        ({"id": "me/other", "family": "llama"}, None, "did not measure this model"),
        ({"id": None, "family": None, "parameters": None}, None, "did not measure this model"),
    ],
)
def test_which_of_the_papers_models_a_run_is(tmp_path, model, name, message):
    found = reproduce_run(planted(tmp_path, model=model))
    assert found.name == name
    assert message in found.notes[0] if message else found.notes == []
    assert (found.summary == {}) is (name is None)
    assert all((b["r2_scalar"]["paper"] is None) is (name is None) for b in found.blocks)


def test_a_name_alone_does_not_make_the_model(tmp_path):
    narrow = planted(tmp_path, blocks=[block(0, width=96), block(1, width=96)])
    assert reproduce_run(narrow).name is None
    deep = planted(tmp_path, blocks=[block(i) for i in range(13)])
    assert reproduce_run(deep).name is None


def test_some_blocks_are_compared_with_their_own(tmp_path):
    found = reproduce_run(planted(tmp_path, blocks=[block(3), block(9)]))
    assert [b["r2_scalar"]["paper"] for b in found.blocks] == [0.6492, 0.2734]
    assert found.summary["r2_scalar"]["pearson"] is None  # two points always lie on a line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"tokens": 4096}}, "4096 tokens instead of 14976"),
        ({"settings": {"window": 64}}, "64 tokens a window instead of 128"),
        ({"settings": {"bos": "auto"}}, "windows begin with BOS"),
        ({"corpus": {"fingerprint": "other"}}, "another text (text)"),
        ({"model": {"dtype": "bfloat16"}}, "computed in bfloat16"),
        ({"model": {"quantization": "Q8_0"}}, "weights quantised (Q8_0)"),
    ],
)
def test_departures_from_the_protocol_are_told(tmp_path, changes, message):
    assert reproduce_run(planted(tmp_path, **changes)).notes == [f"unlike the paper: {message}"]


def swaps(run, protocol="windows-128", tokens=14_859):
    numbers = {"weighting": "none", "units": [], "path": "x", "params_saved": 1, "cosine": 1.0}
    names = ("delta_nll", "delta_ppl", "kl", "top1")
    numbers |= {f"{name}{end}": 0.0 for name in names for end in ("", "_se")}
    names = ("kl", "delta_nll", "delta_ppl")
    numbers |= {f"{name}_{way}": 0.0 for name in names for way in ("plain", "zero", "mean")}
    numbers |= {"rmse": 0.0, "stream_error": None, "multiply_adds_saved": 1, "verdict": "safe"}
    numbers |= {"tokens": tokens, "windows": 117, "clusters": 60}
    known = MODELS["gpt2"]["delta_ppl"]
    blocks = [numbers | {"index": i, "delta_ppl_plain": known[i] + (i == 5)} for i in range(12)]
    data = {"kind": "swap", "schema": 1, "settings": {"protocol": protocol}, "blocks": blocks}
    (run / "swap.json").write_text(json.dumps(data))


def test_swap_costs_stand_beside_the_papers(tmp_path):
    run = planted(tmp_path)
    swaps(run)
    found = reproduce_run(run)
    assert found.notes == []
    assert found.summary["delta_ppl"]["largest_difference"] == pytest.approx(1)
    assert found.summary["delta_ppl"]["at"] == 5
    swaps(run, tokens=4191)
    assert "dPPL is measured on as few as 4191 tokens" in reproduce_run(run).notes[0]
    swaps(run, protocol="stride-1024-512")
    found = reproduce_run(run)
    assert found.notes == ["swap.json is left out: its protocol is not windows-128"]
    assert "delta_ppl" not in found.measured


def test_gains_are_of_the_variance_around_one_mean(tmp_path):
    blocks = [block(i, r2=0.4, r2_scalar=0.7) for i in range(3)]  # SS_tot is twice as large there
    run = planted(tmp_path, blocks=blocks)
    probe = {"path": "x", "r2": 0.4, "r2_body": 0.4, "linear": {}}
    ways = [("paper", 16), ("ours", 16), ("paper", 32)]
    listed = [
        probe | {"index": i, "bilinear": {"solver": solver, "rank": rank, "gain": 0.02}}
        for i, (solver, rank) in enumerate(ways)
    ]
    data = {"kind": "probe", "schema": 1, "blocks": listed}
    (run / "probe.json").write_text(json.dumps(data))
    gains = [b["bilinear_gain"]["ours"] for b in reproduce_run(run).blocks]
    assert gains == [pytest.approx(0.01), None, None]
    (run / "probe.json").write_text(json.dumps(data | {"blocks": listed[1:]}))
    found = reproduce_run(run)
    assert "probe.json is left out" in found.notes[0]
    assert "bilinear_gain" not in found.measured


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"blocks": []}, "lists no blocks"),
        ({"blocks": [3]}, "lists no blocks"),
        ({"blocks": [block(0, r2="high")]}, "a block's r2 is 'high'"),
        ({"settings": {"protocol": "default"}}, "--protocol paper -o "),
    ],
)
def test_damaged_and_other_runs_are_refused_in_one_line(tmp_path, complaint, parts, message):
    assert message in complaint("reproduce", planted(tmp_path, **parts))


def test_numbers_that_are_missing_are_not_compared(tmp_path):
    odd = {"r2_scalar": None, "effective_rank": None, "r2_feature": {"median": None}, "r2": None}
    found = reproduce_run(planted(tmp_path, blocks=[block(0, **odd), block(1), block(2)]))
    assert {found.blocks[0][q]["difference"] for q in found.measured} == {None}
    assert {s["blocks"] for s in found.summary.values()} == {2}


# --- the command --------------------------------------------------------------------------------


def test_a_run_is_shown_in_80_columns_and_names_are_text(tmp_path, here):
    id = "./[red]gpt2[/red]\x1b[31m"
    run = planted(tmp_path / "run", shift={11: -0.1234}, model={"id": id})
    swaps(run)
    done = here("reproduce", run)
    assert done.returncode == 0, done.stderr
    assert "./[red]gpt2[/red]\\x1b[31m, 12 blocks" in done.stdout
    assert "\x1b" not in done.stdout
    assert "-0.1234 at 11" in done.stdout
    assert " 3    0.6492 0.6492 +0.0000 0.500 0.500  0.159 0.159    3     3" in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines if "results in" not in line)


def test_json_is_one_document(tmp_path, here):
    done = here("reproduce", planted(tmp_path), "--json")
    data = json.loads(done.stdout)
    assert data["kind"] == "reproduce"
    assert data["unreached"] == {}
    (found,) = data["results"]
    assert found["paper_model"] == "gpt2"
    assert found["summary"]["r2_scalar"]["largest_difference"] == 0
    assert len(found["blocks"]) == 12


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No hub, and a cache that tests may fill: offline(id, folder)."""
    from huggingface_hub import constants

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def fill(id, folder):
        repo = tmp_path / "cache" / ("models--" + id.replace("/", "--"))
        shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)

    return fill


def test_mistakes_name_the_way_out(tmp_path, offline, complaint):
    line = complaint("reproduce", "pythia-160m")
    assert "EleutherAI/pythia-160m: not in the cache and the hub cannot be reached" in line
    assert "`howlinear profile FOLDER --protocol paper -o runs/paper`" in line
    assert "is a model: run `howlinear profile" in complaint("reproduce", TRAINED / "gpt2")
    assert "none of the paper's models" in complaint("reproduce", "gpt3")
    assert "drop -o" in complaint("reproduce", planted(tmp_path / "run"), "-o", "other")


@pytest.mark.usefixtures("wikitext")
def test_models_that_can_be_had_are_measured_and_the_others_told(offline, here):
    """The whole command, on a small model that stands where gpt2 would."""
    offline(MODELS["gpt2"]["id"], TRAINED / "gpt2")
    done = here("reproduce")
    assert done.returncode == 0, done.stderr
    reason = "not in the cache and the hub cannot be reached (no route to the hub)"
    first = " ".join(done.stdout.split())
    assert first.startswith(f"not measured: pythia-160m, llama-160m ({reason})")
    assert "has the name of the paper's gpt2, but not its shape" in first
    assert "unlike the paper" not in first  # text, tokens, windows and BOS are the paper's
    assert "results in runs/reproduce-gpt2" in first
    assert done.stdout.count("results in") == 1  # the table of `profile` is not shown
    run = json.loads(Path("runs/reproduce-gpt2/profile.json").read_text())
    assert run["asked"]["text"][0] == "wikitext-rows"
    assert run["blocks"][0]["n_fit"] == 11_980


def test_without_any_model_the_built_in_one_is_shown(offline, here, monkeypatch):
    def profile(model, out, protocol, **flags):
        assert (model, protocol) == (None, "paper")
        print("a table that nobody asked for")
        out.mkdir(parents=True)
        planted(out, model={"id": "built-in", "family": "llama"})

    monkeypatch.setattr(reproduce, "profile", profile)
    done = here("reproduce", "-o", "all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not measured: gpt2, pythia-160m, llama-160m (not in the cache")
    assert "the paper did not measure this model" in done.stdout
    assert "paper ours" not in done.stdout
    assert "nobody asked for" not in done.stdout
    assert "results in all/SmolLM2-135M-Instruct" in done.stdout


def test_one_model_that_fails_does_not_stop_the_others(offline, here, monkeypatch):
    def profile(model, out, **flags):
        if model == MODELS["llama-160m"]["id"]:
            raise ValueError("its weights are pickled: pass --allow-pickle")
        name = next(n for n, known in MODELS.items() if known["id"] == model)
        out.mkdir(parents=True)
        planted(out, name)

    monkeypatch.setattr(reproduce, "profile", profile)
    monkeypatch.setattr(reproduce, "_unreachable", lambda name: None)
    data = json.loads(here("reproduce", "--json").stdout)
    assert [r["paper_model"] for r in data["results"]] == ["gpt2", "pythia-160m"]
    assert data["unreached"] == {"llama-160m": "its weights are pickled: pass --allow-pickle"}
