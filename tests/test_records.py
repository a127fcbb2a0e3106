"""Files are whole or not there, and read back checked."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from howlinear.records.files import SCHEMA, atomic, read_json, write_json
from howlinear.records.statistics import ratio, spearman


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=30))
def test_spearman_is_scipys(pairs):
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert spearman(a, b) is None
    else:
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_numbers_that_json_lacks_become_null(tmp_path):
    data = {"kind": "profile", "schema": SCHEMA, "a": [np.float64("nan"), float("inf"), 1.5]}
    write_json(tmp_path / "x.json", data)
    assert read_json(tmp_path / "x.json", "profile")["a"] == [None, None, 1.5]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")

    def interrupted():
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable JSON"),
        (b"\xff\xfe", "not a readable JSON"),
        (b"[" * 100_000, "not a readable JSON"),
        (b'{"kind": "profile", "schema": NaN}', "not a readable JSON"),
        (b"[]", "not a howlinear profile"),
        (b'{"kind": "swap", "schema": 1}', "not a howlinear profile"),
        (b'{"kind": "profile", "schema": 999}', "schema 999"),
    ],
)
def test_foreign_files_are_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(tmp_path / "x.json", "profile")
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder .* it has no x\.json"):
        read_json(tmp_path / "x.json", "profile")
    with pytest.raises(ValueError, match=r"nowhere does not exist: name a run folder"):
        read_json(tmp_path / "nowhere" / "x.json", "profile")


def test_files_are_readable_by_others_as_the_umask_says(tmp_path):
    write_json(tmp_path / "x.json", {"kind": "k", "schema": SCHEMA})
    (tmp_path / "y.json").write_text("{}")
    assert (tmp_path / "x.json").stat().st_mode == (tmp_path / "y.json").stat().st_mode
    assert json.loads((tmp_path / "x.json").read_text())["kind"] == "k"


def test_index_ranges_read_as_blocks_takes_them():
    from howlinear.models.naming import depth_indices
    from howlinear.records.words import ranges

    assert ranges([3, 5, 9, 10, 11, 12]) == "3,5,9-12"
    assert depth_indices(ranges([0, 1, 7]), range(8)) == [0, 1, 7]


def test_a_strip_is_as_high_as_its_shares_and_has_a_spelling_in_ascii():
    from howlinear.records.words import spelled, strip

    made = strip([-3.0, 0.0, 0.5, 1.0, 7.0, None, math.nan])
    assert made == "▁▁▅██··"
    assert spelled(made, "ascii") == "..=##.."


def test_the_standard_error_of_a_ratio_is_the_linearised_one():
    """Of a mean it is the standard error of the mean; unequal groups as in survey sampling."""
    values = [1.0, 2.0, 4.0, 9.0]
    value, se = ratio([(v, 1.0) for v in values])
    assert value == pytest.approx(4.0)
    assert se == pytest.approx(statistics.stdev(values) / 2)
    value, se = ratio([(1.0, 2.0), (3.0, 4.0)])  # deviations -1/3 and 1/3
    assert (value, se) == (pytest.approx(2 / 3), pytest.approx(math.sqrt(2 * 2 / 9) / 6))
    assert math.isnan(ratio([(1.0, 2.0)])[1])
    assert all(map(math.isnan, ratio([(1.0, 0.0), (1.0, 0.0)])))
