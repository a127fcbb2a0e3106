"""The command as a person meets it: separate processes, exit codes, one-line errors."""

import errno
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from command import run
from howlinear.cli.profile import check_room
from howlinear.models import loading
from howlinear.models.corpus import open_text
from howlinear.models.families import Block
from howlinear.models.forward import Forward
from howlinear.profiling.needs import moments_bytes
from howlinear.profiling.passes import Pass
from howlinear.run import room
from howlinear.run.folder import RunFolder
from reports import planted_run

SMALL = Path(__file__).parent / "models" / "llama"


@pytest.fixture
def small(short_text):
    """`profile` of a small model and a short text."""
    common = ("--text-file", short_text, "--tokens", "4096", "--max-length", "128")
    return lambda *args, model=SMALL: ("profile", model, *common, *args)


def test_a_mistake_in_a_process_of_its_own():
    done = run("report", "./nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("howlinear: nowhere does not exist")
    assert "Traceback" not in done.stderr


def test_profile_writes_a_run_and_prints_the_table(small_run):
    _, out, done = small_run
    assert done.returncode == 0, done.stderr
    names = {p.name for p in out.iterdir()}
    assert names == {"profile.json", "maps", "moments"}
    data = json.loads((out / "profile.json").read_text())
    assert len(data["blocks"]) == 6
    assert data["settings"]["tokens"] == 2048
    assert len(data["corpus"]["fingerprint"]) == 64
    assert data["command"].startswith("howlinear profile")
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "results in" not in line)
    for b in data["blocks"]:
        assert f"{b['r2']:.3f}" in done.stdout
        assert b["kind"] in done.stdout
    assert "rank correlation of R2 with depth" in done.stdout
    assert f"results in {out}" in done.stdout
    assert "memory" in done.stderr
    assert "multiply-adds" in done.stderr


