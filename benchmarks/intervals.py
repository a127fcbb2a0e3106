"""Do the error bars hold? Estimates of many disjoint samples beside the standard errors they print.

    python benchmarks/intervals.py                      # three models, two texts: long
    python benchmarks/intervals.py --models gpt2 --texts wikitext --stretches 12

r2: a profile of each of 24 disjoint stretches of a text. losses: the loss of the model, and what a
swap of the first, middle and last block costs, on 60 disjoint samples of 4064 tokens, each spread
over one long text as `howlinear swap` spreads its own. For each model, text and size:

    sd / se     standard deviation of the estimates over the root mean square of their standard errors,
                1 where these are right; root mean square over blocks
    95 %        share of the intervals estimate +- t se that hold the mean of all estimates; t is
                Student's with one degree of freedom less than there are folds or documents
    before      the same two numbers as they were: folds of cells of 2048 tokens without regard to
                documents; samples of consecutive tokens, whose windows count as independent

With 24 stretches the first number has a relative standard error of about 15 %, less over 8 blocks.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from howlinear import builtin_text, load, profile, swap_costs
from howlinear.models.cutting import document_windows
from howlinear.records.statistics import student

MODELS = Path(__file__).parents[1] / "tests" / "models"
LENGTH, SAMPLES, TOKENS = 128, 60, 4064

Pair = tuple[float, float, int]  # an estimate, its standard error, folds or documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama,gpt2,gpt-neox", help="of tests/models, or paths")
    parser.add_argument("--texts", default="wikitext,python-code")
    parser.add_argument("--sizes", default="20480,40960", help="tokens of a stretch")
    parser.add_argument("--stretches", type=int, default=24)
    options = parser.parse_args()
    print(f"{'model':<10}{'text':<13}{'estimate':<22}{'sd / se':>8}{'95 %':>7}{'before':>16}")
    for model in options.models.split(","):
        path = MODELS / model if (MODELS / model).is_dir() else model
        net, tokenizer = load(str(path))
        net.float()
        for text in options.texts.split(","):
            name = f"{Path(model).name:<10}{text:<13}"
            fit = builtin_text(text).fit
            for size in map(int, options.sizes.split(",")):
                many = options.stretches * size
                stretches = document_windows(fit, tokenizer, LENGTH, tokens=many)
                show(f"{name}{f'r2, {size} tokens':<22}", *r2_pairs(net, stretches, size))
            show_losses(name, net, fit, tokenizer)


def r2_pairs(net: Any, windows: dict[str, Any], size: int) -> tuple[list[Any], list[Any]]:
    """(by block, by stretch) R2 with its standard error, by our folds and by cells of 2048 tokens."""
    count, now, before = size // LENGTH, [], []
    for start in range(0, len(windows["input_ids"]) - count + 1, count):
        part = {name: value[start : start + count] for name, value in windows.items()}
        result = profile(net, part, signal=False, batch_size=32)
        now.append([(b.r2, b.r2_se, len(b.fold_sums or [])) for b in result.blocks])
        before.append(_in_small_cells(net, part["input_ids"]))
    return list(zip(*now, strict=True)), list(zip(*before, strict=True))


def _in_small_cells(net: Any, ids: torch.Tensor) -> list[Pair]:
    offsets = range(0, ids.numel(), LENGTH)
    fold = torch.tensor([offset // 2048 % 5 for offset in offsets])
    order = fold.sort(stable=True).indices  # a fold after the other, each a document
    result = profile(
        net, {"input_ids": ids[order], "document": fold[order]}, signal=False, batch_size=32
    )
    return [(b.r2, b.r2_se, len(b.fold_sums or [])) for b in result.blocks]


def show_losses(name: str, net: Any, fit: Any, tokenizer: Any) -> None:
    """Losses of samples that are spread over a text, beside those of stretches of it."""
    part = document_windows(fit, tokenizer, LENGTH, tokens=20480 + SAMPLES * TOKENS)
    begin, per = 20480 // LENGTH, TOKENS // LENGTH
    fitted = profile(net, part["input_ids"][:begin], signal=False, batch_size=32).maps
    maps = {i: fitted[i] for i in (0, len(fitted) // 2, len(fitted) - 1)}
    ids, documents = part["input_ids"][begin:], part["document"][begin:]
    spread, first = [], []
    for i in range(SAMPLES):
        at = torch.arange(i, len(ids), SAMPLES)[:per]
        spread.append(_losses(net, maps, {"input_ids": ids[at], "document": documents[at]}))
        first.append(_losses(net, maps, {"input_ids": ids[i * per : (i + 1) * per]}))
    for quantity in spread[0]:
        now, before = (
            [[s[quantity][b] for s in samples] for b in range(len(spread[0][quantity]))]
            for samples in (spread, first)
        )
        show(f"{name}{quantity:<22}", now, before)


def _losses(net: Any, maps: Any, sample: dict[str, Any]) -> dict[str, list[Pair]]:
    costs = swap_costs(net, maps, sample, batch_size=32)
    base, changes = costs[0].change.original, [cost.change for cost in costs]
    count = int((base.counts > 0).sum())
    return {
        "loss": [(base.nats, base.nats_se, count)],
        "delta_nll of a swap": [(c.delta_nll, c.delta_nll_se, count) for c in changes],
        "KL of a swap": [(c.kl, c.kl_se, count) for c in changes],
    }


def show(name: str, now: Sequence[Sequence[Pair]], before: Sequence[Sequence[Pair]]) -> None:
    (ratio, cover), (old, old_cover) = calibration(now), calibration(before)
    print(f"{name}{ratio:>8.2f}{cover:>7.1%}{old:>9.2f}{old_cover:>7.1%}", flush=True)


def calibration(blocks: Iterable[Sequence[Pair]]) -> tuple[float, float]:
    """(sd / se, share of intervals that hold the mean), over the samples of each block."""
    ratios, inside = [], []
    for pairs in blocks:
        mean = sum(value for value, _, _ in pairs) / len(pairs)
        variance = sum((value - mean) ** 2 for value, _, _ in pairs) / (len(pairs) - 1)
        ratios.append(variance / (sum(se**2 for _, se, _ in pairs) / len(pairs)))
        inside += [abs(value - mean) < student(k - 1) * se for value, se, k in pairs]
    return math.sqrt(sum(ratios) / len(ratios)), sum(inside) / len(inside)


if __name__ == "__main__":
    main()
