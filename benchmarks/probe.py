"""Our bilinear solver beside the paper's, and kept units beside a network of as many parameters.

    python benchmarks/probe.py                          # about 7 minutes on 2 cores
    python benchmarks/probe.py --blocks 5,11 --networks # and dense (2x): a minute or two a block more
    python benchmarks/probe.py --blocks 5 --whitening 0,0.25,1  # ours in other coordinates

On the built-in model: both solvers fit the same rows at rank 16 from seed 0, stop by the same rows and
are scored on the same third set; they take turns in going first. The last line says in how many
blocks ours has the higher gain, and what share of the paper's time it took.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse

from howlinear import Moments, blocks, builtin_text, fit, load, windows
from howlinear.models.naming import depth_indices
from howlinear.probing import bilinear
from howlinear.probing.bilinear import solve_products, train_products
from howlinear.probing.ladder import regressions
from howlinear.probing.probes import windows_of
from howlinear.probing.samples import gather, outcome, size_of
from howlinear.probing.training import dense, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default="0,2,5,8,11,15,20,24,28,29")
    parser.add_argument("--rows", type=int, default=29_696)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--networks", action="store_true", help="train dense (2x) too")
    parser.add_argument("--whitening", default="", help="exponents to search with, of 1")
    options = parser.parse_args()
    model, tokenizer = load()
    every = blocks(model)
    at = [every[i] for i in depth_indices(options.blocks, len(every))]
    text = builtin_text()
    read = windows(text.fit, tokenizer, 512, tokens=options.rows)
    cut = windows_of(read, text, tokenizer, options.rows)
    samples = [gather(model, at, part) for part in cut]
    wins = beaten = 0
    spent = {"ours": 0.0, "paper": 0.0}
    print(
        f"rows: {[len(s[at[0].index]) for s in samples]} to fit, stop and report; rank {options.rank}"
    )
    for turn, block in enumerate(at):
        rows, stop, report = (s.pop(block.index) for s in samples)
        moments = Moments(block.d_in, block.d_out)
        moments.update(rows.x, rows.y)
        affine = fit(moments).to(rows.x)
        ways = [("ours", solve_products), ("paper", train_products)]
        done = {}
        for name, search in ways if turn % 2 else ways[::-1]:
            solved = search(rows, stop, affine, rank=options.rank, seed=0)
            done[name] = (outcome(solved.layer, affine, report), solved)
            spent[name] += solved.seconds
        shown = "  ".join(
            f"{name} {o.gain:+.4f} ±{o.gain_se:.4f} in {s.seconds:4.1f} s"
            for name, (o, s) in sorted(done.items())
        )
        ratio = done["ours"][1].seconds / done["paper"][1].seconds
        wins += done["ours"][0].gain >= done["paper"][0].gain
        print(f"block {block.index:2}  {shown}  time ratio {ratio:.2f}", flush=True)
        for amount in filter(None, options.whitening.split(",")):
            usual, bilinear.WHITENING = bilinear.WHITENING, float(amount)
            solved = solve_products(rows, stop, affine, rank=options.rank, seed=0)
            bilinear.WHITENING = usual
            gain = outcome(solved.layer, affine, report).gain
            print(f"          whitening {amount}: {gain:+.4f} after {solved.steps} iterations")
        if options.networks:
            trained = train(dense(rows, 42), rows, stop, seed=42)
            steps, _ = regressions(model, block, rows, report, affine)
            size = size_of(trained.layer)
            kept = max((s for s in steps if s["parameters"] <= size), key=lambda s: s["k"])
            net = outcome(trained.layer, affine, report)
            beaten += kept["r2"] > net.r2
            print(
                f"          {kept['k']} units R2 {kept['r2']:.4f} ({kept['parameters']} parameters)  "
                f"dense (2x) {net.r2:.4f} ({size}), {trained.steps} steps, "
                f"{'' if trained.converged else 'not '}converged",
                flush=True,
            )
    print(
        f"ours has the higher gain in {wins} of {len(at)} blocks, in "
        f"{spent['ours'] / spent['paper']:.2f} of the time"
    )
    if options.networks:
        print(f"kept units have the higher R2 in {beaten} of {len(at)} blocks")


if __name__ == "__main__":
    main()
