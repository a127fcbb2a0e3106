"""Whatever a user passes becomes the same batches; one loop runs them and hands out rows."""

from collections import UserDict, UserList

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tiny
from howlinear.linear.folds import CELL
from howlinear.models import bfloat16
from howlinear.models.families import blocks
from howlinear.models.forward import Batch, Forward, StopForward, as_windows, run_rows
from howlinear.models.hooks import tap
from howlinear.run.work import Ranks, Work

IDS = torch.arange(5 * 6).view(5, 6) % 40
MASK = torch.ones_like(IDS)
ROWS = [{"input_ids": row.tolist(), "attention_mask": [1] * 6} for row in IDS]

# What is passed -> how many windows are in each batch of at most 2, and is all of it in memory?
PASSED = {
    "a tensor": (IDS, [2, 2, 1], True),
    "int32": (IDS.int(), [2, 2, 1], True),
    "numpy": (IDS.numpy(), [2, 2, 1], True),
    "numpy uint16": (IDS.numpy().astype(np.uint16), [2, 2, 1], True),
    "lists": (IDS.tolist(), [2, 2, 1], True),
    "a list of windows": (list(IDS), [2, 2, 1], True),
    "a list of numpy windows": (list(IDS.numpy()), [2, 2, 1], True),
    "a dataset's column": (UserList(IDS.tolist()), [2, 2, 1], True),
    "a numpy array of lists": (np.array([*IDS.tolist(), None], object)[:5], [2, 2, 1], True),
    "a data frame's column": (pd.Series(list(IDS.numpy())), [2, 2, 1], True),
    "columns": ({"input_ids": UserList(IDS.tolist()), "attention_mask": MASK}, [2, 2, 1], True),
    "a dict": ({"input_ids": IDS}, [2, 2, 1], True),
    "windows made before": (as_windows(IDS), [2, 2, 1], True),
    "a dict with a mask": ({"input_ids": IDS, "attention_mask": MASK}, [2, 2, 1], True),
    "a BatchEncoding": (UserDict(input_ids=IDS.tolist(), attention_mask=MASK), [2, 2, 1], True),
    "a list of rows of a dataset": (ROWS, [2, 2, 1], True),
    "a dict with None": (UserDict(input_ids=IDS, attention_mask=None), [2, 2, 1], True),
    "a list of batches": ([IDS[:3], IDS[3:]], [3, 2], False),
    "a tuple of batches": (IDS.split(3), [3, 2], False),
    "numpy batches": ([IDS[:3].numpy(), IDS[3:].numpy()], [3, 2], False),
    "dicts": ([{"input_ids": IDS[:3]}, {"input_ids": IDS[3:].tolist()}], [3, 2], False),
    "a generator": ((part for part in IDS.split(3)), [3, 2], False),
    "a generator of windows": ((row for row in IDS), [1] * 5, False),
    "rows of a dataset": (iter(ROWS), [1] * 5, False),
    "a DataLoader of tensors": (DataLoader(IDS, batch_size=3), [3, 2], False),
    "a DataLoader of lists": (DataLoader(TensorDataset(IDS), batch_size=3), [3, 2], False),
    "a DataLoader of pairs": (
        DataLoader(TensorDataset(IDS, torch.arange(5)), batch_size=3),
        [3, 2],
        False,
    ),
    "a DataLoader of dicts": (
        DataLoader([{"input_ids": row} for row in IDS], batch_size=3),
        [3, 2],
        False,
    ),
    "pairs of inputs and labels": ([({"input_ids": IDS}, torch.arange(5))], [5], False),
}


@pytest.mark.parametrize("name", PASSED)
def test_everything_becomes_the_same_batches(name):
    passed, sizes, in_memory = PASSED[name]
    text = as_windows(passed)
    assert (text.ids is not None) is in_memory
    assert (text.tokens, text.length) == ((30, 6) if in_memory else (0, None))
    batches = list(text.batches(2))
    assert [len(batch) for batch in batches] == sizes
    ids = torch.cat([batch.inputs["input_ids"] for batch in batches])
    assert torch.equal(ids, IDS)
    assert ids.dtype == torch.long
    assert [batch.number for batch in batches] == list(range(len(sizes)))
    assert [offset for batch in batches for offset in batch.offsets] == [0, 6, 12, 18, 24]
    assert [batch.first for batch in batches] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(batch.tokens for batch in batches) == 30


def test_masks_are_cut_with_their_windows():
    mask = torch.tensor([[1] * 6, [1] * 5 + [0]] * 2 + [[0] * 6])
    batches = list(as_windows({"input_ids": IDS, "attention_mask": mask}).batches(2))
    assert torch.equal(torch.cat([b.inputs["attention_mask"] for b in batches]), mask)
    (row,) = list(as_windows(iter(ROWS[:1])).batches())
    assert row.inputs["attention_mask"].shape == (1, 6)


