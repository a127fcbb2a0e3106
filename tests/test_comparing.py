"""Profiles side by side, from run folders alone."""

import pytest
import torch

import tiny
from howlinear import profile
from howlinear.profiling.comparing import compare_runs
from howlinear.records.statistics import pearson


def ids(seed, n=160, length=64):
    """Another text: other tokens are frequent."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.rand(tiny.VOCABULARY, generator=generator) ** 3
    return torch.multinomial(odds, n * length, replacement=True, generator=generator).view(
        n, length
    )


def saved(folder, model, weights, text, **options):
    found = profile(model, ids(text), **options)
    found.about.update(
        model={"id": "m", "weights": weights}, corpus={"name": "t", "fingerprint": text}
    )
    found.save(folder)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two texts under one model, and another model on the first text."""
    root = tmp_path_factory.mktemp("runs")
    a, b = tiny.model("gpt2", n_layer=5), tiny.model("gpt2", seed=1, n_layer=5)
    profiles = [
        saved(root / "a" / "one", a, "a", 1),
        saved(root / "a" / "two", a, "a", 2),
        saved(root / "b" / "one", b, "b", 1),
    ]
    return root, profiles


def test_correlations_and_shifts_are_those_of_the_r2s(runs):
    root, (one, two, _) = runs
    found = compare_runs([root / "a" / "one", root / "a" / "two"])
    assert found.names == ["one", "two"]
    x, y = ([b.r2 for b in p.blocks] for p in (one, two))
    pair = found.pairs[0]
    assert pair["pearson"]["value"] == pytest.approx(pearson(x, y), abs=1e-12)
    assert pair["spearman"]["value"] is None  # over five blocks
    shifts = [v - u for u, v in zip(x, y, strict=True)]
    assert pair["mean_shift"]["value"] == pytest.approx(sum(shifts) / 5, abs=1e-12)
    at = max(range(5), key=lambda i: abs(shifts[i]))
    assert pair["largest_shift_at"] == at
    assert pair["largest_shift"]["value"] == pytest.approx(shifts[at], abs=1e-12)
    for name in ("pearson", "mean_shift", "largest_shift"):
        assert pair[name]["low"] < pair[name]["value"] < pair[name]["high"]
    assert pair["paired"] is False
    assert [row["runs"][1]["r2"] for row in found.blocks] == y


def test_maps_of_one_text_are_scored_on_the_rows_of_the_other(runs):
    root, (one, two, _) = runs
    found = compare_runs([root / "a" / "one", root / "a" / "two"])
    assert [(c["fit"], c["scored"]) for c in found.crossed] == [("one", "two"), ("two", "one")]
    # by hand: the whole of the second text, each fold around its own mean
    for i, store in enumerate(two.stores):
        res = tot = 0.0
        for body, first in zip(store.body, store.first, strict=True):
            rows = body.narrow(16).merge(first.narrow(16))
            W, b = one.maps[i].weight, one.maps[i].bias
            S_xx, S_xy = rows.gram()
            away = rows.mean_y - W @ rows.mean_x - b
            res += float((rows.S_yy + ((W @ S_xx) * W).sum(1) - 2 * (W * S_xy.t()).sum(1)).sum())
            res += rows.weight * float(away.square().sum())
            tot += float(rows.S_yy.sum())
        assert found.crossed[0]["r2"][i] == pytest.approx(1 - res / tot, abs=1e-9)
        assert found.crossed[0]["r2"][i] < two.blocks[i].r2  # a map of another text is no better


def test_other_models_are_paired_by_fold_and_not_crossed(runs):
    root, _ = runs
    found = compare_runs([root / "a" / "one", root / "b" / "one"])
    assert found.names == ["a/one", "b/one"]
    assert found.pairs[0]["paired"] is True
    assert found.crossed == []


def test_other_depths_are_shown_and_not_correlated(runs, tmp_path):
    root, _ = runs
    saved(tmp_path / "short", tiny.model("gpt2"), "c", 1)
    found = compare_runs([root / "a" / "one", tmp_path / "short"])
    assert found.pairs == []
    assert "5 and 2 blocks" in found.notes[0]
    assert found.blocks[4]["runs"][1] is None


def test_a_run_without_folds_has_no_interval_and_the_right_value(runs, tmp_path):
    root, (one, *_) = runs
    paper = saved(tmp_path / "paper", tiny.model("gpt2", n_layer=5), "a", 3, protocol="paper")
    found = compare_runs([root / "a" / "one", tmp_path / "paper"])
    want = pearson([b.r2 for b in one.blocks], [b.r2 for b in paper.blocks])
    assert found.pairs[0]["pearson"]["value"] == pytest.approx(want)
    assert found.pairs[0]["pearson"]["low"] is None
    assert "different protocols" in found.notes[0]


@pytest.mark.parametrize(("which", "message"), [([0], "two or more"), ([0, 0], "named twice")])
def test_runs_that_cannot_be_compared(runs, which, message):
    root, _ = runs
    with pytest.raises(ValueError, match=message):
        compare_runs([[root / "a" / "one"][i] for i in which])


def test_fold_sums_lead_to_r2(runs):
    _, (one, *_) = runs
    for b in one.blocks:
        res, tot = (sum(f[k] for f in b.fold_sums) for k in (0, 1))
        assert b.r2 == pytest.approx(1 - res / tot, abs=1e-15)
        assert len(b.fold_sums) == 5
