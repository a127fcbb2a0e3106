"""How long a compression takes: counted from shapes, then from the steps that are done."""

import time

import pytest

import tiny
from howlinear import blocks
from howlinear.compression.needs import Course, steps_of
from howlinear.compression.refitting import SURVEYED
from howlinear.losses.readout import Readout
from howlinear.models.units import hidden_count

SHAPES = {"tokens": 4096, "length": 64, "held_out": 512}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_left_follows_the_speed_of_the_steps_that_are_done(clock):
    course = Course([("a", 10.0), ("b", 20.0), ("c", 20.0), ("b", 50.0)], 1.0)
    told = []
    begin = course.telling(lambda label, tokens: told.append((label, tokens)))
    assert course.left == 100
    begin("a", 7)
    clock[0] += 20  # half as fast as expected
    begin("b", 8)
    assert course.left == 2 * 90
    clock[0] += 10  # 30 units in 30 seconds
    begin("not expected", 9)
    clock[0] += 1000
    begin("b, and more", 1)  # c is skipped
    assert course.left == 50
    assert [tokens for _, tokens in told] == [7, 8, 9, 1]
    assert [label for label, _ in told] == [
        "a, about 2 min to the end",
        "b, about 3 min to the end",
        "not expected",
        "b, and more, about 50 s to the end",
    ]


def test_multiply_adds_of_a_search_and_of_named_blocks():
    model = tiny.model("llama")
    at = {b: hidden_count(model, b) for b in blocks(model)}
    named = steps_of(model, at, **SHAPES, fits=(1.0,), searched=False)
    assert [label for label, _ in named] == [
        "the model writes text",
        "refitting",
        "measuring",
        "measuring",
    ]
    more = {"written": 2048, "healed": 1024}
    searched = steps_of(model, at, **SHAPES, fits=(0.5, 1.0), searched=True, **more)
    by_label = dict(searched)
    head = model.get_output_embeddings().weight.numel()
    assert Readout(model).vocabulary * model.config.hidden_size == head
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    attention = 2 * 64 * model.config.hidden_size * len(at)
    assert by_label["the model writes text"] == 2048 * (weights + attention + head)
    assert by_label["healing"] == 4 * 1024 * (weights + attention + head)
    halves = [work for label, work in searched if label == "refitting"]
    assert halves == [dict(named)["refitting"] / 2, dict(named)["refitting"]]
    assert 2 * 4096 * (weights + attention) < halves[1]
    rows = SURVEYED * max(b.d_in + hidden for b, hidden in at.items())
    products = by_label["fitting options"] - rows * (weights + attention)
    block, hidden = next(iter(at.items()))
    columns = block.d_in + hidden
    each = rows * columns * (columns / 2 + block.d_out) + 6 * columns**3
    assert products == len(at) * each
