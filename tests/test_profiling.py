"""The pass against rows captured by hand, fitted by numpy, scored by definition."""

import json
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

import tiny
from howlinear import Profile, profile, text_loss
from howlinear.linear.folds import CELL, Folds, RowSplit, check_rows
from howlinear.linear.rows import SAMPLE, RowSample
from howlinear.models.families import blocks
from howlinear.models.hooks import swapped
from howlinear.profiling.passes import Course
from howlinear.run.tensors import read_moments

LENGTH = 128
SHARE = 2048  # tokens of a fold


def ids(windows, length=LENGTH, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, length), generator=g)


def captured(model, windows, module):
    """(x, y) of one module by plain hooks: (n, length, d) each, in float64."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        for window in windows:
            model(window[None])
    hook.remove()
    return tuple(
        np.concatenate([t.double().numpy() for t in side]) for side in zip(*seen, strict=True)
    )


def lstsq(x, y):
    ones = np.column_stack([x, np.ones(len(x))])
    B = np.linalg.lstsq(ones, y, rcond=None)[0]
    return lambda u: np.column_stack([u, np.ones(len(u))]) @ B


def ss(y):
    return ((y - y.mean(0)) ** 2).sum(0)


@pytest.fixture(scope="module")
def llama():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def measured(llama):
    windows = ids(5 * SHARE // LENGTH + 9)  # all five folds, unevenly
    return windows, profile(llama, windows)


def folds_of(count):
    """The fold of each of so many windows: fifths of the text."""
    return np.searchsorted(np.round(np.arange(1, 5) * count / 5), np.arange(count), side="right")


def by_folds(model, windows, module, drop_first=False):
    """Five folds by the definition: (residuals, outputs, is first) of each held-out fold."""
    x, y = captured(model, windows, module)
    fold = folds_of(len(windows))
    start = int(drop_first)
    parts = []
    for f in range(5):
        flat = [t[fold != f, start:].reshape(-1, t.shape[-1]) for t in (x, y)]
        guess = lstsq(*flat)
        u, v = (t[fold == f, start:].reshape(-1, t.shape[-1]) for t in (x, y))
        first = np.tile(np.arange(start, LENGTH) == 0, (fold == f).sum())
        parts.append((v - guess(u), v, first))
    return parts


@pytest.mark.parametrize("index", [0, 2])
def test_every_score_is_its_definition(llama, measured, index):
    windows, result = measured
    b = result.blocks[index]
    module = llama.get_submodule(b.path)
    parts = by_folds(llama, windows, module)
    res, tot = sum((r**2).sum(0) for r, _, _ in parts), sum(ss(v) for _, v, _ in parts)
    r2 = 1 - res.sum() / tot.sum()
    # float32 rows; the fit sees them exactly, so float64 rounding is all that differs
    assert b.r2 == pytest.approx(r2, abs=1e-9)
    scalar = sum(((v - v.mean()) ** 2).sum() for _, v, _ in parts)
    assert b.r2_scalar == pytest.approx(1 - res.sum() / scalar, abs=1e-9)
    assert b.r2_feature["median"] == pytest.approx(np.median(1 - res / tot), abs=1e-9)
    folds = [((r**2).sum(), ss(v).sum()) for r, v, _ in parts]
    spread = sum((a - (1 - r2) * t) ** 2 for a, t in folds)
    assert b.r2_se == pytest.approx(math.sqrt(5 / 4 * spread) / tot.sum(), rel=1e-6)
    assert b.r2_interval == pytest.approx(stats.t(4, b.r2, b.r2_se).interval(0.95), rel=1e-6)
    first = sum(((v - v.mean(0))[at] ** 2).sum() for _, v, at in parts) / tot.sum()
    assert b.first_share == pytest.approx(first, rel=1e-9)
    n = sum(len(r) for r, _, _ in parts)
    assert b.residual_norm == pytest.approx(math.sqrt(res.sum() / n), rel=1e-9)
    assert b.rmse == pytest.approx(math.sqrt(res.sum() / n / b.d_out), rel=1e-9)
    assert (b.n_heldout, b.n_fit) == (n, n - max(len(r) for r, _, _ in parts))
    body = by_folds(llama, windows, module, drop_first=True)
    bare = 1 - sum((r**2).sum() for r, _, _ in body) / sum(ss(v).sum() for _, v, _ in body)
    assert b.r2_body == pytest.approx(bare, abs=1e-9)
    assert abs(b.r2_body - b.r2) > 1e-7  # the two are different questions


def test_the_curve_ends_in_r2_and_rises(measured):
    _, result = measured
    for b in result.blocks:
        assert len(b.r2_curve) == 3  # fitted on 1, 2 and 4 folds
        assert b.r2_curve[-1] == b.r2
        assert b.r2_curve[0] < b.r2_curve[-1]


@pytest.mark.parametrize(("name", "scale"), [("llama", 1), ("granitemoe", 0.22)])
def test_stream_error_by_definition(name, scale, monkeypatch):
    """On a sample as large as the data, the sample is the data."""
    windows = ids(5 * SHARE // 32, 32)[: 3 * SHARE // 32]
    few = windows.numel()
    monkeypatch.setattr(RowSample.__init__, "__defaults__", (few,))
    model = tiny.model(name, num_hidden_layers=3)
    b = profile(model, windows).blocks[1]
    x, y = captured(model, windows, model.get_submodule(b.path))
    with torch.no_grad():
        h = model(windows, output_hidden_states=True).hidden_states[2].double().numpy()
    fold = folds_of(len(windows))
    ratios = []
    for f in range(5):
        guess = lstsq(*(t[fold != f].reshape(-1, t.shape[-1]) for t in (x, y)))
        u, v, s = (t[fold == f].reshape(-1, t.shape[-1]) for t in (x, y, h))
        ratios.append(((scale * (v - guess(u))) ** 2).sum(1) / (s**2).sum(1))
    assert b.stream_error == pytest.approx(np.concatenate(ratios).mean(), rel=1e-4)


def test_the_row_sample_is_uniform_bounded_and_seeded(llama):
    windows = ids(5 * SHARE // LENGTH)
    one, two = (profile(llama, windows, course=Course(seed=1)).stores[0].sample for _ in range(2))
    other = profile(llama, windows, course=Course(seed=2)).stores[0].sample
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)
    counts = torch.bincount(one.group, minlength=5)
    assert counts.sum() == SAMPLE
    # 512 rows over 5 equal folds: mean 102, sd 9; five sd either way
    assert ((counts - 102.4).abs() < 46).all()


def test_a_linear_block_scores_one_and_its_neighbour_does_not(llama):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 16)
    at = blocks(llama)
    with swapped(llama, {at[1]: linear}):
        result = profile(llama, ids(3 * SHARE // LENGTH), at=at)
    assert result.blocks[1].r2 > 1 - 1e-9
    assert result.blocks[1].kind == "broadly linear"
    np.testing.assert_allclose(result.maps[1].weight, linear.weight.detach(), atol=1e-5)
    assert result.blocks[0].r2 < 0.999


def test_batching_changes_nothing(llama, measured):
    windows, result = measured
    again = profile(llama, windows, batch_size=3)
    listed = profile(llama, [{"input_ids": w} for w in windows.split(5)])
    for other in (again, listed):
        for a, b in zip(result.blocks, other.blocks, strict=True):
            # float32 forwards of other batch shapes differ in the last bits
            assert a.r2 == pytest.approx(b.r2, abs=1e-6)
            assert a.r2_body == pytest.approx(b.r2_body, abs=1e-6)
            assert (a.n_fit, a.n_heldout) == (b.n_fit, b.n_heldout)


def test_tsqr_and_moments_agree(llama):
    windows = ids(3 * SHARE // LENGTH)
    for a, b in zip(
        profile(llama, windows).blocks,
        profile(llama, windows, course=Course(solver="tsqr")).blocks,
        strict=True,
    ):
        assert a.r2 == pytest.approx(b.r2, abs=1e-11)
        assert a.r2_body == pytest.approx(b.r2_body, abs=1e-11)
        assert a.effective_rank == b.effective_rank


def test_padding_is_left_out(llama):
    """Padded windows give what the same rows give without padding."""
    windows = ids(4 * SHARE // 32, 32)
    keep = torch.ones_like(windows)
    keep[::2, 20:] = 0
    batches = [
        {"input_ids": w, "attention_mask": m}
        for w, m in zip(windows.split(8), keep.split(8), strict=True)
    ]
    b = profile(llama, batches).blocks[0]
    assert b.n_heldout == int(keep.sum())
    x, y = captured(llama, windows, llama.get_submodule(b.path))  # causal: rows kept are the same
    fold = np.repeat(folds_of(len(windows)), 32).reshape(-1, 32)
    mask = keep.numpy().astype(bool)
    res = tot = 0.0
    for f in range(5):
        guess = lstsq(*(t[mask & (fold != f)] for t in (x, y)))
        u, v = (t[mask & (fold == f)] for t in (x, y))
        res, tot = res + ((v - guess(u)) ** 2).sum(), tot + ss(v).sum()
    assert b.r2 == pytest.approx(1 - res / tot, abs=1e-6)


def test_the_paper_protocol_is_one_split_of_rows(llama):
    windows = ids(31)
    windows[25:] %= 9  # other tokens, so that it matters whose mean is meant
    result = profile(llama, windows, protocol="paper")
    b = result.blocks[1]
    x, y = (
        t.reshape(-1, t.shape[-1]) for t in captured(llama, windows, llama.get_submodule(b.path))
    )
    cut = int(0.8 * len(x))
    assert cut % LENGTH  # inside a window
    v = y[cut:]
    r = v - lstsq(x[:cut], y[:cut])(x[cut:])
    assert b.r2 == pytest.approx(1 - (r**2).sum() / ss(v).sum(), abs=1e-9)
    assert b.r2_scalar == pytest.approx(1 - (r**2).sum() / ((v - v.mean()) ** 2).sum(), abs=1e-9)
    assert b.r2_se is None is b.r2_interval
    assert b.r2_curve is None
    assert (b.n_fit, b.n_heldout) == (cut, len(x) - cut)
    assert b.effective_rank == centred_rank(x[:cut], y[:cut], x[cut:], v)


def centred_rank(x, y, u, v):
    """The paper's rank by numpy: everything less the means of the fit rows, SS_tot too."""
    x, y, u, v = (t.astype(np.float64) for t in (x, y, u, v))
    u, v, x, y = u - x.mean(0), v - y.mean(0), x - x.mean(0), y - y.mean(0)
    B = np.linalg.lstsq(x, y, rcond=None)[0]
    V = np.linalg.svd(x @ B, full_matrices=False)[2].T
    left = [((v - u @ B @ V[:, :k] @ V[:, :k].T) ** 2).sum() for k in range(1, len(V) + 1)]
    r2 = 1 - np.array(left) / (v**2).sum()
    return int((r2 >= 0.9 * r2[-1]).argmax()) + 1


