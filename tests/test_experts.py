"""Experts found, heard and replaced one by one, against their weights and the layers themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

import tiny
from howlinear.linear.folds import Folds
from howlinear.linear.moments import Moments
from howlinear.linear.rows import Rows
from howlinear.linear.stores import BlockStore
from howlinear.losses.sweeps import sweep
from howlinear.models.experts import (
    SHARED,
    Alone,
    Mixture,
    mixtures,
    replaced,
    run_pairs,
    tap_experts,
)
from howlinear.models.families import Block, blocks
from howlinear.models.hooks import as_module, swapped, tap

NAMES = [name for name, row in tiny.TINY.items() if row.experts]
HOWS = ["eager", "grouped_mm", "batched_mm"]
SIDES = ["", "right", "left"]
WITH_SHARED = ["qwen2_moe", "deepseek_v3"]
COUNT, K = 4, 2  # experts, and how many a token is sent to, in every tiny model
FIFTH = torch.tensor([5])
Heard = dict[tuple[int, int | str], tuple[Rows, Tensor | None]]


@functools.cache
def cached(name: str, how: str = "grouped_mm", kind: torch.dtype = torch.float32) -> Any:
    model = tiny.model(name).to(kind)
    model.set_experts_implementation(how)
    return model


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def as_expert(model: nn.Module, mixture: Mixture, key: int | str) -> nn.Module:
    if key == SHARED:
        return as_module(model, mixture.expert(key))
    return Alone(model.get_submodule(mixture.path), int(key))


def hear(model: nn.Module, batch: dict[str, Tensor], **how: Any) -> Heard:
    heard: Heard = {}

    def receive(mixture: Mixture, expert: int | str, rows: Rows, weights: Tensor | None) -> None:
        assert (mixture.block.index, expert) not in heard
        heard[mixture.block.index, expert] = rows, weights

    with tap_experts(model, receive, **how):
        model(**batch)
    return heard


def called(model: nn.Module, mixture: Mixture, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """x (n, d), experts (n, k), weights (n, k) and output of the fused module, by a plain hook."""
    seen: list[Any] = []
    module = model.get_submodule(mixture.path)
    with module.register_forward_hook(lambda _, args, y: seen.extend([*args, y])):
        model(**batch)
    return tuple(seen)


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


def real(batch: dict[str, Tensor]) -> Tensor:
    return batch["attention_mask"].flatten().nonzero()[:, 0]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def by_hand(model: nn.Module, mixture: Mixture, x: Tensor, expert: int) -> Tensor:
    """From the 3-D weights."""
    fused = model.get_submodule(mixture.path)
    gate, up = linear(x, fused.gate_up_proj[expert]).chunk(2, -1)
    return linear(silu(gate) * up, fused.down_proj[expert])


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---------------------------------------------------------------------------------- finding


def test_the_table_holds_six_families() -> None:
    assert sorted(NAMES) == sorted(
        ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_finds_every_mixture(name: str) -> None:
    model = cached(name)
    found = mixtures(model)
    assert tuple(m.block.index for m in found) == tiny.TINY[name].experts
    assert [m.block for m in found] == [b for b in blocks(model) if b.down is None]
    for mixture in found:
        assert mixture.count == COUNT
        assert mixture.path == f"{mixture.block.path}.experts"
        assert (mixture.shared is not None) == (name in WITH_SHARED)
        assert mixture.keys == [*range(COUNT)] + [SHARED] * (name in WITH_SHARED)
        parts = [mixture.expert(key) for key in mixture.keys]
        assert len(set(parts)) == len(parts)  # values that a dict may have as keys
        assert {(p.index, p.d_in, p.d_out, p.down) for p in parts} == {
            (mixture.block.index, 16, 16, None)
        }
        assert parts[1].path == f"{mixture.path}.1"
        for wrong in (COUNT, -1, "both", *([] if mixture.shared else [SHARED])):
            with pytest.raises(ValueError, match=r"has no expert .* 0-3"):
                mixture.expert(wrong)
    assert mixtures(model, [found[-1].block]) == found[-1:]


def test_dense_models_have_none() -> None:
    model = tiny.model("llama")
    assert mixtures(model) == []
    assert hear(model, tiny.inputs("llama")) == {}


# -------------------------------------------------------------------------------- running


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_the_weights_by_hand(name: str, how: str) -> None:
    model, x = cached(name, how), torch.randn(9, 16)
    experts = torch.tensor([3, 0, 0, 2, 1, 3, 3, 0, 2])
    for mixture in mixtures(model):
        y = run_pairs(model.get_submodule(mixture.path), x, experts)
        want = torch.stack(
            [by_hand(model, mixture, r, int(e)) for r, e in zip(x, experts, strict=True)]
        )
        torch.testing.assert_close(y, want)
        other = run_pairs(model.get_submodule(mixture.path), x, experts.flip(0))
        assert not torch.allclose(other, want)
        alone = as_expert(model, mixture, 2)(x.view(3, 3, 16))
        torch.testing.assert_close(
            alone, by_hand(model, mixture, x.view(3, 3, 16), 2), atol=1e-5, rtol=1e-4
        )


# ------------------------------------------------------------------------------ listening


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_heard_adds_up_to_the_layer(name: str, how: str) -> None:
    model, batch = cached(name, how), tiny.inputs(name)
    layers: dict[int, Rows] = {}
    with tap(model, lambda block, rows: layers.update({block.index: rows})):
        heard = hear(model, batch)
    for mixture in mixtures(model):
        rows, i = layers[mixture.block.index], mixture.block.index
        total = torch.zeros_like(rows.y)
        for own, weights in (heard[i, e] for e in range(COUNT) if (i, e) in heard):
            assert torch.equal(own.x, rows.x[own.kept])
            assert own.y.shape == (len(own.x), 16)
            total[own.kept] += weights[:, None] * own.y
        if name in WITH_SHARED:
            shared, weights = heard[i, SHARED]
            assert weights is None
            assert torch.equal(shared.x, rows.x)
            assert torch.equal(shared.y, as_expert(model, mixture, SHARED)(rows.x))
            layer = model.get_submodule(mixture.block.path)
            gate = layer.shared_expert_gate(rows.x).sigmoid() if name == "qwen2_moe" else 1
            assert not torch.allclose(total, rows.y, atol=1e-3)
            total += gate * shared.y
        torch.testing.assert_close(total, rows.y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_implementations_agree(name: str) -> None:
    batch = tiny.inputs(name)
    first, *others = (hear(cached(name, how), batch) for how in HOWS)
    for other in others:
        assert other.keys() == first.keys()
        for key, (rows, weights) in first.items():
            torch.testing.assert_close(rows.y, other[key][0].y, atol=1e-4, rtol=1e-3)
            assert rows.kept.tolist() == other[key][0].kept.tolist()
            if weights is not None:
                torch.testing.assert_close(weights, other[key][1])


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_does_not_notice(name: str, how: str, all_tokens: bool) -> None:
    model, batch = cached(name, how), tiny.inputs(name, "right")
    before, count = logits(model, batch), hooks(model)
    with tap_experts(model, lambda *_: None, all_tokens=all_tokens):
        assert torch.equal(logits(model, batch), before)
        assert hooks(model) > count
    assert hooks(model) == count
    assert torch.equal(logits(model, batch), before)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_each_token_is_where_the_router_sent_it(name: str, side: str) -> None:
    """Windows, positions and weights as the module was called; padding left out."""
    model, batch = cached(name), tiny.inputs(name, side)
    heard, kept = hear(model, batch), real(batch)
    mask = batch["attention_mask"]
    position = (mask.cumsum(1) - 1).flatten()
    for mixture in mixtures(model):
        x, experts, weights, _ = called(model, mixture, batch)
        sizes = 0
        for e in range(COUNT):
            token, slot = (experts == e).nonzero(as_tuple=True)
            is_real = torch.isin(token, kept)
            token, slot = token[is_real], slot[is_real]
            if not len(token):
                assert (mixture.block.index, e) not in heard
                continue
            rows, own = heard[mixture.block.index, e]
            assert rows.kept.tolist() == token.tolist()
            assert rows.window.tolist() == (token // tiny.LENGTH).tolist()
            assert rows.position.tolist() == position[token].tolist()
            assert torch.equal(rows.x, x[token])
            assert torch.equal(own, weights[token, slot])
            assert rows.shape is rows.h is None
            sizes += len(rows.x)
        assert sizes == K * len(kept)
        if name in WITH_SHARED:
            rows, _ = heard[mixture.block.index, SHARED]
            assert rows.kept.tolist() == kept.tolist()
            assert rows.position.tolist() == position[kept].tolist()


def test_positions_are_not_counted_from_an_experts_first_token() -> None:
    """The control of the test above: some expert does not see the first token of some window."""
    heard = hear(cached("mixtral"), tiny.inputs("mixtral", "left"))
    firsts = [
        int(rows.position[rows.window == w].min())
        for rows, _ in heard.values()
        for w in (0, 1)
        if (rows.window == w).any()
    ]
    assert max(firsts) > 0
    assert min(firsts) == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_reach_every_expert(name: str, side: str) -> None:
    model, batch = cached(name), tiny.inputs(name, side)
    routed, heard, kept = hear(model, batch), hear(model, batch, all_tokens=True), real(batch)
    assert set(heard) == {(m.block.index, key) for m in mixtures(model) for key in m.keys}
    for mixture in mixtures(model):
        for e in range(COUNT):
            rows, weights = heard[mixture.block.index, e]
            assert rows.kept.tolist() == kept.tolist()
            assert rows.shape == (None if side else (tiny.BATCH, tiny.LENGTH))
            torch.testing.assert_close(
                rows.y, by_hand(model, mixture, rows.x, e), atol=1e-5, rtol=1e-4
            )
            asked = torch.zeros(len(kept), dtype=torch.bool)
            if (mixture.block.index, e) in routed:
                own, some = routed[mixture.block.index, e]
                asked = torch.isin(kept, own.kept)
                torch.testing.assert_close(rows.y[asked], own.y, atol=1e-5, rtol=1e-4)
                assert torch.equal(weights[asked], some)
            assert (weights[~asked] == 0).all()
            assert (weights[asked] > 0).all()


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in (torch.bfloat16, torch.float16) for how in HOWS]
    + [(torch.float64, how) for how in HOWS if how != "grouped_mm"],  # torch has no such kernel
)
def test_other_types_add_up_too(kind: torch.dtype, how: str) -> None:
    for name in ("mixtral", "qwen2_moe", "deepseek_v3"):
        heard = hear(cached(name, how, kind), tiny.inputs(name))
        assert heard
        assert all(rows.y.dtype == kind for rows, _ in heard.values())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_experts_that_are_not_what_ran_are_refused(name: str, how: str, kind: torch.dtype) -> None:
    model, batch = cached(name, how, kind), tiny.inputs(name)
    last = mixtures(model)[-1]
    fused = model.get_submodule(last.path)
    message = rf"block {last.block.index} \({last.path}\).* do not add up .*eager"
    tampered: list[Any] = [
        lambda _, args, y: y * 1.2,
        lambda _, args, y: y.index_fill(0, FIFTH, 0),  # one token alone
        lambda _, args, y: y.roll(1, 0),
        lambda _, args, y: y * torch.nan,
    ]
    for tamper in tampered:
        with fused.register_forward_hook(tamper):
            with pytest.raises(RuntimeError, match=message) as error:
                hear(model, batch)
            assert "\n" not in str(error.value)
    before = hooks(model)
    assert hear(model, batch)
    tamper = fused.register_forward_hook(lambda _, args, y: y.roll(1, 0))
    with tamper, pytest.raises(RuntimeError, match=message):
        hear(model, batch, all_tokens=True)
    assert hooks(model) == before


def test_padding_may_be_tampered_with() -> None:
    model, batch = tiny.model("mixtral"), tiny.inputs("mixtral", "right")
    padding = (batch["attention_mask"].flatten() == 0).nonzero()[:, 0]
    fused = model.get_submodule(mixtures(model)[-1].path)
    with fused.register_forward_hook(lambda _, args, y: y.index_fill(0, padding, torch.nan)):
        assert hear(model, batch)


def test_loud_rows_hide_nothing_and_faint_ones_may_underflow() -> None:
    def scaled(by: float) -> Any:
        rows = torch.ones(tiny.BATCH * tiny.LENGTH, 1)
        rows[0] = by
        return lambda _, args: (args[0] * rows.to(args[0]), *args[1:])

    batch = tiny.inputs("olmoe")
    for by, kind in ((1000, torch.float32), (1e-3, torch.float16)):
        model = cached("olmoe", kind=kind)
        fused = model.get_submodule(mixtures(model)[-1].path)
        with fused.register_forward_pre_hook(scaled(by)):
            assert hear(model, batch)
            quiet = fused.register_forward_hook(lambda _, args, y: y.index_fill(0, FIFTH, 0))
            with quiet, pytest.raises(RuntimeError, match="do not add up"):
                hear(model, batch)


def test_nothing_but_padding_is_nothing_to_hear() -> None:
    model, batch = cached("qwen2_moe"), tiny.inputs("qwen2_moe")
    batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
    assert hear(model, batch) == hear(model, batch, all_tokens=True) == {}


class Enough(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("all_tokens", [False, True])
def test_listens_beside_tap_also_when_that_has_heard_enough(all_tokens: bool) -> None:
    model, batch = cached("deepseek_v3"), tiny.inputs("deepseek_v3", "left")
    full, found = hear(model, batch, all_tokens=all_tokens), blocks(model)
    layers: list[int] = []
    heard: Heard = {}

    def whole(block: Block, rows: Rows) -> None:
        layers.append(block.index)
        if block == found[1]:
            raise Enough

    def receive(mixture: Mixture, expert: int | str, rows: Rows, weights: Tensor | None) -> None:
        heard[mixture.block.index, expert] = rows, weights

    at = mixtures(model)[:1]
    for inside in (True, False):
        layers.clear()
        heard.clear()
        with contextlib.ExitStack() as stack:
            taps = [
                tap(model, whole, at=found[:2]),
                tap_experts(model, receive, at=at, all_tokens=all_tokens),
            ]
            for each in taps if inside else taps[::-1]:
                stack.enter_context(each)
            for _ in range(2):
                with contextlib.suppress(Enough):
                    model.model(**batch)
        assert layers == [0, 1, 0, 1]
        assert heard.keys() == {key for key in full if key[0] == 1}
        assert all(torch.equal(rows.y, full[key][0].y) for key, (rows, _) in heard.items())


def test_training_is_left_alone() -> None:
    model, batch = tiny.model("qwen3_moe").train(), tiny.inputs("qwen3_moe")
    seen: list[bool] = []

    def gradients() -> list[Tensor]:
        with torch.enable_grad():
            model.zero_grad()
            logits(model, batch).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients()
    with tap_experts(
        model, lambda m, e, rows, w: seen.append(rows.y.requires_grad or w.requires_grad)
    ):
        got = gradients()
    assert seen
    assert not any(seen)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_families_outside_the_table_are_heard_and_swapped() -> None:
    import transformers

    settings = tiny.GQA | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", vocab_size=50, pad_token_id=0, **settings)
    model, batch = (
        transformers.AutoModelForCausalLM.from_config(config).eval(),
        tiny.inputs("llama"),
    )
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape))
    heard, found, before = hear(model, batch), mixtures(model), logits(model, batch)
    assert {m.block.family for m in found} == {"structural"}
    for i in (0, 1):
        assert sum(len(rows.x) for key, (rows, _) in heard.items() if key[0] == i) == 14 * K
    maps = [{e: as_expert(model, m, e) for e in m.keys} for m in found]
    for swaps, alike in ((maps, True), ([{1: zeros}] * 2, False)):
        pairs = zip(found, swaps, strict=True)
        with swapped(model, {m.block: replaced(model, m, own) for m, own in pairs}):
            assert torch.allclose(logits(model, batch), before, atol=1e-4, rtol=1e-3) == alike


# ----------------------------------------------------------------------------------- books


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_stores_hold_each_experts_moments(name: str, side: str) -> None:
    model, batch = cached(name), tiny.inputs(name, side)
    split, offsets = Folds(2, (0, 2048)), [0, 2048]  # a fold a window
    stores: dict[Block, BlockStore] = {}

    def receive(mixture: Mixture, expert: int | str, rows: Rows, _: Tensor | None) -> None:
        block = mixture.expert(expert)
        new = BlockStore(block, split.groups, "moments", 0, torch.device("cpu"))
        stores.setdefault(block, new).update(rows, offsets, split)

    with tap_experts(model, receive):
        model(**batch)
    kept, first = real(batch), (batch["attention_mask"].cumsum(1) == 1).flatten()
    for mixture in mixtures(model):
        x, experts, _, _ = called(model, mixture, batch)
        for e in range(COUNT):
            token = torch.tensor([t for t in kept.tolist() if e in experts[t]], dtype=torch.long)
            block = mixture.expert(e)
            assert (block in stores) == bool(len(token))
            for part, which in (("first", first), ("body", ~first)):
                for g in range(2) if len(token) else ():
                    at = token[which[token] & (token // tiny.LENGTH == g)]
                    want = Moments(16, 16)
                    if len(at):
                        want.update(x[at], by_hand(model, mixture, x[at], e))
                    got = getattr(stores[block], part)[g]
                    assert got.n == want.n == len(at)
                    if len(at):
                        for name_ in ("mean_x", "mean_y", "S_xx", "S_xy", "S_yy"):
                            torch.testing.assert_close(
                                getattr(got, name_), getattr(want, name_), atol=1e-4, rtol=1e-4
                            )


# -------------------------------------------------------------------------------- swapping


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_replacing_by_itself_changes_nothing(name: str, how: str) -> None:
    model, batch = cached(name, how), tiny.inputs(name, "right")
    before, modules, count = logits(model, batch), dict(model.named_modules()), hooks(model)
    found = mixtures(model)
    for keys in ([], [1], found[0].keys):
        swaps = {
            m.block: replaced(model, m, {key: as_expert(model, m, key) for key in keys})
            for m in found
        }
        with swapped(model, swaps):
            torch.testing.assert_close(logits(model, batch), before, atol=1e-4, rtol=1e-3)
    assert torch.equal(logits(model, batch), before)
    assert dict(model.named_modules()) == modules
    assert hooks(model) == count


@pytest.mark.parametrize("name", NAMES)
def test_replacing_one_expert_reaches_its_tokens_alone(name: str) -> None:
    model, batch = cached(name), tiny.inputs(name)
    for mixture in mixtures(model):
        x, experts, weights, _ = called(model, mixture, batch)
        windows = x.view(tiny.BATCH, tiny.LENGTH, 16)
        layer = as_module(model, mixture.block)
        before = layer(windows).flatten(0, 1)
        for e in range(COUNT):
            after = replaced(model, mixture, {e: torch.tanh})(windows).flatten(0, 1)
            token, slot = (experts == e).nonzero(as_tuple=True)
            rest = torch.ones(len(x), dtype=torch.bool).index_fill(0, token, False)
            torch.testing.assert_close(after[rest], before[rest], atol=1e-6, rtol=1e-5)
            change = x[token].tanh() - by_hand(model, mixture, x[token], e)
            want = before[token] + weights[token, slot, None] * change
            torch.testing.assert_close(after[token], want, atol=1e-5, rtol=1e-4)
            assert not len(token) or not torch.allclose(after[token], before[token], atol=1e-3)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NAMES)
def test_without_experts_the_shared_one_remains(name: str, how: str) -> None:
    model, x = cached(name, how), torch.randn(2, 7, 16)
    for mixture in mixtures(model):
        y = replaced(model, mixture, dict.fromkeys(range(COUNT), zeros))(x)
        want = torch.zeros_like(x)
        if mixture.shared:
            want = as_expert(model, mixture, SHARED)(x)
            if name == "qwen2_moe":
                layer = model.get_submodule(mixture.block.path)
                want = layer.shared_expert_gate(x).sigmoid() * want
            nothing = replaced(model, mixture, dict.fromkeys(mixture.keys, zeros))(x)
            assert (nothing == 0).all()
            assert not torch.allclose(want, nothing)
        torch.testing.assert_close(y, want)


@pytest.mark.parametrize("name", WITH_SHARED)
def test_the_shared_expert_is_replaced_before_its_gate(name: str) -> None:
    model, x = cached(name), torch.randn(2, 7, 16)
    mixture = mixtures(model)[0]
    layer = as_module(model, mixture.block)
    y = replaced(model, mixture, {SHARED: torch.tanh})(x)
    gate = 1.0
    if name == "qwen2_moe":
        gate = model.get_submodule(mixture.block.path).shared_expert_gate(x).sigmoid()
    want = layer(x) + gate * (x.tanh() - as_expert(model, mixture, SHARED)(x))
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)


def test_replacements_that_are_modules_learn_and_the_rest_too() -> None:
    model, batch = tiny.model("olmoe"), tiny.inputs("olmoe")
    mixture, maps = mixtures(model)[1], {e: nn.Linear(16, 16) for e in range(COUNT)}
    with torch.enable_grad(), swapped(model, {mixture.block: replaced(model, mixture, maps)}):
        inside = {id(p) for p in model.parameters()}
        logits(model, batch).square().mean().backward()
    assert all(id(p) in inside for m in maps.values() for p in m.parameters())
    routed = hear(model, batch)
    for e, m in maps.items():
        assert (m.weight.grad is not None) == ((1, e) in routed)
    assert model.get_submodule(mixture.block.path).gate.weight.grad.abs().sum() > 0


def test_sweeps_tell_what_one_expert_costs() -> None:
    model, windows = tiny.model("mixtral"), torch.randint(3, 50, (6, 12))
    mixture = mixtures(model)[0]
    itself, gone = {0: as_expert(model, mixture, 0)}, {0: zeros}
    variants = [(mixture.block, replaced(model, mixture, maps)) for maps in (itself, gone)]
    same, other = sweep(model, variants, windows).costs
    assert same.cosine == pytest.approx(1, abs=1e-6)
    assert abs(same.change.kl) < 1e-6 < 1e-3 < other.change.kl
    assert other.cosine < 0.999


def test_wrong_replacements_are_refused() -> None:
    model, x = cached("mixtral"), torch.randn(2, 7, 16)
    mixture = mixtures(model)[1]
    for wrong in (COUNT, SHARED):
        with pytest.raises(ValueError, match="has no expert"):
            replaced(model, mixture, {wrong: zeros})
    before = hooks(model)
    shape = r"expert 2 of block 1 .*returned shape \(\d+, 3\), expected \(\d+, 16\)"
    with pytest.raises(ValueError, match=shape):
        replaced(model, mixture, {2: lambda x: x[:, :3]})(x)
    assert hooks(model) == before
