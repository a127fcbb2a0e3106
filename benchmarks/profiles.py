"""What a profile costs beside a bare forward of the same windows, and beside two rivals.

    python benchmarks/profiles.py                 # every ratio; about 8 minutes on 2 cores
    python benchmarks/profiles.py --only slope    # or whole, rivals, memory

All ratios are to a forward of the same windows through the base model: no language-model head,
`inference_mode`, the same batch size, the same process. Machines are noisy, so bare and measured
work alternate and medians are printed with their range.

slope   cost of each further token between 8k and 16k tokens, also in windows of 128
whole   profile() of 30,000 tokens with 5 folds, solving included, nothing written
rivals  one fit a block on stored rows: float64 lstsq (scipy, gelsd) and scikit-learn
memory  peak resident memory of `howlinear profile` with 10 times the tokens
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its signal.py would hide the standard library's

import argparse
import os
import statistics
import subprocess
import tempfile
import time

import torch

from howlinear import blocks, builtin_text, load, profile, windows
from howlinear.linear.stores import BlockStore, Known
from howlinear.models.families import backbone
from howlinear.models.forward import Forward, as_windows
from howlinear.models.units import sink_units
from howlinear.profiling.passes import Course, Pass

LENGTH, SHORT, BATCH = 512, 128, 8


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bare(model, ids) -> float:
    net = backbone(model)

    def run() -> None:
        with torch.inference_mode():
            for batch in ids.split(BATCH):
                net(input_ids=batch, use_cache=False)

    return seconds(run)


def show(name: str, ratios: list[float], aim: str) -> None:
    middle = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} runs"
    print(f"{name:44s} {middle:5.2f} x   ({spread}; {aim})", flush=True)


def slope(model, ids, repeats: int) -> None:
    """Bare and profiled passes over the same 4096 tokens, taking turns."""
    ratios, length = [], ids.shape[1]
    further = ids[8192 // length : 16384 // length]
    at, text, forward = blocks(model), as_windows(ids), Forward(model)
    reading = Pass(model, text, at, text.folds(5), Course(batch_size=BATCH))
    start = reading.beginning(next(text.batches(BATCH)))
    sinks = sink_units(model, at, lambda: forward(start))
    for _ in range(repeats):
        stores = [
            BlockStore(b, 5, "moments", 0, torch.device("cpu"), Known(*sinks[b.index]), "auto")
            for b in at
        ]

        def read(batch, stores=stores) -> None:
            # offsets count from 0: which of the five folds fills up does not matter here
            batches, advance = as_windows(batch).batches(BATCH), lambda tokens: None
            run = lambda batch: forward(batch.inputs)  # noqa: E731
            reading.read(batches, stores, run, advance)

        read(ids[: 4096 // length])  # sums in place, precision decided
        for part in further.split(4096 // length):
            before = bare(model, part)
            taken = seconds(lambda part=part, read=read: read(part))
            ratios.append(2 * taken / (before + bare(model, part)))
    show(f"each further token, windows of {length}", ratios, "wanted: at most 1.18")


def whole(model, ids, repeats: int) -> None:
    ids = ids[: 30_000 // LENGTH]
    ratios = []
    for _ in range(repeats):
        before = bare(model, ids)
        taken = seconds(lambda: profile(model, ids, batch_size=BATCH))
        ratios.append(2 * taken / (before + bare(model, ids)))
    show("whole profile, 30,000 tokens, 5 folds", ratios, "wanted: at most 1.40")


def rivals(model, ids, timed: int) -> None:
    """Rows stored, then one fit a block. Fits are timed on a few blocks and scaled to all."""
    import numpy as np
    from scipy.linalg import lstsq
    from sklearn.linear_model import LinearRegression

    ids = ids[: 30_000 // LENGTH]
    at = blocks(model)
    rows: dict[int, list] = {b.index: [] for b in at[:timed]}
    handles = [
        model.get_submodule(b.path).register_forward_hook(
            lambda _, args, out, i=b.index: rows[i].append((args[0].clone(), out.clone()))
        )
        for b in at[:timed]
    ]
    stored = bare(model, ids)
    for handle in handles:
        handle.remove()
    base = min(bare(model, ids), stored)
    data = {
        i: tuple(torch.cat([p[k].flatten(0, 1) for p in parts]) for k in (0, 1))
        for i, parts in rows.items()
    }

    def by_lstsq() -> None:
        for x, y in data.values():
            ones = np.column_stack([x.double().numpy(), np.ones(len(x))])
            lstsq(ones, y.double().numpy(), overwrite_a=True, overwrite_b=True, check_finite=False)

    def by_sklearn() -> None:
        for x, y in data.values():
            LinearRegression().fit(x.double().numpy(), y.double().numpy())

    for name, work in (("float64 lstsq", by_lstsq), ("scikit-learn", by_sklearn)):
        fits = seconds(work) * len(at) / timed
        show(f"rows stored, {name}, one fit", [(stored + fits) / base], f"{timed} blocks timed")


def memory(tokens: int) -> None:
    """Peak resident memory of the command itself, in processes of their own."""
    peaks = []
    for count in (tokens, 10 * tokens):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "howlinear", "profile", "--tokens", str(count)]
            process = subprocess.Popen(
                [*command, "-o", os.path.join(folder, "run")], stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                sys.exit("the command failed")
            peaks.append(usage.ru_maxrss / 1e6)
            print(f"peak memory, {count} tokens {peaks[-1]:.2f} GB", flush=True)
    print(
        f"{'peak memory, 10 times the tokens':44s} {peaks[1] / peaks[0]:5.3f} x   (wanted: at most 1.05)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["slope", "whole", "rivals", "memory"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timed-blocks", type=int, default=4)
    parser.add_argument("--memory-tokens", type=int, default=8192)
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, built-in model, WikiText-2, windows of {LENGTH}")
    parts = [args.only] if args.only else ["slope", "whole", "rivals", "memory"]
    if parts != ["memory"]:
        model, tokenizer = load()
        ids = windows(builtin_text().fit, tokenizer, LENGTH, tokens=32_768)
        bare(model, ids[:BATCH])  # warm up
    if "slope" in parts:
        slope(model, ids, args.repeats)
        slope(model, ids.view(-1, SHORT), args.repeats)
    if "whole" in parts:
        whole(model, ids, max(1, args.repeats // 3))
    if "rivals" in parts:
        rivals(model, ids, args.timed_blocks)
    if "memory" in parts:
        memory(args.memory_tokens)


if __name__ == "__main__":
    main()
