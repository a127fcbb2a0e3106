"""What a user may get wrong: one true line on stderr that names the thing and the way out, exit
code 2, no traceback, and every file as it was before.

A line of the table is a command, as typed in a folder with a tiny model, its text and its run.
"""

import hashlib
import json
import shlex
import shutil

import pytest

import tiny
from howlinear.models import loading

TEXT = "--text-file text.txt --tokens 4096 --max-length 64"
MISTAKES = {
    # commands and arguments that there are not
    "profil model": "No such command 'profil'",
    "control nothing model": "No such command 'nothing'",
    "profile model --no-such-flag": "No such option: --no-such-flag",
    "swap": "Missing argument",
    "compare": "Missing argument",
    "control cross-feed model": "Missing argument",
    # models
    "profile nobody/nothing -o new": "hf download nobody/nothing",
    "profile nowhere/at/all/here -o new": "nowhere/at/all/here",
    "profile broken.gguf -o new": "broken.gguf",
    "profile notes -o new": "notes has no config.json",
    "profile hollow -o new": "no weights beside",
    "profile model --dtype int3 -o new": "--dtype takes",
    "profile model --device cuda:9 -o new": "--device cpu",
    "profile model --device tpu -o new": "--device",
    "profile model --revision v2 -o new": "--revision",
    f"profile narrow {TEXT} -o new": "is not in the vocabulary of LlamaForCausalLM, 0 to 63",
    f"profile damaged {TEXT} -o new": "weight model.layers.1.mlp.up_proj.weight is not finite",
    "bench nowhere/model": "nowhere/model",
    "bench model --against nowhere/model": "nowhere/model",
    "bench model --repeats 0": "'--repeats'",
    # texts
    "profile model --text-file nowhere.txt -o new": "nowhere.txt does not exist",
    "profile model --text-file notes -o new": "notes is a folder",
    "profile model --text-file broken.gguf -o new": "broken.gguf is not utf-8: byte 0xff",
    "profile model --text-file void.txt -o new": "void.txt is empty",
    "profile model --text-file a --dataset b -o new": "not both",
    "profile model --corpus a=x.txt --text-file y.txt -o new": "all texts with --corpus",
    "profile model --corpus a=wikitext --corpus a=python-docs -o new": "--corpus a occurs twice",
    "profile model --corpus ../x=wikitext -o new": "NAME=SOURCE",
    "profile model --corpus a=missing.txt -o new": "missing.txt does not exist",
    # how a profile is made
    f"profile model {TEXT} --tokens 100 --max-length 512 -o new": "lower --max-length",
    f"profile model {TEXT} --tokens 16 --max-length 8 -o new": "tokens would do",
    f"profile model {TEXT} --tokens 0 -o new": "'--tokens'",
    f"profile model {TEXT} --tokens many -o new": "'--tokens'",
    f"profile model {TEXT} --max-length 1 -o new": "'--max-length'",
    f"profile model {TEXT} --batch-size 0 -o new": "'--batch-size'",
    f"profile model {TEXT} --folds 1 -o new": "'--folds'",
    f"profile model {TEXT} --solver magic -o new": "'magic' is not one of",
    f"profile model {TEXT} --precision float8 -o new": "'float8' is not one of",
    f"profile model {TEXT} --protocol mine -o new": "'mine' is not one of",
    f"profile model {TEXT} --bos always -o new": "has no BOS token",
    f"profile model {TEXT} --blocks 77 -o new": "'77' is not among the blocks, which are 0-2",
    f"profile model {TEXT} --blocks 2-1 -o new": "'2-1' ends before it begins",
    f"profile model {TEXT} --blocks , -o new": "names no block",
    f"profile model {TEXT} --blocks nonsense.* -o new": "matches no block",
    f"profile model {TEXT} --blocks ( -o new": "not a regular expression",
    f"profile model {TEXT} --shard 2/2 -o new": "--shard 2/2: write I/N",
    f"profile model {TEXT} --all-tokens -o new": "add --experts",
    f"profile model {TEXT} --experts -o new": "has no mixtures of experts: drop --experts",
    f"profile model {TEXT} --layerwise --device-map auto -o new": "drop --device-map",
    f"profile model {TEXT} -o notes": "notes is not empty",
    f"profile model {TEXT} -o text.txt": "text.txt is a file",
    f"profile model {TEXT} --folds 2 -o run": "--overwrite",
    # runs that are none
    "swap nowhere": "nowhere does not exist: name a run folder that howlinear profile wrote",
    "swap notes": "notes is not a run folder of howlinear profile: it has no profile.json",
    "probe nowhere": "nowhere does not exist: name a run folder",
    "compress nowhere --dry-run": "nowhere does not exist: name a run folder",
    "report nowhere": "nowhere does not exist: name a run folder",
    "report empty": "lists no blocks",
    "swap torn": "torn/profile.json is not a readable JSON file",
    "swap old": "old/profile.json has schema 99, this version reads 1",
    "swap other": "other/profile.json is not a howlinear profile file",
    "swap text.txt": "text.txt",
    "swap mapless --tokens 256": "mapless/maps",
    # swap
    "swap run --blocks 9": "'9' is not among the blocks, which are 0-2",
    "swap some --blocks 1": "'1' is not among the blocks, which are 0,2",
    "swap run --blocks (": "not a regular expression",
    "swap run --blocks attn": "chooses no block that the run has measured",
    "swap run --units 3": "'3' is not one of",
    "swap run --weighting best": "'best' is not one of",
    "swap run --safe cheap": "--safe 'cheap' is not a share above 0 and below 100%: write 5% or 0.05",
    "swap run --safe 0%": "--safe '0%' is not a share",
    "swap run --safe 1.5": "--safe '1.5' is not a share",
    "swap run --together 1,9": "--together '1,9': '9' is not among the blocks, which are 0-2",
    "swap run --together 1": "one block alone, 1: name several (--together)",
    "swap run --together mlp": "--together 'mlp': 'mlp' is no index",
    "swap run --positions few": "--positions 'few' is neither auto, all nor a number",
    "swap run --positions 0": "--positions",
    "swap run --eval sliding": "unknown protocol 'sliding'",
    "swap run --eval windows-1": "2 tokens or more",
    "swap run --eval gptq-100000": "one window takes 100000",
    "swap run --tokens 0": "'--tokens'",
    "swap run --text-file other.txt": "is not the text of run",
    "swap run --model wide": "another model",
    "swap run --experts all": "experts",
    # probe
    "probe run --kind magic": "there is no probe 'magic'",
    "probe run --blocks 9": "'9' is not among the blocks, which are 0-2",
    "probe run --solver theirs": "'theirs' is not one of",
    "probe run --rank 0": "'--rank'",
    "probe run --seeds 0": "'--seeds'",
    "probe run --rows 0": "'--rows'",
    # compress
    "compress run": "name one with -o, or pass --dry-run",
    "compress run --dry-run --remove-params 20% --blocks 1": "--remove-params and --blocks exclude",
    "compress run --dry-run --remove-params lots": "'lots' is not a share above 0 and below 100%",
    "compress run --dry-run --remove-params 150%": "'150%' is not a share above 0 and below 100%",
    "compress run --dry-run --max-ppl-increase -1%": "'-1%' is not a share",
    "compress run --dry-run --curve 5%,x": "--curve 'x' is not a share",
    "compress run --dry-run --rank abc": "--rank 'abc' is neither auto, full nor a number",
    "compress run --dry-run --rank abc --export nemotron-nas": "--rank 'abc' is neither",
    "compress run --dry-run --keep-units x": "--keep-units 'x' is neither auto nor a number",
    "compress run --dry-run --blocks 99": "'99' is not among the blocks, which are 0-2",
    "compress run --dry-run --plan nope.json": "nope.json does not exist: name a plan.json",
    "compress run --dry-run --plan text.txt": "text.txt is not a readable JSON file",
    "compress run --dry-run --plan run/profile.json": "is not a howlinear plan file",
    "compress run --dry-run --plan twice.json": "names block 0 twice",
    "compress run --dry-run --plan few.json": "the plan has no blocks",
    "compress run -o notes --blocks 1": "notes is not empty",
    "compress run -o new --blocks 1 --export stock": "replace all 3 blocks",
    "compress run --dry-run --export stock --rank full": "leave out --rank, or use --export hf",
    "compress run -o new --export onnx": "'onnx' is not one of",
    "compress run --dry-run --tokens 1": "'--tokens'",
    "compress run --dry-run --layerwise --device-map auto": "drop --device-map",
    "compress run -o new --layerwise --heal 9": "--heal needs all weights in memory: drop --heal, or",
    "compress run -o new --layerwise --export stock": "stock needs all weights in memory: use --export hf",
    "compress run -o new --layerwise --export nemotron-nas": "or drop --layerwise and --device-map",
    "compress run --dry-run --layerwise --export gguf": "gguf needs all weights in memory: use --export hf",
    "compress run -o new --layerwise --also-fit generated": "in memory: name another text with --also-fit",
    "compress run --dry-run --also-fit none --also-fit generated": "--also-fit none stands alone",
    "compress run --dry-run --also-fit generated --also-fit generated": "generated is fitted on already",
    # controls
    f"control cross-feed model wide {TEXT}": "only models of one width",
    f"control cross-feed model model --pairs 9:9 {TEXT}": "3 and 3 blocks",
    f"control cross-feed model model --pairs x {TEXT}": "--pairs",
    f"control matched model {TEXT} --blocks attn": "matches no block",
    f"control random-init model --seeds 0 {TEXT}": "'--seeds'",
    f"control random-init model --blocks 9 {TEXT}": "'9' is not among the blocks, which are 0-2",
    "control matched run --text-file other.txt": "is not the text of",
    f"control matched model --model x {TEXT}": "is for a run",
    f"control checkpoints . --revisions step7 {TEXT}": "has no checkpoint step7",
    f"control checkpoints some/model {TEXT}": "Name --revisions, such as step0,main",
    # compare, merge, report, reproduce
    "compare run": "name two or more",
    "compare run run": "run is named twice",
    "compare run notes": "notes is not a run folder",
    "merge run run": "Missing option '--out'",
    "merge run run -o new": "have read the same rows of one text",
    "merge run notes -o new": "notes",
    "report run run": "is named twice",
    "report run -o .": "is a folder: name a file with -o",
    "report run -o no/such/page.html": "there is no folder no/such",
    "report run --figures run/profile.json": "is a file: name a folder with --figures",
    "reproduce gpt3": "none of the paper's models",
}