@pytest.mark.parametrize("shard", [(), ("--shard", "0/2")])
def test_a_finished_command_measures_and_removes_nothing(tmp_path, here, complaint, small, shard):
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(SMALL, model)
    args = small("--blocks", "0", "-o", out, *shard, model=model)
    first = here(*args)
    for kind in ("swap", "probe", "plan", "compress", "control-matched"):
        (out / f"{kind}.json").write_text("hours of work")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    again = here(*args)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert again.stderr.splitlines()[-1] == (
        f"{out} holds this profile already: --overwrite to measure again"
    )
    document = here(*args, "--json").stdout  # one document and nothing else
    assert json.loads(document) == json.loads(
        before[out / f"{'shard' if shard else 'profile'}.json"]
    )
    weights = load_file(model / "model.safetensors")
    save_file({k: 2 * v for k, v in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert "another model: weights was" in complaint(*args)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert here(*args, "--overwrite").returncode == 0
    assert not (out / "swap.json").exists()


def test_another_command_does_not_write_over_a_run(small_run, complaint):
    args, out, _ = small_run
    before = (out / "profile.json").read_bytes()
    line = complaint(*args, "--folds", "2")
    assert "is not empty" in line
    assert "--overwrite" in line
    assert (out / "profile.json").read_bytes() == before


def test_foreign_folders_are_left_alone(minilm, tmp_path, complaint):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "is not empty" in complaint("profile", minilm, "-o", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    assert "is a file" in complaint("profile", minilm, "-o", tmp_path / "thesis.tex")


def test_some_blocks_by_index_or_path(tmp_path, here, small):
    by_index = here(*small("--json", "--blocks", "1,3-4", "-o", tmp_path / "a"))
    by_path = here(*small("--json", "--blocks", r"layers\.[134]\.", "-o", tmp_path / "b"))
    one, two = (json.loads(done.stdout)["blocks"] for done in (by_index, by_path))
    assert [b["index"] for b in one] == [1, 3, 4]
    assert one == two


def test_text_from_a_file_and_from_stdin(short_text, tmp_path, here, monkeypatch, small):
    args = small("--json", "--blocks", "0")
    one = here(*args, "-o", tmp_path / "a")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(short_text.read_bytes())))
    two = here(*args, "--text-file", "-", "-o", tmp_path / "b")
    one, two = json.loads(one.stdout), json.loads(two.stdout)
    assert one["blocks"] == two["blocks"]
    assert one["corpus"]["fingerprint"] == two["corpus"]["fingerprint"]
    assert one["corpus"]["part"] == "first 80 %"


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (["profile", SMALL, "-o", "full/run"], "with -o"),
        (["profile", SMALL, "--corpus", "a=text.txt", "-o", "full"], "with -o"),
        (["control", "matched", SMALL, "--text-file", "text.txt", "-o", "full"], "with -o"),
        (["control", "checkpoints", SMALL.parent, "--text-file", "text.txt", "-o", "full"], "-o"),
        (["merge", "run", "run", "-o", "full"], "with -o"),
        (["compare", "run", "run", "-o", "full.json"], "with -o"),
        (["report", "run", "-o", "full.html"], "with -o"),
        (["report", "run", "--figures", "full"], "with"),
        (["swap", "run"], "No space left"),
        (["probe", "run"], "No space left"),
        (["compress", "run", "-o", "full"], "No space left"),
        (["control", "random-init", "run"], "No space left"),
    ],
)
def test_a_full_disk_is_found_before_the_work(command, way_out, tmp_path, complaint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 9000)
    text = ["text.txt", None, None, "train", "text"]
    asked = {"model": str(SMALL), "revision": None, "dtype": "float32", "text": text}
    corpus = {"name": "text", "fingerprint": open_text(*text).fingerprint()}
    planted_run(tmp_path / "run", full=False, asked=asked, corpus=corpus)
    monkeypatch.setattr(loading, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    monkeypatch.setattr(tempfile, "TemporaryFile", no_space)
    line = complaint(*command)
    assert "cannot be written (No space left on device)" in line
    assert way_out in line
    assert not list(tmp_path.glob("full*"))


def test_a_result_that_cannot_be_written_is_printed(little, tmp_path, here, monkeypatch):
    run = shutil.copytree(little / "run", tmp_path / "run")
    monkeypatch.setattr(tempfile, "mkstemp", no_space)
    for command in (
        ("swap", run, "--tokens", "200", "--units", "0"),
        ("probe", run, "--kind", "where", "--blocks", "1", "--rows", "1000", "--tokens", "0"),
        ("compare", run, little / "run", "-o", tmp_path / "compare.json"),
    ):
        done = here(*command, "--json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["blocks"]
        line = done.stderr.splitlines()[-1]
        assert re.fullmatch(
            r"howlinear: .*\.json cannot be written \(No space left on device\)", line
        )


def test_a_profile_that_cannot_be_written_is_printed_and_not_measured_again(
    tmp_path, here, monkeypatch, small
):
    args = small("--blocks", "0", "-o", tmp_path / "run")
    write = RunFolder.write
    with monkeypatch.context() as full:
        full.setattr(
            RunFolder, "write", lambda r, d: (no_space if d["kind"] == "profile" else write)(r, d)
        )
        first = here(*args)
    assert first.returncode == 2
    assert "R2 from" in first.stdout
    assert "results in" not in first.stdout
    monkeypatch.setattr(Pass, "read", lambda *_: pytest.fail("read again"))
    again = here(*args)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(first.stdout)


def test_models_that_are_not_there(tmp_path, complaint):
    assert "hf download" in complaint("profile", "nobody/nothing", "-o", tmp_path / "run")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    line = complaint("profile", tmp_path / "broken.gguf", "-o", tmp_path / "run")
    assert "not a readable GGUF" in line


def test_too_little_memory_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(room, "available_memory", lambda: 10**9)
    with pytest.raises(ValueError, match=r"need 2 GB of memory and 1 GB are free: lower --folds"):
        check_room(2 * 10**9, 1, Path("x"))
    with pytest.raises(ValueError, match=r"B of disk .* are free in .*--folds"):
        check_room(1, 10**18, Path("x"))
    check_room(1, 1, Path("x"))


def test_what_is_stated_is_what_it_takes(small_run):
    """Disk as stated before the start, within a tenth."""
    _, out, _ = small_run
    data = json.loads((out / "profile.json").read_text())
    at = [
        Block(
            b["index"], b["path"], (b["path"],), ("", ""), None, None, "", b["d_in"], b["d_out"], ""
        )
        for b in data["blocks"]
    ]
    settings = data["settings"]
    windows = settings["tokens"] // settings["window"]
    _, disk = moments_bytes(at, windows, settings["folds"])
    taken = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    assert disk == pytest.approx(taken, rel=0.1)


def test_interrupting_leaves_nothing(tmp_path, here, monkeypatch, small):
    real, batches = Forward.__call__, []

    def third_interrupted(*args, **options):
        batches.append(args)
        if len(batches) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(Forward, "__call__", third_interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        done = here(*small("-o", tmp_path / "run"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("howlinear: interrupted; no incomplete file")
    assert "Traceback" not in done.stderr
    assert len(batches) == 3
    assert not (tmp_path / "run").exists()


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['howlinear', 'profile', '--help']; from howlinear.cli.app import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--max-length" in done.stdout
    assert run("--version").stdout.startswith("howlinear 0.")


def test_strange_names_are_shown_as_text(tmp_path, here, small):
    odd = tmp_path / "[red]\x1b[31mname"
    shutil.copytree(SMALL, odd)
    done = here(*small("--blocks", "0", "-o", tmp_path / "r", model=odd))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "[red]" in done.stdout


def test_a_dry_run_needs_no_weights_and_writes_nothing(tmp_path, here, complaint, monkeypatch):
    """The figures of docs/scale.md, by hand: 7B has 32 x 4 x 4096^2 + 32 x 3 x 4096 x 11008 weights."""
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
    config |= {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False}
    (tmp_path / "7b").mkdir()
    (tmp_path / "7b" / "config.json").write_text(json.dumps(config))
    done = here("profile", "7b", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    assert cost["tokens"] == 40 * 4096
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert cost["parameters"] == matrices + 2 * 32000 * 4096 + 65 * 4096
    assert cost["weights"] == 4 * cost["parameters"]
    attention = 32 * 2 * 512 * 4096
    assert cost["forward"] == 40 * 4096 * (matrices + attention)
    one = 4100 * (4100 / 2 + 4096)  # sums of one fold, in numbers
    sampled = 32 * 4 * 12 * 84 * (3 * 4096 + 4)  # rows with their gradients
    assert cost["kept"] == pytest.approx(8 * 32 * (5 * one + 4100 * 4096) + sampled, rel=0.04)
    half = json.loads(here("profile", "7b", "--dry-run", "--json", "--dtype", "bfloat16").stdout)
    assert half["weights"] == cost["weights"] / 2
    slow = json.loads(here("profile", "7b", "--dry-run", "--json", "--layerwise").stdout)
    layer = matrices // 32 + 2 * 4096
    assert slow["weights"] == 4 * (layer + 32000 * 4096)
    assert slow["moments"] < cost["moments"] / 5
    assert slow["states"] == 2 * 4 * 40 * 4096 * 4096
    assert slow["saves"] == pytest.approx(2 * (cost["kept"] - sampled) / 32)
    told = here("profile", "7b", "--dry-run", "--layerwise").stdout
    assert "hidden states" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80
    assert [p.name for p in tmp_path.iterdir()] == ["7b"]
    assert "this model has no tokenizer" in complaint("profile", "7b", "-o", "out")


def test_layers_groups_and_precisions_give_the_same_run(tmp_path, here, monkeypatch, small):
    def blocks(name, *flags):
        done = here(*small("--blocks", "0-3", "--json", "-o", tmp_path / name, *flags))
        assert done.returncode == 0, done.stderr
        assert {p.name for p in (tmp_path / name).iterdir()} == {"profile.json", "maps", "moments"}
        return json.loads(done.stdout), done.stderr

    def near(one, two, off):
        for a, b in zip(one["blocks"], two["blocks"], strict=True):
            for name in ("r2", "r2_se", "r2_body", "r2_scalar", "stream_error", "effective_rank"):
                assert a[name] == pytest.approx(b[name], rel=off), name

    plain, said = blocks("plain")
    layered, _ = blocks("layered", "--layerwise")
    near(plain, layered, 1e-6)
    assert layered["model"] == plain["model"]  # its weights are on disk, and are the same
    placed, _ = blocks("placed", "--device-map", "auto")
    near(plain, placed, 1e-12)
    mixed, _ = blocks("mixed", "--precision", "mixed")
    near(plain, mixed, 1e-4)
    assert mixed["blocks"][1]["r2"] != plain["blocks"][1]["r2"]
    assert (plain["settings"]["precision"], mixed["settings"]["precision"]) == ("auto", "mixed")
    from howlinear import blocks as found
    from howlinear.models import loading

    own = found(loading.load(str(SMALL))[0], "0-1")
    free = moments_bytes(own, 32, 5, sampled=12 * 84)[0] + 1000
    monkeypatch.setattr(room, "available_memory", lambda: free)
    grouped, told = blocks("grouped")
    near(plain, grouped, 1e-12)
    assert "do not fit into memory: 2 at a time" in told
    assert "2 passes over the text" in told
    assert "do not fit" not in said


def test_a_killed_run_is_taken_up_or_refused_by_name(tmp_path, here, complaint, small):
    args = small("--blocks", "0", "-o", tmp_path / "run")
    assert here(*args, "--shard", "0/2").returncode == 0
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"shard.json", "moments"}
    line = complaint(*args)
    assert "is not empty" in line
    assert "write I/N" in complaint(*args, "--shard", "2/2")
    assert "drop --device-map" in complaint(*args, "--layerwise", "--device-map", "auto")
    asked = json.loads((tmp_path / "run" / "shard.json").read_text())["asked"]
    left = {"kind": "progress", "schema": 1, "asked": asked | {"folds": 4}, "done": []}
    left["schema"] = json.loads((tmp_path / "run" / "shard.json").read_text())["schema"]
    (tmp_path / "run" / "progress.json").write_text(json.dumps(left))
    (tmp_path / "run" / ".progress.json.abc.tmp").touch()  # of a kill in the middle of a write
    line = complaint(*args, "--shard", "0/2")
    assert "another folds (4, now 5)" in line
    assert here(*args, "--overwrite").returncode == 0
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"profile.json", "maps", "moments"}
    other = small("--blocks", "0")
    assert here(*other, "--shard", "0/2", "-o", tmp_path / "a").returncode == 0
    done = here(*other, "--shard", "1/2", "-o", tmp_path / "b")
    assert "shard 1 of 2: 2048 of 4096 tokens" in done.stdout
    done = here("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "sum", "--json")
    one, two = (
        json.loads((tmp_path / name / "profile.json").read_text()) for name in ("run", "sum")
    )
    assert json.loads(done.stdout) == two
    assert one["blocks"][0]["r2"] == pytest.approx(two["blocks"][0]["r2"], rel=1e-12)
    assert two["asked"] == one["asked"] | {"shard": two["asked"]["shard"]}
    assert here("swap", tmp_path / "sum", "--tokens", "500").returncode == 0
    assert "is not empty" in complaint(
        "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "sum"
    )
