"""Do the error bars hold? Estimates of many disjoint samples beside the standard errors they print.

    python benchmarks/intervals.py                      # three models, two texts: long
    python benchmarks/intervals.py --models gpt2 --texts wikitext --samples 12

r2: profiles of 24 disjoint samples of a text, each spread over all of it as `howlinear profile` reads
it. losses: the loss of the model, and what a swap of the first, middle and last block costs, on 60
disjoint samples of 4064 tokens, spread as `howlinear swap` spreads its own. For each model, text and
size:

    sd / se     standard deviation of the estimates over the root mean square of their standard errors,
                1 where these are right; root mean square over blocks
    95 %        share of the intervals estimate +- t se that hold the mean of all estimates; t is
                Student's with one degree of freedom less than there are folds or documents
    in a row    the same two numbers for as many consecutive tokens, a few documents each; of losses,
                with windows as independent
    wider       standard deviation of those over that of the spread samples

With 24 samples the first number has a relative standard error of about 15 %, less over 8 blocks.
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

from howlinear import builtin_text, load, profile, spread_windows, swap_costs
from howlinear.records.statistics import student

MODELS = Path(__file__).parents[1] / "tests" / "models"
LENGTH, SAMPLES, TOKENS = 128, 60, 4064

Pair = tuple[float, float, int]  # an estimate, its standard error, folds or documents
Windows = dict[str, torch.Tensor]  # input_ids (n, LENGTH), document (n,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama,gpt2,gpt-neox", help="of tests/models, or paths")
    parser.add_argument("--texts", default="wikitext,python-code")
    parser.add_argument("--sizes", default="20480,40960", help="tokens of a profile")
    parser.add_argument("--samples", type=int, default=24, help="profiles of each kind")
    options = parser.parse_args()
    print(f"{'':<45}{'spread':>15}{'in a row':>16}")
    heading = f"{'model':<10}{'text':<13}{'estimate':<22}{'sd / se':>8}{'95 %':>7}"
    print(f"{heading}{'sd / se':>9}{'95 %':>7}{'wider':>7}")
    for model in options.models.split(","):
        path = MODELS / model if (MODELS / model).is_dir() else model
        net, tokenizer = load(str(path))
        net.float()
        for text in options.texts.split(","):
            name = f"{Path(model).name:<10}{text:<13}"
            windows = spread_windows(builtin_text(text).fit, tokenizer, LENGTH)
            for size in map(int, options.sizes.split(",")):
                spread, row = (r2_pairs(net, w) for w in samples(windows, options.samples, size))
                show(f"{name}{f'r2, {size} tokens':<22}", spread, row)
            show_losses(name, net, windows)


def samples(windows: Windows, many: int, tokens: int) -> tuple[list[Windows], list[Windows]]:
    """So many disjoint samples, each spread over all windows; and as many of windows in a row."""
    count, every = tokens // LENGTH, len(windows["input_ids"])
    step = every // count  # between the windows of a sample
    if step < many:
        raise SystemExit(f"the text has {every * LENGTH} tokens, {many * tokens} are needed")
    starts = [i * step // many for i in range(many)]
    places = [torch.arange(count) * step + start for start in starts]
    rows = [torch.arange(count) + start * count for start in starts]
    return tuple(
        [{name: value[at] for name, value in windows.items()} for at in kind]
        for kind in (places, rows)
    )


def r2_pairs(net: Any, kind: list[Windows]) -> list[list[Pair]]:
    """By block and by sample: R2 with its standard error."""
    results = [profile(net, sample, signal=False, batch_size=32) for sample in kind]
    pairs = [[(b.r2, b.r2_se, len(b.fold_sums or [])) for b in result.blocks] for result in results]
    return list(map(list, zip(*pairs, strict=True)))


def show_losses(name: str, net: Any, windows: Windows) -> None:
    """Losses of samples that are spread over a text, beside those of stretches of it."""
    begin = 20480 // LENGTH
    fitted = profile(net, windows["input_ids"][:begin], signal=False, batch_size=32).maps
    maps = {i: fitted[i] for i in (0, len(fitted) // 2, len(fitted) - 1)}
    others = {name: value[begin:] for name, value in windows.items()}
    spread, row = samples(others, SAMPLES, TOKENS)
    row = [{"input_ids": sample["input_ids"]} for sample in row]  # one or two documents each
    kinds = [[_losses(net, maps, sample) for sample in kind] for kind in (spread, row)]
    for quantity in kinds[0][0]:
        pairs = (
            [[s[quantity][b] for s in kind] for b in range(len(kind[0][quantity]))]
            for kind in kinds
        )
        show(f"{name}{quantity:<22}", *pairs)


def _losses(net: Any, maps: Any, sample: dict[str, Any]) -> dict[str, list[Pair]]:
    costs = swap_costs(net, maps, sample, batch_size=32)
    base, changes = costs[0].change.original, [cost.change for cost in costs]
    count = int((base.counts > 0).sum())
    return {
        "loss": [(base.nats, base.nats_se, count)],
        "delta_nll of a swap": [(c.delta_nll, c.delta_nll_se, count) for c in changes],
        "KL of a swap": [(c.kl, c.kl_se, count) for c in changes],
    }


def show(name: str, spread: Sequence[Sequence[Pair]], row: Sequence[Sequence[Pair]]) -> None:
    (sd, ratio, cover), (wide, row_ratio, row_cover) = calibration(spread), calibration(row)
    ours, theirs = f"{ratio:>8.2f}{cover:>7.1%}", f"{row_ratio:>9.2f}{row_cover:>7.1%}"
    print(f"{name}{ours}{theirs}{wide / sd:>7.1f}", flush=True)


def calibration(blocks: Iterable[Sequence[Pair]]) -> tuple[float, float, float]:
    """(sd, sd / se, share of intervals that hold the mean), over the samples of each block."""
    variances, ratios, inside = [], [], []
    for pairs in blocks:
        mean = sum(value for value, _, _ in pairs) / len(pairs)
        variances.append(sum((value - mean) ** 2 for value, _, _ in pairs) / (len(pairs) - 1))
        ratios.append(variances[-1] / (sum(se**2 for _, se, _ in pairs) / len(pairs)))
        inside += [abs(value - mean) < student(k - 1) * se for value, se, k in pairs]
    sd, ratio = (math.sqrt(sum(values) / len(values)) for values in (variances, ratios))
    return sd, ratio, sum(inside) / len(inside)


if __name__ == "__main__":
    main()
