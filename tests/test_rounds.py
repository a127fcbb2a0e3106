"""Swaps in rounds: on some positions, until decided, adding up over calls; several blocks at once."""

import copy
import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from howlinear import blocks, compare, profile, swapped
from howlinear.losses.positions import ALIKE, best_number, scored_positions
from howlinear.losses.protocols import EvalProtocol, scored_batches
from howlinear.losses.sweeps import Sweeper
from howlinear.models.cutting import spread_order
from howlinear.profiling.profiler import Profile
from howlinear.records.fields import BlockSwap
from howlinear.run.folder import RunFolder
from howlinear.swapping import choosing
from howlinear.swapping.maps import RunMaps
from howlinear.swapping.rounds import Rounds, Tally, next_look
from howlinear.swapping.swaps import SwapOptions, measure_swaps

CUT = EvalProtocol.parse("windows-12")
EVERY = SwapOptions(0, positions=5, all_tokens=True)


def ids(n, seed):
    return torch.randint(3, 49, (n, 12), generator=torch.Generator().manual_seed(seed))


@functools.cache
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds") / "run"
    profile(model(), ids(400, 0), batch_size=64).save(folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A run without swaps, of the test's own."""
    for name in ("maps", "moments", "profile.json"):
        (tmp_path / name).symlink_to(made / name)
    return tmp_path


def swaps(run, windows, options=EVERY, **more):
    return measure_swaps(
        model(), run, choose=ids(8, 1), report=ids(40, 2)[:windows], options=options, **more
    )


def obvious(change, windows):
    """The whole model with blocks replaced, on all positions."""
    return compare(model(), lambda: swapped(model(), change), windows)


def test_sums_of_other_weights_and_of_other_windows_do_not_add_up(run):
    swaps(run, 8).save(run)
    other = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    report = ids(40, 2)[:8]
    changed = torch.cat([report[:1], ids(7, 9)])  # the first window is the same
    options = {"choose": ids(8, 1), "options": EVERY}
    for net, windows in ((other, report), (model(), changed)):
        fresh = measure_swaps(
            net, run, report=windows, **options | {"options": replace(EVERY, overwrite=True)}
        )
        again = measure_swaps(net, run, report=windows, **options)
        assert [b.kl for b in again.blocks] == [b.kl for b in fresh.blocks]


# -- positions


def test_positions_are_drawn_at_random_and_belong_to_their_window():
    (whole,) = scored_batches(ids(6, 0), CUT)
    (some,) = scored_batches(ids(6, 0), CUT, positions=4)
    assert some.counted.sum(1).tolist() == [4] * 6
    assert bool((whole.counted | ~some.counted).all())
    assert len({tuple(row.tolist()) for row in some.counted}) > 1
    (later,) = scored_batches(ids(6, 0)[2:], CUT, positions=4, first=2)  # a later round
    assert torch.equal(later.counted, some.counted[2:])
    (most,) = scored_batches(ids(6, 0), CUT, positions=99)
    assert torch.equal(most.counted, whole.counted)
    many = torch.cat([b.counted for b in scored_batches(ids(2000, 0), CUT, positions=4)]).double()
    share, sd = 4 / 11, math.sqrt(4 / 11 * 7 / 11 / 2000)
    assert many.mean(0).tolist() == pytest.approx([share] * 11, abs=4 * sd)


def test_scores_of_some_positions_are_those_of_the_whole_model():
    """Against the model's own logits at these positions."""
    at = blocks(model())
    maps = [(b, lambda x: 0.5 * x) for b in at]
    (batch,) = scored_batches(ids(6, 3), CUT, positions=4)
    found = Sweeper(model(), at).run(maps, ids(6, 3), protocol=CUT, positions=4)
    with torch.no_grad():
        p = model()(ids(6, 3)).logits[:, :-1][batch.counted].double().log_softmax(-1)
        for cost in found:
            with swapped(model(), {cost.block: maps[0][1]}):
                q = model()(ids(6, 3)).logits[:, :-1][batch.counted].double().log_softmax(-1)
            want = float((p.exp() * (p - q)).sum(-1).mean())
            assert cost.change.tokens == 24
            assert cost.change.kl == pytest.approx(want, rel=1e-4)


def test_the_number_of_positions_is_the_best_for_a_fixed_amount_of_work():
    def variance(m, ratio):  # of a mean, times the work
        return (ALIKE + (1 - ALIKE) / m) * (ratio + m)

    for ratio in (10.0, 240.0, 3000.0):
        best = best_number(ratio)
        assert all(variance(best, ratio) <= variance(best + d, ratio) for d in (-2, 2))
    long = EvalProtocol.parse("windows-4096")
    wide, narrow = (tiny.model("llama", vocab_size=v) for v in (4000, 50))
    assert scored_positions(wide, long) < scored_positions(narrow, long)
    weights = [  # multiply-adds of a token, besides attention to 8 tokens
        p.numel() for n, p in wide.named_parameters() if "layers" in n and p.ndim == 2
    ]
    ratio = sum(weights) * 4096 / 2 / (4000 * wide.config.hidden_size)
    assert scored_positions(wide, long) == pytest.approx(best_number(ratio), rel=0.1)
    assert scored_positions(narrow, EvalProtocol.parse("windows-8")) == 7  # all there are


# -- windows


@pytest.mark.parametrize("n", [1, 2, 37, 100])
def test_every_beginning_of_the_order_is_spread(n):
    order = spread_order(n)
    assert sorted(order) == list(range(n))
    for m in range(1, n + 1):
        gaps = np.diff([0, *sorted(order[:m]), n])
        assert max(gaps) <= 4 * n / m + 1  # at random, log m times as much


def test_looks_double():
    looks = [next_look(n) for n in (0, 7, 8, 9, 16, 33, 1000)]
    assert looks == [8, 8, 16, 16, 32, 64, 1024]


def test_decided_swaps_stop_and_others_take_what_is_left(run):
    result = swaps(run, 40, SwapOptions(0, positions=5, safe=0.03))
    taken = {b.index: b.windows for b in result.blocks}
    assert all(b.tokens == 5 * b.windows for b in result.blocks)
    assert set(taken.values()) <= {8, 16, 32, 40}
    for b in result.blocks:
        assert (b.verdict == "undecided") <= (b.windows == 40)
    nothing = swaps(run, 40, SwapOptions(0, positions=5, safe=1e-9))  # everything costs more
    assert {b.verdict for b in nothing.blocks} == {"costly"}
    assert {b.windows for b in nothing.blocks} == {8}
    everything = swaps(run, 40, SwapOptions(0, positions=5, safe=0.9))
    assert {(b.verdict, b.windows) for b in everything.blocks} == {("safe", 16)}


# -- adding up


def numbers(result):
    return [{k: v for k, v in b.to_dict().items() if k != "verdict"} for b in result.blocks]


def test_more_tokens_measure_further_windows_alone_and_add_up(run, monkeypatch):
    swaps(run, 16).save(run)
    ran, real = [], Sweeper.run

    def watched(self, variants, windows, **options):
        ran.append((len(variants), len(windows["input_ids"]), options["first"]))
        return real(self, variants, windows, **options)

    monkeypatch.setattr(Sweeper, "run", watched)
    more = swaps(run, 40)
    assert ran == [(3, 16, 16), (3, 8, 32)]
    more.save(run)
    ran.clear()
    assert numbers(swaps(run, 40)) == numbers(more) == numbers(swaps(run, 16))  # nothing is run
    assert ran == []
    again = swaps(run, 40, SwapOptions(0, positions=5, all_tokens=True, overwrite=True))
    assert len(ran) == 4
    assert numbers(again) == numbers(more)  # to the bit: sums in the file are exact
    (only,) = RunFolder(run).sets("swap")
    assert [b["windows"] for b in only["blocks"]] == [40] * 3


def test_an_interrupted_sweep_goes_on_from_its_last_round(run):
    class Stop(BaseException):
        pass

    def stop(result):
        result.save(run)
        if result.blocks[0].windows == 16:
            raise Stop

    with pytest.raises(Stop):
        swaps(run, 40, after_round=stop)
    half = RunFolder(run).blocks("swap", BlockSwap)
    assert {b.windows for b in half.values()} == {16}
    whole = swaps(run, 40, SwapOptions(0, positions=5, all_tokens=True, overwrite=True))
    assert numbers(swaps(run, 40)) == numbers(whole)


def test_blocks_and_baselines_add_to_what_is_there(run):
    swaps(run, 16, at="0").save(run)
    swaps(run, 16, SwapOptions(0, positions=5, baselines=True, all_tokens=True), at="1").save(run)
    swaps(run, 24, at="1-2").save(run)  # without baselines: theirs stay as they were
    found = RunFolder(run).blocks("swap", BlockSwap)
    assert {i: b.windows for i, b in found.items()} == {0: 16, 1: 24, 2: 24}
    assert [found[i].kl_zero is None for i in (0, 1, 2)] == [True, False, True]
    ways = RunFolder(run).read("swap")["sums"]["1"]
    assert {name: tally["windows"] for name, tally in ways.items()} == {
        "chosen": 24,
        "zero": 16,
        "mean": 16,
    }
    other = measure_swaps(model(), run, choose=ids(8, 1), report=ids(8, 9), options=EVERY)
    other.save(run)
    assert len(RunFolder(run).sets("swap")) == 2  # other windows: both stay
    swaps(run, 24, SwapOptions(0, positions=5, safe=0.9), at="0").save(run)
    newest = RunFolder(run).sets("swap")[0]
    assert newest["settings"]["safe"] == 0.9  # another limit measures nothing again
    assert {b["index"]: b["verdict"] for b in newest["blocks"]} == dict.fromkeys(range(3), "safe")


def test_sums_from_a_file_are_not_trusted(run):
    swaps(run, 16).save(run)
    path = run / "swap.json"
    good = path.read_text()
    for change in (
        {"windows": 0},
        {"sums": [[0, 1, 2]]},
        {"sums": []},
        {"sums": [[-1, 1, 1, 1, 1, 1]]},
        {"errors": [1]},
        {"windows": "16"},
    ):
        data = json.loads(good)
        data["sums"]["1"]["chosen"] |= change
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"^the sums of block 1 [^\n]* are damaged"):
            swaps(run, 16)


