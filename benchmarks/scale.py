"""How cost grows: several processes, depth with and without --layerwise, width, tokens, vocabulary.

    python benchmarks/scale.py              # everything, about ten minutes on two cores
    python benchmarks/scale.py ranks        # or one part: ranks, memory, growth, paper

ranks: two processes over gloo with one thread each against one process with two threads, the same
windows of the built-in text through the built-in model, by turns in one run; loading is not counted.
memory: peak memory of a process that profiles random Llamas of 1, 4 and 16 layers from disk, its own
and with pages of files, beside what is stated before the start.
growth: seconds of profile, swap and compress against width, depth, tokens and vocabulary, with fitted
powers. paper: what 7 and 70 billion parameters would need, by the formulas; nothing is run.
Machines are shared and noisy: ratios of one run are what to read.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its signal.py would hide the standard library's

import json
import math
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import howlinear as hl
from howlinear import builtin_text
from howlinear.models.loading import quiet
from howlinear.profiling.needs import profile_needs
from howlinear.profiling.passes import Course
from howlinear.records.words import size
from howlinear.run.saving import Saves
from howlinear.run.work import Ranks

TOKENS, ROUNDS = 16384, 3


# -- in a process of its own ----------------------------------------------------------------------


def ranked(out: Path) -> None:
    """Profile the built-in model; rank 0 writes seconds and results."""
    ranks = Ranks.start()
    model, tokenizer = hl.load()
    ids = hl.windows(builtin_text().fit, tokenizer, 512, tokens=TOKENS)
    model.model(ids[:1])  # the first forward is slower
    ranks.share(None)
    began = time.perf_counter()
    result = hl.profile(model, ids, course=Course(ranks=ranks))
    seconds = time.perf_counter() - began
    if ranks.rank == 0:
        found = {"seconds": seconds, "blocks": [b.to_dict() for b in result.blocks]}
        out.write_text(json.dumps(found))
    ranks.stop()


class Peak(threading.Thread):
    """The most memory of its own that this process has held, looked at every 20 ms.

    Resident memory also counts pages of files that are being read, a checkpoint's among them, which
    the system takes back when it needs them.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own = 0
        self.start()

    def run(self) -> None:
        while True:
            self.own = max(self.own, status("RssAnon"))
            time.sleep(0.02)


def status(name: str) -> int:
    """Bytes of one kind of memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def deep(folder: str, layerwise: str, out: Path) -> None:
    """Profile a checkpoint from disk; peak memory of this process."""
    layer_by_layer = layerwise == "yes"
    peak = Peak()
    where = "disk" if layer_by_layer else None
    model, _ = hl.load(folder, device_map=where)
    ids = torch.randint(0, 1000, (32, 256), generator=torch.Generator().manual_seed(0))
    at = hl.blocks(model)
    stated = profile_needs(model, at, windows=32, length=256, layerwise=layer_by_layer)
    with tempfile.TemporaryDirectory() as run:
        course = Course(layerwise=layer_by_layer, saves=Saves(run, {}, 1e9))
        began = time.perf_counter()
        result = hl.profile(model, ids, at=at, course=course)
    found = {
        "seconds": time.perf_counter() - began,
        "peak": peak.own,
        "resident": status("VmHWM"),  # not ru_maxrss, which begins with the parent's
        "stated": stated.memory,
        "r2": [b.r2 for b in result.blocks],
    }
    out.write_text(json.dumps(found))


# -- what is printed ------------------------------------------------------------------------------


def run(command: list[str], *args: Any, threads: int) -> dict[str, Any]:
    """A worker's result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [*command, __file__, *map(str, args), str(out)], capture_output=True, text=True, env=env
        )
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(out.read_text())


