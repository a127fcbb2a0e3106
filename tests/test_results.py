"""What functions hand back: plain values that JSON holds, and a line that a person reads."""

import json
import math

import pytest
import torch

import shown
import tiny
from howlinear import Affine, LinearityMonitor, Moments, compare_runs, merge_runs, profile, score
from howlinear import fit as fit_map
from howlinear.compression.compress import Compression
from howlinear.controls.checkpoints import Training
from howlinear.controls.results import Control
from howlinear.linear.affine import Factored, UnitMap
from howlinear.losses.perplexity import Comparison
from howlinear.losses.protocols import EvalProtocol
from howlinear.losses.speed import Speed, SpeedComparison
from howlinear.losses.sweeps import swap_costs
from howlinear.probing.results import Probes
from howlinear.profiling.comparing import RunComparison
from howlinear.profiling.gathering import Shard
from howlinear.profiling.profiler import Profile
from howlinear.swapping.expert_swaps import ExpertSwaps
from howlinear.swapping.swaps import Swaps

ABOUT = {"model": {"id": "gpt2\x1b[31m"}, "corpus": {"name": "a text"}}
IDS = torch.randint(3, tiny.VOCABULARY - 1, (160, 32), generator=torch.Generator().manual_seed(0))


def comparison(more=0.0):
    counts = torch.full((4,), 31.0, dtype=torch.float64)
    nll = counts * 4
    return Comparison(EvalProtocol.parse("windows-32"), counts, nll, nll + more, counts, counts)


def speed():
    settings = {"batch": 1, "length": 64, "new_tokens": 8}
    return Speed(2_320_000, 10**7, None, 10**9, (0.5, 0.6), None, settings, dict(ABOUT))


def profiled(v=shown.USUAL):
    return Profile(shown.profile(v)[2], {}, {}, [], {"tokens": 9}, dict(ABOUT))


def blocks(name):
    return shown.RESULTS[name](shown.USUAL)[2]


def pair():
    return shown.compare(2)(shown.USUAL)[1]["pairs"]


RESULTS = {
    "profile": lambda: profiled(),
    "profile of nothing": lambda: profiled(shown.NAN),
    "shard": lambda: Shard([{"index": 0}], {"shard": (1, 8), "read": 3712}, dict(ABOUT)),
    "swap": lambda: Swaps(
        blocks("swap"), {}, {}, comparison().original, {"safe": 0.03}, {}, [], about=dict(ABOUT)
    ),
    "encoder": lambda: Swaps(blocks("swap"), {}, {}, None, {}, {}, [], about=dict(ABOUT)),
    "swap-experts": lambda: ExpertSwaps(
        blocks("swap --experts"), comparison().original, {}, dict(ABOUT)
    ),
    "probe": lambda: Probes(blocks("probe healing"), {}, None, {}, [], dict(ABOUT)),
    "compare": lambda: RunComparison(["a", "b"], [profiled(), profiled()], pair(), [], []),
    "compress": lambda: Compression(
        blocks("compress"), {}, comparison(31.0), 9, 99, 999, [], {}, [], dict(ABOUT)
    ),
    "control": lambda: Control("matched", [{"r2": math.nan}], {}, {}, [], dict(ABOUT)),
    "checkpoints": lambda: Training({"model": "gpt2"}, [{"name": "step1", "blocks": []}] * 2),
    "bench": speed,
    "bench of two": lambda: SpeedComparison(speed(), speed(), dict(ABOUT)),
}
SAID = {
    "profile": "<Profile of gpt2\\x1b[31m: 2 blocks, R2 0.887 (block 0) to 0.887 (block 0)>",
    "profile of nothing": "<Profile of gpt2\\x1b[31m: 2 blocks, R2 ->",
    "shard": "<Shard of gpt2\\x1b[31m: 1 of 8, 1 block, 3712 tokens>",
    "swap": "2 blocks, each replaced alone, KL 0.8870 (block 0) to 0.8870 (block 0) nats>",
    "encoder": "2 blocks, each replaced alone, cosine 0.887 (block 0)",
    "swap-experts": "1 expert, each replaced alone, perplexity +4.60 (block 3.shared)",
    "probe": "3 blocks; healing>",
    "compare": "<RunComparison: 2 runs; mean shift of R2 runs/",
    "compress": "2 of 2 blocks replaced, 9 parameters removed, perplexity +93.82>",
    "control": "matched, 1 block>",
    "checkpoints": "<Training: 2 checkpoints (step1 to step1), 0 blocks>",
    "bench": "prefill 117 tokens/s, 2.32M parameters>",
    "bench of two": "<SpeedComparison of gpt2\\x1b[31m: prefill: ",
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_plain_values_and_a_line(name):
    result = RESULTS[name]()
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data  # no tuple, no NaN, no tensor
    assert list(data)[:2] == ["kind", "schema"]
    line = repr(result)
    assert SAID[name] in line
    assert line.isprintable()
    assert len(line) < 200


def test_what_functions_of_the_library_hand_back(tmp_path):
    torch.manual_seed(0)
    model = tiny.model("llama")
    halves = [profile(model, part, folds=2) for part in (IDS[:80], IDS[80:])]
    for name, found in zip("ab", halves, strict=True):
        found.about.update(model={"id": "tiny"}, corpus={"name": name, "fingerprint": name})
        found.settings.update(window=32)
        found.save(tmp_path / name)
        assert json.loads((tmp_path / name / "profile.json").read_text()) == found.to_dict()
    folders = [tmp_path / "a", tmp_path / "b"]
    costs = swap_costs(model, {0: halves[0].maps[0]}, IDS[:4])
    monitor = LinearityMonitor(model, IDS, folds=2, path=tmp_path / "m.jsonl")
    monitor.step(0)
    for result in (halves[0], compare_runs(folders), merge_runs(folders, tmp_path / "c"), *costs):
        json.dumps(result.to_dict(), allow_nan=False)
    header, *rows = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert monitor.to_dict() == header | {"rows": rows}
    assert costs[0].to_dict()["change"]["delta_ppl"] == costs[0].change.delta_ppl
    said = [repr(x) for x in (halves[0], costs[0], costs[0].change, monitor, halves[0].maps[0])]
    for line, begin in zip(
        said, ("<Profile of tiny:", "<SwapCost of block 0", "<Comp"), strict=False
    ):
        assert line.startswith(begin)
    assert all(len(line) < 250 and "tensor" not in line for line in said)
    assert "1 measurements; at step 0 R2" in said[3]


def test_maps_and_moments_say_their_size():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    moments = Moments(3, 2)
    moments.update(x, x[:, :2])
    assert repr(moments) == "<Moments of 64 rows, 3 to 2>"
    affine = fit_map(moments)
    assert repr(affine) == "<Affine map of 3 to 2, inputs of rank 3>"
    assert repr(score(affine, moments)) == "<Score on 64 rows: R2 1.0000>"
    factored = Factored(torch.zeros(1, 3), torch.zeros(2, 1), torch.zeros(2))
    assert repr(factored) == "<Factored map of 3 to 2, rank 1>"
    units = UnitMap(Affine(torch.zeros(2, 3), torch.zeros(2), 3), (7,), torch.zeros(2, 1), None)
    assert repr(units) == "<<Affine map of 3 to 2, inputs of rank 3> beside 1 hidden units>"
