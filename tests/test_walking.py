"""Windows that walk through a changing model arrive where the changed model would bring them."""

import pytest
import torch

import tiny
from howlinear import blocks, swapped
from howlinear.compression.walking import Walk
from howlinear.linear.affine import Affine
from howlinear.models.forward import run_rows
from howlinear.run import room
from howlinear.run.work import Work

WINDOWS = torch.randint(3, 49, (6, 12), generator=torch.Generator().manual_seed(0))
WORK = Work(batch_size=2)


def some_map(block):
    g = torch.Generator().manual_seed(block.index)
    weight = 0.3 * torch.randn(block.d_out, block.d_in, generator=g)
    return Affine(weight, torch.randn(block.d_out, generator=g), block.d_in, block.path)


def walked(model, at, replaced):
    """Rows (x, y, h) of each block, while those of `replaced` become maps behind it."""
    walk, rows, maps = Walk(model, at, WINDOWS, WORK), {}, {}
    for block in at:
        inputs = {}

        def receive(batch, found, block=block, inputs=inputs):
            parts = (found.x, found.y, found.y if found.h is None else found.h)
            rows.setdefault(block, []).append(torch.cat(parts, 1).clone())
            inputs[batch.number] = found.x.clone()

        walk.read(block, receive)
        if block in replaced:
            maps[block] = some_map(block)
            walk.replace(block, maps[block], lambda b, m=maps[block], x=inputs: m(x[b.number]))
    return {block: torch.cat(parts) for block, parts in rows.items()}, maps


def in_the_swapped_model(model, block, maps):
    rows = []

    def receive(_, __, found):
        parts = (found.x, found.y, found.y if found.h is None else found.h)
        rows.append(torch.cat(parts, 1))

    with swapped(model, maps):
        run_rows(model, WINDOWS, receive, at=[block], work=WORK)
    return torch.cat(rows)


FAMILIES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "bert",
    "opt-350m",
    "granitemoe",
    "mixtral",
    "t5",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_gets_the_rows_of_the_model_changed_before_it(name):
    model = tiny.model(name)
    at = blocks(model)
    rows, maps = walked(model, at, at[::2])
    for block in at:
        before = {b: m for b, m in maps.items() if b.index < block.index}
        want = in_the_swapped_model(model, block, before)
        slack = 1e-5 * float(want.abs().max())  # float32, through a few layers
        torch.testing.assert_close(rows[block], want, rtol=0, atol=slack)
    if maps:  # a walk that forgot to replace would be found
        plain = in_the_swapped_model(model, at[-1], {})
        assert not torch.allclose(rows[at[-1]], plain, rtol=0, atol=1e-3 * float(plain.abs().max()))


def test_states_in_files_are_those_in_memory(monkeypatch):
    model = tiny.model("llama")
    at = blocks(model)
    kept, _ = walked(model, at, at[:2])
    monkeypatch.setattr(room, "available_memory", lambda: 1)
    filed, _ = walked(model, at, at[:2])
    assert all(torch.equal(kept[b], filed[b]) for b in at)


def test_files_that_do_not_fit_are_refused_before_the_work(monkeypatch):
    monkeypatch.setattr(room, "available_memory", lambda: 1)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ValueError, match=r"hidden states need .* set TMPDIR"):
        walked(tiny.model("llama"), blocks(tiny.model("llama")), [])


def test_each_layer_runs_once_for_each_batch():
    model = tiny.model("llama")
    at, ran = blocks(model), []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: ran.append(i))
    walked(model, at, at)
    batches = len(WINDOWS) // WORK.batch_size
    assert ran == [i for i in range(len(at)) for _ in range(batches)]