def test_a_tally_reads_back_to_the_bit():
    at = blocks(model())[:1]
    rounds = Rounds(Sweeper(model(), at), ids(8, 3), CUT, 5)
    (tally,) = rounds.measure({0: (at[0], lambda x: x)}, {}, lambda *_: False).values()
    back = Tally.from_dict(json.loads(json.dumps(tally.to_dict())), at[0], CUT)
    assert back.windows == 8
    assert torch.equal(back.change.sums, tally.change.sums)
    assert torch.equal(back.cost.errors, tally.cost.errors)


# -- several blocks at once


def test_blocks_together_are_compared_with_the_sum_of_single_swaps(run):
    result = swaps(run, 24, SwapOptions(0, together=(0, 2)), at="1")
    assert [b.index for b in result.blocks] == [0, 1, 2]
    (found,) = result.together
    both = {b: result.maps[b.index] for b in blocks(model()) if b.index in (0, 2)}
    windows = ids(40, 2)[:24]
    joint = obvious(both, windows)
    alone = [obvious({b: m}, windows) for b, m in both.items()]
    assert found["blocks"] == [0, 2]
    assert found["kl"] == pytest.approx(joint.kl, rel=1e-4)
    assert found["delta_nll"] == pytest.approx(joint.delta_nll, rel=1e-3, abs=1e-6)
    gap = joint.divergence - sum(c.divergence for c in alone)
    assert found["kl_gap"] == pytest.approx(
        float(gap.sum() / joint.counts.sum()), rel=1e-3, abs=1e-7
    )
    n = joint.counts.numpy()
    rest = gap.numpy() - float(gap.sum() / joint.counts.sum()) * n
    se = math.sqrt(len(n) / (len(n) - 1) * (rest**2).sum()) / n.sum()
    assert found["kl_gap_se"] == pytest.approx(se, rel=1e-3)
    assert found["kl_sum"] == pytest.approx(sum(c.kl for c in alone), rel=1e-4)
    result.save(run)
    swaps(run, 24, SwapOptions(0), at="1").save(run)
    assert RunFolder(run).read("swap")["together"] == result.together
    with pytest.raises(ValueError, match="`together`"):
        SwapOptions(together=(3,))


