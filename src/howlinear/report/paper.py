"""The figures of the paper (arXiv 2606.19379), and a run's beside them.

    result = reproduce_run("runs/reproduce-gpt2")    # made by `howlinear profile --protocol paper`
    result.name, result.notes                        # which of the paper's models, and reservations
    result.blocks[3]["r2_scalar"]                    # {"ours": , "paper": , "difference": }
    result.summary["r2_scalar"]["pearson"]

Everything is read from the files of a run, which are checked; no model is loaded. A model that the
paper did not measure has only our numbers.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from howlinear.records.fields import BlockProbe, BlockProfile, BlockSwap
from howlinear.records.files import SCHEMA
from howlinear.records.statistics import pearson
from howlinear.run.folder import RunFolder, records_of

Values = dict[int, float | None]  # by block

#: quantities that the paper reports for every block, by the names of our fields
QUANTITIES = ("r2_scalar", "r2_feature_median", "effective_rank", "delta_ppl", "bilinear_gain")
BLOCKS, WIDTH = 12, 768  # of all three models
PREDICTED = 14_859  # scored tokens: 117 windows of 128, all but the first token of each
CUT = "windows-128"
RANK = 16  # of the bilinear probe


@cache
def paper() -> dict[str, Any]:
    """The paper's figures, block by block."""
    text = resources.files("howlinear.report").joinpath("paper.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


@dataclass(frozen=True)
class Reproduction:
    """A run by the paper's protocol. `name` is the paper's model, None for a model it did not measure."""

    run: str
    name: str | None
    blocks: list[dict[str, Any]]
    notes: list[str]
    about: dict[str, Any]  # model, corpus, settings of the run

    @property
    def measured(self) -> list[str]:
        """Which of the paper's quantities this run holds."""
        return [q for q in QUANTITIES if any(q in b for b in self.blocks)]

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """Correlation and largest difference of the columns, for every quantity that both have."""
        if self.name is None:
            return {}
        return {q: _agreement([(b["index"], b[q]) for b in self.blocks]) for q in self.measured}

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "paper_model": self.name,
            **self.about,
            "summary": self.summary,
            "notes": self.notes,
            "blocks": self.blocks,
        }


def document(
    results: list[Reproduction], unreached: Mapping[str, str], command: str
) -> dict[str, Any]:
    """What `howlinear reproduce --json` prints."""
    head = {"kind": "reproduce", "schema": SCHEMA, "source": paper()["source"], "command": command}
    return {**head, "unreached": dict(unreached), "results": [r.to_dict() for r in results]}


def reproduce_run(run: str | Path) -> Reproduction:
    """A run that followed the paper's protocol, beside the paper's figures for its model."""
    folder, run = RunFolder(run), Path(run)
    data = folder.read("profile")
    about = {part: _dict(data.get(part)) for part in ("model", "corpus", "settings")}
    if about["settings"].get("protocol") != "paper":
        model = _dict(data.get("asked")).get("model")
        again = ["howlinear", "profile", *([str(model)] if model else [])]
        command = shlex.join([*again, "--protocol", "paper", "-o", f"{run}-paper"])
        raise ValueError(f"{run} does not follow the paper's protocol: run `{command}`")
    blocks = list(records_of(folder.path("profile"), data, BlockProfile).values())
    name, notes = paper_model(about["model"], blocks)
    notes += _departures(**about)
    quantities: dict[str, Values] = {
        "r2_scalar": {b.index: b.r2_scalar for b in blocks},
        "r2_feature_median": {b.index: b.r2_feature.get("median") for b in blocks},
        "effective_rank": {b.index: b.effective_rank for b in blocks},
    }
    if costs := _swap_costs(folder, notes):
        quantities["delta_ppl"] = costs
    if gains := _gains(folder, blocks, notes):
        quantities["bilinear_gain"] = gains
    return Reproduction(str(run), name, _compared(blocks, quantities, name), notes, about)


def paper_model(
    model: Mapping[str, Any], blocks: list[BlockProfile]
) -> tuple[str | None, list[str]]:
    """(name of the paper's model that this one is or None, notes on what was assumed)"""
    models, id = paper()["models"], str(model.get("id"))
    fits = all(b.d_in == WIDTH and b.index < BLOCKS for b in blocks)
    for name, known in models.items():
        if fits and id in (name, known["id"]):
            return name, []
    shape = (model.get("family"), model.get("parameters"))
    for name, known in models.items():
        if fits and shape == (known["family"], known["parameters"]):
            return name, [
                f"{id} is taken for the paper's {name}: the same architecture and "
                f"{known['parameters']:,} parameters; the weights are not checked"
            ]
    called = id.rstrip("/").split("/")[-1]
    if called in models:
        return None, [f"{id} has the name of the paper's {called}, but not its shape"]
    return None, ["the paper did not measure this model: only our numbers are shown"]


