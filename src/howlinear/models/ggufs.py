"""GGUF files: the header is checked before memory is allocated by it; loading takes a third of the time.

header = read_header(path)              # ValueError in one line for a damaged file
with parsed_once():                     # transformers' own loading, the same result, faster
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name)
forget_quantization(model)              # or it refuses to be saved
"""

import functools
import importlib.util
import mmap
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_SCALARS = {  # value type -> struct format, as the specification numbers them
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

# Sizes that readers allocate by. None can exceed the largest dimension of a tensor in the file.
_SIZES = (
    "block_count", "embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length",
)  # fmt: skip


def read_header(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file (arrays as their lengths), checked against the file's size.

    The gguf package does not check: one flipped byte in a count makes it loop or allocate without
    end. Every count, length and extent is checked here first, which takes about 0.2 s.
    """
    if missing := [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]:
        raise ValueError(
            f"a .gguf file needs the package {' and '.join(missing)}: "
            f"run `pip install {' '.join(missing)}`"
        )
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(data)
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error, OSError) as err:
        raise ValueError(
            f"{path.name} is not a readable GGUF file ({one_line(err)}): "
            "is it complete? Download it again"
        ) from err


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> int:
        """Move on by so many bytes; where they began."""
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, before its header says")
        return self.at - size

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def string(self) -> str:
        start = self.skip(self.number("<Q"))
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        """A scalar, a string, or the length of an array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.number("<Q"))
        else:
            raise ValueError(f"unknown array type {inner}")
        return count


def _read_header(data: mmap.mmap) -> dict[str, Any]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(data)
    cursor.skip(4)
    if (version := cursor.number("<I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are known")
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    header = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(pairs)}
    largest, end = 0, 0
    for _ in range(tensors):
        cursor.skip(cursor.number("<Q"))  # its name
        dims = [cursor.number("<Q") for _ in range(cursor.number("<I"))]
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.number("<I"))]
        elements = functools.reduce(int.__mul__, dims, 1)
        end = max(end, cursor.number("<Q") + elements // block * nbytes)
        largest = max(largest, *dims, 0)
    cursor.skip(-cursor.at % header.get("general.alignment", 32) + end)
    arch = header["general.architecture"]
    for name in _SIZES:
        size, most = header.get(f"{arch}.{name}", 0), tensors if name == "block_count" else largest
        if isinstance(size, int) and size > most:
            raise ValueError(f"{arch}.{name} is {size}, more than its tensors have")
    return header


def file_type(path: Path, header: dict[str, Any] | None = None) -> str:
    """How the file is quantised, such as "Q4_1", by its metadata or else by its name."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType((header or read_header(path)).get("general.file_type")).name
    except ValueError:
        return path.stem.rsplit(".", 1)[-1]
    return kind.removeprefix("MOSTLY_").removeprefix("ALL_")


def stored_dtype(path: Path, header: dict[str, Any]) -> Any:
    """The dtype that an export stores its weights in: their own, or bfloat16 where quantised."""
    import torch

    known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return known.get(file_type(path, header).upper(), torch.bfloat16)


@contextmanager
def parsed_once() -> Iterator[None]:
    """Three times faster GGUF loading (23 s -> 7 s for the built-in model), the same result.

    transformers parses the file again for config, weights and tokenizer, through numpy's slow memmap
    class, and builds the table of tensor names once per module. Inside, each happens once.

    This relies on three names: transformers imports `GGUFReader` and `get_tensor_name_map` from
    `gguf` inside its functions, so that replacing them in the package takes effect; the reader keeps
    the file in `self.data`; the loader's progress bar is `tqdm` in its module. A name that is gone
    is skipped: loading is slower then, not wrong. tests/test_models.py counts how often it parses.
    """
    import gguf
    import numpy as np
    import transformers.modeling_gguf_pytorch_utils as loader

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    quicker = (
        (gguf, "GGUFReader", functools.cache(Reader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (loader, "tqdm", lambda items, **_: items),
    )
    with ExitStack() as stack:
        for module, name, replacement in quicker:
            if (original := getattr(module, name, None)) is not None:
                setattr(module, name, replacement)
                stack.callback(setattr, module, name, original)
        yield


def forget_quantization(model: Any) -> None:
    """Remove the quantisation mark: the weights are dense, and a quantised model cannot be saved."""
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)


def complete_tokenizer(tokenizer: Any, header: dict[str, Any]) -> None:
    """Add BOS where the file's metadata requires one, which transformers ignores.

    Gemma requires it: its perplexity is useless without. As llama.cpp does, add it by default for
    sentencepiece vocabularies ("llama").
    """
    wants_bos = header.get(
        "tokenizer.ggml.add_bos_token", header.get("tokenizer.ggml.model") == "llama"
    )
    if wants_bos and tokenizer.bos_token_id is not None:
        tokenizer.add_bos_token = True


def one_line(err: BaseException | str, limit: int = 300) -> str:
    """The message of another library's error on one line of at most `limit` characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(err)).split())
    text = text or type(err).__name__
    return text if len(text) <= limit else text[: limit - 4] + " ..."
