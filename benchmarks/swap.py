"""What a sweep over all blocks costs beside the obvious loop on the same tokens.

    python benchmarks/swap.py               # about 3 minutes on 2 cores
    python benchmarks/swap.py --tokens 2048 --repeats 5

The obvious loop runs the whole model once for each block. The sweep computes what comes before a
swapped block once: (L + 1) / 2 passes through the layers and L + 1 through the head for L blocks,
plus the maps themselves and, once, a try on four tokens whether the model can be resumed.
Multiply-adds are counted by torch, times are ratios within one run, the two ways taking turns; both
must give the same losses.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from howlinear import Affine, blocks, builtin_text, load, windows
from howlinear.losses.sweeps import sweep
from howlinear.models.families import backbone


def counted(work) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model, tokenizer = load()
    ids = windows(builtin_text().report(), tokenizer, 128, tokens=options.tokens)
    at = blocks(model)
    maps = [(b, Affine(torch.zeros(b.d_out, b.d_in), torch.zeros(b.d_out), 0)) for b in at]
    depth, n = len(at), ids.numel()

    def swept(resume: bool):
        return sweep(model, maps, ids, resume=resume)

    layers = counted(lambda: backbone(model)(input_ids=ids))
    head = model.get_output_embeddings().weight.numel() * (n - len(ids))
    own = sum(n * affine.multiply_adds for _, affine in maps)
    total = counted(lambda: swept(True))
    allowed = (depth + 1) / 2 * layers + (depth + 1) * head
    print(f"{depth} blocks, {n} tokens; multiply-adds in units of one pass through the layers:")
    print(f"  sweep {total / layers:.2f}, of which maps {own / layers:.2f}")
    print(f"  (L + 1) / 2 passes and L + 1 heads: {allowed / layers:.2f}")
    print(f"  obvious loop {counted(lambda: swept(False)) / layers:.2f}")
    ratios = []
    for _ in range(options.repeats):
        taken, losses = {}, {}
        for resume in (True, False):
            start = time.perf_counter()
            costs = swept(resume).costs
            taken[resume] = time.perf_counter() - start
            losses[resume] = torch.stack([c.change.nll_changed for c in costs])
        ratios.append(taken[False] / taken[True])
        apart = float((losses[True] - losses[False]).abs().max())
        print(
            f"  obvious loop {ratios[-1]:.2f} times the sweep's time; losses differ by {apart:.1e}"
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
