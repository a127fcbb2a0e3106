"""The time that a measurement still takes, by what it took so far."""

import pytest

from howlinear.run.work import Steps


def test_nothing_is_said_before_the_first_step():
    steps = Steps({"short": 2}, {"short": 1.0})
    assert steps.left is None
    assert str(steps) == ""


def test_kinds_that_were_not_done_are_guessed_by_their_size_and_then_corrected():
    steps = Steps({"short": 2, "long": 2}, {"short": 1.0, "long": 10.0})
    steps.done("short", 3.0)
    assert steps.left == pytest.approx(3 + 2 * 30)
    assert str(steps) == ", about 60 s left"
    steps.done("long", 12.0)  # shorter than guessed
    assert steps.left == pytest.approx(3 + 12)


def test_several_steps_at_once_and_steps_that_are_not_needed():
    steps = Steps({"block": 5}, {"block": 1.0})
    steps.done("block", 60.0, 3)
    assert steps.left == pytest.approx(40)
    steps.skip("block")
    assert steps.left == pytest.approx(20)
    steps.done("block", 20.0)
    assert str(steps) == ""  # nothing is to come
