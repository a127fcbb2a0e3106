"""Stores as files: what is written reads back to the bit, what is spoiled is refused, and a pass that
was killed ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from command import COMMAND, inside
from howlinear import Profile, blocks, profile
from howlinear.linear.stores import OutNorm
from howlinear.profiling.passes import Course
from howlinear.run.saving import Saves
from howlinear.run.tensors import read_map, read_store, read_tensors, write_tensors

LENGTH = 64


def ids(windows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, LENGTH), generator=g)


@pytest.fixture(scope="module")
def llama():
    return tiny.model("llama")


WINDOWS = ids(6144 // LENGTH + 5)


def files(folder):
    """Every number of a run: blocks of profile.json, and the bytes of each tensor."""
    data = json.loads((folder / "profile.json").read_text())
    paths = sorted(p for name in ("moments", "maps") for p in (folder / name).glob("[!.]*"))
    tensors = {
        (path.parent.name, path.name, name): value.reshape(-1).view(torch.uint8).numpy().tobytes()
        for path in paths
        for name, value in read_tensors(path).items()
    }
    return data["blocks"], tensors


# -- one block ------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["moments", "tsqr"])
def test_a_store_reads_back_to_the_bit(llama, tmp_path, solver):
    result = profile(llama, WINDOWS, course=Course(solver=solver))
    result.save(tmp_path)
    for store in result.stores:
        again = read_store(tmp_path, store.block)
        mine, theirs = store.state_dict(), again.state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert again.known.units == store.known.units
        assert again.n == WINDOWS.numel()


def test_an_output_norm_is_numbers(llama):
    model = tiny.model("gemma2")
    (block, *_) = blocks(model)
    module = model.get_submodule(block.out_norm)
    with torch.no_grad():
        module.weight.normal_()
    found = OutNorm.of(module, block.d_out)
    rows = 0.01 * torch.randn(50, block.d_out)  # so small that eps counts
    assert torch.allclose(found(rows.double()).float(), module(rows), rtol=1e-5, atol=1e-6)
    assert OutNorm.of(torch.nn.LayerNorm(16), 16) is None  # takes the mean away: another norm
    assert found(rows).std() > 0.5


def spoiled(good, rng, count):
    """Truncated, flipped, foreign and mixed-up versions of a file."""
    yield from (b"", b"{}", b"\x80\x04pickle", good[: len(good) // 2], good[:-1], good[:9])
    for _ in range(count):
        broken = bytearray(good)
        kind = rng.integers(0, 4)
        at = int(rng.integers(0, len(good)) if kind else rng.integers(0, min(4000, len(good))))
        if kind < 2:
            broken[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2:
            broken[at : at + 64] = rng.bytes(64)
        else:
            del broken[at : at + int(rng.integers(1, 200))]
        if bytes(broken) != good:
            yield bytes(broken)


def test_a_thousand_mutated_files_are_refused_with_name_and_reason(llama, tmp_path):
    result = profile(llama, WINDOWS, at="1")
    result.save(tmp_path)
    block = result.blocks[0]
    rng = np.random.default_rng(0)
    seen, refused, same = set(), 0, result.stores[0].state_dict()
    for name, read in (("moments", read_store), ("maps", read_map)):
        path = tmp_path / name / "1.safetensors"
        good = path.read_bytes()
        for content in spoiled(good, rng, 500):
            path.write_bytes(content)
            told, found = None, None
            try:
                found = read(tmp_path, block)
            except ValueError as err:
                told = str(err)
            if told is not None:
                refused += 1
                assert str(path) in told
                assert "\n" not in told
                seen.add(told.removeprefix(str(path)).split(":")[0])
            elif name == "moments":  # blanks in the header, say: nothing that matters has changed
                state = found.state_dict()
                assert all(torch.equal(value, same[key]) for key, value in state.items())
            else:
                assert torch.equal(found[0].weight, result.maps[1].weight)
        path.write_bytes(good)
        read(tmp_path, block)
    assert refused > 980
    assert {" is damaged", " is not a readable safetensors file"} <= seen


def test_a_file_of_another_block_or_of_somebody_else_is_refused(llama, tmp_path):
    from safetensors.torch import save_file

    result = profile(llama, WINDOWS)
    result.save(tmp_path)
    path = tmp_path / "moments" / "0.safetensors"
    path.write_bytes((tmp_path / "moments" / "1.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"of another block: model.layers.1.mlp, expected .*0.mlp"):
        read_store(tmp_path, result.blocks[0])
    save_file({"a": torch.ones(3)}, str(path))
    with pytest.raises(ValueError, match="was not written by howlinear"):
        read_store(tmp_path, result.blocks[0])
    path.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        read_store(tmp_path, result.blocks[0])
    # a checksum that fits makes nothing true
    state = result.stores[0].state_dict() | {"units": torch.tensor([-1, 2, 3, 4])}
    write_tensors(path, state, kind="moments", block=result.blocks[0].path)
    with pytest.raises(ValueError, match="sink units are not numbers"):
        read_store(tmp_path, result.blocks[0])
    good = result.stores[0].state_dict()
    state = {k: v for k, v in good.items() if not k.startswith("first.2")}
    write_tensors(path, state, kind="moments", block=result.blocks[0].path)
    with pytest.raises(ValueError, match="no complete first moments"):
        read_store(tmp_path, result.blocks[0])
    assert read_tensors(path, kind="moments").keys() == state.keys()
    for name, odd in (
        ("units", torch.ones(9)),
        ("body.0.kind", torch.ones(3)),
        ("sample.keys", torch.tensor(1)),
        ("body.0.scalars", torch.ones(2, dtype=torch.complex64)),
        ("body.0.shape", torch.tensor([10**13, 16, 1])),
    ):
        write_tensors(path, good | {name: odd}, kind="moments", block=result.blocks[0].path)
        with pytest.raises(ValueError, match=r"0\.safetensors: "):
            read_store(tmp_path, result.blocks[0])
    path = tmp_path / "maps" / "0.safetensors"
    fine = read_tensors(path)
    for name, odd in (("rank", torch.tensor(torch.inf)), ("weight", fine["bias"])):
        write_tensors(path, fine | {name: odd}, kind="map", block=result.blocks[0].path)
        with pytest.raises(ValueError, match=r"0\.safetensors: "):
            read_map(tmp_path, result.blocks[0])
    data = json.loads((tmp_path / "profile.json").read_text())
    for part, odd in (("experts", 5), ("experts", [5]), ("settings", []), ("blocks", {})):
        (tmp_path / "profile.json").write_text(json.dumps(data | {part: odd}))
        with pytest.raises(ValueError, match=r"profile\.json"):
            Profile.load(tmp_path)


# -- going on -------------------------------------------------------------------------------------


class Killed(Exception):  # noqa: N818
    pass


def killed_after(tokens):
    def progress(count):
        nonlocal tokens
        tokens -= count
        if tokens <= 0:
            raise Killed

    return progress


@pytest.mark.parametrize(
    ("solver", "together"), [("moments", None), ("tsqr", None), ("moments", 1), ("tsqr", 2)]
)
def test_a_pass_that_stopped_goes_on_to_the_bit(llama, tmp_path, solver, together):
    """Stopped again and again, with a save after every batch, in whichever group."""

    def course(folder, every):
        saves = Saves(folder, {"tokens": 1}, every)
        return Course(together=together, saves=saves, solver=solver)

    profile(llama, WINDOWS, course=course(tmp_path / "one", 1e9), batch_size=7).save(
        tmp_path / "one"
    )
    folder, stops, forwards = tmp_path / "two", 0, []
    handle = llama.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    passes = 1 if together is None else -(-3 // together)
    while True:
        tokens = None if stops > 4 else int((stops + 0.6) / 5 * passes * WINDOWS.numel())
        try:
            stop = killed_after(tokens) if tokens else None
            result = profile(
                llama,
                WINDOWS,
                course=course(folder, 0.0),
                batch_size=7,
                progress=stop,
            )
            break
        except Killed:
            stops += 1
            assert not (folder / "profile.json").exists()
            kept = [p for p in (folder / "partial" / "0").iterdir() if (p / "pass.json").exists()]
            assert len(kept) == 1
    handle.remove()
    assert stops == 5
    # each batch once a pass; each time what sink units are chosen by, gradients, and tests of the head
    assert passes * 15 <= len(forwards) <= passes * 15 + 6 * (passes + 8)
    result.save(folder)
    assert files(folder) == files(tmp_path / "one")


def test_settings_that_changed_are_named(llama, tmp_path):
    course = Course(saves=Saves(tmp_path, {"tokens": 1, "folds": 5}, 0.0))
    with pytest.raises(Killed):
        profile(llama, WINDOWS, course=course, progress=killed_after(3000))
    with pytest.raises(ValueError, match=r"another folds \(5, now 4\).*`overwrite=True`"):
        Saves(tmp_path, {"tokens": 1, "folds": 4}, 0.0)
    assert Saves(tmp_path, {"tokens": 1, "folds": 5}, 0.0).begun
    # a damaged save is told by its name, not believed
    (save,) = (tmp_path / "partial" / "0").iterdir()
    path = save / "moments" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"1\.safetensors is not a readable"):
        profile(llama, WINDOWS, course=course)


def test_kill_at_random_moments(short_text, tmp_path):
    """Real processes, kill -9 at any moment of their lives: the same run in the end, to the bit.

    HOWLINEAR_KILLS=20 tries twenty moments; the suite has time for one.
    """
    model = Path(__file__).parent / "models" / "llama"
    args = ["profile", str(model), "--tokens", "4096", "--max-length", "128", "--batch-size", "2"]
    args += ["--blocks", "0-1", "--save-every", "0", "--text-file", str(short_text)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(folder):
        """A process that has begun to read."""
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": env}
        process = subprocess.Popen([*COMMAND, *args, "-o", str(folder)], **how)
        assert any("tokens to run" in line for line in process.stderr)
        return process

    def ended(process):
        process.stderr.read()
        return process.wait()

    began = time.monotonic()
    assert inside(*args, "-o", tmp_path / "one").returncode == 0
    life, rng, want = time.monotonic() - began, random.Random(0), files(tmp_path / "one")
    left = []
    for trial in range(int(os.environ.get("HOWLINEAR_KILLS", "1"))):
        folder = tmp_path / f"{trial}"
        process = start(folder)
        time.sleep(rng.uniform(0, 0.9) * life)
        process.send_signal(signal.SIGKILL)
        left.append((ended(process), sorted(p.name for p in folder.glob("*"))))
        assert inside(*args, "-o", folder).returncode == 0  # anybody may go on
        assert files(folder) == want
        assert {p.name for p in folder.iterdir()} == {"profile.json", "moments", "maps"}
    print("\n".join(map(str, left)))  # what the kills left behind


def test_known_goes_with_the_moments(llama, tmp_path):
    result = profile(tiny.model("gemma2"), WINDOWS, at="0")
    known = result.stores[0].known
    assert known.norm is not None
    sample = result.stores[0].gradients
    assert len(sample)
    result.save(tmp_path)
    store = read_store(tmp_path, result.blocks[0])
    again = store.known
    assert torch.equal(again.norm.scale, known.norm.scale)
    assert again.norm.eps == known.norm.eps
    assert torch.equal(store.gradients.gradient, sample.gradient)
    assert torch.equal(store.gradients.x, sample.x)
    assert (again.units, again.shares) == (known.units, known.shares)


def test_the_first_save_comes_after_a_minute(tmp_path, monkeypatch, llama):
    clock, stores = [0.0], profile(llama, WINDOWS, at=0, signal=False).stores
    monkeypatch.setattr("howlinear.run.saving.time.monotonic", lambda: clock[0])
    saves, due = Saves(tmp_path, {}, 600), []
    for seconds in (59, 60, 600, 661):
        clock[0] = float(seconds)
        due.append(saves.due)
        saves.tick(stores, seconds)
    assert due == [False, True, False, True]
