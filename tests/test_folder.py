"""The run folder: what it holds, and whether a run belongs to a request, a model and a text."""

import pytest

import reports
from howlinear.records.fields import BlockSwap
from howlinear.records.files import SCHEMA
from howlinear.run.folder import RunFolder

MODEL = {"id": "m", "family": "llama", "revision": None, "parameters": 9, "weights": "abc"}
ASKED = {"model": "m", "revision": None, "dtype": "float32", "text": ["t", None, None, "s", "c"]}
TEXT = {"name": "t", "fingerprint": "f"}


def head(kind, **fields):
    return {"kind": kind, "schema": SCHEMA, "model": MODEL, **fields}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    blocks = [reports.block(i).to_dict() for i in (2, 0, 1)]
    folder.write(head("profile", asked=ASKED, corpus=TEXT, settings={}, blocks=blocks))
    return folder


def test_each_kind_has_a_file_and_its_records(run):
    assert run.write(head("swap", blocks=[reports.swap(1).to_dict()])) == run.path("swap")
    assert run.has("swap")
    assert not run.has("probe")
    assert run.blocks("swap", BlockSwap) == {1: reports.swap(1)}
    run.write(head("swap", blocks=[reports.swap(1).to_dict()] * 2))
    with pytest.raises(ValueError, match="lists a block twice"):
        run.blocks("swap", BlockSwap)


def test_results_of_other_settings_stay_in_the_file(run):
    def swaps(tokens, *indices, nats=3.0, **more):
        blocks = [reports.swap(i, delta_nll=tokens / 1000).to_dict() for i in indices]
        base = {"nats": nats, "tokens": tokens}
        return head("swap", settings={"tokens": tokens, **more}, base=base, blocks=blocks)

    whole = swaps(100, 0, 1, 2)
    run.add(whole)
    assert run.read("swap") == whole
    run.add(whole)  # the same again
    assert run.read("swap") == whole
    run.write(swaps(100, 1))
    run.add(whole)  # says all that the file says
    assert run.read("swap") == whole
    run.add(swaps(200, 1))
    assert run.sets("swap") == [swaps(200, 1), whole]
    assert {i: b.delta_nll for i, b in run.newest("swap", BlockSwap).items()} == {
        0: 0.1,
        1: 0.2,
        2: 0.1,
    }
    assert run.alike(swaps(100, 2, batch_size=3, nats=3.0 + 1e-6)) == whole
    assert run.alike(swaps(100, 2, nats=3.1)) is None  # other tokens
    assert run.alike(swaps(100, 2) | {"model": MODEL | {"weights": "other"}}) is None
    run.add(swaps(100, 1), whole)
    assert run.sets("swap") == [swaps(100, 1), swaps(200, 1)]
    for speed in (1, 2, 2):  # no blocks, but nothing of it is lost either
        run.add(head("bench", settings={}, speeds=[speed]))
    assert [bench["speeds"] for bench in run.sets("bench")] == [[2], [1]]
    compressed = head("compress", settings={}, blocks=[], curve=[{"share": 0.1}])
    for more in ({}, {"exported": {"folder": "small"}}, {"curve": []}):
        run.add(compressed | more)
    assert [c["curve"] for c in run.sets("compress")] == [[], [{"share": 0.1}]]
    for rank in (3, 4, 4):  # a plan has no settings
        run.add(head("plan", blocks=[{"index": 0, "rank": rank}], command=str(rank)))
    assert [plan["blocks"][0]["rank"] for plan in run.sets("plan")] == [4, 3]
    run.write(whole | {"earlier": 3})
    with pytest.raises(ValueError, match=r"swap\.json is damaged"):
        run.add(whole)


def test_costs_are_measured_where_there_is_a_swap_and_expected_elsewhere(run):
    expected = {i: f"expected +{1 + i}.0 % ± 0.2" for i in (0, 1, 2)}
    assert run.costs_in_words() == expected
    swaps = [reports.swap(1, kl=0.0325), reports.swap(2, kl=None)]
    run.write(head("swap", blocks=[s.to_dict() for s in swaps]))
    assert run.costs_in_words() == expected | {1: "measured 0.0325 nats, some cost"}


def test_a_run_belongs_to_its_model_and_its_text(run):
    asked, profile = run.request()
    assert asked == ASKED
    assert profile["corpus"]["name"] == "t"
    run.check_model(MODEL)
    run.check_text("f", "t")
    with pytest.raises(ValueError, match="weights was abc, m has other: profile again"):
        run.check_model(MODEL | {"weights": "other"})
    with pytest.raises(ValueError, match=r"t is not the text of .* or has changed since"):
        run.check_text("g", "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"asked": None}, "does not say how its model and text were loaded"),
        ({"corpus": 3}, "lacks model, corpus or settings"),
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
    assert run.finished(ASKED, TEXT, MODEL)
    assert not run.finished(other, TEXT, MODEL)
    with pytest.raises(
        ValueError, match=r"t is not the text of .* has changed since: .* `overwrite=True`"
    ):
        run.finished(ASKED, TEXT | {"fingerprint": "g"}, MODEL)
    with pytest.raises(ValueError, match=r"weights was abc, m has other: .* `overwrite=True`"):
        run.finished(ASKED, TEXT, MODEL | {"weights": "other"})
    with pytest.raises(ValueError, match="is not empty: name another folder with `out`"):
        run.check_free(other)
    run.check_free(other, overwrite=True)
    run.write({"kind": "progress", "schema": SCHEMA, "asked": ASKED})
    run.check_free(ASKED)
    assert not run.finished(ASKED, TEXT, MODEL)  # it is being measured again
    with pytest.raises(ValueError, match=r"unfinished profile with another model \(m, now n\)"):
        run.check_free(other)
    run.check_free(other, overwrite=True)
    assert not run.has("progress")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "file").check_free(ASKED)


def test_what_is_measured_is_named_before_it_is_removed(run):
    for kind in ("swap", "probe", "control-matched"):
        run.write(head(kind))
    (run.folder / "report.html").touch()
    run.written.touch()  # of other weights, perhaps
    message = r"holds a run already \(profile.json, swap.json, probe.json\).*overwrite=True"
    with pytest.raises(ValueError, match=message):
        run.check_unmeasured()
    run.remove_results()
    run.check_unmeasured()
    assert [p.name for p in run.folder.iterdir()] == ["report.html"]
