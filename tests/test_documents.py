"""Documents of a text: folds keep them whole, held-out samples are spread over them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from howlinear import builtin_text, profile, swap_costs, text_file, text_loss
from howlinear.linear.affine import Affine
from howlinear.losses.protocols import EvalProtocol, held_out_tokens
from howlinear.models import cutting
from howlinear.models.corpus import as_lines
from howlinear.models.documents import Documents

ARTICLES = "".join(f" = Title {i} = \n \n = = Part = = \n \n Some text {i} . \n" for i in range(3))


@pytest.fixture(scope="module")
def letters():
    """A token is a byte: 256 tokens, each a character of GPT-2's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# -- where documents begin -------------------------------------------------------------------------


def test_documents_are_found_and_kept():
    rows = as_lines(["one\n", "two", "three"])
    assert (str(rows), rows.starts) == ("one\ntwo\nthree\n", (0, 4, 8))
    assert rows.pieces() == ["one\n", "two\n", "three\n"]
    assert rows.part(2, 10).starts == (0, 2, 6)
    assert rows.part(5, 7).starts == ()  # within one
    assert Documents("plain").pieces() == ["plain"]
    articles = Documents.found(ARTICLES)
    assert [p.split("\n")[0] for p in articles.pieces()] == [f" = Title {i} = " for i in range(3)]
    as_rows = as_lines(ARTICLES.splitlines(keepends=True))  # as a dataset has them
    assert as_rows.starts == articles.starts


def test_texts_know_their_documents(tmp_path):
    file = tmp_path / "wiki.txt"
    file.write_text(ARTICLES * 10)
    text = text_file(file)
    assert len(text.fit.pieces()) == 24
    assert sum(len(part.pieces()) for part in (text.choose(), text.report())) in (6, 7)
    code = builtin_text("python-code")
    assert len(code.fit.pieces()) > 50
    assert "".join(code.fit.pieces()) == code.fit


# -- windows ---------------------------------------------------------------------------------------


def test_windows_have_the_document_in_which_they_begin(letters):
    text = Documents.joined(["a" * 25, "b" * 10, "c" * 65])
    cut = cutting.spread_windows(text, letters, 10)
    starts = [text[10 * i] for i in range(10)]
    assert ["abc"[d] for d in cut["document"].tolist()] == starts
    assert torch.equal(cut["input_ids"], cutting.windows(text, letters, 10))
    assert "document" not in cutting.spread_windows(Documents("a" * 100), letters, 10)


def test_mixed_windows_are_all_there_and_each_text_is_spread():
    parts = [torch.full((n, 3), float(k)) for k, n in enumerate((12, 6, 1))]
    mixed = cutting.mixed(parts)[:, 0].tolist()
    assert sorted(mixed) == [0] * 12 + [1] * 6 + [2]
    for half in (mixed[:9], mixed[10:]):
        assert half.count(0) in (5, 6)
        assert half.count(1) == 3


@pytest.mark.parametrize("every", [2, 3, 4])
def test_every_second_window_is_not_of_one_text(every):
    some = cutting.mixed([torch.zeros(300, 1), torch.ones(300, 1)])[::every]
    assert 0.35 < float(some.mean()) < 0.65


def test_held_out_windows_are_spread_over_the_whole_text(letters):
    text = Documents.joined([chr(97 + i) * 100 for i in range(20)])  # a to t
    sample = cutting.spread_windows(text, letters, 10, tokens=200)
    assert letters.decode(sample["input_ids"][:, 0]) == "abcdefghijklmnopqrst"
    assert sample["document"].tolist() == list(range(20))
    few = cutting.spread_windows(text, letters, 10, tokens=40)
    assert letters.decode(few["input_ids"][:, 0]) == "chmr"
    every = cutting.spread_windows(text, letters, 10, tokens=2000)["input_ids"]
    assert torch.equal(every, cutting.windows(text, letters, 10))