def furthest(one: Any, two: Any) -> float:
    """The largest difference of two results, relative to what is above 1."""
    if isinstance(one, dict):
        return max((furthest(one[k], two[k]) for k in one), default=0.0)
    if isinstance(one, list):
        return max((furthest(a, b) for a, b in zip(one, two, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - two) / max(1.0, abs(one))
    return 0.0 if one == two else float("inf")


def ranks() -> None:
    alone = [sys.executable]
    pair = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ratios, single, double = [], {}, {}
    for _ in range(ROUNDS):
        single = run(alone, "ranked", threads=2)
        double = run(pair, "ranked", threads=1)
        ratios.append(single["seconds"] / double["seconds"])
        print(
            f"one process, two threads: {TOKENS / single['seconds']:.0f} tokens/s; two ranks: "
            f"{TOKENS / double['seconds']:.0f} tokens/s; ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"two ranks over one process: {statistics.median(ratios):.2f} (median of {ROUNDS})")
    off = furthest(run(alone, "ranked", threads=1)["blocks"], double["blocks"])
    print(f"largest difference of any field of any block: {off:.1e} with as many threads each,")
    off = furthest(single["blocks"], double["blocks"])
    print(f"{off:.1e} beside two threads, in which the model's own float32 sums differ")


def llama(folder: Path, layers: int, width: int, vocabulary: int = 1000, hidden: int = 4) -> str:
    """A random Llama on disk, with `hidden` times as many hidden units as its width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=vocabulary,
    )
    path = folder / f"{layers}-{width}-{vocabulary}"
    if not path.exists():
        with quiet():
            LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def memory() -> None:
    print(
        "peak memory of width 1024, 8192 tokens; in brackets with pages of files, and what is stated,"
    )
    print("without what Python and torch take by themselves")
    with tempfile.TemporaryDirectory() as folder:
        for layers in (1, 4, 16):
            path = llama(Path(folder), layers, 1024)
            ways = {"plain": "no", "layerwise": "yes"}
            found = {
                way: run([sys.executable], "deep", path, yes, threads=2)
                for way, yes in ways.items()
            }
            told = [
                f"{way} {size(f['peak'])} ({size(f['resident'])}, stated {size(f['stated'])}), "
                f"{f['seconds']:.0f} s"
                for way, f in found.items()
            ]
            pairs = zip(*(f["r2"] for f in found.values()), strict=True)
            off = max(abs(a - b) for a, b in pairs)
            print(f"{layers:>3} layers: {'; '.join(told)}; R2 differs by {off:.0e}", flush=True)


# what one axis at a time is varied over; the others stay at their first value
AXES = {
    "width": (256, 512, 1024, 2048),
    "layers": (2, 4, 8, 16),
    "tokens": (8192, 16384, 32768, 65536),
    "vocabulary": (1000, 8000, 64000),
}
EXPECTED = {  # powers for large values: the model's products, solving, swaps x layers behind them, the head
    "profile": {"width": "2 to 3", "layers": "1", "tokens": "1", "vocabulary": "0 to 1"},
    "swap": {"width": "2", "layers": "1 to 2", "tokens": "1", "vocabulary": "0 to 1"},
    "compress": {"width": "2 to 3", "layers": "1", "tokens": "0 to 1", "vocabulary": "0 to 1"},
}


def growth() -> None:
    """Seconds of each command over one axis at a time, and the power that fits them best."""
    for axis, values in AXES.items():
        seconds: dict[str, list[float]] = {name: [] for name in EXPECTED}
        for value in values:
            sizes = {name: each[0] for name, each in AXES.items()} | {axis: value}
            taken = timed(**sizes)
            for name, each in taken.items():
                seconds[name].append(each)
            shown = ", ".join(f"{name} {each:.1f} s" for name, each in taken.items())
            print(f"{axis} {value:>6}: {shown}", flush=True)
        for name, each in seconds.items():
            logs = ([math.log(v) for v in part] for part in (values, each))
            power = statistics.linear_regression(*logs)
            last = math.log(each[-1] / each[-2]) / math.log(values[-1] / values[-2])
            print(
                f"  {name} grows with {axis} to the power {power.slope:.2f}, {last:.2f} at the end "
                f"(expected {EXPECTED[name][axis]})",
                flush=True,
            )


def timed(width: int, layers: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """Seconds that three commands take on a random Llama, without loading it."""
    from howlinear.compression.compress import compress_model
    from howlinear.compression.plan import Budget
    from howlinear.swapping.swaps import SwapOptions, measure_swaps

    with tempfile.TemporaryDirectory() as folder:
        model, _ = hl.load(llama(Path(folder), layers, width, vocabulary, hidden=2))
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 1000, (tokens // 256 + 24, 256), generator=g)
        fit, choose, report = ids[24:], ids[:8, :128], ids[8:24, :128].repeat(tokens // 8192, 1)
        run = Path(folder, "run")
        work = {
            "profile": lambda: hl.profile(model, fit).save(run),
            "swap": lambda: measure_swaps(
                model, run, choose=choose, report=report, options=SwapOptions(0, all_tokens=True)
            ),
            "compress": lambda: compress_model(
                model, run, Budget(parameters=0.2), fit=fit, choose=choose, report=report[:16]
            ),
        }
        seconds = {}
        for name, each in work.items():
            began = time.perf_counter()
            each()
            seconds[name] = time.perf_counter() - began
        return seconds


LLAMAS = {  # width, hidden units, layers, key-value width, vocabulary
    "built-in": (576, 1536, 30, 192, 49152),
    "7B": (4096, 11008, 32, 4096, 32000),
    "70B": (8192, 28672, 80, 1024, 32000),
}
SPEED = 36e9  # multiply-adds a second: float32 products on two cores


def paper() -> None:
    """What the three commands need by their formulas, at SPEED, on one machine and divided by eight."""
    for name, (d, m, layers, kv, vocabulary) in LLAMAS.items():
        block = 3 * d * m
        model = layers * (block + 2 * d * d + 2 * d * kv)  # multiply-adds a token
        tokens = max(30_000, 40 * d)
        columns = d + m
        sums = layers * d * (d / 2 + d)  # of [x, y], a row
        wide = layers * columns * (columns / 2 + d)  # of [x, units, y]
        solving = layers * (8 * d**3 / 3 + 8 * d**3 + 6 * d**3)
        measured = 4096 * (model + vocabulary * d)
        work = {
            "profile": tokens * (model + sums) + solving + 2040 * (model + vocabulary * d),
            "swap": layers * 4096 * (model / 2 + 0.6 * vocabulary * d),
            "compress": 96 * 85 * 2 * (model + vocabulary * d)  # gradients
            + tokens * (model + wide)
            + layers * 3 * columns**3  # factors and elimination, with and without a matrix
            + 1.5 * tokens * (2 * model + wide / 2)  # half and all windows, original and changed
            + 6 * measured,
        }
        weights = 2 * (model + 2 * vocabulary * d)  # bytes in bfloat16
        room = {
            "profile": 5 * 12 * d * d,  # of one layer's moments: --layerwise
            "swap": weights,
            "compress": weights + 6 * columns * (columns + d) * 8 + layers * d * d * 12,
        }
        for command, count in work.items():
            hours = count / SPEED / 3600
            print(
                f"{name:8} {command:8} {count:.1e} multiply-adds, {hours:8.2f} h on one machine, "
                f"{hours / 8:8.2f} h on eight; memory {size(int(room[command]))}"
            )


if __name__ == "__main__":
    parts = {"ranks": ranks, "memory": memory, "growth": growth, "paper": paper}
    asked = sys.argv[1:]
    if asked[:1] == ["ranked"]:
        ranked(Path(asked[1]))
    elif asked[:1] == ["deep"]:
        deep(asked[1], asked[2], Path(asked[3]))
    else:
        for name in asked or parts:
            print(f"\n{name}")
            parts[name]()
