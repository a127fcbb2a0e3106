"""How much faster the built-in model is with blocks replaced by one matrix, beside what the
multiply-adds promise.

    python benchmarks/speed.py                          # some minutes
    python benchmarks/speed.py --length 128 --replace 30 --repeats 9

The matrices are random: speed does not depend on what they hold. Each model takes turns with the
original in one run, so that whatever else the machine does hits both; 0 blocks is the control, which
should show no gain.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import copy

import torch

from howlinear import Affine, blocks, load
from howlinear.export.install import install_maps
from howlinear.losses.speed import Spread, compare_speeds


def with_matrices(model, count: int):
    """A copy of the model with its first blocks replaced."""
    smaller = copy.deepcopy(model)
    maps = {}
    for block in blocks(smaller)[:count]:
        weight = 0.02 * torch.randn(block.d_out, block.d_in)
        maps[block] = Affine(weight, torch.zeros(block.d_out), block.d_in)
    install_maps(smaller, maps)
    return smaller


def shown(spread: Spread, digits: int) -> str:
    low, high = (f"{x:.{digits}f}" for x in (spread.q25, spread.q75))
    return f"{spread.median:.{digits}f} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replace", type=int, nargs="+", default=[0, 10, 20, 30])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model, _ = load()
    torch.manual_seed(0)
    how = {"length": options.length, "batch": options.batch, "repeats": options.repeats}
    print(f"{torch.get_num_threads()} threads, {how}; median (quartiles)")
    for count in options.replace:
        smaller = with_matrices(model, count)
        both = compare_speeds(smaller, model, **how)
        fast, slow = both.model, both.other
        share = "-" if both.saved_share is None else f"{both.saved_share:.2f}"
        print(
            f"{count} blocks: {fast.parameters / 1e6:.1f}M of {slow.parameters / 1e6:.1f}M parameters"
        )
        print(f"  prefill tokens/s {shown(fast.prefill, 0)}, was {shown(slow.prefill, 0)}")
        print(f"  decode  tokens/s {shown(fast.decode, 1)}, was {shown(slow.decode, 1)}")
        print(f"  times as fast: prefill {shown(both.prefill, 2)}, decode {shown(both.decode, 2)}")
        print(
            f"  multiply-adds promise {both.promised:.2f} in prefill: reached {both.reached:.2f}",
            end="",
        )
        print(f", {share} of the promised time saved", flush=True)


if __name__ == "__main__":
    main()
