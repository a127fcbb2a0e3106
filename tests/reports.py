"""Run folders with planted numbers, for what reads them."""

import json
import math

from howlinear.records.fields import BlockProbe, BlockProfile, BlockSwap
from howlinear.records.verdicts import verdict_of

HOSTILE = "<script>alert(1)</script>"
CONTROL = "to\x1b[31mken\u202e\x00\ud800"


def block(index, **fields):
    """A block whose numbers are smooth functions of its index."""
    r2 = 0.3 + 0.6 * abs(math.sin(index))
    planted = {
        "index": index,
        "path": f"model.layers.{index}.mlp",
        "d_in": 64,
        "d_out": 64,
        "kind": "partly linear",
        "r2": r2,
        "r2_se": 0.01 + 0.001 * index,
        "r2_body": r2 - 0.05,
        "r2_body_se": 0.02,
        "r2_scalar": r2 + 0.04,
        "r2_feature": {"median": 0.9 * r2 - 0.02, "q25": 0.2, "q75": 0.8},
        "r2_curve": [r2 - 0.02, r2],
        "first_share": 0.01,
        "sink_units": [3],
        "sink_shares": [0.1],
        "effective_rank": 1 + 2 * index,
        "input_rank": 64,
        "input_condition": 30.0,
        "input_participation": 12.5,
        "input_range": 3.0,
        "stream_error": 0.01 * (1 + index % 7),
        "stream_error_se": 0.001,
        "expected_kl": 0.01 * (1 + index % 5),
        "expected_kl_se": 0.002,
        "expected_beyond": 0.001,
        "rmse": 0.5,
        "residual_norm": 3.0 + index % 3,
        "output_norm": 9.0,
        "n_fit": 2000,
        "n_heldout": 500,
        "rows_per_column": 31.0,
        "fold_sums": [[(1 - r2) * (1 + 0.1 * f), 1.0] for f in (-1, 0, 1)],
        "input_spectrum": [[k, 2.0**-k] for k in (1, 2, 3, 10, 30, 64)],
        "map_spectrum": [[k, 10.0 / k] for k in (1, 2, 3, 10, 30, 64)],
    }
    return BlockProfile(**(planted | fields))


def swap(index, **fields):
    """What a swap cost; block 2 keeps a unit, block 4 gains perplexity."""
    cost = -0.01 if index == 4 else 0.004 * (index + 1)
    planted = {
        "index": index,
        "path": f"model.layers.{index}.mlp",
        "units": [7] if index == 2 else [],
        "weighting": "none",
        "verdict": None,
        "delta_nll": cost,
        "delta_nll_se": 0.002,
        "delta_ppl": 20 * math.expm1(cost),
        "delta_ppl_se": 0.05,
        "kl": abs(cost),
        "kl_se": 0.0005,
        "tokens": 1200,
        "windows": 32,
        "clusters": 30,
        "kl_plain": 2.0 if index == 2 else abs(cost),
        "kl_zero": 1.0,
        "kl_mean": 0.8,
        "top1": 0.9,
        "top1_se": 0.01,
        "delta_nll_plain": 2.0 if index == 2 else cost,
        "delta_nll_zero": 1.0,
        "delta_nll_mean": 0.8,
        "delta_ppl_plain": 20 * math.expm1(cost),
        "delta_ppl_zero": 34.0,
        "delta_ppl_mean": 24.0,
        "cosine": 0.9,
        "rmse": 0.5,
        "stream_error": 0.02,
        "params_saved": 1000,
        "multiply_adds_saved": 1000,
    }
    known = planted | fields
    if known["kl"] is not None and known["verdict"] is None:
        names = ("kl", "kl_se", "clusters", "windows")
        kl, se, *numbers = (known[name] for name in names)
        known["verdict"] = verdict_of(kl, math.nan if se is None else se, *numbers)
    return BlockSwap(**known)


def probe(index):
    steps = [{"k": k, "r2": 0.5 + 0.1 * i} for i, k in enumerate((0, 1, 16, 64))]
    return BlockProbe(
        index=index,
        path=f"model.layers.{index}.mlp",
        r2=0.5,
        r2_body=0.4,
        linear={},
        bilinear={"gain": 0.01 * index, "gain_se": 0.002},
        units={"steps": steps},
        where={
            "positions": [{"from": 0, "to": 0, "share": 0.25}],
            "tokens": [{"text": f" {CONTROL}", "times_mean": 3.5}],
        },
    )


def write(folder, name, kind, blocks, **more):
    data = {"kind": kind, "schema": 1, **more, "blocks": [b.to_dict() for b in blocks]}
    (folder / name).write_text(json.dumps(data))


def planted_run(folder, blocks=30, model="planted", full=True, **about):
    """A run folder; with `full`, everything that a report draws."""
    folder.mkdir(parents=True)
    rows = [block(i) for i in range(blocks)]
    made = {
        "model": {"id": model, "revision": "main", "dtype": "float32", "parameters": 10},
        "corpus": {"name": "planted text", "part": "train", "fingerprint": "f"},
        "settings": {"tokens": 2500, "window": 128, "folds": 3, "protocol": "default"},
        "command": f"howlinear profile {model}",
        "versions": {"howlinear": "0.1.0"},
        "notes": ["a note"],
    } | about
    write(folder, "profile.json", "profile", rows, **made)
    if not full:
        return folder
    base = {"perplexity": 20.0, "tokens": 1000, "protocol": "windows-128"}
    write(folder, "swap.json", "swap", [swap(i) for i in range(blocks)], base=base)
    write(folder, "probe.json", "probe", [probe(i) for i in range(0, blocks, 4)])
    bands = [{"index": i, "low": 0.1, "high": -3.0 if i == 1 else 0.2} for i in range(blocks)]
    control = {"kind": "control-random-init", "schema": 1, "blocks": bands}
    (folder / "control-random-init.json").write_text(json.dumps(control))
    curve = [
        {"method": m, "share": 0.05 * k, "perplexity": 20.0 * far**k, "delta_ppl_se": 0.3}
        for m, far in (("ours", 1.01), ("zero", 2.0))
        for k in range(1, 7)
    ]
    change = {"original": {"perplexity": 20.0}}
    write(folder, "compress.json", "compress", [], curve=curve, change=change)
    steps = [
        {"step": s, "blocks": [{"index": i, "r2": i / blocks} for i in range(blocks)]}
        for s in (0, 1, 10, 100)
    ]
    lines = [{"kind": "monitor", "schema": 1}, *steps]
    (folder / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