# -- choosing units


class Planted:
    """Maps of one block with sink units; what is measured is read from `costs`."""

    weighting = "none"

    def __init__(self, errors):
        self.errors = errors

    def ladder(self, _):
        return list(self.errors)

    def squared_error(self, _, k):
        return self.errors[k]


@pytest.mark.parametrize(
    ("costs", "errors", "k"),
    [
        ({0: 5.0, 1: 0.21, 2: 0.20, 4: 0.20}, {0: 1.0, 1: 0.9, 2: 0.5, 4: 0.4}, 1),  # 1 is close
        ({0: 5.0, 1: 2.0, 2: 0.20, 4: 0.20}, {0: 1.0, 1: 0.9, 2: 0.9, 4: 0.9}, 2),
        ({0: 0.21, 1: 0.2, 2: 0.2, 4: 0.2}, {0: 1.0, 1: 0.1, 2: 0.1, 4: 0.1}, 0),
        ({}, {0: 1.0, 1: 0.2, 2: 0.1, 4: 0.095}, 2),  # no estimate: the squared error
        ({}, {0: 1.0, 1: 0.99, 2: 0.985, 4: 0.98}, 0),  # units remove too little of it
        ({0: 5.0, 4: 0.2}, {0: 1.0, 1: 0.99, 2: 0.985, 4: 0.98}, 0),
        ({}, {0: 1.0}, 0),  # no sink units
        ({0: 1.0}, {0: 1.0}, 0),
    ],
)
def test_the_estimate_suggests_the_fewest_units_that_do(costs, errors, k):
    assert choosing.suggested(None, Planted(errors), lambda *_: costs) == k


def test_a_suggestion_is_kept_only_if_the_measurement_confirms_it(run, monkeypatch):
    monkeypatch.setattr(choosing, "MIN_GAIN", 0.0)
    at, folder = blocks(model()), run
    maps = RunMaps(model(), folder, Profile.load(folder))
    assert all(len(maps.ladder(b)) > 1 for b in at)
    rounds = Rounds(Sweeper(model(), at), ids(8, 1), CUT)
    suggestion = {0: 1.0, 1: 0.1}  # a random model has no sinks: one unit gains nothing or little
    kept = choosing.chosen_units(at, maps, rounds, lambda *_: suggestion)
    for b in at:
        one, plain = (obvious({b: maps.map(b, k)}, ids(8, 1)) for k in (1, 0))
        gain, se = one.gain_over(plain, by="divergence")
        assert kept[b.index] == (gain > 2.364624 * se)  # Student's t, 7 degrees of freedom
    assert choosing.chosen_units(at, maps, rounds, lambda *_: {0: 0.1, 1: 1.0}) == {
        0: 0,
        1: 0,
        2: 0,
    }
