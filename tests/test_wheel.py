"""A wheel built from the tree, installed into an environment of its own, works."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from reports import planted_run

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def run(*command, **options):
    """What it prints."""
    done = subprocess.run(map(str, command), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_installs_into_an_empty_environment_and_works(tmp_path):
    for package in ("hatchling", "pip"):
        pytest.importorskip(package, reason=f"no {package} to build or install a wheel with")
    name = run(sys.executable, "-c", BUILD, tmp_path, cwd=ROOT).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        packed = {n for n in wheel.namelist() if n.startswith("howlinear/")}
    source = ROOT / "src"
    files = [p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert packed == {p.relative_to(source).as_posix() for p in files}

    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", "-q", tmp_path / name)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    # torch and the others come from here; `.pth` files there, and so this tree, are not followed
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import howlinear; print(howlinear.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(site)
    howlinear = tmp_path / "env" / "bin" / "howlinear"
    assert "profile" in run(howlinear, "--help", cwd=tmp_path, env=env)
    planted_run(tmp_path / "run", blocks=3)
    assert run(howlinear, "report", "run", cwd=tmp_path, env=env) == "run/report.html\n"
