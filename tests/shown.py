"""Planted results of every command: usual numbers, extreme numbers, and none at all.

`RESULTS[name](v)` is (function that prints, data, blocks); `v` says which numbers.
"""

import math
from dataclasses import dataclass, fields

from howlinear.cli.bench import show_bench
from howlinear.cli.compare import show_comparison
from howlinear.cli.compress import show_compression
from howlinear.cli.control_tables import (
    show_cross_feed,
    show_matched,
    show_random_init,
    show_training,
)
from howlinear.cli.probe import show_probes
from howlinear.cli.profile_table import show_profile, show_shard
from howlinear.cli.swap import show_expert_swaps, show_swaps
from howlinear.records.fields import (
    BlockCompression,
    BlockProbe,
    BlockProfile,
    BlockSwap,
    ExpertSwap,
)
from howlinear.records.statistics import summarise

LONG = "very_long_name.language_model.model.decoder.layers.{}.feed_forward"  # 60 and more
PRE = "a text from somewhere"


@dataclass(frozen=True)
class Numbers:
    r2: float | None
    se: float | None
    cost: float | None
    cost_se: float | None
    index: int
    parameters: int

    def estimate(self, wide=True):
        ends = (self.r2, self.r2) if wide else (None, None)
        return dict(zip(("value", "low", "high"), (self.r2, *ends), strict=True))


USUAL = Numbers(0.887, 0.0031, 4.6, 0.85, 3, 2_320_000)
WILD = Numbers(-12.3451, 0.1234, 1.2e6, 3e5, 117, 1_000_000_000)
NONE = Numbers(None, None, None, None, 0, 1)
NAN = Numbers(math.nan, math.nan, math.nan, math.nan, 0, 1)
EVERY = {"usual": USUAL, "wild": WILD, "none": NONE, "nan": NAN}


def about(**more):
    text = {"name": PRE, "part": "train", "fit": "train", "choose": "valid", "report": "test"}
    model = {"id": "somebody/" + "model-" * 12, "dtype": "float32"}
    settings = {"tokens": 29696, "window": 512, "protocol": "default", "folds": 5}
    settings |= {"shard": [1, 8], "read": 3712, "experts": "routed", "weights": "fresh", "seeds": 3}
    settings |= {"rows": {"fit": 29696, "choose": 7424, "report": 9899}, "scales": [0.5, 2, 4]}
    return {
        "model": model,
        "model_b": model,
        "corpus": text,
        "settings": settings,
        "notes": [],
        **more,
    }


def profile_block(v, index, kind="outlier-concentrated"):
    special = {"kind": kind, "index": index, "path": LONG.format(index)}
    special |= {"r2_feature": {"median": v.r2, "q25": v.r2, "q75": v.r2}, "r2_se": v.se}
    special |= {"d_in": 12288, "d_out": 12288, "input_rank": 12288, "effective_rank": 12288}
    special |= {"input_condition": 1.5e12, "rows_per_column": 40.9, "expected_kl": 2.256}
    special |= {"first_share": 0.959, "stream_error": 4.4358, "r2_interval": [v.r2, v.r2]}
    return BlockProfile(**{f.name: v.r2 for f in fields(BlockProfile)} | special)


def profile(v):
    blocks = [profile_block(v, i) for i in (0, v.index)]
    summary = summarise([profile_block(USUAL, i) for i in (0, 1)])
    return show_profile, about(summary=summary), blocks


def experts(v):
    name, data, blocks = profile(v)
    own = [
        {"index": i, "expert": e, "tokens": 12345, "r2": v.r2, "problem": p}
        for i in (0, 117)
        for e, p in (("0", None), ("1", None), ("63", "too few"), ("shared", None))
    ]
    return name, data | {"experts": own}, blocks


def shard(v):
    return show_shard, about(), [{"index": 0, "rows": v.parameters}]


def swap_block(v, index):
    known = {"index": index, "path": LONG.format(index), "units": [1, 2], "weighting": "none"}
    known |= {"params_saved": v.parameters, "multiply_adds_saved": v.parameters, "kl_se": v.cost_se}
    known |= {"tokens": 131072, "windows": 2048, "clusters": 62, "verdict": "undecided"}
    known |= {"kl": v.r2, "top1": 0.842, "cosine": v.r2, "rmse": v.r2, "delta_ppl_se": v.cost_se}
    return BlockSwap(**{f.name: v.cost for f in fields(BlockSwap)} | known)


