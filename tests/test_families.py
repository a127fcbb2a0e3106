"""Blocks of every family: found, heard and swapped, against what the model itself computes."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from howlinear import profile
from howlinear.linear.rows import Rows
from howlinear.models.families import FAMILIES, Block, backbone, blocks, left_out
from howlinear.models.hooks import as_module, swapped, tap

NAMES = list(tiny.TINY)
PADDED = [(name, side) for name, row in tiny.TINY.items() for side in row.sides]
SPLIT = ("gpt2", "gptj", "bloom", "mpt", "opt", "bert", "distilbert", "whisper")

cached = functools.cache(tiny.model)  # tests that change weights make their own


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several times faster than many threads on matrices this small
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def hear(model: nn.Module, batch: dict[str, Tensor], **how: Any) -> dict[Block, Rows]:
    heard: dict[Block, Rows] = {}
    with tap(model, lambda block, rows: heard.update({block: rows}), **how):
        model(**batch)
    return heard


def _ignore(block: Block, rows: Rows) -> None:
    pass


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)[0]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)  # every tiny model has blocks as wide as they are narrow


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---------------------------------------------------------------------------------- finding


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) <= {row.model_type for row in tiny.TINY.values()}


@pytest.mark.parametrize("name", NAMES)
def test_finds_every_block(name: str) -> None:
    found = blocks(cached(name))
    row = tiny.TINY[name]
    assert [b.index for b in found] == list(range(row.blocks))
    assert all((b.d_in, b.d_out) == (16, 16) for b in found)
    assert tuple(b.index for b in found if b.down is None) == row.experts
    assert all(b.family in FAMILIES and b.stream is not None for b in found)
    assert len({b.path for b in found}) == row.blocks


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_the_encoder_comes_first(name: str) -> None:
    assert [b.stack for b in blocks(cached(name))] == ["encoder"] * 2 + ["decoder"] * 3


def test_composite_models_are_searched_in_their_text_stack() -> None:
    """The others are counted, and chosen by their path."""
    model = cached("gemma3")
    others = [f"model.vision_tower.encoder.layers.{i}.mlp" for i in (0, 1)]
    assert [b.path for b in left_out(model)] == others
    assert [b.path for b in blocks(model, "vision_tower")] == others
    windows = torch.arange(2 * 2600).view(-1, 20) % (tiny.VOCABULARY - 1)
    note = "2 feed-forward blocks outside the text stack are not measured, such as " + others[0]
    result = profile(model, windows, signal=False)
    assert [n.partition(":")[0] for n in result.notes if "outside" in n] == [note]
    assert left_out(cached("llama")) == []
    assert any("vision_tower" in path and "mlp" in path for path, _ in model.named_modules())
    assert [b.path for b in blocks(model)] == [
        "model.language_model.layers.0.mlp",
        "model.language_model.layers.1.mlp",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_backbone_has_the_same_blocks_and_rows(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name)
    whole, base = hear(model, batch), hear(backbone(model), batch)
    inside = {}
    with tap(model, lambda block, rows: inside.update({block: rows})):
        backbone(model)(**batch)
    for (block, a), (bare, b), c in zip(whole.items(), base.items(), inside.values(), strict=True):
        assert block.path.endswith(bare.path)
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, c.y)


def test_indices_choose_blocks_and_keep_their_depth() -> None:
    model = cached("whisper")
    assert [b.index for b in blocks(model, "0, 2-3")] == [0, 2, 3]
    assert [b.index for b in blocks(model, "4,1 4")] == [1, 4]
    assert blocks(model, "3")[0] == blocks(model)[3]


@pytest.mark.parametrize("text", ["5", "3-7", "2-1", "1--2", "-", "", " ,"])
def test_wrong_indices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="`at`") as error:
        blocks(cached("whisper"), text)
    assert "\n" not in str(error.value)


def test_an_index_out_of_range_tells_how_many_there_are() -> None:
    with pytest.raises(ValueError, match="which are 0-4"):
        blocks(cached("whisper"), "1,9")


def test_a_regular_expression_chooses_blocks() -> None:
    model = cached("whisper")
    assert [b.index for b in blocks(model, r"decoder\.layers\.[02]")] == [2, 4]
    with pytest.raises(ValueError, match="nothing-like-this"):
        blocks(model, "nothing-like-this")
    with pytest.raises(ValueError, match="not a regular expression"):
        blocks(model, "(")


def test_a_regular_expression_makes_blocks_of_outermost_modules() -> None:
    model, batch = cached("llama"), tiny.inputs("llama")
    found = blocks(model, r"model\.layers\.[12]\.self_attn(\..*)?")
    assert [b.path for b in found] == [f"model.layers.{i}.self_attn" for i in (1, 2)]
    assert {(b.family, b.d_in, b.d_out) for b in found} == {("pattern", 16, 16)}
    heard = hear(model, batch, at=found)
    assert [b.index for b in heard] == [0, 1]
    assert all(rows.x.shape == (14, 16) and rows.h is None for rows in heard.values())
    assert all(rows.stream is None for rows in heard.values())
    before = output(model, batch)
    with swapped(model, dict.fromkeys(found, zeros)):  # attention returns a tuple
        assert not torch.equal(output(model, batch), before)
    assert torch.equal(output(model, batch), before)


# -------------------------------------------------------------------------------- listening


@pytest.mark.parametrize("name", NAMES)
def test_y_is_the_block_of_x_to_the_bit(name: str) -> None:
    model = cached(name)
    heard = hear(model, tiny.inputs(name))
    assert [b.index for b in heard] == list(range(tiny.TINY[name].blocks))  # in the order run
    for block, rows in heard.items():
        x = rows.x.unflatten(0, rows.shape)
        assert torch.equal(as_module(model, block)(x).flatten(0, 1), rows.y)
        other = blocks(model)[block.index - 1]
        assert not torch.allclose(as_module(model, other)(x).flatten(0, 1), rows.y)


@pytest.mark.parametrize("name", NAMES)
def test_h_is_what_the_block_adds_to(name: str) -> None:
    """Without block i alone, its h lacks its output, after the output norm where there is one."""
    model, batch = cached(name), tiny.inputs(name)
    for block, rows in hear(model, batch).items():
        with swapped(model, {block: zeros}):
            residual = hear(model, batch, at=[block])[block].h
        norm = model.get_submodule(block.out_norm) if block.out_norm else nn.Identity()
        added = block.scale * norm(rows.y)
        torch.testing.assert_close(rows.h - residual, added, atol=2e-5, rtol=1e-4)
        share = added.norm(dim=-1) ** 2 / rows.h.norm(dim=-1) ** 2  # as stream_error has it
        torch.testing.assert_close(norm(rows.y).norm(dim=-1) ** 2 / rows.stream, share)
        if block.out_norm:
            assert not torch.allclose(rows.h - residual, rows.y, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_h_is_the_hidden_state_that_the_model_reports(name: str) -> None:
    """Up to the norm that follows the add, and but for the last layers, which end in a norm."""
    model, batch = cached(name), tiny.inputs(name)
    out = model(**batch, output_hidden_states=True)
    stacks = {
        "": out.get("hidden_states"),
        "encoder": out.get("encoder_hidden_states"),
        "decoder": out.get("decoder_hidden_states"),
    }
    depth = dict.fromkeys(stacks, 0)
    for block, rows in hear(model, batch).items():
        states = stacks[block.stack]
        depth[block.stack] += 1
        if depth[block.stack] == len(states) - 1:
            continue
        side, path = block.stream
        h = model.get_submodule(path)(rows.h) if side == "input" else rows.h
        assert torch.equal(h, states[depth[block.stack]].flatten(0, 1))
        assert not torch.allclose(h, states[depth[block.stack] - 1].flatten(0, 1))
    assert max(depth.values()) > 1


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_padding_is_left_out(name: str, side: str) -> None:
    model, batch = cached(name), tiny.inputs(name, side)
    full = hear(model, tiny.inputs(name))
    windows = [hear(model, tiny.alone(batch, window)) for window in range(tiny.BATCH)]
    for block, rows in hear(model, batch).items():
        alone = [w[block] for w in windows]
        if tiny.TINY[name].kind == "audio" and block.stack == "encoder":
            assert rows.shape == full[block].shape == (2, 10)  # frames know no mask
            continue
        assert len(rows.x) == tiny.SHORT + tiny.LENGTH == int(batch[_mask_name(block)].sum())
        assert full[block].shape == (tiny.BATCH, tiny.LENGTH)
        assert rows.shape is None
        assert rows.window.tolist() == [0] * tiny.SHORT + [1] * tiny.LENGTH
        assert rows.position.tolist() == [*range(tiny.SHORT), *range(tiny.LENGTH)]
        for part in ("x", "y", "h", "stream"):
            want = torch.cat([getattr(a, part) for a in alone])
            torch.testing.assert_close(getattr(rows, part), want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("side", ["", "right", "left"])
def test_some_of_the_rows_keep_their_positions(side: str) -> None:
    at = torch.tensor([2, 3, 9])
    for rows in hear(cached("llama"), tiny.inputs("llama", side)).values():
        some = rows.only(at, rows.y[at] + 1)
        assert some.shape is None
        for part in ("x", "h", "stream", "kept", "window", "position"):
            assert torch.equal(getattr(some, part), getattr(rows, part)[at])
        assert torch.equal(some.y, rows.y[at] + 1)
        assert torch.equal(some.only(torch.tensor([2]), some.y[2:]).position, rows.position[at[2:]])


def _mask_name(block: Block) -> str:
    return "decoder_attention_mask" if block.stack == "decoder" else "attention_mask"


def test_encoder_and_decoder_have_their_own_masks() -> None:
    model, batch = cached("t5"), tiny.inputs("t5", "right")
    batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_attention_mask"])
    counts = [len(rows.x) for rows in hear(model, batch).values()]
    assert counts == [11, 11, 14, 14, 14]


@pytest.mark.parametrize("name", ["llama", "opt", "bert"])
def test_a_mask_may_be_positional_boolean_or_missing(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name, "right")
    counts: list[int] = []
    with tap(model, lambda block, rows: counts.append(len(rows.x))):
        model(batch["input_ids"], batch["attention_mask"])
        model(batch["input_ids"], attention_mask=batch["attention_mask"].bool())
        model(batch["input_ids"])
    each = len(blocks(model))
    assert counts == [11] * each + [11] * each + [14] * each


@pytest.mark.parametrize("name", NAMES)
def test_without_padding_nothing_is_copied(name: str) -> None:
    model, kept = cached(name), []
    block = blocks(model)[-1]
    entry, leave = model.get_submodule(block.entry), model.get_submodule(block.exit)
    handles = [
        entry.register_forward_pre_hook(lambda _, args: kept.append(args[0])),
        leave.register_forward_hook(lambda _, args, y: kept.append(y)),
    ]
    rows = hear(model, tiny.inputs(name), at=[block])[block]
    for handle in handles:
        handle.remove()
    assert rows.x.data_ptr() == kept[0].data_ptr()
    assert (rows.y.data_ptr() == kept[1].data_ptr()) is not block.copies


@pytest.mark.parametrize("name", NAMES)
def test_hidden_units_are_the_input_of_the_last_projection(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name, *tiny.TINY[name].sides[:1])
    for block in blocks(model):
        if block.down is None:
            with pytest.raises(ValueError, match="no hidden units"):
                hear(model, batch, units={block.index: torch.tensor([0])})
            continue
        down = model.get_submodule(block.down)
        width = down.nx if hasattr(down, "nx") else down.in_features
        some, every = torch.tensor([5, 2]), torch.arange(width)
        rows = hear(model, batch, units={block.index: every})[block]
        torch.testing.assert_close(down(rows.hidden), rows.y)
        few = hear(model, batch, units={block.index: some})
        assert torch.equal(few[block].hidden, rows.hidden[:, some])
        assert all(r.hidden is None for b, r in few.items() if b != block)


def test_rows_are_detached_wide_enough_and_not_kept() -> None:
    model, batch, alive = tiny.model("llama").bfloat16(), tiny.inputs("llama"), []

    def receive(block: Block, rows: Rows) -> None:
        assert not any(t.requires_grad for t in (rows.x, rows.y, rows.h, rows.stream))
        assert rows.x.dtype == torch.bfloat16
        assert rows.stream.dtype == torch.float32
        alive.append(weakref.ref(rows))

    with torch.enable_grad(), tap(model, receive):
        model(**batch)[0].sum().backward()
        gc.collect()
        assert len(alive) == 3
        assert not any(ref() for ref in alive)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_heard_once(reentrant: bool) -> None:
    model, batch, count = tiny.model("llama", use_cache=False).train(), tiny.inputs("llama"), []
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
    runs: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with torch.enable_grad(), tap(model, lambda block, rows: count.append(block.index)):
        model(**batch, inputs_embeds=embeddings)[0].sum().backward()
    assert count == [0, 1, 2]
    assert len(runs) == 2  # the backward pass did run it again


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_an_exception_leaves_no_hook_and_is_not_masked(name: str) -> None:
    model, batch = tiny.model(name), tiny.inputs(name)
    assert hooks(model) == 0

    def refuse(block: Block, rows: Rows) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), tap(model, refuse):
        model(**batch)
    assert hooks(model) == 0


def test_a_forward_that_fails_does_not_count() -> None:
    model, batch, count = cached("llama"), tiny.inputs("llama"), []
    with tap(model, lambda block, rows: count.append(block.index)):
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        handle.remove()
        backbone(model)(**batch)
    assert count == [0, 0, 1, 2]


def test_a_silent_block_is_named_unless_something_else_went_wrong() -> None:
    def run_and_fail() -> None:
        model(**batch)
        raise KeyError("later" if hooks(model) else "nothing was hooked")

    model, batch = tiny.model("llama"), tiny.inputs("llama")
    model.config.num_hidden_layers = 2  # the forward takes as many layers as this says
    with pytest.raises(ValueError, match=r"blocks: 2 \(model.layers.2.mlp\): "):
        hear(model, batch)
    with pytest.raises(KeyError, match="later"), tap(model, _ignore):
        run_and_fail()
    assert hooks(model) == 0


def test_a_projection_that_is_read_but_not_called_is_not_heard() -> None:
    model, batch = tiny.model("bloom", pretraining_tp=2, slow_but_exact=True), tiny.inputs("bloom")
    with pytest.raises(ValueError, match=r"without these blocks: 0 .* 1 "):
        hear(model, batch)
    with swapped(model, dict.fromkeys(blocks(model), zeros)), pytest.raises(AttributeError):
        model(**batch)


def test_running_a_part_of_the_model_is_refused() -> None:
    model, batch = cached("whisper"), tiny.inputs("whisper")
    with pytest.raises(RuntimeError, match="only a part"), tap(model, _ignore):
        model.get_encoder()(batch["input_features"])
    with tap(model, _ignore):
        pass  # nothing ran: nothing to complain about


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_chunked_blocks_are_refused(name: str) -> None:
    model = tiny.model(name, chunk_size_feed_forward=1)
    with pytest.raises(RuntimeError, match="ran twice"):
        hear(model, tiny.inputs(name))


def test_receive_may_run_the_block() -> None:
    model = cached("gpt2")
    with tap(model, lambda block, rows: as_module(model, block)(rows.x)):
        model(**tiny.inputs("gpt2"))


# --------------------------------------------------------------------------------- swapping


@pytest.mark.parametrize("name", NAMES)
def test_copies_change_nothing_and_zeros_do(name: str) -> None:
    """To the bit, with the originals' weights spoilt meanwhile: they must not run."""
    model, batch = tiny.model(name), tiny.inputs(name, *tiny.TINY[name].sides[:1])
    found, before, modules = blocks(model), output(model, batch), dict(model.named_modules())
    copies = {block: copy.deepcopy(as_module(model, block)) for block in found}
    weights = {p: p.clone() for b in found for p in as_module(model, b).parameters()}
    with swapped(model, copies):
        for parameter in weights:
            parameter.fill_(torch.nan)
        assert torch.equal(output(model, batch), before)
        assert blocks(model) == found
    assert output(model, batch).isnan().any()
    for parameter, weight in weights.items():
        parameter.copy_(weight)
    for block in found:
        with swapped(model, {block: zeros}):
            assert not torch.allclose(output(model, batch), before)
    assert torch.equal(output(model, batch), before)
    after = dict(model.named_modules())
    assert list(after) == list(modules)
    assert all(after[path] is modules[path] for path in modules)


