"""The monitor measures what a profile would, and training does not notice."""

import json
import logging

import pytest
import torch
from torch import nn

import tiny
from howlinear import profile
from howlinear.profiling.monitor import LinearityCallback, LinearityMonitor
from howlinear.records.fields import MONITORED
from howlinear.records.files import read_monitor


def ids(n=96, length=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (n, length), generator=generator)


def train(steps=6, watch=None, family="gpt2", clumsy=False, **options):
    """Losses of a few steps with dropout, and the model."""
    torch.manual_seed(0)
    model = tiny.model(family, resid_pdrop=0.1).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = LinearityMonitor(model, watch, **options) if watch is not None else None
    losses = []
    for step in range(steps):
        if monitor is not None:
            monitor.step(step)
        if clumsy:
            torch.rand(1)
        batch = ids(8, 16, seed=step)
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.finish(steps)
    return losses, model, monitor


def test_losses_are_the_same_to_the_bit_and_would_not_be_with_a_clumsy_monitor():
    alone, *_ = train()
    watched, _, monitor = train(watch=ids(), every=2, max_overhead=None)
    assert watched == alone
    assert [row["step"] for row in monitor.rows] == [0, 2, 4, 6]
    assert train(clumsy=True)[0] != alone  # dropout draws from the same numbers


def test_the_last_row_is_a_fresh_profile_of_the_weights_that_came_out(tmp_path):
    _, model, _ = train(watch=ids(), every=3, path=tmp_path / "m.jsonl")
    assert model.training  # as it was
    fresh = profile(model.eval(), ids())
    _, rows = read_monitor(tmp_path / "m.jsonl")
    for kept, b in zip(rows[-1]["blocks"], fresh.blocks, strict=True):
        assert kept == {name: getattr(b, name) for name in MONITORED}
    assert rows[0]["blocks"] != rows[-1]["blocks"]


def test_what_is_logged_has_the_names_people_filter_by():
    monitor = LinearityMonitor(tiny.model("gpt2"), ids(), every=10)
    logs = monitor.step(0)
    assert logs["linearity/block_01/r2"] == monitor.latest.blocks[1].r2
    assert set(logs) > {"linearity/r2_mean", "linearity/block_00/r2_se", "linearity/overhead"}
    assert monitor.step(5) is None
    assert all(isinstance(v, float) for v in logs.values())


def test_measurements_that_would_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("howlinear.profiling.monitor.time.perf_counter", lambda: clock[0])
    monitor = LinearityMonitor(tiny.model("gpt2"), ids(), every=1, max_overhead=0.1)
    monkeypatch.setattr(
        "howlinear.profiling.monitor.profile",
        lambda *a, **k: clock.__setitem__(0, clock[0] + 1) or real,
    )
    real = profile(tiny.model("gpt2"), ids())
    measured = []
    for step in range(60):
        if monitor.step(step) is not None:
            measured.append(step)
        clock[0] += 1  # a second of training
    # each takes a second, a tenth of training: one after every ten seconds, the first one free
    assert measured == [0, 20, 30, 40, 50]
    assert monitor.overhead <= 0.1
    assert monitor.skipped == 59 - 4


def test_steps_can_be_named():
    monitor = LinearityMonitor(tiny.model("gpt2"), ids(), every=(1, 4), max_overhead=None)
    assert [s for s in range(8) if monitor.step(s) is not None] == [0, 1, 4]


def test_a_training_that_goes_on_goes_on_with_the_file(tmp_path):
    path = tmp_path / "monitor.jsonl"
    for start in (0, 4):
        model = tiny.model("gpt2")
        monitor = LinearityMonitor(model, ids(), every=2, max_overhead=None, path=path)
        for step in range(start, start + 7):
            monitor.step(step)
    header, rows = read_monitor(path)
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10]
    assert header["tokens"] == 96 * 64
    with pytest.raises(ValueError, match="another text, model or setting"):
        LinearityMonitor(model, ids(seed=1), path=path)
    assert LinearityMonitor(model, ids(), path=path).rows == rows
    other = json.dumps({**header, "cells": header["cells"][:-1]})  # the same text in other folds
    path.write_text(path.read_text().replace(json.dumps(header), other))
    with pytest.raises(ValueError, match="another text, model or setting"):
        LinearityMonitor(model, ids(), path=path)
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="not a readable monitor file"):
        LinearityMonitor(model, ids(), path=path)


def test_weights_that_blow_up_are_told_and_training_goes_on(tmp_path, caplog):
    model = tiny.model("gpt2")
    monitor = LinearityMonitor(model, ids(), every=1, max_overhead=None, path=tmp_path / "m.jsonl")
    monitor.step(0)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.fill_(float("nan"))
    with caplog.at_level(logging.WARNING):
        assert set(monitor.step(1)) == {"linearity/overhead"}
    assert "step 1 is not measured: block 1" in caplog.text
    assert "not finite" in read_monitor(tmp_path / "m.jsonl")[1][1]["problem"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "at least 1 step"),
        ({"max_overhead": 0.0}, "positive"),
        ({"at": "nothing"}, "matches no block"),
    ],
)
def test_mistakes_are_told_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        LinearityMonitor(tiny.model("gpt2"), ids(), **options)


def test_too_little_text_and_a_model_without_blocks_are_told_at_once():
    with pytest.raises(ValueError, match="too little text"):
        LinearityMonitor(tiny.model("gpt2"), ids(2, 8))
    with pytest.raises(ValueError, match="no feed-forward blocks in Linear"):
        LinearityMonitor(nn.Linear(3, 3), ids())


# -- transformers' Trainer


def trainer_of(folder, **settings):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in ids(32, 16, seed=3)]
    settings = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"} | settings
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    return Trainer(tiny.model("gpt2", resid_pdrop=0.1), arguments, train_dataset=rows)


def losses_of(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_callback_logs_through_the_trainer_and_changes_nothing(tmp_path):
    pytest.importorskip("accelerate")
    plain = trainer_of(tmp_path / "a")
    plain.train()
    watched = trainer_of(tmp_path / "b")
    callback = LinearityCallback(watched, ids(), every=2, max_overhead=None)
    watched.add_callback(callback)
    watched.train()
    assert losses_of(watched) == losses_of(plain)
    seen = [row for row in watched.state.log_history if "linearity/block_01/r2" in row]
    assert [row["step"] for row in seen] == [0, 2, 4]
    _, rows = read_monitor(tmp_path / "b" / "monitor.jsonl")
    assert rows[-1]["step"] == 4
    fresh = profile(watched.model.eval(), ids())
    assert [b["r2"] for b in rows[-1]["blocks"]] == [b.r2 for b in fresh.blocks]
    assert seen[-1]["linearity/block_01/r2"] == fresh.blocks[1].r2
    json.dumps(watched.state.log_history)  # what the trainer saves with a checkpoint


def test_a_callback_on_a_model_without_blocks_is_one_clear_line(tmp_path):
    pytest.importorskip("accelerate")
    trainer = trainer_of(tmp_path)
    trainer.model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="no feed-forward blocks in Linear"):
        LinearityCallback(trainer, ids())