def swap(v):
    base = {
        "perplexity": v.cost,
        "perplexity_se": v.cost_se,
        "bits_per_byte": 1.359,
        "tokens": 4191,
    }
    names = [
        f"{n}{end}{se}"
        for n in ("kl", "delta_nll")
        for end in ("", "_sum", "_gap")
        for se in ("", "_se")
    ]
    joint = {"blocks": [0, 3, 117], "tokens": 131072, **dict.fromkeys(names, v.cost)}
    data = about(base=base, signals={"1 - r2": v.estimate(), "expected_kl": v.estimate(wide=False)})
    data["settings"]["safe"], data["together"] = 0.03, [joint]
    return show_swaps, data, [swap_block(v, i) for i in (0, v.index)]


def swap_of_an_encoder(v):
    _, data, blocks = swap(v)
    return show_swaps, data | {"base": None, "signals": {}, "together": []}, blocks


def expert_swap(v):
    known = {"index": v.index, "expert": "shared", "path": LONG.format(0), "tokens": 123456}
    known |= {"r2": v.r2, "kl": v.r2, "top1": 0.842, "delta_nll_se": v.se, "delta_nll": v.r2}
    one = ExpertSwap(**{f.name: v.cost for f in fields(ExpertSwap)} | known)
    base = {"perplexity": v.cost, "protocol": "windows-128", "tokens": 4191}
    return show_expert_swaps, about(base=base), [one]


def probe(kind):
    def made(v):
        cost = {"delta_ppl": v.cost}
        swaps = ("linear", "bilinear", "second", "192 units", "dense", "poly", "seeded", "int8")
        swaps += ("int4", "swapped", "healed", "control")
        own = {"swap": dict.fromkeys(swaps, cost), "gain": v.r2, "gain_se": v.se, "r2": v.r2}
        own |= {"parameters": v.parameters, "converged": False, "best": "second", "units": [1, 2]}
        own |= {"seeds": [{"gain": v.r2}, {"gain": v.r2}], "recruitment": 0.53, "seconds": 1234.0}
        own |= {"ranks": [{"rank": r, "gain": v.r2} for r in (1, 4, 16, 64)]}
        own |= {"at_two_matrices": 192, "r2_closed_form": v.r2, "input_condition": 4.0e12}
        own |= {"verdict": "no polynomial of degree 3 in the leading directions"}
        own |= {"int8": {"error": 1.25e-7}, "int4": {"error": 3.5e-3}, "healed": {"steps": 200}}
        names = [(o, i) for o in ("sgd", "adam", "adamw") for i in ("raw", "whitened")]
        own |= {"runs": [{"optimiser": o, "inputs": i, "r2": v.r2} for o, i in names]}
        own |= {"positions": [{"from": 0, "share": v.r2}]}
        tokens = [
            {"text": t, "token": 7, "times_mean": 1234.5, "count": 99} for t in (" a", " ", "中文")
        ]
        own |= {"tokens": tokens, "directions": [{"writes": {"up": ["word" * 9] * 3}}]}
        step = {"recovered": v.r2, "r2": v.r2, "parameters": v.parameters}
        own["steps"] = [step | {"k": k} for k in (0, 1, 16, 64, 192, 256)]
        if kind in ("dense", "poly", "seeded"):
            own["steps"] = 3000
        linear = {"swap": {"linear": cost}}
        blocks = [BlockProbe(i, LONG, v.r2, v.r2, linear, **{kind: own}) for i in (0, v.index)]
        left = BlockProbe(1, LONG, v.r2, v.r2, linear, **{kind: {"skipped": "it is constant"}})
        found = {"blocks": 3, "median": v.r2, "max": v.r2}
        found |= {f"{r}_with_1_minus_r2": v.estimate() for r in ("pearson", "spearman")}
        return show_probes, about(summary={"bilinear_gain": found}), [*blocks, left]

    return made