def test_images_count_as_cells_and_unequal_inputs_are_not_cut():
    (batch,) = as_windows({"pixel_values": torch.zeros(3, 3, 8, 8)}).batches()
    assert (batch.offsets, batch.tokens) == ([0, CELL, 2 * CELL], 3 * CELL)
    patches = {"input_ids": IDS, "pixel_values": torch.zeros(64, 12)}
    (batch,) = as_windows(patches).batches(2)
    assert (len(batch), len(batch.inputs["pixel_values"])) == (5, 64)


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ("some text", "got str"),
        (None, "got NoneType"),
        (7, "got int"),
        (IDS[0], "one stream of tokens"),
        (IDS[0].tolist(), "one stream of tokens"),
        (torch.zeros(2, 6), "float32 of shape"),
        (torch.zeros(2, 3, 8, 8), "pixel_values"),
        (IDS > 3, "torch.bool"),
        ([[1, 2, 3], [4, 5]], "different lengths: pad them"),
        ([torch.arange(3), torch.arange(2)], "different lengths: pad them"),
        ({}, "without inputs"),
        ({"input_ids": "text"}, "input_ids is str"),
        ({"input_ids": IDS, "text": ["a", "b"]}, "text is list"),
        ([[IDS, MASK]], "without names"),
        (["a", "b"], "input_ids is str"),
        ([object()], "input_ids is object"),
    ],
)
def test_anything_else_is_refused_in_one_line(passed, message):
    with pytest.raises(ValueError, match=r"expected|names") as err:
        list(as_windows(passed).batches())
    assert message in str(err.value)
    assert "\n" not in str(err.value)


def test_what_can_be_read_again():
    assert as_windows(IDS).repeatable
    assert as_windows(IDS.split(2)).repeatable
    assert not as_windows(iter(IDS.split(2))).repeatable
    with pytest.raises(ValueError, match="batch size must be at least 1"):
        list(as_windows(IDS).batches(0))


# -- the loop -------------------------------------------------------------------------------------


def rows_of(model, windows, **options):
    received = []

    def receive(batch, block, rows):
        assert isinstance(batch, Batch)
        received.append((batch.number, block.index, rows.x.clone(), rows.y.clone()))

    run_rows(model, windows, receive, **options)
    return received


def test_rows_are_those_of_the_model():
    model, expected = tiny.model("llama"), []
    with torch.no_grad(), tap(model, lambda b, rows: expected.append(rows.y.clone())):
        model(IDS)
    received = rows_of(model, IDS, work=Work(batch_size=5))
    assert [index for _, index, _, _ in received] == [0, 1, 2]
    for (_, _, _, y), want in zip(received, expected, strict=True):
        torch.testing.assert_close(y, want)


def test_a_forward_ends_with_the_last_block_wanted_and_the_model_is_as_before():
    model, ran = tiny.model("llama").train(), []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append((i, model.training)))
    received = rows_of(model, IDS, at=blocks(model, "0"), work=Work(batch_size=2))
    assert [(number, index) for number, index, _, _ in received] == [(0, 0), (1, 0), (2, 0)]
    first = [(i, False) for i in range(len(model.model.layers))]  # to its end, to find repetitions
    assert ran == [*first, (0, False), (0, False), (0, False)]
    assert model.training
    assert torch.is_grad_enabled()


def test_the_callback_may_run_blocks():
    model = tiny.model("llama")
    last = blocks(model)[-1]

    def receive(batch, block, rows):
        got = model.get_submodule(block.path)(rows.x)
        torch.testing.assert_close(got, rows.y)

    run_rows(model, IDS, receive, at=[last])


def test_ranks_take_batches_in_turn_and_all_report_progress():
    model, said = tiny.model("llama"), []

    def progress(label, tokens):
        said.append((label, tokens))
        return said.append

    work = Work(Ranks(1, 2), 2, progress)
    received = rows_of(model, IDS, at=blocks(model, "1"), work=work, label="inputs")
    assert [number for number, *_ in received] == [1]
    assert said == [("inputs", 30), 12, 12, 6]


def test_padding_and_both_sides_of_an_encoder_decoder():
    model, padded = tiny.model("llama"), tiny.inputs("llama", "right")
    assert all(len(x) == 11 for _, _, x, _ in rows_of(model, [padded | {"labels": IDS}]))
    both = rows_of(tiny.model("t5"), IDS)
    assert {index for _, index, _, _ in both} == set(range(5))


def test_an_error_in_the_callback_is_raised_and_a_stop_is_not():
    model = tiny.model("llama")

    def fails(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_rows(model, IDS, fails)

    def stops(*_):
        raise StopForward

    with tap(model, stops):
        assert Forward(model)({"input_ids": IDS}) is None
    assert Forward(model)({"input_ids": IDS})[0].shape == (5, 6, 16)
    assert Forward(model, head=True)({"input_ids": IDS}).logits.shape == (5, 6, 50)


def test_bfloat16_is_refused_where_it_would_crash(monkeypatch):
    monkeypatch.setattr(bfloat16, "crashes", lambda: True)
    with pytest.raises(ValueError, match='`dtype="float32"`'):
        Forward(tiny.model("llama").bfloat16())


def test_a_block_that_runs_twice_is_refused():
    """Although a forward ends when every block has run once."""
    import transformers

    config = transformers.AutoConfig.for_model("albert", **tiny.HF, embedding_size=8, vocab_size=50)
    model = transformers.AutoModel.from_config(config).eval()
    with pytest.raises(RuntimeError, match="ran twice"):
        run_rows(model, tiny.inputs("llama"), lambda batch, block, rows: None)
