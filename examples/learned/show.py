"""What the monitors of `train.py all` saw, as the tables of docs/learned.md.

    python examples/learned/show.py models

Every number comes from the folders' `monitor.jsonl` and `train.json`; error bars are standard
errors over folds (one model) or the spread over seeds (several), as each table says.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import combinations
from pathlib import Path

from howlinear.records.files import read_monitor
from howlinear.records.statistics import pearson

FAMILIES = ("gpt2", "gpt-neox", "llama")
SEEDS = (0, 1, 2)
SHOWN = (0, 1, 4, 16, 64, 128, 256, 512, 1024)

Rows = dict[int, list[dict[str, float]]]  # step -> blocks


def load(folder: Path) -> tuple[dict[str, object], Rows]:
    _, rows = read_monitor(folder / "monitor.jsonl")
    return json.loads((folder / "train.json").read_text()), {r["step"]: r["blocks"] for r in rows}


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(*cells: object) -> None:
    row(*cells)
    row(*("---" for _ in cells))


def over_seeds(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def mean(blocks: list[dict[str, float]], name: str) -> float:
    return statistics.mean(b[name] for b in blocks)


def main() -> None:
    root = Path(sys.argv[1])
    runs = {
        path.name: load(path) for path in sorted(root.iterdir()) if (path / "train.json").exists()
    }
    print("\nModels\n")
    head("model", "parameters", "lr", "weight decay", "held-out loss", "mean R2", "mean body R2")
    for name, (about, steps) in runs.items():
        last = steps[max(steps)]
        settings = (f"{about['parameters']:,}", about["lr"], about["weight_decay"])
        means = (f"{mean(last, key):.3f}" for key in ("r2", "r2_body"))
        row(name, *settings, about["held_out_loss"], *means)
    for key, title in (("r2_body", "body R2"), ("r2", "R2")):
        print(f"\nMean {title} over depth while training, mean ± sd over seeds\n")
        head("family", *(f"step {s}" for s in SHOWN))
        for family in FAMILIES:
            cells = [
                over_seeds([mean(runs[f"{family}-{seed}"][1][s], key) for seed in SEEDS])
                for s in SHOWN
            ]
            row(family, *cells)
    for key, title in (("r2_body", "body R2"), ("r2", "R2")):
        for step, when in ((0, "before training"), (max(SHOWN), "after training")):
            print(f"\n{title} by depth {when}, mean ± sd over seeds\n")
            head("family", *range(8))
            for family in FAMILIES:
                profiles = [runs[f"{family}-{seed}"][1][step] for seed in SEEDS]
                row(family, *(over_seeds([p[i][key] for p in profiles]) for i in range(8)))
    print("\nAlike? Final profiles, mean ± sd over pairs of models\n")
    head(
        "pairs",
        "n",
        "correlation of body R2",
        "mean distance of body R2",
        "correlation of R2",
        "mean distance of R2",
    )
    final = {name: steps[max(steps)] for name, (_, steps) in runs.items()}
    for label, chosen in _pairs():
        row(label, len(chosen), *_alike(final, chosen, "r2_body"), *_alike(final, chosen, "r2"))
    print("\nRegimes: final body R2 by depth beside the spread of seeds\n")
    head("model", *range(8), "mean")
    seeds = [final[f"gpt2-{seed}"] for seed in SEEDS]
    means = over_seeds([mean(p, "r2_body") for p in seeds])
    row("gpt2, seeds 0-2", *(over_seeds([p[i]["r2_body"] for p in seeds]) for i in range(8)), means)
    for name in ("gpt2-lr-low", "gpt2-lr-high", "gpt2-no-decay", "gpt2-wide"):
        blocks = final[name]
        cells = (f"{b['r2_body']:.3f} ± {b['r2_body_se']:.3f}" for b in blocks)
        row(name, *cells, f"{mean(blocks, 'r2_body'):.3f}")


def _pairs() -> list[tuple[str, list[tuple[str, str]]]]:
    within = [
        (
            f"{family}: two seeds",
            [(f"{family}-{a}", f"{family}-{b}") for a, b in combinations(SEEDS, 2)],
        )
        for family in FAMILIES
    ]
    across = [
        (f"{a} and {b}: one seed", [(f"{a}-{seed}", f"{b}-{seed}") for seed in SEEDS])
        for a, b in combinations(FAMILIES, 2)
    ]
    return within + across


def _alike(
    final: dict[str, list[dict[str, float]]], chosen: list[tuple[str, str]], key: str
) -> tuple[str, str]:
    both = [([x[key] for x in final[a]], [x[key] for x in final[b]]) for a, b in chosen]
    correlations = [pearson(x, y) or 0.0 for x, y in both]
    distances = [statistics.mean(abs(u - v) for u, v in zip(x, y, strict=True)) for x, y in both]
    return over_seeds(correlations, 2), over_seeds(distances)


if __name__ == "__main__":
    main()
