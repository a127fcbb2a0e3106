"""The run folder: what it holds, and whether a run belongs to a request, a model and a text."""

import pytest

import reports
from howlinear.records.fields import BlockSwap
from howlinear.records.files import SCHEMA
from howlinear.run.folder import RunFolder

MODEL = {"id": "m", "family": "llama", "revision": None, "parameters": 9, "weights": "abc"}
ASKED = {"model": "m", "revision": None, "dtype": "float32", "text": ["t", None, None, "s", "c"]}


def head(kind, **fields):
    return {"kind": kind, "schema": SCHEMA, "model": MODEL, **fields}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    blocks = [reports.block(i).to_dict() for i in (2, 0, 1)]
    corpus = {"name": "t", "fingerprint": "f"}
    folder.write(head("profile", asked=ASKED, corpus=corpus, settings={}, blocks=blocks))
    return folder


def test_each_kind_has_a_file_and_its_records(run):
    assert run.write(head("swap", blocks=[reports.swap(1).to_dict()])) == run.path("swap")
    assert run.has("swap")
    assert not run.has("probe")
    assert run.blocks("swap", BlockSwap) == {1: reports.swap(1)}
    run.write(head("swap", blocks=[reports.swap(1).to_dict()] * 2))
    with pytest.raises(ValueError, match="lists a block twice"):
        run.blocks("swap", BlockSwap)


def test_safety_is_measured_where_there_is_a_swap_and_estimated_elsewhere(run):
    assert run.safety() == dict.fromkeys((0, 1, 2), "some cost")
    swaps = [reports.swap(1, delta_nll=0.0325), reports.swap(2, delta_nll=None)]
    run.write(head("swap", blocks=[s.to_dict() for s in swaps]))
    assert run.safety() == {0: "some cost", 1: "measured +3.3 %", 2: "some cost"}
    assert run.read("profile")["blocks"][0]["safety"] == "some cost"


def test_a_run_belongs_to_its_model_and_its_text(run):
    asked, profile = run.request()
    assert asked == ASKED
    assert profile["corpus"]["name"] == "t"
    run.check_model(MODEL)
    run.check_text("f", "t")
    with pytest.raises(ValueError, match="weights was abc, m has other: profile again"):
        run.check_model(MODEL | {"weights": "other"})
    with pytest.raises(ValueError, match=r"has changed since: profile again \(t\)"):
        run.check_text("g", "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"asked": None}, "does not say how its model and text were loaded"),
        ({"corpus": 3}, "lacks model, corpus or settings"),
        ({"asked": ASKED | {"text": ["-", None, None, "s", "c"]}}, "from stdin"),
    ],
)
def test_requests_that_cannot_be_repeated_are_refused(run, change, message):
    run.write(run.read("profile") | change)
    with pytest.raises(ValueError, match=message):
        run.request()


def test_a_folder_is_free_resumable_or_in_the_way(run, tmp_path):
    other = ASKED | {"model": "n"}
    RunFolder(tmp_path / "new").check_free(other)
    run.check_free(ASKED)  # the same again
    assert run.holds("profile", ASKED, "f")
    assert not run.holds("profile", ASKED, "g")
    with pytest.raises(ValueError, match="is not empty: name another folder with -o"):
        run.check_free(other)
    run.check_free(other, overwrite=True)
    run.write({"kind": "progress", "schema": SCHEMA, "asked": ASKED})
    run.check_free(ASKED)
    with pytest.raises(ValueError, match=r"unfinished profile with another model \(m, now n\)"):
        run.check_free(other)
    run.check_free(other, overwrite=True)
    assert not run.has("progress")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "file").check_free(ASKED)


def test_a_new_profile_removes_what_was_derived_from_the_old_one(run):
    for kind in ("swap", "probe", "control-matched"):
        run.write(head(kind))
    (run.folder / "report.html").touch()
    run.remove_results()
    assert [p.name for p in run.folder.iterdir()] == ["report.html"]