@pytest.mark.parametrize("name", NAMES)
def test_swapped_blocks_can_be_tapped(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name)
    torch.manual_seed(3)
    linear = nn.Linear(16, 16)
    with swapped(model, dict.fromkeys(blocks(model), linear)):
        for rows in hear(model, batch).values():
            torch.testing.assert_close(rows.y, linear(rows.x))
        with pytest.raises(ValueError, match="no hidden units"):
            hear(model, batch, units={0: torch.tensor([0])})


@pytest.mark.parametrize("name", ["llama", "falcon", "mixtral", *SPLIT])
def test_gradients_reach_the_replacement_and_pass_through(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name)
    found, linear, seen = blocks(model), nn.Linear(16, 16), []
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    first = next(iter(as_module(model, found[0]).parameters()))
    with torch.enable_grad(), swapped(model, {found[1]: linear}):
        assert any(p is linear.weight for p in model.parameters())
        output(model, batch).square().mean().backward()
    assert seen[0].grad_fn is not None
    assert linear.weight.grad.abs().sum() > 0
    assert first.grad.abs().sum() > 0
    model.zero_grad()


DROPOUT = {
    "gpt2": "resid_pdrop",
    "gpt_neo": "resid_dropout",
    "gptj": "resid_pdrop",
    "bloom": "hidden_dropout",
    "phi": "resid_pdrop",
    "bert": "hidden_dropout_prob",
    "distilbert": "dropout",
}


