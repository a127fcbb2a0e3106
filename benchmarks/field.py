"""Published training-free compression methods beside ours, in one table, on the model of a run.

    python benchmarks/field.py RUN --out field.json --figure field.svg
    python benchmarks/field.py RUN --out field.json --methods ours,flap --sizes 10%   # a part of it
    python benchmarks/field.py RUN --out a.json --join b.json --figure field.svg      # of two commands
    python benchmarks/field.py RUN --fit-tokens 8192 --tokens 1024 --sizes 10%        # a trial

RUN is a run of the built-in model or another one with Llama's architecture (`make demo` leaves one in
runs/demo). All methods are fitted on the windows of the run and measured on the same texts: the run's text to
report on, and two texts of other domains (half as many tokens of each). Sizes are shares of all parameters, an
embedding that is tied counted once; a method that cannot hit a size is measured at the next larger one. Where a
method has published variants, or its paper leaves a number open, the variant with the lowest loss on
calibration text is kept (fitted on a quarter of it), and the table names it. Ours also reads 33 windows of the text
for choosing, to price its options. METHOD-generated also reads as many tokens that the model writes itself;
every method can be named so.

Every result goes to --out as soon as it is there; the same command goes on with what is missing.
Differences are paired with the original, in nats per token with standard errors. Prefill is the speed over that
of the original (512 tokens, taking turns, median of 5). CPU seconds are those of one size from nothing, comparisons of
variants included. One thread by default: CPU seconds and speeds then depend little on what else the machine does, and
two such commands share two cores (--out must differ; the third form joins their files).

Each method's function says which paper it follows and what it leaves out: benchmarks/field/*.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # this folder goes last: its signal.py would hide the standard library's
    sys.path.append(sys.path.pop(0))

import argparse
import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import set_num_threads

from field.layers import angle, replaceme, shortgpt, sleb
from field.llama import Calibration, Made, feed_forward_count, spread_rows
from field.lowrank import svd_llm
from field.ours import Ours
from field.slicing import slicegpt
from field.table import figure, markdown, summary
from field.units import flap, modegpt, obs, olica, wanda
from howlinear.cli.sources import Loader, RunSource
from howlinear.compression.prices import PRICED
from howlinear.losses.perplexity import compare_all
from howlinear.losses.protocols import held_out_tokens
from howlinear.losses.readout import KeptReadout
from howlinear.losses.speed import compare_speeds
from howlinear.models.corpus import builtin_text
from howlinear.models.cutting import mixed
from howlinear.models.families import parameter_count
from howlinear.models.generated import generated_windows
from howlinear.records.files import write_json

OTHERS = ("python-docs", "python-code")
DOMAIN = "its own text"
WRITTEN = "-generated"  # behind a method: its calibration text and as much that the model writes
METHODS: dict[str, Callable[[Calibration, int], Made]] = {
    "wanda-sp": wanda,
    "flap": flap,
    "obs": obs,
    "modegpt": modegpt,
    "svd-llm": svd_llm,
    "olica": olica,
    "sleb": sleb,
    "shortgpt": shortgpt,
    "angle": angle,
    "replaceme": replaceme,
    "slicegpt": slicegpt,
}


class Field:
    """A run's model, the texts that all methods are measured on, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        source = RunSource(Path(options.run))
        model = source.load(Loader())
        if model.config.model_type != "llama":
            raise ValueError(f"{options.run} is of a {model.config.model_type}: expected a llama")
        self.protocol, self.out = source.protocol(), options.out
        windows = source.fit_windows().ids
        count = max(1, options.fit_tokens // windows.shape[1])
        self.source, self.model = source, model
        self.calibration = Calibration(model, spread_rows(windows, count))
        self.length = min(512, model.config.max_position_embeddings - 1)  # and one more to decode
        self.original = KeptReadout(model)
        self.texts = {DOMAIN: source.held_out("report", self.protocol, options.tokens)[0]}
        for name in OTHERS:
            text = builtin_text(name).report()
            more = (source.tokenizer, self.protocol, options.tokens // 2, source.bos)
            self.texts[name] = held_out_tokens(text, *more)[0]
        choose = source.held_out("choose", self.protocol, options.tokens)[0]
        self.methods = {"ours": Ours(choose, self.texts[DOMAIN], self.protocol), **METHODS}
        self.settings = {
            "model": source.profile["model"],
            "fit_tokens": self.calibration.ids.numel(),
            "tokens": options.tokens,
            "threads": options.threads,
            "priced": PRICED,  # windows, and other tokens of WRITTEN for each of the text's:
            "written": 1,
        }
        files = [options.out] if options.out and Path(options.out).exists() else []
        rows = [row for file in [*files, *options.join] for row in self._read(file)]
        self.rows = list({(row["method"], row["size"]): row for row in rows}.values())

    def _read(self, file: str) -> list[dict[str, Any]]:
        kept = json.loads(Path(file).read_text())
        if kept["settings"] != self.settings:
            raise ValueError(f"{file} holds results with other settings: name another file")
        return kept["rows"]

    @cached_property
    def written(self) -> tuple[Calibration, float]:
        """The windows of `calibration` and as many that the model writes; the CPU seconds of writing."""
        ids, source, began = self.calibration.ids, self.source, time.process_time()
        more = generated_windows(self.model, source.tokenizer, *ids.shape, bos=source.bos)
        return Calibration(self.model, mixed([ids, more])), time.process_time() - began

    def has(self, method: str, size: float) -> bool:
        return any(row["method"] == method and row["size"] == size for row in self.rows)

    def measure(self, method: str, size: float) -> None:
        """One method at one size: compress, compare, time, write."""
        model, calibration, writing = self.model, self.calibration, 0.0
        if method.endswith(WRITTEN):
            calibration, writing = self.written
        before, blocks = parameter_count(model), feed_forward_count(model)
        target = -(-round(size * 1e6) * before // 10**6)
        compress = self.methods[method.removesuffix(WRITTEN)]
        made, seconds = calibration.timed(lambda: compress(calibration, target))
        after = parameter_count(made.model)
        losses = {
            name: compare_all(self.original, [made.model], ids, self.protocol)[0].to_dict()
            for name, ids in self.texts.items()
        }
        speed = compare_speeds(made.model, model, length=self.length, repeats=5, new_tokens=1)
        row = {
            "method": method,
            "size": size,
            "note": made.note,
            "parameters": after,
            "removed": 1 - after / before,
            "feed_forward_removed": 1 - feed_forward_count(made.model) / blocks,
            "bytes": 2 * after,
            "seconds": seconds + writing,
            "prefill": speed.prefill.median,
            "texts": losses,
        }
        self.rows.append(row)
        if self.out is not None:
            write_json(self.out, {"settings": self.settings, "rows": self.rows})
        told = losses[DOMAIN]
        print(
            f"{method} at {size:.0%}: {row['removed']:.2%} removed, {told['delta_nll']:+.4f} ± "
            f"{told['delta_nll_se']:.4f} nats, {seconds:.0f} CPU seconds ({made.note})",
            file=sys.stderr,
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--methods", default=",".join(["ours", f"ours{WRITTEN}", *METHODS]))
    parser.add_argument("--sizes", default="5%,10%,15%,20%", help="shares of all parameters")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="to measure on; half of each other text"
    )
    parser.add_argument(
        "--fit-tokens", type=int, default=30_000, help="of calibration text, at most"
    )
    parser.add_argument("--out", help="a JSON file that results are added to")
    parser.add_argument("--join", action="append", default=[], help="results of another --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", help="draw nats against size into this SVG file")
    options = parser.parse_args(arguments)
    names = options.methods.split(",")
    if unknown := {name.removesuffix(WRITTEN) for name in names} - {"ours", *METHODS}:
        parser.error(
            f"no method {', '.join(sorted(unknown))}: expected {', '.join(['ours', *METHODS])}"
        )
    set_num_threads(options.threads)
    field = Field(options)
    for size in [float(s.rstrip("%")) / 100 for s in options.sizes.split(",") if s]:
        for name in names:
            if not field.has(name, size):
                field.measure(name, size)
    for text in field.texts:
        print(summary(field.rows, text))
    print(markdown(field.rows, list(field.texts)))
    if options.figure:
        Path(options.figure).write_text(figure(field.rows, DOMAIN))


if __name__ == "__main__":
    main()
