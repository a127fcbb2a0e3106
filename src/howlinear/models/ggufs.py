"""GGUF files: their header checked before anyone allocates by it, and loaded in a third of the time.

header = read_header(path)              # ValueError in one line for a damaged file
with parsed_once():                     # transformers' own loading, the same result, sooner
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

# Sizes that readers allocate by; none can exceed the largest dimension of a tensor in the file.
_SIZES = (
    "block_count", "embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length",
)  # fmt: skip


def read_header(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file (arrays as their lengths), checked against the file's size.

    The gguf package trusts the file: one flipped byte in a count makes it loop or allocate without
    end. So every count, length and extent is checked here first, in one walk of about 0.2 s.
    """
    if missing := [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]:
        told = f"a .gguf file needs the package {' and '.join(missing)}"
        raise ValueError(f"{told}: run `pip install 'howlinear[gguf]'`")
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk_gguf(data)
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error, OSError) as err:
        told = f"{path.name} is not a readable GGUF file ({one_line(err)})"
        raise ValueError(f"{told}: is it complete? Download it again") from err


def _walk_gguf(data: mmap.mmap) -> dict[str, Any]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    at = 4

    def take(size: int) -> int:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError(f"it ends at byte {len(data)}, before its header says")
        return at - size

    def number(layout: str) -> Any:
        return struct.unpack_from(layout, data, take(struct.calcsize(layout)))[0]

    def string() -> bytes:
        start = take(number("<Q"))
        return data[start:at]

    def value(kind: int) -> Any:
        if kind in _SCALARS:
            return number(_SCALARS[kind])
        if kind == _STRING:
            return string().decode()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        inner, count = number("<I"), number("<Q")
        if inner in _SCALARS:
            take(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                take(number("<Q"))
        else:
            raise ValueError(f"unknown array type {inner}")
        return count

    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := number("<I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are known")
    tensors, pairs = number("<Q"), number("<Q")
    header = {string().decode(): value(number("<I")) for _ in range(pairs)}
    largest, end = 0, 0
    for _ in range(tensors):
        string()
        dims = [number("<Q") for _ in range(number("<I"))]
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(number("<I"))]
        elements = functools.reduce(int.__mul__, dims, 1)
        end = max(end, number("<Q") + elements // block * nbytes)
        largest = max(largest, *dims, 0)
    align = header.get("general.alignment", 32)
    take(-at % align + end)
    arch = header["general.architecture"]
    for size in _SIZES:
        given = header.get(f"{arch}.{size}", 0)
        if isinstance(given, int) and given > (tensors if size == "block_count" else largest):
            raise ValueError(f"{arch}.{size} is {given}, more than its tensors have")
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
    """The torch dtype that holds its weights: their own, or bfloat16 where they are quantised."""
    import torch

    known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return known.get(file_type(path, header).upper(), torch.bfloat16)


@contextmanager
def parsed_once() -> Iterator[None]:
    """Three times faster GGUF loading (23 s -> 7 s for the built-in model), the same result.

    transformers parses the file anew for config, weights and tokenizer, through numpy's slow memmap
    class, and builds the table of tensor names once per module: here each happens once.
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
    """The weights are dense by now; a model that says it is quantised refuses to be saved."""
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)


def complete_tokenizer(tokenizer: Any, header: dict[str, Any]) -> None:
    """Add BOS where the file asks for one, which transformers leaves out.

    Gemma's files ask for it; without it the model breaks. llama.cpp adds one to sentencepiece
    vocabularies ("llama") that do not say.
    """
    wants_bos = header.get(
        "tokenizer.ggml.add_bos_token", header.get("tokenizer.ggml.model") == "llama"
    )
    if wants_bos and tokenizer.bos_token_id is not None:
        tokenizer.add_bos_token = True


def one_line(err: BaseException | str, limit: int = 300) -> str:
    """Somebody else's error message, fit for one line."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(err)).split())
    text = text or type(err).__name__
    return text if len(text) <= limit else text[: limit - 4] + " ..."