@pytest.mark.parametrize(("name", "dropout"), DROPOUT.items())
def test_dropout_stays(name: str, dropout: str) -> None:
    model, batch = tiny.model(name, **{dropout: 0.5}).train(), tiny.inputs(name)
    for block, rows in hear(model, batch).items():  # y is taken before it
        torch.testing.assert_close(as_module(model, block)(rows.x), rows.y)
    found = blocks(model)

    def seeded() -> Tensor:
        torch.manual_seed(5)
        return output(model, batch)

    before = seeded()
    with swapped(model, {b: copy.deepcopy(as_module(model, b)) for b in found}):
        assert torch.equal(seeded(), before)
    assert not torch.equal(output(model, batch), before)  # dropout was at work


@pytest.mark.parametrize("name", ["llama", "opt", "bert", "bloom"])
def test_swaps_nest_and_survive_exceptions(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name)
    first, second = blocks(model)[:2]
    before, modules = output(model, batch), dict(model.named_modules())
    with swapped(model, {first: zeros}):
        once = output(model, batch)
        with swapped(model, {first: as_module(model, second), second: zeros}):
            twice = output(model, batch)
        assert torch.equal(output(model, batch), once)
        with pytest.raises(KeyError), swapped(model, {second: zeros}):
            raise KeyError
        assert torch.equal(output(model, batch), once)
    assert torch.equal(output(model, batch), before)
    assert not torch.equal(once, twice)
    assert dict(model.named_modules()) == modules


