"""What healing recovers: every block keeps a share of its hidden units, then all are trained at once.

    python benchmarks/heal.py RUN                               # 200 steps, the recipe of `compress --heal`
    python benchmarks/heal.py RUN --rates 3e-5,1e-4,3e-4 --steps 40     # which learning rate
    python benchmarks/heal.py RUN --units-frozen                # the weights of kept units not trained

RUN is a run of the built-in model (`make demo` leaves one in runs/demo). Maps are refitted on some of the run's
windows, without a search, healed on all of them and stopped by the text for choosing. They are compared
unhealed and healed on the text for reporting and on texts of other kinds. Labels are not
used, so the original model trained by the same recipe stays as it is (tests/test_healing.py); what maps
learn of the text alone shows as a gain on the run's text that other texts do not have.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import resource
import time
from pathlib import Path

from howlinear.cli.sources import Loader, RunSource
from howlinear.compression.healing import Recipe, heal
from howlinear.compression.prices import Sizes
from howlinear.compression.refitting import Refitter
from howlinear.losses.perplexity import compare_all
from howlinear.losses.protocols import held_out_tokens
from howlinear.models.corpus import builtin_text
from howlinear.models.forward import as_windows
from howlinear.models.hooks import swapped
from howlinear.run.work import Work


def squeezed(model, at, windows, keep):
    """Maps that keep a share of each block's hidden units, fitted front to back."""
    sizes = Sizes(model, at)
    maps = Refitter(model, at, windows).refit({b: (0, sizes.units_near(b, keep)) for b in at})
    print(f"{sizes.removed(maps) / sizes.total:.1%} of the feed-forward parameters removed")
    return maps


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--keep", type=float, default=0.8, help="share of the hidden units")
    parser.add_argument("--fit-tokens", type=int, default=14336, help="that maps are fitted on")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text to report on")
    parser.add_argument("--rates", default=str(Recipe.learning_rate))
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--units-frozen", action="store_true")
    options = parser.parse_args()

    source = RunSource(Path(options.run))
    model = source.load(Loader())
    fit = source.fit_windows().ids
    choose = as_windows(source.held_out("choose", source.protocol(), 4096)[0]).ids
    variants = {
        "unhealed": squeezed(
            model, source.blocks(), fit[: options.fit_tokens // fit.shape[1]], options.keep
        )
    }
    began = time.perf_counter()

    def progress(label, tokens):
        print(f"{time.perf_counter() - began:6.0f} s  {label}", file=sys.stderr, flush=True)
        return lambda done: None

    for rate in map(float, options.rates.split(",")):
        recipe = Recipe(options.steps, rate, units=not options.units_frozen)
        work = Work(progress=progress)
        healed = heal(model, variants["unhealed"], fit, choose, recipe, work=work)
        variants[f"healed, {rate:g}"] = healed.maps
        curve = ", ".join(f"{step}: {kl:.4f}" for step, kl in healed.record["curve"])
        print(f"rate {rate:g}, {healed.record['seconds']:.0f} s, KL {curve}", flush=True)
    compared(model, variants, texts_of(source, options.tokens))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
