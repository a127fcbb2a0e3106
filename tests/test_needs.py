"""How long a compression takes: counted from shapes, then from the steps that are done."""

import time

import pytest

import tiny
from howlinear import blocks
from howlinear.compression import needs
from howlinear.compression.needs import TimeLeft, prediction_work, steps_of
from howlinear.compression.prices import OPTION_TOKENS
from howlinear.models.units import hidden_count

SHAPES = {"tokens": 4096, "length": 64, "held_out": 512}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_left_follows_the_speed_of_the_steps_that_are_done(clock, monkeypatch):
    monkeypatch.setattr(needs, "PRIOR", 0.0)
    left = TimeLeft([("a", 10.0), ("b", 20.0), ("c", 20.0), ("b", 50.0)], 1.0)
    labels, said = [], []
    begin = left.following(lambda label, tokens: labels.append((label, tokens)), said.append)
    assert left.seconds == 100
    begin("a", 7)
    clock[0] += 20  # half as fast as expected
    begin("b", 8)
    assert left.seconds == 2 * 90
    clock[0] += 100  # 30 units in 120 seconds
    begin("not expected", 9)
    clock[0] += 1000
    begin("b, and more", 1)  # c is left out
    assert left.seconds == 4 * 50
    clock[0] += 60
    begin("b, and more still", 1)  # the same step goes on
    clock[0] += 60
    begin("d", 1)
    assert left.rate == pytest.approx((120 + 120) / 80)
    assert left.seconds == 0
    assert labels == [
        ("a", 7),
        ("b", 8),
        ("not expected", 9),
        ("b, and more", 1),
        ("b, and more still", 1),
        ("d", 1),
    ]
    assert said == ["about 3 min to the end"]  # not twice or half of what was said before


def test_one_slow_step_does_not_decide_what_is_said(clock):
    left, said = TimeLeft([("a", 10.0), ("b", 85.0), ("c", 5.0)], 1.0), []
    begin = left.following(lambda *_: None, said.append)
    begin("a", 1)
    clock[0] += 25  # 2.5 times as slow
    begin("b", 1)
    assert left.rate == (25 + 0.3 * 100) / (10 + 0.3 * 100)
    assert said == []
    clock[0] += 1000
    begin("c", 1)
    assert left.rate == (1025 + 30) / (95 + 30)
    assert said == ["about 40 s to the end"]
    begin("d", 1)
    assert len(said) == 1  # no time is left


def test_multiply_adds_of_a_search_and_of_named_blocks():
    model = tiny.model("llama")
    hidden = {b: hidden_count(model, b) for b in blocks(model)}
    named = steps_of(model, hidden, **SHAPES, fits=(), weighed="", priced="")
    assert [label for label, _ in named] == ["refitting", "measuring"]
    lower = steps_of(model, hidden, **SHAPES, fits=(), weighed="matrices", priced="")
    assert [label for label, _ in lower] == ["weighing errors", *(label for label, _ in named)]
    searched = steps_of(model, hidden, **SHAPES, fits=(0.5, 1.0), sizes=2)
    assert [label for label, _ in searched] == [
        *("weighing errors", "fitting options", "pricing options"),
        *("refitting", "measuring", "refitting", "measuring"),
        *("refitting", "measuring", "measuring"),
    ]
    refits = [work for label, work in searched if label == "refitting"]
    assert refits == [refits[1] / 2, dict(named)["refitting"], refits[1]]
    head = model.get_output_embeddings().weight.numel()
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    forward = weights + 2 * 64 * model.config.hidden_size * len(hidden)  # and attention
    assert prediction_work(model, 64) == forward + head
    assert dict(searched)["weighing errors"] == 2 * 4096 * (
        forward + head
    )  # 64 windows of 64 tokens
    assert dict(searched)["measuring"] == 2 * 512 * (forward + head)
    assert 2 * 4096 * forward < refits[1]
    block, m = next(iter(hidden.items()))
    columns, rows = block.d_in + m, 4096
    each = rows * columns * (columns / 2 + block.d_out) + 6 * columns**3
    assert dict(searched)["fitting options"] == rows * forward + len(hidden) * each
    swaps = dict(steps_of(model, hidden, **SHAPES, fits=(), priced="swaps"))
    assert swaps["measuring options"] == 3 * len(hidden) * OPTION_TOKENS * (forward + head)
    halved = dict(steps_of(model, hidden, **SHAPES, fits=(), ranks=2))
    assert halved["refitting"] == refits[1] / 2
