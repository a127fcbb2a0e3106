"""Whatever sequence of commands, crashes, moves and changes: nothing measured is lost, nothing stale is shown.

A tiny model and text in a folder of their own; each step is a command in this process, or something
that happens to the files between two commands. A disk may fill up in the middle of a command, Ctrl-C
may be pressed, the process may be killed; then nothing that follows touches the disk. After each
step every file can be read, every result says what it is about, and every block that was measured
before is still there. `make sequences` runs a thousand sequences instead of a few.
"""

import contextlib
import copy
import errno
import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer.main
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from command import inside
from howlinear import Profile
from howlinear.export import write
from howlinear.models import corpus, loading
from howlinear.records.files import read_json
from howlinear.run.folder import COURSE
from howlinear.run.tensors import read_store, read_tensors

SEQUENCES = int(os.environ.get("SEQUENCES", "8"))
STEPS = 10

PROFILE = ("--tokens", "4096", "--max-length", "64", "--batch-size", "16", "--folds", "2")
PREDICT = ("--tokens", "256")
COMPRESS = ("--blocks", "0", "--rank", "full", "--keep-units", "0", "--also-fit", "none")


class Killed(BaseException):
    """What `kill -9` is to a process: no cleaning up."""


class Disk:
    """The disk under a command: after some operations it is full, or the process is at its end."""

    MAKING = ("open", "mkdir", "fsync", "replace", "rename")
    REMOVING = ("unlink", "rmdir")

    def __init__(self, end, after):
        self.end, self.after, self.done = end, after, 0

    def _operation(self, real, name, *args, **options):
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **options)  # for reading
        self.done += 1
        if self.done > self.after:
            if self.end == "killed":
                raise Killed
            if self.end == "full" and name not in self.REMOVING:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.end == "interrupted" and name not in self.REMOVING:
                self.after = 10**9  # once
                raise KeyboardInterrupt
        return None if name == "fsync" else real(*args, **options)

    def _save(self, real, tensors, path, *args, **options):
        """safetensors writes in code of its own, which has an error of its own."""
        if self.end == "full" and self.done >= self.after:
            raise safetensors.SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        real(tensors, path, *args, **options)

    @contextlib.contextmanager
    def under(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in (*self.MAKING, *self.REMOVING):
                operation = functools.partial(self._operation, getattr(os, name), name)
                patch.setattr(os, name, operation)
            save = functools.partial(self._save, safetensors.torch.save_file)
            patch.setattr(safetensors.torch, "save_file", save)
            yield


@functools.cache
def origin():
    """A folder with a model, its other weights, two texts, and `runs` of them to begin with."""
    folder = Path(tempfile.mkdtemp())
    words = [f"w{i}" for i in range(tiny.VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    tiny.model("llama", hidden_size=8, num_hidden_layers=2).save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "other-model")
    tiny.change_weights(folder / "other-model")
    draw = random.Random(0)
    for name in ("text", "other-text"):
        (folder / name).write_text(" ".join(draw.choices(words, k=6000)))
    begin(folder)
    profile = ("profile", ROOT / "model", "--text-file", ROOT / "text", *PROFILE, "-o")
    runs = folder / "runs"
    for name in ("shard-0", "shard-1"):
        assert inside(*profile, runs / name, "--shard", f"{name[-1]}/2").returncode == 0
    assert inside(*profile, runs / "a").returncode == 0
    assert (
        inside("merge", runs / "shard-0", runs / "shard-1", "-o", runs / "merged").returncode == 0
    )
    return folder


ROOT = Path(tempfile.gettempdir(), f"howlinear-sequences-{os.getpid()}")  # of every sequence


def begin(folder):
    """The model and the text in a folder without anything else."""
    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "elsewhere").mkdir(parents=True)
    shutil.copytree(folder / "model", ROOT / "model")
    shutil.copy(folder / "text", ROOT / "text")


LOAD = loading.load
LOADED = {}


def load(name=None, **options):
    """The model, from memory if these weights were loaded before."""
    weights = Path(name, "model.safetensors")
    if not weights.exists():
        return LOAD(name, **options)
    key = weights.read_bytes()
    if key not in LOADED:
        LOADED[key] = copy.deepcopy(LOAD(name, **options))  # whose tensors are the file's own bytes
    elif options.get("check"):
        options["check"](*LOADED[key])
    return copy.deepcopy(LOADED[key])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What a process does once is done once; afterwards nothing is left."""
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    monkeypatch.setattr(write, "verify", lambda *_: None)  # which needs a new process
    yield
    shutil.rmtree(origin())
    origin.cache_clear()


MOVED = "-moved"
RUNS = st.sampled_from(["a", "merged", "b"])
BLOCKS = st.sampled_from([(), ("--blocks", "0"), ("--blocks", "1")])
ENDS = st.one_of(
    st.just((None, 0)),
    *(
        st.tuples(st.sampled_from(["killed", "full", "interrupted"]), st.integers(0, n))
        for n in (9, 60)
    ),
)


class Sequence(RuleBasedStateMachine):
    """`self.here` is where the model and the text are now; `self.holds` what the runs held before.

    A run that is renamed is "a-moved" instead of "a" until it is renamed again.
    """

    root = ROOT

    @initialize(missing=st.sets(st.sampled_from(["a", "shard-0", "shard-1", "merged"]), max_size=2))
    def begin(self, missing):
        begin(origin())
        for run in (origin() / "runs").iterdir():
            if run.name not in missing:
                shutil.copytree(run, self.root / run.name)
        self.cwd = Path.cwd()
        os.chdir(self.root)
        self.here = {"model": "model", "text": "text"}
        self.other = {"model": False, "text": False}
        self.renamed = set()  # runs
        self.holds, self.left, self.overwritten = {}, set(), None

    def teardown(self):
        os.chdir(self.cwd)
        shutil.rmtree(self.root, ignore_errors=True)

    # -- commands

    def command(self, end, *args):
        """Run it; what it printed, or None if it was killed. One line for a mistake, no traceback."""
        with Disk(*end).under():
            try:
                done = inside(*args)
            except Killed:
                self.left |= set(self.traces())
                event(f"{args[0]} killed")
                return None
        event(f"{args[0]} {end[0]}: {done.returncode}")
        assert done.returncode in (0, 2, 130), done
        if done.returncode:
            last = done.stderr.splitlines()[-1]
            assert last.startswith("howlinear: "), done.stderr
            assert done.stderr.count("howlinear: ") <= 3, done.stderr
            assert end[0] or "No space" not in last
        assert set(self.traces()) <= self.left, "a command that ends by itself leaves no trace"
        return done

    def traces(self):
        """Files under temporary names."""
        return [p for p in self.root.rglob(".*") if p.name.endswith((".tmp", ".part"))]

    def place(self, name):
        return self.root / (f"{name}{MOVED}" if name in self.renamed else name)

    def path(self, name):
        return os.path.relpath(self.place(name))

    def moved(self):
        return "--model", self.path(self.here["model"]), "--text-file", self.path(self.here["text"])

    @rule(run=st.sampled_from(["a", "b"]), at=BLOCKS, overwrite=st.booleans(), end=ENDS)
    def profile(self, run, at, overwrite, end):
        self.overwritten = run if overwrite else None
        self.profiled(run, end, *at, *(["--overwrite"] if overwrite else []))

    @rule(part=st.sampled_from([0, 1]), end=ENDS)
    def shard(self, part, end):
        self.overwritten = None
        self.profiled(f"shard-{part}", end, "--shard", f"{part}/2")

    def profiled(self, run, end, *flags):
        text = ("--text-file", self.path(self.here["text"]), *PROFILE)
        args = ("profile", self.path(self.here["model"]), *text, "-o", self.path(run), *flags)
        free = "--overwrite" in flags or not self.place(run).exists()
        done = self.command(end, *args)
        if free and end[0] and end[1] % 2:  # what was cut off goes on
            end = (None, 0)
            done = self.command(end, *args)
        assert end[0] or not free or done.returncode == 0, done.stderr
        if done and done.returncode == 0:
            kind = "shard" if "--shard" in flags else "profile"
            data = read_json(self.place(run) / f"{kind}.json", kind)
            assert data["model"]["weights"] == self.weights()
            assert not (self.place(run) / "progress.json").exists()

    @rule(overwrite=st.booleans(), end=ENDS)
    def merge(self, overwrite, end):
        self.overwritten = "merged" if overwrite else None
        parts = [self.path(f"shard-{part}") for part in (0, 1)]
        flags = ["--overwrite"] if overwrite else []
        self.command(end, "merge", *parts, "-o", self.path("merged"), *flags)

    @rule(
        run=RUNS,
        at=BLOCKS,
        units=st.sampled_from(["0", "1"]),
        more=st.sampled_from([PREDICT, ("--tokens", "512"), ("--tokens", "512", "--baselines")]),
        told=st.booleans(),
        end=ENDS,
    )
    def swap(self, run, at, units, more, told, end):
        flags = (*at, *more, "--eval", "windows-32", "--positions", "16", "--units", units)
        self.reading("swap", run, told, end, *flags)

    @rule(run=RUNS, at=BLOCKS, rows=st.sampled_from(["512", "640"]), told=st.booleans(), end=ENDS)
    def probe(self, run, at, rows, told, end):
        flags = ("--kind", "quantised", "--rows", rows, "--tokens", "0")
        self.reading("probe", run, told, end, *at, *flags)

    @rule(run=RUNS, export=st.booleans(), told=st.booleans(), end=ENDS)
    def compress(self, run, export, told, end):
        """The smaller model is written as a whole or not at all."""
        out = self.root / "elsewhere" / "small"
        shutil.rmtree(out, ignore_errors=True)
        to = ("-o", os.path.relpath(out)) if export else ("--dry-run",)
        self.reading("compress", run, told, end, *to, *COMPRESS, *PREDICT)
        if out.exists():
            assert export
            assert load_file(out / "model.safetensors")
            assert read_json(out / "compress.json", "compress")["exported"]["folder"] == out.name

    @rule(kind=st.sampled_from(["random-init", "matched"]), run=RUNS, told=st.booleans(), end=ENDS)
    def control(self, kind, run, told, end):
        if (self.place(run) / "profile.json").exists():  # else it would be the name of a model
            seeds = ("--seeds", "1") if kind == "random-init" else ()
            self.reading(f"control {kind}", run, told, end, *seeds)

    def reading(self, command, run, told, end, *flags):
        """A command that reads a run: it works if the run's model and text are there, and only then."""
        self.overwritten, path = None, self.place(run) / "profile.json"
        data = read_json(path, "profile") if path.exists() else None
        places = self.moved() if told else ()
        done = self.command(end, *command.split(), self.path(run), *flags, *places)
        if done is None or end[0]:
            return
        there = data is not None and data["model"]["weights"] == self.weights()
        if there and "--blocks" in flags:
            block = int(flags[flags.index("--blocks") + 1])
            there = block in [b["index"] for b in data["blocks"]]
        there = there and data["corpus"]["fingerprint"] == self.fingerprint()
        if not told and there:
            places = data["asked"]["model"], data["asked"]["text"][0]
            there = places == tuple(str(self.root / self.here[n]) for n in ("model", "text"))
        assert (done.returncode == 0) == there, done.stderr

    def weights(self):
        return _about(self.other["model"])["weights"]

    def fingerprint(self):
        return corpus.text_file(self.root / self.here["text"]).fingerprint()

    # -- what happens between commands

    @rule(name=st.sampled_from(["model", "text"]))
    def change(self, name):
        """Other weights, or another text, under the same path; and back."""
        self.other[name] = not self.other[name]
        source = origin() / (f"other-{name}" if self.other[name] else name)
        if name == "model":
            source /= "model.safetensors"
        target = self.root / self.here[name]
        shutil.copy(source, target / source.name if name == "model" else target)

    @rule(name=st.sampled_from(["model", "text"]))
    def move(self, name):
        places = name, f"elsewhere/{name}"
        there = places[self.here[name] == name]
        (self.root / self.here[name]).rename(self.root / there)
        self.here[name] = there

    @rule(run=RUNS)
    def rename(self, run):
        if self.place(run).exists():
            before = self.place(run)
            self.renamed ^= {run}
            before.rename(self.place(run))
            self.left = set(self.traces())

    @rule(folder=st.sampled_from([".", "elsewhere"]))
    def go(self, folder):
        os.chdir(self.root / folder)

    # -- what holds after each step

    @invariant()
    def nothing_is_lost_and_everything_can_be_read(self):
        holds = {}
        for folder in self.root.iterdir():
            if folder.name in ("model", "text", "elsewhere") or folder.name.startswith("."):
                continue
            files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
            now = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in files)
            holds[folder.name.removesuffix(MOVED)] = results(folder, now)
        for name, before in self.holds.items():
            lost = before - holds.get(name, set())
            assert not lost or name == self.overwritten, (name, lost)
        self.holds, self.overwritten = holds, None


