"""Perplexity against parameters removed, ours beside the baselines, on the built-in model.

    python benchmarks/compress.py RUN                       # ours alone
    python benchmarks/compress.py RUN --shares 3%,6%,9%     # fewer points
    python benchmarks/compress.py RUN --baselines           # and simpler methods
    python benchmarks/compress.py RUN --variants            # the maps of its compress.json, refitted in other ways
    python benchmarks/compress.py RUN --also-fit none       # the run's text alone

RUN is a run of the built-in model (`make demo` leaves one in runs/demo); `howlinear swap RUN` first
lets the baselines rank blocks by measured swap costs. Two questions, answered on text that ours
was neither fitted to nor chosen by (the baseline's ranking was): how many feed-forward parameters each
method removes within a budget of 10 % perplexity, and which has the lowest perplexity at equal numbers
of them. Baselines replace whole blocks; ours is measured where it removes at least as much as each of
their points.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

import argparse
import math
import resource
import time
from pathlib import Path

from howlinear import builtin_text
from howlinear.cli.sources import GENERATED, Loader, RunSource
from howlinear.compression.compress import CompressSettings, Point, compress_model
from howlinear.compression.plan import Budget
from howlinear.compression.refitting import Refitter
from howlinear.losses.perplexity import compare_all
from howlinear.losses.protocols import held_out_tokens
from howlinear.losses.readout import KeptReadout
from howlinear.models.hooks import swapped
from howlinear.records.fields import BlockCompression
from howlinear.records.files import write_json
from howlinear.run.work import Work


def against_baselines(points: list[Point], most: float) -> None:
    """How many points of the baselines ours has a lower perplexity than, where it removes as much."""
    ours = [p for p in points if p.method == "ours"]
    won = fair = 0
    for p in points:
        rivals = [o for o in ours if o.removed >= p.removed]
        if p.method != "ours" and rivals and p.removed <= most:
            mine = min(rivals, key=lambda o: o.removed)
            gain, se = mine.change.gain_over(p.change)
            fair += 1
            won += gain >= -se
    print(
        f"\nlower perplexity than {won} of {fair} points of the baselines up to 30 %, within one "
        "paired standard error, removing as much or more"
    )


VARIANTS = {  # settings of the refit
    "as it is": {},
    "drift not corrected": {"correction": 0.0},
    "drift corrected fully": {"correction": 1.0},
}


def variants(run: str, tokens: int) -> None:
    """The maps of compress.json, refitted in several ways and measured on three texts."""
    source = RunSource(Path(run))
    model, protocol = source.load(Loader()), source.protocol()
    made = source.folder.newest("compress", BlockCompression)
    kept = {b: made[b.index] for b in source.blocks() if made[b.index].replaced}
    shapes = {b: (record.rank, len(record.units)) for b, record in kept.items()}
    texts = {"its own text": source.held_out("report", protocol, tokens)[0]}
    for name in ("python-docs", "python-code"):
        text = builtin_text(name).report()
        texts[name] = held_out_tokens(text, source.tokenizer, protocol, tokens)[0]
    original, first = KeptReadout(model), {}
    for name, settings in VARIANTS.items():
        fitter = Refitter(model, list(shapes), source.fit_windows().ids, **settings)
        for block, record in kept.items():
            fitter.keep_units(block, record.units)
        maps = fitter.refit(shapes)
        for text, held in texts.items():
            (change,) = compare_all(
                original, [lambda maps=maps: swapped(model, maps)], held, protocol
            )
            gain, se = first.setdefault(text, change).gain_over(change)
            print(
                f"{name:23} {text:12} {change.delta_nll:+.4f} ± {change.delta_nll_se:.4f} nats; "
                f"worse by {gain:.4f} ± {se:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--budget", type=float, default=0.10)
    parser.add_argument("--shares", default="3%,6%,9%,15%,21%,30%")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--baselines", action="store_true", help="replace whole blocks, too")
    parser.add_argument("--also-fit", default=GENERATED, help="a text, or none")
    parser.add_argument("--out", help="write the result's JSON here")
    parser.add_argument(
        "--variants", action="store_true", help="instead: the plan, refitted in other ways"
    )
    options = parser.parse_args()
    if options.variants:
        variants(options.run, options.tokens)
        return
    began = time.perf_counter()

    def progress(what, tokens):
        print(f"{time.perf_counter() - began:6.0f} s  {what}", file=sys.stderr, flush=True)
        return lambda done: None

    source = RunSource(Path(options.run))  # the texts are those of `howlinear compress`
    model = source.load(Loader())
    fit, _ = source.mixed_windows(source.other_texts([options.also_fit]))
    protocol = source.protocol()
    choose, report = (
        source.held_out(part, protocol, options.tokens)[0] for part in ("choose", "report")
    )
    result = compress_model(
        model,
        options.run,
        Budget(perplexity=options.budget),
        fit=fit,
        choose=choose,
        report=report,
        settings=CompressSettings(
            curve=[float(s.rstrip("%")) / 100 for s in options.shares.split(",")],
            baselines=options.baselines,
            protocol=protocol,
        ),
        work=Work(progress=progress),
    )
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if options.out:
        write_json(options.out, result.to_dict())
    points = sorted(result.curve, key=lambda p: (p.method != "ours", p.method, p.removed))
    for p in points:
        print(
            f"{p.method:5} {p.removed / result.feed_forward:6.1%} removed, {len(p.chosen):2} blocks, "
            f"perplexity {p.change.changed.perplexity:8.2f}, "
            f"{p.change.delta_nll:+.4f} ± {p.change.delta_nll_se:.4f} nats"
        )
    allowed = math.log1p(options.budget)
    print(f"\nmost removed within {options.budget:.0%} more perplexity (text reported on):")
    most = {}
    for p in points:
        if p.change.delta_nll <= allowed:
            most[p.method] = max(most.get(p.method, 0.0), p.removed / result.feed_forward)
    for name, share in most.items():
        print(f"  {name:5} {share:.1%}")
    if options.baselines:
        against_baselines(points, 0.3 * result.feed_forward)
    print(f"{seconds:.0f} s, peak memory {peak / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