def test_a_long_text_is_read_in_excerpts(letters, monkeypatch):
    monkeypatch.setattr(cutting, "LONG", 5120)
    read = []
    encode = cutting._encode_all
    monkeypatch.setattr(cutting, "_encode_all", lambda t, k: read.extend(t) or encode(t, k))
    text = Documents("".join(chr(97 + i * 26 // 100_000) for i in range(100_000)))
    sample = cutting.spread_windows(text, letters, 10, tokens=260)
    assert sum(map(len, read)) == 5120
    shown = letters.decode(sample["input_ids"][:, 0])
    assert len(set(shown)) > 20
    assert list(shown) == sorted(shown)
    read.clear()
    assert len(cutting.spread_windows(text, letters, 10, tokens=1600)["input_ids"]) == 160
    assert sum(map(len, read)) == 1600 * 16  # more tokens take more text
    every = [text[i : i + 10] for i in range(len(text))]
    cut = cutting.spread_windows(text, letters, 10, tokens=1600)
    assert all(letters.decode(window) in every for window in cut["input_ids"])  # none is joined
    assert len(set(cut["document"].tolist())) > 100
    assert len(cutting.spread_windows(text, letters, 400, tokens=1600)["input_ids"]) == 4
    asked, recorded = (cutting.spread_windows(text, letters, 10, tokens=n) for n in (1609, 1600))
    assert torch.equal(asked["input_ids"], recorded["input_ids"])  # a run finds its windows again
    assert torch.equal(
        cutting.spread_windows(text, letters, 10)["input_ids"], cutting.windows(text, letters, 10)
    )


@pytest.mark.parametrize("name", ["windows-16", "gptq-16", "stride-16-4"])
def test_a_sample_of_everything_is_the_protocol_of_the_whole_text(name, letters):
    text = Documents.joined(["to be or not to be " * 5, "that is the question " * 3])
    protocol, model = EvalProtocol.parse(name), tiny.model("llama", vocab_size=256)
    sample, n_bytes = held_out_tokens(text, letters, protocol, 10**4)
    stream = torch.tensor(letters(text)["input_ids"])
    whole, spread = text_loss(model, stream, protocol), text_loss(model, sample, protocol)
    if name.startswith("stride"):  # the first window's context and a shorter last one are left out
        assert spread.tokens == (len(stream) - 16) // 4 * 4 + 4 == n_bytes
    else:
        assert spread.nats == pytest.approx(whole.nats, rel=1e-6)
        assert spread.tokens == whole.tokens == n_bytes


def test_bytes_of_cut_characters_are_counted(letters):
    """Characters of 2 to 4 bytes, windows that begin and end within them."""
    text = "naïve — 漢字 😀 " * 20
    ids = cutting.windows(text, letters, 7)
    assert cutting.count_bytes(ids, letters) == ids.numel()
    pieces = {"▁ab": 3, "<0xE6>": 1, "é": 2, "<s>": 0}
    fallback = SimpleNamespace(
        all_special_ids=[3],
        backend_tokenizer=SimpleNamespace(decoder=decoders.ByteFallback()),
        convert_ids_to_tokens=lambda ids: [list(pieces)[i] for i in ids],
    )
    assert cutting.count_bytes(torch.tensor([[3, 0, 1, 2, 2]]), fallback) == 8


def test_windows_are_those_of_the_whole_text():
    """Also for a tokenizer that begins every text with a space."""
    words = ["▁", *(f"▁{c}{d}" for c in "abcdefghij" for d in "abcdefghij")]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="▁"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = Documents.joined(["ab cd ef " * 20, "gh ij ab " * 30])
    every = cutting.windows(text, tokenizer, 8).tolist()
    sample = cutting.spread_windows(text, tokenizer, 8, tokens=64)["input_ids"].tolist()
    assert all(window in every for window in sample)


@pytest.mark.parametrize(
    "document",
    [torch.arange(-1, 11), torch.rand(12), torch.arange(12)[:, None], torch.arange(12) * 10**10],
)
def test_odd_document_numbers_are_refused(document):
    ids = torch.randint(0, tiny.VOCABULARY, (12, 16))
    with pytest.raises(ValueError, match="whole numbers from 0, one for each window"):
        text_loss(tiny.model("llama"), {"input_ids": ids, "document": document}, "windows-16")


# -- folds and standard errors ---------------------------------------------------------------------


def test_a_profile_keeps_documents_whole():
    model, ids = tiny.model("llama"), torch.randint(0, tiny.VOCABULARY, (100, 32))
    documents = torch.tensor([0] * 23 + [1] * 19 + [2] * 17 + [3] * 22 + [4] * 19)
    result = profile(model, {"input_ids": ids, "document": documents})
    assert (result.settings["folds"], result.settings["cells"]) == (5, 5)
    assert result.settings["documents"] == 5
    assert not any("documents for" in note for note in result.notes)
    few = profile(model, {"input_ids": ids, "document": documents.clamp_max(2)})
    assert any("3 documents for 5 folds" in note for note in few.notes)
    sizes = [n // 32 for n in result.stores[0].sizes]
    assert sizes == [23, 19, 17, 22, 19]
    parts = zip(ids.split(7), documents.split(7), strict=True)
    listed = profile(model, [{"input_ids": i, "document": d} for i, d in parts])
    assert listed.settings == result.settings | {"window": None}
    plain = profile(model, ids)
    assert [n // 32 for n in plain.stores[0].sizes] == [20] * 5
    assert plain.settings["documents"] is None
    assert profile(model, ids[:3], folds=5).settings["folds"] == 3


def test_standard_errors_count_documents():
    """Windows twice over: as documents they are no news, as windows they shrink every error."""
    model, ids = tiny.model("llama"), torch.randint(0, tiny.VOCABULARY, (12, 16))
    twice = torch.cat([ids, ids])
    documents = torch.arange(12).repeat(2)
    once = text_loss(model, ids)
    as_windows, as_documents = (
        text_loss(model, w) for w in (twice, {"input_ids": twice, "document": documents})
    )
    assert as_documents.nats_se == pytest.approx(once.nats_se, rel=1e-6)
    assert as_windows.nats_se == pytest.approx(once.nats_se * math.sqrt(11 / 23), rel=1e-6)
    assert as_documents.to_dict()["clusters"] == 12
    maps = {0: Affine(torch.zeros(16, 16), torch.zeros(16), 16)}
    one, two = (
        swap_costs(model, maps, w)[0].change
        for w in (ids, {"input_ids": twice, "document": documents})
    )
    for name in ("delta_nll_se", "delta_ppl_se", "kl_se", "top1_se"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6)
    np.testing.assert_allclose(two.counts, 2 * one.counts)