def test_wrong_replacements_are_refused() -> None:
    model, batch = cached("llama"), tiny.inputs("llama")
    block = blocks(model)[1]
    shapes = r"block 1 .*\(2, 7, 1\), expected \(2, 7, 16\)"
    with swapped(model, {block: lambda x: x[..., :1]}), pytest.raises(ValueError, match=shapes):
        model(**batch)
    other = cached("gpt2")
    before = hooks(other)
    with pytest.raises(ValueError, match="no module"), swapped(other, {block: zeros}):
        pass
    with pytest.raises(ValueError, match="no module"):
        hear(other, batch, at=[block])
    assert hooks(other) == before


# --------------------------------------------------------------------------- unknown families


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(6), kind
        if kind == "inline":
            self.fc1, self.fc2, self.act = nn.Linear(6, 9), nn.Linear(9, 6), nn.ReLU()
        else:
            self.ffn = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.Dropout())
        if kind == "tuple":
            self.ffn = WithRouter(self.ffn)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        if self.kind == "inline":
            return x + self.fc2(self.act(self.fc1(z)))
        if self.kind == "tuple":
            y, _ = self.ffn(hidden_states=z)
            return x + y
        y = self.ffn(z)
        y += x  # in place
        return y


class WithRouter(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(hidden_states), hidden_states.mean()


class Unknown(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="unheard-of", hidden_size=6)
        self.embed = nn.Embedding(20, 6)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return (x,)


@pytest.mark.parametrize(
    ("kind", "path", "down"),
    [
        ("inline", "layers.1.fc1+fc2", "layers.1.fc2"),
        ("whole", "layers.1.ffn", "layers.1.ffn.2"),
        ("tuple", "layers.1.ffn", None),
    ],
)
def test_unknown_families_are_found_by_structure(kind: str, path: str, down: str | None) -> None:
    torch.manual_seed(0)
    model = Unknown(kind).eval()
    batch = tiny.inputs("llama", "right")
    batch["input_ids"] %= 20
    found = blocks(model)
    assert [b.index for b in found] == [0, 1, 2]
    assert {(b.family, b.d_in, b.d_out, b.stream) for b in found} == {("structural", 6, 6, None)}
    assert (found[1].path, found[1].down) == (path, down)
    for block, rows in hear(model, batch).items():
        assert rows.x.shape == (11, 6)
        assert rows.h is None
        torch.testing.assert_close(as_module(model, block)(rows.x), rows.y)
    before = output(model, batch)
    with swapped(model, {b: copy.deepcopy(as_module(model, b)) for b in found}):
        assert torch.equal(output(model, batch), before)
        assert blocks(model) == found
    with swapped(model, {found[2]: zeros}):
        assert not torch.equal(output(model, batch), before)


class Inner(nn.Module):
    """A module named as a feed-forward block that holds one, a norm, and more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(6)
        self.ffn = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        if kind == "nothing inside":
            self.other, self.ffn = self.ffn, None

    def forward(self, x: Tensor) -> Tensor:
        f = self.ffn or self.other
        if self.kind == "mixes positions":
            return f(x + x.mean(1, keepdim=True))
        if self.kind == "mixes normed positions":
            x = self.norm(x)
            return f(x + x.roll(1, 1))
        return self.norm(x + f(x)) if self.kind == "norm after" else x + f(self.norm(x))


@pytest.mark.parametrize(
    "kind",
    [
        "norm before",
        "norm after",
        "mixes positions",
        "mixes normed positions",
        "nothing inside",
    ],
)
def test_modules_with_the_residual_add_or_mixed_positions_are_no_blocks(kind: str) -> None:
    """What they hold is measured instead; where that is not known, one line says why."""
    torch.manual_seed(0)
    model = Unknown("whole").eval()
    for layer in model.layers:
        layer.ffn = Inner(kind)
    if kind == "nothing inside":
        with pytest.raises(
            ValueError, match="ffn adds its input to its output; name them"
        ) as error:
            blocks(model)
        assert "\n" not in str(error.value)
        assert len(blocks(model, r"layers\.\d\.ffn\.other")) == 3
        return
    found = blocks(model)
    assert [b.path for b in found] == [f"layers.{i}.ffn.ffn" for i in range(3)]
    with swapped(model, {b: copy.deepcopy(as_module(model, b)) for b in found}):
        assert blocks(model) == found
    for block, rows in hear(model, {"input_ids": torch.arange(12).view(2, 6)}).items():
        torch.testing.assert_close(as_module(model, block)(rows.x), rows.y)


@pytest.mark.parametrize(
    ("name", "settings", "path"),
    [
        (
            "cpmant",
            {"hidden_size": 16, "num_attention_heads": 4, "dim_head": 4, "num_hidden_layers": 2},
            "encoder.layers.0.ffn.ffn",
        ),
        (
            "funnel",
            {"block_sizes": [2], "d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 40}
            | {"architectures": ["FunnelBaseModel"]},
            "encoder.blocks.0.0.ffn.linear_1+linear_2",
        ),
    ],
)
def test_real_modules_with_the_residual_add(name: str, settings: dict, path: str) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(name, **settings, vocab_size=50)
    with torch.device("meta"):
        assert blocks(transformers.AutoModel.from_config(config))[0].path == path


UNKNOWN = {  # real families that are not in the table
    "gpt_oss": (tiny.GQA | {"head_dim": 8, "num_local_experts": 4}, 2),
    "starcoder2": (tiny.GQA, 2),
    "cohere": (tiny.GQA, 2),
    "bart": (
        {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 40}
        | {"decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        3,
    ),
    "electra": (tiny.HF | {"embedding_size": 16}, 2),
    "llava": (
        {
            "text_config": tiny.GQA | {"model_type": "llama", "vocab_size": tiny.VOCABULARY},
            "vision_config": tiny.HF
            | {"image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"},
        },
        2,
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_real_families_outside_the_table(name: str) -> None:
    import transformers

    settings, count = UNKNOWN[name]
    special = {"vocab_size": tiny.VOCABULARY, "pad_token_id": 0} if name != "llava" else {}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **special, **settings)
    model = transformers.AutoModel.from_config(config).eval()
    batch = tiny.inputs("t5" if name == "bart" else "llama", "right")
    heard = hear(model, batch)
    assert len(heard) == count
    assert all(rows.x.shape == (11, 16) and rows.y.shape == (11, 16) for rows in heard.values())
    before = output(model, batch)
    with swapped(model, {b: copy.deepcopy(as_module(model, b)) for b in heard}):
        assert torch.equal(output(model, batch), before)
    with swapped(model, dict.fromkeys(heard, zeros)):
        assert not torch.allclose(output(model, batch), before)


def test_a_pair_of_models_has_two_masks() -> None:
    import transformers

    bert = transformers.BertConfig(**tiny.HF, vocab_size=tiny.VOCABULARY)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    model, batch = transformers.EncoderDecoderModel(both).eval(), tiny.inputs("t5", "right")
    batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_attention_mask"])
    heard = hear(model, batch)
    assert [b.stack for b in heard] == ["encoder"] * 2 + ["decoder"] * 2
    assert [len(rows.x) for rows in heard.values()] == [11, 11, 14, 14]


def test_shared_layers_are_found_but_refused_under_tap() -> None:
    import transformers

    config = transformers.AutoConfig.for_model("albert", **tiny.HF, embedding_size=8, vocab_size=50)
    model = transformers.AutoModel.from_config(config).eval()
    assert [b.path for b in blocks(model)] == [
        "encoder.albert_layer_groups.0.albert_layers.0.ffn+ffn_output"
    ]
    with pytest.raises(RuntimeError, match="ran twice"):
        hear(model, tiny.inputs("llama"))


def test_nothing_found_says_what_to_type() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    for pattern in (None, "0"):
        with pytest.raises(ValueError, match="a pattern of paths") as error:
            blocks(model, pattern)
        assert "\n" not in str(error.value)
    assert [b.path for b in blocks(model, "[0]")] == ["0"]


def test_widths_come_from_the_weights_where_there_is_no_config() -> None:
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    (block,) = blocks(nn.Sequential(network), "[0]")
    assert (block.path, block.d_in, block.d_out) == ("0", 3, 4)
    model = Unknown("tuple")
    del model.config
    assert {(b.d_in, b.d_out) for b in blocks(model)} == {(6, 6)}
    with pytest.raises(ValueError, match="width"):
        blocks(nn.Sequential(nn.ReLU()), "[0]")