# lines whose mistake shows only in the weights, or in the text as tokens
NEED_WEIGHTS = (
    "profile hollow", "profile narrow", "profile damaged", "swap mapless", "swap run --model wide",
    "swap run --eval gptq", "bench model --against nowhere",
    "compress run -o new --blocks 1 --export stock", "compress run --dry-run --export stock --rank",
    "compress run -o new --layerwise", "compress run --dry-run --layerwise --export gguf",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(little, tmp_path_factory):
    """A folder with a model, its text and its run, and with what is none of these."""
    root = tmp_path_factory.mktemp("place")
    shutil.copytree(little / "model", root / "model")
    shutil.copy(little / "text.txt", root)
    for name in ("run", "mapless", "some"):
        shutil.copytree(little / "run", root / name)
    shutil.rmtree(root / "mapless" / "maps")
    data = json.loads((root / "run" / "profile.json").read_text())
    profiles = {
        "some": json.dumps(data | {"blocks": data["blocks"][::2]}),
        "empty": json.dumps(data | {"blocks": []}),
        "torn": json.dumps(data)[:1000],
        "old": json.dumps(data | {"schema": 99}),
        "other": json.dumps(data | {"kind": "swap"}),
    }
    for name, text in profiles.items():
        (root / name).mkdir(exist_ok=True)
        (root / name / "profile.json").write_text(text)
    shutil.copytree(root / "model", root / "wide")
    tiny.model("llama", hidden_size=32, vocab_size=2048).save_pretrained(root / "wide")
    for name in ("narrow", "damaged"):
        shutil.copytree(root / "model", root / name)
    tiny.model("llama", vocab_size=64).save_pretrained(root / "narrow")
    net = tiny.model("llama", vocab_size=2048)
    net.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    net.save_pretrained(root / "damaged")
    for name in ("notes", "hollow"):
        (root / name).mkdir()
    (root / "notes" / "thesis.tex").write_text("precious")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "model" / name, root / "hollow")
    (root / "broken.gguf").write_bytes(b"GGUF\xff\xfe\x00")
    (root / "void.txt").write_text("")
    (root / "other.txt").write_text("Another text. " * 4000)
    block = {"index": 0, "path": data["blocks"][0]["path"], "rank": None, "units": 0}
    for name, blocks in (("twice", [block, block]), ("few", [])):
        plan = {"kind": "plan", "schema": 1, "blocks": blocks}
        (root / f"{name}.json").write_text(json.dumps(plan))
    return root, _tree(root)


def _tree(root):
    """Every file and folder, with what is in it."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_true_line_and_changes_nothing(line, place, complaint, monkeypatch):
    """It is found before weights are read, unless it shows only there."""
    root, before = place
    monkeypatch.chdir(root)
    if not line.startswith(NEED_WEIGHTS):
        monkeypatch.setattr(loading, "_weights", None)  # whoever reads them fails
    said = complaint(*shlex.split(line, posix=True))
    assert MISTAKES[line] in said
    assert _tree(root) == before


@pytest.mark.parametrize("line", [(), ("control",)])
def test_without_a_command_there_is_help(line, here):
    done = here(*line)
    assert done.returncode == 2
    assert done.stderr == "howlinear: no command: howlinear --help lists them\n"
    assert "Commands" in done.stdout
