"""What a sweep over all blocks costs beside the obvious loop, and beside all positions of fixed tokens.

    python benchmarks/swap.py runs/demo             # a run of the built-in model; some minutes on 2 cores
    python benchmarks/swap.py runs/demo --tokens 2048 --repeats 5

The obvious loop runs the whole model once for each block. The sweep computes what comes before a
swapped block once: (L + 1) / 2 passes through the layers and L + 1 through the head for L blocks,
plus the maps themselves and, once, a try on four tokens whether the model can be resumed. Scoring some
positions of each window leaves out a part of the head. Multiply-adds are counted by torch, times are
ratios within one run, the ways taking turns; with all positions both ways must give the same losses.

Where the run has a swap.json, its windows are set against fixed settings: 4,096 tokens at all positions
for plain, zero, mean and chosen maps, and units chosen by measuring 0, 1, 2 and 4 of them on half as many.

Verdicts against 8 times the tokens (about an hour; on a copy, since tokens add up):
    cp -r runs/demo runs/long && howlinear swap runs/long --tokens 32768 --all-tokens
    python benchmarks/swap.py runs/demo --against runs/long
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from howlinear import Profile, blocks, builtin_text, load, swapped
from howlinear.losses.positions import best_number, scored_positions
from howlinear.losses.protocols import PROTOCOLS, held_out_tokens, scored_batches
from howlinear.losses.readout import Readout
from howlinear.losses.sweeps import Sweeper
from howlinear.models.families import backbone
from howlinear.records.fields import BlockSwap
from howlinear.records.verdicts import COSTLY
from howlinear.run.folder import RunFolder

CUT = PROTOCOLS["windows-128"]
FIXED = 33  # windows of 4,096 tokens at all positions
WINDOWS = 24  # to measure the correlation on


def counted(work) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2


def token_kls(model, block, fitted, ids) -> torch.Tensor:
    """(windows, 127) KL of each token, in float64."""
    readout, rows = Readout(model), []
    for batch in scored_batches(ids, CUT, 1):
        p = readout.logits(batch.rows(readout.states(batch.inputs))).double().log_softmax(-1)
        with swapped(model, {block: fitted}):
            states = batch.rows(readout.states(batch.inputs))
        q = readout.logits(states).double().log_softmax(-1)
        rows.append((p.exp() * (p - q)).sum(-1))
    return torch.stack(rows)


def alike(kls: torch.Tensor) -> float:
    """The correlation of tokens of one window, by the analysis of variance."""
    m, within = kls.shape[1], float(kls.var(1).mean())
    between = m * float(kls.mean(1).var())
    return (between - within) / (between + (m - 1) * within)


def at_fixed_work(ratio: float, rho: float, m: int) -> float:
    """Variance of a mean at m positions a window over that at all positions, for the same work."""

    def variance(n):
        return (rho + (1 - rho) / n) * (ratio + n)

    return variance(m) / variance(CUT.counted)


def show_work(model, ids, variants, positions) -> float:
    depth, n = len(variants), ids.numel()
    layers = counted(lambda: backbone(model)(input_ids=ids))
    head = model.get_output_embeddings().weight.numel() * (n - len(ids))
    sweeper, slow = (Sweeper(model, [b for b, _ in variants], resume=r) for r in (True, False))
    print(f"{depth} blocks, {n} tokens; multiply-adds in units of one pass through the layers:")
    for label, run in (
        (
            f"sweep, {positions} positions a window",
            lambda: sweeper.run(variants, ids, positions=positions),
        ),
        ("sweep, all positions", lambda: sweeper.run(variants, ids)),
        ("obvious loop", lambda: slow.run(variants, ids)),
    ):
        print(f"  {label}: {counted(run) / layers:.2f}")
    allowed = (depth + 1) / 2 * layers + (depth + 1) * head
    print(f"  (L + 1) / 2 passes and L + 1 heads: {allowed / layers:.2f}")
    return layers / n * CUT.length / 2 / (head / (n - len(ids)))


def show_alike(model, ids, variants, positions, ratio) -> None:
    """What scoring some positions of more windows gains, where a window's layers take `ratio` heads."""
    at = [variants[i] for i in range(2, len(variants), max(1, len(variants) // 6))]
    rhos = {b.index: alike(token_kls(model, b, fitted, ids)) for b, fitted in at}
    rho = max(statistics.median(rhos.values()), 0.001)
    print(f"correlation of token KLs within each of {len(ids)} windows:", _joined(rhos))
    print(f"  best number of positions at the median {rho:.3f}: {best_number(ratio, rho)}")
    share = at_fixed_work(ratio, rho, positions)
    print(f"  variance at the same work, {positions} positions over all: {share:.2f}")
    few = best_number(ratio / 6)
    wide = at_fixed_work(ratio / 6, rho, few)
    print(f"  the same with a head six times as large, {few} positions: {wide:.2f}")


def _joined(values: dict[int, float]) -> str:
    return ", ".join(f"block {i} {v:.3f}" for i, v in values.items())


def show_times(model, ids, variants, positions, repeats) -> dict[str, float]:
    """Medians of CPU seconds of one variant on one window, the ways taking turns."""
    sweepers = {r: Sweeper(model, [b for b, _ in variants], resume=r) for r in (True, False)}
    ways = {"some positions": (True, positions), "all": (True, None), "obvious": (False, None)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        losses = {}
        for name, (resume, few) in ways.items():
            start = time.process_time()
            costs = sweepers[resume].run(variants, ids, positions=few)
            taken[name].append((time.process_time() - start) / len(variants) / len(ids))
            losses[name] = torch.stack([c.change.nll_changed for c in costs])
        apart = float((losses["all"] - losses["obvious"]).abs().max())
        ratio = taken["obvious"][-1] / taken["all"][-1]
        fewer = taken["obvious"][-1] / taken["some positions"][-1]
        print(
            f"  obvious loop {ratio:.2f} times the CPU time of the sweep at all positions, {fewer:.2f} "
            f"times that at {positions}; losses at all positions differ by {apart:.1e}"
        )
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def show_defaults(folder: Path, seconds: dict[str, float]) -> None:
    """The run's sweep against fixed tokens, and against the obvious loop over these."""
    run = RunFolder(folder)
    if not run.has("swap"):
        return
    data, swaps = run.read("swap"), run.blocks("swap", BlockSwap)
    windows = sum(
        t["windows"]
        for name, ways in data["sums"].items()
        if name != "together"
        for t in ways.values()
    )
    kept = [b for b in swaps.values() if b.units]
    ours = (windows + 16 * len(kept)) * seconds["some positions"]
    variants = 3 * len(swaps) + len(kept)
    fixed = (FIXED * variants + FIXED / 2 * 4 * len(kept)) * seconds["all"]
    obvious = FIXED * len(swaps) * seconds["obvious"]
    print(f"swap.json: {windows} windows over all swaps, {len(kept)} blocks keep units")
    print(f"  about {ours:.0f} CPU seconds; fixed settings {fixed / ours:.1f} times as many")
    print(f"  the obvious loop over {FIXED} windows a block {obvious / ours:.1f} times as many")
    for label, cheap in (("below", True), ("from", False)):
        ratios = [b.delta_nll_se / b.kl_se for b in swaps.values() if (b.kl < COSTLY) == cheap]
        if ratios:
            median = f"{statistics.median(ratios):.1f} ({len(ratios)} blocks)"
            print(f"  standard error of delta_nll over that of KL, {label} {COSTLY} nats: {median}")


def show_verdicts(folder: Path, long: Path) -> None:
    """Does a longer measurement take a verdict back?"""
    short, more = (RunFolder(f).blocks("swap", BlockSwap) for f in (folder, long))
    told = {i: b for i, b in short.items() if b.verdict != "undecided"}
    back = [i for i, b in told.items() if more[i].verdict not in (b.verdict, "undecided")]
    held = [i for i, b in told.items() if more[i].verdict == b.verdict]
    print(
        f"{len(told)} of {len(short)} blocks have a verdict, {len(short) - len(told)} are undecided"
    )
    print(
        f"  {len(held)} verdicts hold, {len(back)} are taken back {back}, others are undecided there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--against", type=Path, help="a run with more tokens: compare verdicts alone"
    )
    options = parser.parse_args()
    if options.against is not None:
        show_verdicts(options.run, options.against)
        return
    model, tokenizer = load()
    text, most = builtin_text().report(), max(options.tokens, WINDOWS * CUT.counted)
    sample, _ = held_out_tokens(text, tokenizer, CUT, most, nested=True)
    every, maps = sample["input_ids"], Profile.load(options.run).maps
    ids = every[: -(-options.tokens // CUT.counted)]
    variants = [(b, maps[b.index]) for b in blocks(model)]
    positions = scored_positions(model, CUT)
    ratio = show_work(model, ids, variants, positions)
    show_alike(model, every, variants, positions, ratio)
    seconds = show_times(model, ids, variants, positions, options.repeats)
    print("CPU seconds of one swap on one window:", {k: round(v, 3) for k, v in seconds.items()})
    show_defaults(options.run, seconds)


if __name__ == "__main__":
    main()
