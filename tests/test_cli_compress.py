"""`howlinear compress` and `howlinear bench`, as a user types them, on a tiny model."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from howlinear import blocks, load
from howlinear.cli.sources import GENERATED, Loader, RunSource
from howlinear.compression.refitting import Refitter
from howlinear.export.write import FROM_DISK
from howlinear.run.tensors import write_tensors


@pytest.fixture(scope="module")
def copied(little, tmp_path_factory):
    """The run in a folder of its own: compress adds to it."""
    return shutil.copytree(little / "run", tmp_path_factory.mktemp("compress") / "run")


@pytest.fixture
def squeezed(copied, here, tmp_path):
    def call(*args):
        done = here("compress", copied, "--tokens", 512, *args)
        assert done.returncode == 0, done.stderr
        return done

    return call


def test_a_smaller_model_is_written_loads_and_says_how_it_was_made(squeezed, copied, tmp_path):
    out = tmp_path / "small"
    done = squeezed("-o", out, "--remove-params", "30%")
    assert "blocks replaced" in done.stdout
    assert "compressing takes about " in done.stderr
    assert "tokens that nothing was fitted to or chosen by" in " ".join(done.stdout.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(out) not in line)
    names = {p.name for p in out.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "plan.json", "compress.json"} <= names
    record = json.loads((out / "compress.json").read_text())
    assert record["command"].startswith("howlinear compress ")
    assert record["removed"] >= 0.3 * record["feed_forward"]
    model, tokenizer = load(out, trust_remote_code=True)
    assert tokenizer is not None
    assert len(blocks(model)) == 3
    assert sum(p.numel() for p in model.parameters()) == record["exported"]["parameters"]
    assert record["exported"]["parameters"] == record["parameters"] - record["removed"]
    assert json.loads((copied / "compress.json").read_text())["removed"] == record["removed"]


def test_other_texts_are_fitted_on_and_reported_on(squeezed, here, copied, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("for i in range(10):\n    print(i, i * i)\n\n" * 900)
    alone = ("--dry-run", "--blocks", "0", "--also-fit", "none", "--json")
    plain = json.loads(squeezed(*alone).stdout)
    shown = squeezed("--dry-run", "--blocks", "0", "--also-fit", more).stdout
    assert f"{more}:perplexity" in "".join(shown.split())  # long paths are broken over lines
    data = json.loads((copied / "compress.json").read_text())
    own, other = data["texts"]
    assert own["tokens"] == other["tokens"] == plain["settings"]["fit_tokens"] // 2
    assert data["settings"]["fit_tokens"] == 2 * own["tokens"]
    assert other["name"] == str(more)
    assert own["change"] == data["change"] != plain["change"]  # of another map, on the same text
    assert other["change"]["changed"] != own["change"]["changed"]
    assert plain["texts"] is None
    data = json.loads(squeezed("--dry-run", "--blocks", "0", "--json").stdout)
    own, written = data["texts"]
    assert (written["name"], written["tokens"]) == ("generated", own["tokens"])
    assert written["change"] is None  # nothing is reported on text of the model's own
    assert own["change"] == data["change"] != plain["change"]
    for wrong, why in (([tmp_path / "none.txt"], "--also-fit"), ([more, more], "on already")):
        flags = [part for path in wrong for part in ("--also-fit", path)]
        done = here("compress", copied, "--dry-run", *flags)
        assert done.returncode == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr


def test_written_text_is_kept_for_the_next_call(squeezed, here, copied):
    flags, kept = ("--dry-run", "--blocks", "0", "--json"), copied / "written.safetensors"
    kept.unlink(missing_ok=True)
    first = squeezed(*flags)
    assert "wrote before" not in first.stderr
    ids = load_file(kept)["ids"]
    again = squeezed(*flags)
    assert "wrote before" in again.stderr
    assert json.loads(again.stdout)["change"] == json.loads(first.stdout)["change"]
    with safe_open(kept, "pt") as file:
        about = dict(file.metadata())
    about.pop("crc32")
    write_tensors(kept, {"ids": ids.flip(1)}, **about)  # it is read: other text, another map
    other = json.loads(squeezed(*flags).stdout)
    assert other["change"] != json.loads(first.stdout)["change"]
    for tensors, change in (
        ({"ids": ids.flip(1)}, {"weights": "of another model"}),
        ({"ids": ids.flip(1)}, {"windows": "3 of 4 tokens, first []"}),
        ({"ids": ids.flip(1)}, {"vocabulary": "of another tokenizer"}),
        ({"ids": ids[1:]}, {}),
        ({"ids": ids + 10**6}, {}),  # not in the vocabulary
        ({"ids": ids.flip(1).double()}, {}),
        ({"text": ids}, {}),
    ):
        write_tensors(kept, tensors, **about | change)
        assert "wrote before" not in squeezed(*flags).stderr
        assert torch.equal(load_file(kept)["ids"], ids)  # written again
    kept.write_bytes(b"damaged")
    squeezed(*flags)
    assert torch.equal(load_file(kept)["ids"], ids)
    layerwise = ("--dry-run", "--blocks", "0", "--layerwise", "--also-fit", "generated")
    done = here("compress", copied, "--tokens", 512, *layerwise)  # as without the file
    assert done.returncode == 2
    assert "all weights in memory" in done.stderr


def test_how_long_it_takes_counts_what_is_still_to_do(squeezed, copied):
    source = RunSource(copied)
    source.load(Loader())
    (copied / "written.safetensors").unlink(missing_ok=True)
    windows = source.fit_windows().ids
    assert source.to_write([]) == 0
    written = source.to_write([GENERATED])
    squeezed("--dry-run", "--blocks", "0")
    assert written == len(load_file(copied / "written.safetensors")["ids"]) * windows.shape[1]
    assert source.to_write([GENERATED]) == 0
    assert source.to_write([GENERATED, "other"]) == len(windows[::2]) // 2 * windows.shape[1]


def test_a_file_is_as_small_as_asked_for(squeezed, here, copied, little, tmp_path, reloaded_here):
    dense = (little / "model" / "model.safetensors").stat().st_size
    wanted = int(0.96 * dense)
    for export in ("hf", "stock"):
        out = tmp_path / export
        squeezed("-o", out, "--target-size", wanted, "--export", export)
        assert 0.9 * wanted < (out / "model.safetensors").stat().st_size <= wanted
    for flags, why in (
        (["--target-size", "small"], "is not a size"),
        (["--speedup", "0.9"], "above 1"),
        (["--speedup", "1.1", "--remove-params", "5%"], "exclude each other"),
        (["--target-size", "1MB", "--export", "gguf"], "--remove-params"),
    ):
        done = here("compress", copied, "--dry-run", *flags)
        assert done.returncode == 2
        assert why in done.stderr


def test_weights_on_disk_are_exported_as_those_in_memory(squeezed, copied, tmp_path, monkeypatch):
    """Where both choose hidden units by squares, as they do without gradients."""
    monkeypatch.setattr(Refitter, "metric", lambda *_: None)
    plan = ("--blocks", "0,2", "--keep-units", 2, "--also-fit", "none")
    for name, flags in {"plain": (), "disk": ("--layerwise",), "other": ("--rank", 3)}.items():
        squeezed("-o", tmp_path / name, *plan, *flags)
    plain, disk, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "disk", "other")
    )
    assert disk.keys() == plain.keys()
    assert all(torch.equal(disk[name], plain[name]) for name in plain)  # the same sums, in order
    assert other.keys() != plain.keys()
    one, two = (json.loads((tmp_path / n / "compress.json").read_text()) for n in ("plain", "disk"))
    assert two["exported"]["perplexity"] == pytest.approx(one["exported"]["perplexity"], rel=1e-6)
    assert two["exported"]["notes"] == [FROM_DISK]
    assert [b["units"] for b in two["blocks"]] == [b["units"] for b in one["blocks"]]
    assert not list(copied.glob(".weights-*"))


def test_a_budget_is_met_with_weights_on_disk(squeezed, tmp_path, reloaded_here):
    done = squeezed("-o", tmp_path / "small", "--remove-params", "30%", "--layerwise")
    record = json.loads((tmp_path / "small" / "compress.json").read_text())
    assert record["removed"] >= 0.3 * record["feed_forward"]
    assert record["exported"]["parameters"] == record["parameters"] - record["removed"]
    assert "generated text was not" in " ".join(done.stdout.split())
    assert "all weights in memory: maps are fitted on the run's text alone" in done.stderr


def test_a_plan_goes_out_by_hand_and_comes_back(squeezed, here, copied, tmp_path):
    squeezed("--dry-run", "--blocks", "0,2", "--keep-units", 2)
    plan = json.loads((copied / "plan.json").read_text())
    assert [(b["index"], b["rank"], b["units"]) for b in plan["blocks"]] == [
        (0, None, 2),
        (2, None, 2),
    ]
    plan["blocks"] = [plan["blocks"][1] | {"rank": 3, "units": 8}]
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(plan))
    done = squeezed("--dry-run", "--plan", mine, "--json")
    (replaced,) = [b for b in json.loads(done.stdout)["blocks"] if b["replaced"]]
    assert (replaced["index"], replaced["rank"], len(replaced["units"])) == (2, 3, 8)
    plan["blocks"][0]["units"] = 4096
    mine.write_text(json.dumps(plan))
    done = here("compress", copied, "--dry-run", "--plan", mine)
    assert done.returncode == 2
    assert "the plan keeps 4096 units of block 2, which has" in done.stderr
    assert "to fit on" not in done.stderr
    plan["blocks"][0]["path"] = "model.layers.9.mlp"
    mine.write_text(json.dumps(plan))
    done = here("compress", copied, "--dry-run", "--plan", mine)
    assert done.returncode == 2
    assert "(model.layers.9.mlp) is not in the run" in done.stderr
    assert "loading" not in done.stderr


def test_baselines_are_in_the_table(squeezed):
    done = squeezed("--dry-run", "--blocks", "1", "--keep-units", 0, "--baselines")
    for method in ("refitted", "cheapest swaps", "highest R2", "blocks removed"):
        assert method in done.stdout


def test_healing_reads_new_text_in_each_step_where_there_is_enough(little):
    source = RunSource(little / "run")
    source.load(Loader())
    fit = source.fit_windows().ids
    assert torch.equal(source.heal_windows([], 3, 512), fit)  # enough for three steps
    more = source.heal_windows([], 24, 512)
    assert more.numel() == 24 * 512 > fit.numel()
    assert len({tuple(window) for window in more.tolist()}) == len(more)
    assert source.heal_windows([], 200, 1).numel() == 200 * 64 > fit.numel()  # a window a step
    source.mixed_windows([GENERATED])
    both = source.heal_windows([GENERATED], 48, 512)
    assert len(both) == len({tuple(window) for window in both.tolist()}) == 48 * 512 // 64


def test_maps_are_healed_and_the_result_says_from_what_to_what(
    squeezed, copied, tmp_path, reloaded_here
):
    out = tmp_path / "small"
    done = squeezed("-o", out, "--remove-params", "60%", "--heal", 2)
    told = " ".join(done.stdout.split())
    record = json.loads((out / "compress.json").read_text())
    assert record["healed"]["steps_run"] == 2
    assert record["settings"]["heal"] == 2
    assert len(record["curve"]) == 1 + record["healed"]["kept"]
    assert ("healed: perplexity" if record["healed"]["kept"] else "unhealed maps kept") in told
    assert "healing, KL" in done.stderr
    assert not (copied / "healing").exists()


def test_a_folder_that_holds_something_is_left_alone(copied, complaint, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    assert "is not empty" in complaint("compress", copied, "-o", tmp_path, "--blocks", "1")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_an_export_that_cannot_be_is_told_before_the_work(copied, complaint, tmp_path):
    out = tmp_path / "out"
    for export, way in (("nemotron-nas", "--export stock"), ("gguf", "convert_hf_to_gguf.py")):
        told = complaint("compress", copied, "-o", out, "--remove-params", "9%", "--export", export)
        assert way in told
    assert not out.exists()


def test_a_stock_model_is_smaller_by_what_the_plan_says_to_the_byte(
    squeezed, copied, little, tmp_path, reloaded_here
):
    out = tmp_path / "small"
    done = squeezed("-o", out, "--export", "stock", "--remove-params", "20%")
    assert done.stderr.index("vLLM on CPUs has no") < done.stderr.index("fitting options")
    record = json.loads((out / "compress.json").read_text())
    assert record["removed"] >= 0.2 * record["feed_forward"]
    exported = record["exported"]
    saved = 4 * record["removed"]  # the model is in float32
    assert exported["bytes_before"] - exported["tensor_bytes"] == saved
    assert f"{saved:,} bytes less of weights" in " ".join(done.stdout.split())
    headers = []
    for folder in (little / "model", out):
        with (folder / "model.safetensors").open("rb") as file:
            headers.append(8 + int.from_bytes(file.read(8), "little"))
    files = [(f / "model.safetensors").stat().st_size for f in (little / "model", out)]
    assert files[0] - files[1] == saved + headers[0] - headers[1]
    model, _ = load(out)  # without remote code
    assert model.config.intermediate_size == len(record["blocks"][0]["units"]) == 32
    card = (out / "README.md").read_text()
    for line in ("`vllm serve .`", "`llama-server -m model.gguf`", 'from_pretrained(".")'):
        assert line in card


def test_a_budget_that_cannot_be_met_ends_with_1_and_the_nearest_plan(here, copied, tmp_path):
    out = tmp_path / "small"
    args = ("--tokens", 512, "-o", out, "--remove-params", "99%", "--export", "stock")
    done = here("compress", copied, *args)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("howlinear: 99.0% of the feed-forward parameters")
    assert "3 of 3 blocks replaced" in done.stdout
    assert not out.exists()
    assert json.loads((copied / "compress.json").read_text())["unmet"] in last


def test_bench_prints_both_models(little, here):
    model = little / "model"
    short = ("--max-length", 32, "--new-tokens", 4, "--repeats", 3)
    done = here("bench", model, "--against", model, *short)
    assert done.returncode == 0, done.stderr
    assert "prefill tokens/s" in done.stdout
    data = json.loads(here("bench", model, *short, "--json").stdout)
    assert data["kind"] == "bench"
    assert data["speeds"][0]["prefill"]["median"] > 0
    assert torch.isfinite(torch.tensor(data["speeds"][0]["decode"]["median"]))
