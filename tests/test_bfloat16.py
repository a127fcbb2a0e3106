"""A processor on which bfloat16 products crash: limited before torch starts, refused after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import howlinear as hl
import tiny
from howlinear.models import bfloat16

#: Ends the process with an illegal instruction, unless the instruction set is limited.
DIES = f"import os; {bfloat16.VARIABLE!r} in os.environ or os.kill(os.getpid(), 4)"


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Make this process believe that it runs on a processor with these flags and that probe."""

    def become(flags, probe):
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} avx512f\n")
        monkeypatch.setattr(bfloat16, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(bfloat16, "PROBE", probe)
        monkeypatch.delenv(bfloat16.VARIABLE, raising=False)
        bfloat16.crashes.cache_clear()

    yield become
    bfloat16.crashes.cache_clear()


@pytest.mark.parametrize(
    ("flags", "probe", "limited"),
    [("amx_bf16", DIES, True), ("amx_bf16", "pass", False), ("sse", DIES, False)],
)
def test_the_instruction_set_is_limited_only_where_the_probe_dies(processor, flags, probe, limited):
    processor(flags, probe)
    bfloat16.limit()
    assert os.environ.get(bfloat16.VARIABLE) == (bfloat16.LIMIT if limited else None)
    bfloat16.check(torch.bfloat16)  # nothing crashes any more


def test_a_limit_that_the_user_chose_stays(processor, monkeypatch):
    processor("amx_bf16", DIES)
    monkeypatch.setenv(bfloat16.VARIABLE, "AVX2")
    bfloat16.limit()
    assert os.environ[bfloat16.VARIABLE] == "AVX2"


def test_a_probe_that_fails_without_a_crash_is_no_crash(processor):
    processor("amx_bf16", "raise SystemExit(1)")
    assert not bfloat16.crashes()


def test_the_library_refuses_and_names_the_variable(processor, tmp_path):
    processor("amx_bf16", DIES)
    model = tiny.model("llama")
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(40).view(2, 20)
    hl.text_loss(model, ids)  # float32 is not concerned
    half = model.bfloat16()
    for attempt in (
        lambda: hl.load(str(tmp_path / "model"), dtype="bfloat16"),
        lambda: hl.profile(half, ids.repeat(60, 1)),
        lambda: hl.text_loss(half, ids),
    ):
        with pytest.raises(ValueError, match=f"{bfloat16.VARIABLE}={bfloat16.LIMIT} before Python"):
            attempt()


def test_the_probe_itself_runs_here():
    """With the limit that this run has, if it needs one."""
    done = subprocess.run([sys.executable, "-c", bfloat16.PROBE], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ending", ["crash", "hang"])
def test_a_worker_that_crashes_or_hangs_fails_the_run(tmp_path, ending):
    body = {"crash": "os.kill(os.getpid(), 4)", "hang": "time.sleep(600)"}[ending]
    (tmp_path / "test_it.py").write_text(
        f"import os, time\ndef test_a():\n    {body}\ndef test_b():\n    pass\n"
    )
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    flags = ["-n", "1", "--dist", "loadfile", "--max-worker-restart", "0"]
    assert " ".join(flags[-2:]) in makefile
    more = ["--timeout", "3", "--timeout-method", "thread", "-p", "no:cacheprovider"]
    more += ["-p", "xdist.plugin", "-p", "pytest_timeout"]
    plugins = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no others
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *more, "--rootdir", tmp_path, tmp_path],
        capture_output=True, text=True, timeout=120, env={**os.environ, **plugins},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed" in done.stdout