@functools.cache
def _about(other):
    folder = origin() / ("other-model" if other else "model")
    return loading.describe(load(folder)[0], str(folder))


@functools.lru_cache(1000)
def results(folder, files):
    """(kind, settings, block) of everything in a run folder; all of it is read, once for the same files."""
    found = set()
    for path in folder.rglob("[!.]*.safetensors"):
        if "partial" not in path.parts:
            read_tensors(path)
    for path in folder.glob("[!.]*.json"):
        data = read_json(path, path.stem)
        if path.stem in ("progress", "plan"):
            continue
        for result in (data, *data.get("earlier", [])):
            assert {"settings", "model", "corpus", "command"} <= result.keys(), path
            assert result["settings"], path
            said = {k: v for k, v in result["settings"].items() if k not in COURSE}
            about = json.dumps([said, result["model"]["weights"]])
            found |= {(path.stem, about, block["index"]) for block in result["blocks"]}
            for block in result["blocks"] if path.stem == "swap" else ():
                looks = range(1, 1 + block["windows"] // 8)  # windows add up and are never fewer
                found |= {(path.stem, about, block["index"], look) for look in looks}
    if (folder / "profile.json").exists():
        run = Profile.load(folder)
        for block in run.blocks:
            assert torch.isfinite(run.maps[block.index].weight).all()
            assert read_store(folder, block).n == run.settings["tokens"]
    return found


Sequence.TestCase.settings = settings(
    max_examples=SEQUENCES,
    stateful_step_count=STEPS,
    derandomize=SEQUENCES < 100,  # the suite runs the same ones each time
    phases=[Phase.generate],  # a sequence is short as it is
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSequences = Sequence.TestCase
