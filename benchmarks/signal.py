"""How well the expected cost of a swap agrees with the measured one, on any model.

    python benchmarks/signal.py                     # the built-in model
    python benchmarks/signal.py MODEL --text-file notes.txt --tokens 8192

Profiles the model, replaces each block alone by its plain map on held-out text, and prints for each block
the expected and the measured KL divergence in nats a token with standard errors, their ratio, and whether the
block's errors are beyond what the estimate reaches. Below: the rank correlation over all blocks, and the
median of |ln(measured / expected)| over the blocks within reach, with 95 % intervals over blocks.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: this file would hide the standard library's

import argparse
import math
import random
import statistics
import time

from howlinear.losses.protocols import EvalProtocol, held_out_tokens
from howlinear.losses.sweeps import swap_costs
from howlinear.models.corpus import open_text
from howlinear.models.cutting import default_tokens, fitting_length, spread_windows
from howlinear.models.families import blocks
from howlinear.models.loading import load
from howlinear.profiling.profiler import profile
from howlinear.records.statistics import over_blocks, spearman
from howlinear.records.verdicts import beyond_reach


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="hub id, folder or GGUF file; default: built-in")
    parser.add_argument("--text-file", help="a file, or the name of a built-in text")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens to predict")
    parser.add_argument("--fit-tokens", type=int, help="tokens of the profile; default: its own")
    return parser.parse_args()


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of medians of blocks drawn with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]


def main() -> None:
    options = arguments()
    model, tokenizer = load(options.model)
    text, at = open_text(options.text_file), blocks(model)
    length, width = fitting_length(model, tokenizer, 512), max(b.d_in for b in at)
    tokens = options.fit_tokens or default_tokens(width)
    began = time.monotonic()
    result = profile(model, spread_windows(text.fit, tokenizer, length, tokens=tokens))
    print(f"profile of {result.settings['tokens']} tokens: {time.monotonic() - began:.0f} s")
    if result.settings["no_expected_kl"]:
        raise SystemExit(f"no expected costs: {result.settings['no_expected_kl']}")
    began, protocol = time.monotonic(), EvalProtocol.parse(f"windows-{min(length, 128)}")
    ids, _ = held_out_tokens(text.report(), tokenizer, protocol, options.tokens)
    changes = [cost.change for cost in swap_costs(model, result.maps, ids)]
    print(f"sweep of {options.tokens} tokens: {time.monotonic() - began:.0f} s")
    print(" #  expected ± se           measured ± se           ratio  beyond")
    for b, change in zip(result.blocks, changes, strict=True):
        expected = f"{b.expected_kl:.5f} ± {b.expected_kl_se:.5f}"
        print(
            f"{b.index:2}  {expected:22}  {f'{change.kl:.5f} ± {change.kl_se:.5f}':22}  "
            f"{change.kl / b.expected_kl:5.2f}  {b.expected_beyond:.4f}{' *' * beyond_reach(b)}"
        )
    pairs = [(b, c.kl) for b, c in zip(result.blocks, changes, strict=True)]
    rho = over_blocks(spearman, [b.expected_kl for b, _ in pairs], [kl for _, kl in pairs])
    if rho.value is not None:
        print(f"rank correlation {rho.value:.3f} ({rho.low:.3f} to {rho.high:.3f})")
    logs = [math.log(kl / b.expected_kl) for b, kl in pairs if not beyond_reach(b)]
    for name, values in (
        ("ln(measured / expected)", logs),
        ("|ln(measured / expected)|", [abs(value) for value in logs]),
    ):
        low, high = interval(values)
        print(f"median {name} {statistics.median(values):.3f} ({low:.3f} to {high:.3f})")
    print(f"{len(logs)} of {len(pairs)} blocks within reach; * beyond it")


if __name__ == "__main__":
    main()
