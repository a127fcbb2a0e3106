"""What healing recovers: a plan's maps, refitted, then trained at once; on three texts.

    python benchmarks/heal.py RUN                               # 21 % of the feed-forward parameters, 200 steps
    python benchmarks/heal.py RUN --share 25% --beside 18%      # and another plan that is not healed
    python benchmarks/heal.py RUN --rates 3e-5,1e-4,3e-4 --steps 40     # which learning rate
    python benchmarks/heal.py RUN --units-frozen                # the weights of kept units not trained
    python benchmarks/heal.py RUN --also-fit none               # the run's text alone

RUN is a run of the built-in model (`make demo` leaves one in runs/demo). Plan, refit and healing are those of
`howlinear compress RUN --remove-params SHARE --heal STEPS`. They are compared
unhealed and healed on the text for reporting and on texts of other kinds. Labels are not
used, so the original model trained by the same recipe stays as it is (tests/test_healing.py); what maps
learn of the text alone shows as a gain on the run's text that other texts do not have. Loss may also fall because
predictions become smoother, which a division of the logits by a temperature does as well: the last lines compare
the original, the unhealed and the healed model, each at the temperature with the lowest loss on the text for choosing.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import resource
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from howlinear.cli.sources import GENERATED, Loader, RunSource
from howlinear.compression.healing import TOKENS, Recipe, heal
from howlinear.compression.prices import Losses, Sizes
from howlinear.compression.refitting import Refitter
from howlinear.compression.search import Search
from howlinear.losses.perplexity import compare_all
from howlinear.losses.protocols import held_out_tokens
from howlinear.models.corpus import builtin_text
from howlinear.models.forward import as_windows
from howlinear.models.hooks import swapped
from howlinear.run.work import Work


def planned(model, source, fit, choose, shares, work):
    """Maps of the plans that remove these shares of the feed-forward parameters, by name."""
    at, cut = source.blocks(), source.protocol()
    fitter = Refitter(model, at, fit, work=work)
    search = Search(fitter, Sizes(model, at), Losses(model, choose, choose, cut, work))
    search.price("auto", "auto")
    every = {}
    for share in shares:
        maps = fitter.refit(search.shapes_saving(share))
        every[f"{search.sizes.removed(maps) / search.sizes.total:.1%} removed"] = maps
    return every


def texts_of(source, tokens):
    """Windows to report on, by name: of the run's text and of other kinds."""
    cut = source.protocol()
    texts = {"the run's text": source.held_out("report", cut, tokens)[0]}
    for name in ("python-docs", "python-code"):
        text = builtin_text(name).report()
        texts[name] = held_out_tokens(text, source.tokenizer, cut, tokens, source.bos)[0]
    return texts


def compared(model, variants, texts):
    """Nats above the original and KL of each variant on each text, and the gain over the first."""
    for name, windows in texts.items():
        changes = [lambda maps=maps: swapped(model, maps) for maps in variants.values()]
        first, *_ = every = compare_all(model, changes, windows)
        print(f"{name}: perplexity {first.original.perplexity:.2f}, {first.tokens} tokens")
        for label, change in zip(variants, every, strict=True):
            gain, se = change.gain_over(first)
            print(
                f"  {label:16} {change.changed.perplexity:8.2f}, {change.delta_nll:+.4f} ± "
                f"{change.delta_nll_se:.4f} nats, KL {change.kl:.4f}, gain {gain:.4f} ± {se:.4f}",
                flush=True,
            )


TEMPERATURES = [0.8 + 0.02 * i for i in range(31)]  # 0.80 to 1.40


@torch.no_grad()
def losses_at(model, windows):
    """(temperatures,) mean loss of next tokens with the logits divided by each."""
    sums, count = torch.zeros(len(TEMPERATURES), dtype=torch.float64), 0
    for window in as_windows(windows).all_ids:
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
        for i, t in enumerate(TEMPERATURES):
            sums[i] += float(cross_entropy(logits / t, window[1:], reduction="sum"))
        count += len(window) - 1
    return sums / count


def at_best_temperatures(model, variants, choose, texts):
    """Loss over the original's when each model has the temperature that suits it best."""
    original = {}
    for label, maps in {"original": {}, **variants}.items():
        with swapped(model, maps):
            best = int(losses_at(model, choose).argmin())
            losses = {name: losses_at(model, windows) for name, windows in texts.items()}
        original = original or {name: float(loss[best]) for name, loss in losses.items()}
        more = (f"{name} {float(x[best]) - original[name]:+.4f}" for name, x in losses.items())
        print(f"{label:16} temperature {TEMPERATURES[best]:.2f}: {', '.join(more)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--share", default="21%", help="of the feed-forward parameters to remove")
    parser.add_argument(
        "--beside", default="", help="shares of plans that are not healed: 18%%,30%%"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of each text to report on")
    parser.add_argument("--rates", default=str(Recipe.learning_rate))
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--units-frozen", action="store_true")
    parser.add_argument("--also-fit", default=GENERATED, help="a text, or none")
    options = parser.parse_args()

    source = RunSource(Path(options.run))
    model = source.load(Loader())
    choose = source.held_out("choose", source.protocol(), 4096)[0]
    held_out = as_windows(choose).all_ids
    others = source.other_texts([options.also_fit])
    fit, _ = source.mixed_windows(others)
    windows = source.heal_windows(others, options.steps, TOKENS)
    began = time.perf_counter()

    def progress(label, tokens):
        print(f"{time.perf_counter() - began:6.0f} s  {label}", file=sys.stderr, flush=True)
        return lambda done: None

    work = Work(progress=progress)
    shares = [options.share, *filter(None, options.beside.split(","))]
    shares = [float(share.rstrip("%")) / 100 for share in shares]
    variants = planned(model, source, fit, choose, shares, work)
    unhealed = next(iter(variants))
    compared(model, variants, texts_of(source, options.tokens))
    for rate in map(float, options.rates.split(",")):
        recipe = Recipe(options.steps, rate, units=not options.units_frozen)
        healed = heal(model, variants[unhealed], windows, held_out, recipe, work=work)
        variants[f"healed, {rate:g}"] = healed.maps
        curve = ", ".join(f"{step}: {kl:.4f}" for step, kl in healed.record["curve"])
        print(f"rate {rate:g}, {healed.record['seconds']:.0f} s, KL {curve}", flush=True)
    variants = {
        name: maps for name, maps in variants.items() if "%" not in name or name == unhealed
    }
    compared(model, variants, texts_of(source, options.tokens))
    at_best_temperatures(model, variants, choose, texts_of(source, options.tokens))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