def _compared(
    blocks: list[BlockProfile], quantities: Mapping[str, Values], name: str | None
) -> list[dict[str, Any]]:
    """One row for each block: our values, the paper's and the differences."""
    theirs = paper()["models"][name] if name else {}
    rows = []
    for b in blocks:
        row: dict[str, Any] = {"index": b.index, "path": b.path, "r2": b.r2, "r2_body": b.r2_body}
        for quantity, values in quantities.items():
            ours = _number(values.get(b.index))
            known = theirs[quantity][b.index] if name else None
            difference = None if ours is None or known is None else ours - known
            row[quantity] = {"ours": ours, "paper": known, "difference": difference}
        rows.append(row)
    return rows


def _agreement(cells: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Correlation over three or more blocks that both have, and the largest difference."""
    both = [(index, cell) for index, cell in cells if cell["difference"] is not None]
    if not both:
        return {"blocks": 0, "pearson": None, "largest_difference": None, "at": None}
    at, most = max(both, key=lambda pair: abs(pair[1]["difference"]))
    ours, theirs = ([float(cell[side]) for _, cell in both] for side in ("ours", "paper"))
    return {
        "blocks": len(both),
        "pearson": pearson(ours, theirs) if len(both) > 2 else None,
        "largest_difference": most["difference"],
        "at": at,
    }


def _departures(
    model: Mapping[str, Any], corpus: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[str]:
    """The settings that differ from the paper's, in one note."""
    wanted = paper()
    odd = []
    for key, unit in (("tokens", "tokens"), ("window", "tokens a window")):
        if settings.get(key) != wanted[key]:
            odd.append(f"{settings.get(key)!s:.20} {unit} instead of {wanted[key]}")
    if settings.get("bos") != "never":
        odd.append("windows begin with BOS")
    if corpus.get("fingerprint") != wanted["text_sha256"]:
        odd.append(f"another text ({corpus.get('name')!s:.60})")
    if model.get("dtype") != "float32":
        odd.append(f"computed in {model.get('dtype')!s:.20}")
    if model.get("quantization") is not None:
        odd.append(f"weights quantised ({model['quantization']!s:.20})")
    return [f"unlike the paper: {', '.join(odd)}"] if odd else []


def _swap_costs(run: RunFolder, notes: list[str]) -> Values:
    """Perplexity that plain least squares adds, where it was measured in the paper's windows."""
    sets = run.sets("swap")
    alike = [data for data in sets if _dict(data.get("settings")).get("protocol") == CUT]
    if not alike:
        notes += [f"swap.json is left out: its protocol is not {CUT}"] if sets else []
        return {}
    swaps = records_of(run.path("swap"), alike[0], BlockSwap)
    fewest = min((b.tokens for b in swaps.values()), default=0)
    if fewest < PREDICTED:
        tokens = f"as few as {fewest} tokens, the paper's on about {PREDICTED}"
        folder = shlex.quote(str(run.folder))
        command = f"howlinear swap {folder} --tokens {PREDICTED} --all-tokens"
        notes.append(f"dPPL is measured on {tokens} (`{command}`)")
    return {index: b.delta_ppl_plain for index, b in swaps.items()}


def _gains(run: RunFolder, blocks: list[BlockProfile], notes: list[str]) -> Values:
    """Gains of the bilinear probe, as shares of the variance around one scalar mean."""
    if not (sets := run.sets("probe")):
        return {}
    probes: dict[int, dict[str, Any]] = {}
    for data in reversed(sets):  # the newest counts
        for index, record in records_of(run.path("probe"), data, BlockProbe).items():
            found = record.bilinear or {}
            if (found.get("solver"), found.get("rank")) == ("paper", RANK):
                probes[index] = found
    gains: Values = {}
    for b in blocks:
        probe = probes.get(b.index) or {}
        gain, r2, scalar = (_number(v) for v in (probe.get("gain"), b.r2, b.r2_scalar))
        if gain is not None and r2 is not None and scalar is not None and r2 < 1:
            gains[b.index] = gain * (1 - scalar) / (1 - r2)
    if not gains:
        flags = f"--kind bilinear --solver paper --rank {RANK}"
        command = f"howlinear probe {shlex.quote(str(run.folder))} {flags}"
        notes.append(f"probe.json is left out: it was not made by `{command}`")
    return gains


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and math.isfinite(value) else None
