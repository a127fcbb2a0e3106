"""Several processes give what one gives: real ones, over gloo, started by torchrun or like it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ranked
from command import COMMAND
from howlinear.profiling.passes import Course
from howlinear.run.work import ALONE, Ranks
from test_merging import close

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ranked.everything(ALONE, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("count", [3])
def test_any_number_of_ranks_gives_what_one_gives(alone, count, tmp_path):
    """Profiles by both solvers, swaps, weighted fits and controls, batches divided evenly or not."""
    done = subprocess.run(
        [sys.executable, ranked.__file__, tmp_path, str(count)],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == alone.keys()
    for name in found:
        close(alone[name], found[name], name)
    # the comparison can fail: another model's numbers are not close
    with pytest.raises(AssertionError):
        close(alone["moments"][0], found["moments"][1])


def test_batches_are_dealt_out_once():
    for shards, count in ((1, 1), (1, 3), (4, 1), (3, 2)):
        courses = [
            Course(shard=(i, shards), ranks=Ranks(r, count))
            for i in range(shards)
            for r in range(count)
        ]
        for number in range(20):
            assert sum(c.mine(number) for c in courses) == 1
    with pytest.raises(ValueError, match="no part 2 of 2"):
        Course(shard=(2, 2))


def test_a_peer_that_is_gone_is_one_line_and_torchrun_writes_once(short_text, tmp_path):
    """Without torchrun's eyes on it, as on another machine; then with it, into the same folder."""
    model, out = Path(__file__).parent / "models" / "llama", ["-o", str(tmp_path / "run")]
    args = ["profile", str(model), "--max-length", "64", "--blocks", "0", "--tokens", "8192"]
    args += ["--text-file", str(short_text)]
    env = ENV | {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    first, second = (
        subprocess.Popen(
            [*COMMAND, *args, "--batch-size", size, *out],
            stderr=subprocess.PIPE,
            text=True,
            env=env | {"RANK": rank},
        )
        for rank, size in (("0", "128"), ("1", "1"))
    )
    for line in first.stderr:
        if "tokens to run" in line:
            break
    second.kill()
    told = first.stderr.read()
    assert first.wait(60) == 1
    assert "howlinear: another process ended" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "profile.json").exists()
    job = [*TORCHRUN, "--nproc-per-node=2", "-m", "howlinear", *args, *out]
    done = subprocess.run(job, capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results in") == 1
    assert done.stderr.count("loading") == 1
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"profile.json", "moments", "maps"}