def compress(v):
    loss = {"perplexity": v.cost}
    change = {"original": loss, "changed": loss, "delta_ppl": v.cost, "delta_ppl_se": v.cost_se}
    change |= {"protocol": "windows-128", "tokens": 4096}
    made = {"dtype": "float32", "parameters": v.parameters, "bytes": 10**11, "notes": ["a note"]}
    curve = [
        {"method": m, "removed": 5, "share": 0.138, "blocks": 117, "perplexity": v.cost}
        | {"delta_ppl": v.cost, "delta_ppl_se": v.cost_se}
        for m in ("healed", "ours", "swap", "r2", "zero")
    ]
    healed = {"steps_run": 200, "kl_before": v.cost, "kl_after": v.cost, "kept": v.r2 is not None}
    healed |= {"diverged": False, "seconds": 1234.5, "note": "a note"}
    data = about(change=change, exported=made | loss, curve=curve, healed=healed)
    data["removed"] = v.parameters
    data |= {"feed_forward": 2 * v.parameters, "parameters": 5 * v.parameters}
    n = v.parameters
    blocks = [
        BlockCompression(i, LONG.format(i), 1, rank, [1] * 16, n, n // 3, v.r2)
        for i, rank in ((0, None), (v.index, 12288))
    ]
    return show_compression, data, blocks


def bench(v):
    spread = {"median": 123456.7, "q25": 100000.1, "q75": 150000.9}
    slow = {"median": 12.3, "q25": 11.2, "q75": 13.4}
    speed = {"parameters": v.parameters, "bytes": 4 * v.parameters, "bytes_on_disk": 10**11}
    speeds = [
        speed | {"prefill": spread, "decode": slow},
        speed | {"prefill": slow, "decode": None},
    ]
    settings = {"batch": 8, "length": 512, "new_tokens": 32, "prompt": 16, "repeats": 5}
    settings |= {"dtype": "bfloat16", "device": "cuda:0", "threads": 64}
    compared = {"verdict": "prefill: 1.50 times as fast", "saved_share": v.r2, "promised": 2.0}
    data = about(speeds=speeds, comparison=compared, against=about()["model"])
    return show_bench, data | {"settings": settings}, None


def compare(count):
    def made(v):
        names = [f"runs/some-longer-name-than-that/{i}" for i in range(count)]
        runs = [{"name": n, "model": about()["model"], "corpus": about()["corpus"]} for n in names]
        one = {"r2": v.r2, "r2_se": v.se}
        rows = [{"index": i, "runs": [*[one] * (count - 1), None]} for i in (0, v.index)]
        said = ("pearson", "spearman", "mean_shift", "largest_shift")
        pair = {"a": names[0], "b": names[1], "largest_shift_at": v.index}
        pair |= {"mean_size_of_shift": v.r2, "mean_size_by_noise": v.r2}
        pair |= dict.fromkeys(said, v.estimate())
        crossed = [{"fit": names[0], "scored": names[1], "mean": v.estimate(wide=False)}]
        return show_comparison, about(runs=runs, pairs=[pair], crossed=crossed), rows

    return made


def random_init(v):
    names = ("mean_trained", "mean_untrained", "range_trained", "range_untrained")
    one = {"index": v.index, "r2": v.r2, "r2_se": v.se, "r2_body": v.r2, "low": v.r2, "high": v.r2}
    one["untrained"] = [{"r2_body": v.r2}] * 3
    return (
        show_random_init,
        about(summary=dict.fromkeys(names, v.r2) | {"below": 1, "above": 0}),
        [one],
    )


def cross_feed(v):
    cells = dict.fromkeys(("aa", "ab", "ba", "bb", "a_moved", "b_moved"), v.estimate())
    split = dict.fromkeys(("difference", "weights", "inputs"), v.estimate())
    one = {"index": v.index, "index_b": v.index, "cells": cells, "split": split}
    return show_cross_feed, about(summary=dict.fromkeys(split, v.r2)), [one]


def matched(v):
    names = ("own", "gaussian", "whitened", "x0.5", "x2", "x4")
    one = {"index": v.index, "r2": dict.fromkeys(names, v.estimate()), "predicted": None}
    told = {"r2": v.estimate(), "r2_gaussian": v.r2}
    return show_matched, about(), [one, one | {"predicted": told}]


def training(v):
    blocks = [{"index": i, "r2": [v.r2] * 2} for i in range(118)]
    names = ("step1000", "checkpoint-with-a-very-long-name-in-a-folder-0001")
    data = about(asked={"model": "m" * 100}, checkpoints=[{"name": n} for n in names])
    return show_training, data, blocks


PROBES = ("bilinear", "degree", "units", "dense", "poly", "seeded", "trained", "where", "quantised")
RESULTS = {
    "profile": profile,
    "experts": experts,
    "shard": shard,
    "swap": swap,
    "swap of an encoder": swap_of_an_encoder,
    "swap --experts": expert_swap,
    **{f"probe {kind}": probe(kind) for kind in (*PROBES, "healing")},
    "compress": compress,
    "bench": bench,
    "compare 2": compare(2),
    "compare 9": compare(9),
    "control random-init": random_init,
    "control cross-feed": cross_feed,
    "control matched": matched,
    "control checkpoints": training,
}