def folds(split, offsets):
    return [split.group(offset) for offset in offsets]


def test_a_short_text_is_cut_into_as_many_stretches_as_folds():
    split = Folds.over(5, range(0, 20 * 512, 512), 20 * 512)
    got = [(g, w.start, w.stop) for g, w, _ in split.pieces(range(0, 20 * 512, 512), 512)]
    assert got == [(0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 16), (4, 16, 20)]
    late = [(g, w.start, w.stop) for g, w, _ in split.pieces([14 * 512, 15 * 512, 16 * 512], 512)]
    assert late == [(3, 0, 2), (4, 2, 3)]


@pytest.mark.parametrize(("count", "length"), [(7, 4096), (30, 10240), (600, 512), (1000, 1)])
def test_cells_are_large_and_folds_of_equal_size(count, length):
    offsets = range(0, count * length, length)
    split = Folds.over(5, offsets, count * length)
    sizes = np.bincount(folds(split, offsets))
    assert len(sizes) == split.groups == 5
    assert sizes.max() - sizes.min() <= max(1, len(split.cells) // 5)
    if count * length >= 5 * CELL:
        assert np.diff(split.cells).min() >= CELL - length


def test_cells_begin_with_documents():
    documents = [0] * 7 + [1] * 5 + [2] * 8 + [3] * 5 + [4] * 5  # 30 windows
    split = Folds.over(5, range(30), 30, documents)
    assert split.cells == (0, 7, 12, 20, 25)  # fifths would be 0, 6, 12, 18, 24
    book = Folds.over(5, range(30), 30, [0] * 29 + [1])  # no document begins near
    assert book.cells == (0, 6, 12, 18, 24)
    rows = Folds.over(5, range(30), 30, range(30))  # one begins everywhere
    assert rows.cells == (0, 6, 12, 18, 24)


def test_folds_of_a_stream_follow_from_offsets_alone():
    got = folds(Folds(5), range(0, 100 * 1024, 1024))
    assert got[:15] == [0, 1, 2, 3, 4, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert got[15:35] == [f for f in range(5) for _ in range(4)]
    assert got[35:75] == [f for f in range(5) for _ in range(8)]
    assert got[75:99] == [f for f in range(3) for _ in range(8)]


@pytest.mark.parametrize(
    ("folds", "length"), [(2, 4096), (5, 10240), (5, 1), (4, 4096), (5, 2), (3, 2048)]
)
def test_every_window_length_has_an_end(folds, length):
    """Refused or not, at once; what would do, does; as many folds as asked for."""
    for count in (2, 3, 17):
        split = Folds.over(folds, range(0, count * length, length), count * length)
        assert split.groups == min(folds, count)
        with pytest.raises(ValueError, match="tokens would do") as caught:
            check_rows(count, length, 200_000, split)
        enough = int(re.search(r"(\d+) tokens would do", str(caught.value))[1]) // length
        longer = Folds.over(split.groups, range(0, enough * length, length), enough * length)
        check_rows(enough, length, 200_000, longer)


def test_row_split_cuts_inside_a_window():
    got = [(g, w.start, p.start, p.stop) for g, w, p in RowSplit(100).pieces([0, 50], 50)]
    assert got == [(0, 0, 0, 50), (0, 1, 0, 30), (1, 1, 30, 50)]


def test_memory_does_not_grow_with_the_text(llama):
    def held(windows):
        store = profile(llama, windows, batch_size=64, signal=False).stores[0]
        states = [a.state_dict() for a in (*store.body, *store.first)]
        return sum(v.numel() for state in states for v in state.values())

    # first positions are kept as rows until they outweigh their sums, then as sums
    sizes = [held(ids(k * SHARE // LENGTH)) for k in (5, 10, 20, 40)]
    assert sizes[3] == sizes[2] <= 2.2 * sizes[0]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt", "bert", "t5", "qwen3_moe"])
def test_other_shapes_of_model(family):
    model = tiny.model(family)
    windows = ids(3 * SHARE // 8, 8)
    batches = windows
    if model.config.is_encoder_decoder:
        batches = [{"input_ids": w, "decoder_input_ids": w} for w in windows.split(64)]
    result = profile(model, batches, batch_size=64)
    assert len(result.blocks) == len(blocks(model))
    for b in result.blocks:
        assert b.n_heldout == windows.numel()
        assert 0 < b.r2 < 1
        assert b.stream_error > 0


@pytest.mark.parametrize("family", ["vit", "whisper"])
def test_pictures_and_sounds(family):
    """Inputs without tokens: each is a cell of its own, so that neighbours fall into other folds."""
    model = tiny.model(family)
    batches = [tiny.inputs(family, seed=seed) for seed in range(60)]
    result = profile(model, batches)
    assert len(result.blocks) == len(blocks(model))
    per_input = {b.path: b.n_heldout / 120 for b in result.blocks}
    if family == "vit":
        assert set(per_input.values()) == {5}  # four patches and the class token
    else:
        assert {v for p, v in per_input.items() if "encoder" in p} == {10}
        assert {v for p, v in per_input.items() if "decoder" in p} == {7}


@pytest.mark.parametrize(
    ("windows", "kwargs", "message"),
    [
        (lambda: ids(2, 16), {}, "too little text: 32 tokens .* 64 tokens would do"),
        (lambda: ids(1), {}, "1 window cannot be both fitted and held out"),
        (lambda: ids(1), {"protocol": "paper"}, None),
        (lambda: ids(40), {"protocol": "magic"}, "unknown protocol"),
        (lambda: ids(40), {"folds": 1}, "at least 2 folds"),
        (lambda: ids(40), {"batch_size": 0}, "batch size"),
        (lambda: ids(40), {"at": "99"}, "99"),
        (lambda: list(ids(40).split(8)), {"protocol": "paper"}, "all windows at once"),
        (lambda: iter([ids(2)]), {}, "give more text"),
    ],
)
def test_bad_input_is_one_line(llama, windows, kwargs, message):
    if message is None:  # 128 rows do for 16 columns
        profile(llama, windows(), **kwargs)
        return
    with pytest.raises(ValueError, match=message) as caught:
        profile(llama, windows(), **kwargs)
    assert "\n" not in str(caught.value)


def test_the_number_of_tokens_that_would_do_does(llama):
    profile(llama, ids(4, 16))
    with pytest.raises(ValueError, match="too little text"):
        profile(llama, ids(3, 8))


def test_not_finite_activations_are_located(llama):
    windows = ids(40)
    at = blocks(llama)

    def broken(x):
        y = torch.zeros_like(x)
        if x.shape[0] == 2:  # the last batch
            y[0, 3, 5] = torch.inf
        return y

    with (
        swapped(llama, {at[1]: broken}),
        pytest.raises(
            ValueError, match=r"block 1 \(model.layers.1.mlp\), batch 2: not finite.*feature 5"
        ),
    ):
        profile(llama, windows[:34], at=at, batch_size=16)


@pytest.mark.parametrize("path", ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"])
def test_a_weight_that_is_not_finite_is_named(path):
    model = tiny.model("llama")
    model.get_submodule(path).weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=rf"block 1 .*; the weight {path}.weight is not") as error:
        profile(model, ids(170))
    assert "\n" not in str(error.value)


def test_tokens_and_weights_that_are_not_there_are_one_line():
    wrong = ids(170)
    wrong[3, 4] = tiny.VOCABULARY + 7
    for measure in (profile, text_loss):
        with pytest.raises(ValueError, match="token id 57 is not in the vocabulary of Llama"):
            measure(tiny.model("llama"), wrong)
        with pytest.raises(ValueError, match="has no weights, it is on the meta device"):
            measure(tiny.model("llama").to("meta"), ids(170))


def test_a_run_folder_reads_back(measured, tmp_path):
    _, result = measured
    result.save(tmp_path / "run")
    again = Profile.load(tmp_path / "run")
    assert again.blocks == result.blocks
    for i, affine in result.maps.items():
        assert torch.equal(again.maps[i].weight, affine.weight)
        assert again.maps[i].rank == affine.rank
    for store in result.stores:
        parts = read_moments(tmp_path / "run", result.blocks[store.block.index])
        for part in ("body", "first"):
            for mine, theirs in zip(getattr(store, part), parts[part], strict=True):
                for name, value in mine.state_dict().items():
                    assert torch.equal(value, theirs.state_dict()[name])
    data = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert [b["index"] for b in data["blocks"]] == [0, 1, 2]
    assert not list((tmp_path / "run").glob(".*"))


def test_spoiled_run_folders_are_refused(measured, tmp_path):
    """Truncated, flipped and foreign files: ValueError in one line, or the very same content."""
    _, result = measured
    run = tmp_path / "run"
    result.save(run)
    rng = np.random.default_rng(0)
    refused = 0
    for name in ("profile.json", "maps/1.safetensors", "moments/1.safetensors"):
        good = (run / name).read_bytes()
        spoiled = [b"", b"{}", b"\x80\x04pickle", good[: len(good) // 2], good[:-1], good[:9]]
        for _ in range(60):
            broken = bytearray(good)
            at = int(rng.integers(0, min(len(good), 4000)))
            broken[at] ^= 1 << int(rng.integers(0, 8))
            spoiled.append(bytes(broken))
        for content in spoiled:
            (run / name).write_bytes(content)
            complaint = None
            try:
                again = Profile.load(run)
                for b in again.blocks:
                    read_moments(run, b)
                    assert torch.equal(again.maps[b.index].weight, result.maps[b.index].weight)
            except ValueError as err:
                complaint = str(err)
            refused += complaint is not None
            assert "\n" not in (complaint or "")
        (run / name).write_bytes(good)
    assert refused > 60


def test_a_course_is_checked():
    with pytest.raises(ValueError, match=r"unknown solver 'magic', expected .* \(`solver`\)"):
        Course(solver="magic")


def test_the_expected_cost_is_a_choice(llama):
    """The same for a tensor and for batches of it; None where it is not wanted or cannot be had."""
    windows = ids(40)
    costs = [b.expected_kl for b in profile(llama, windows).blocks]
    batches = list(windows.split(8))
    assert all(costs)
    assert [b.expected_kl for b in profile(llama, batches).blocks] == costs
    masked = [{"input_ids": b, "attention_mask": torch.ones_like(b)} for b in batches]
    for result, why in (
        (profile(llama, windows, signal=False), "it was not asked for"),
        (profile(llama, iter(batches)), "a stream of windows is read once"),
        (profile(llama, masked), "windows have more than token ids"),
    ):
        assert all(b.expected_kl is None and b.expected_beyond is None for b in result.blocks)
        assert f"no expected cost of swaps: {why}" in result.notes


@pytest.mark.parametrize("created_inside", [False, True])
def test_inference_mode_changes_nothing(created_inside):
    """Results can be added to afterwards; a model made inside has no gradients, so no expected cost."""
    want = profile(tiny.model("gpt2"), ids(170)).blocks
    model = None if created_inside else tiny.model("gpt2")
    with torch.inference_mode():
        result = profile(model or tiny.model("gpt2"), ids(170))
    assert [b.r2 for b in result.blocks] == [b.r2 for b in want]
    assert [b.expected_kl for b in result.blocks] == [
        None if created_inside else b.expected_kl for b in want
    ]
    result.stores[0].body[0].merge(result.stores[0].body[1])
