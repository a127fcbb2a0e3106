"""The base class of results: plain values to keep, a summary in one line, and HTML for notebooks.

    result.to_dict()    # the content of the file in the run folder
    result              # in a notebook: a drawing and a table
    repr(result)        # <Profile of gpt2: 12 blocks, R2 0.352 (block 3) to 0.930 (block 11)>

A subclass defines `_file` and `_line`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from howlinear.records.fields import BlockProfile
from howlinear.records.files import SCHEMA, clean
from howlinear.records.words import escaped, number, title
from howlinear.run.folder import RunFolder


class Result:
    """A result about the model and the text that `about` describes."""

    about: dict[str, Any]

    def _file(self) -> tuple[str, dict[str, Any]]:
        """Kind and fields of the file in a run folder."""
        raise NotImplementedError

    def _line(self) -> str:
        """A summary in a few words."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The content of the file in a run folder: plain values, None for numbers that are not finite."""
        kind, fields = self._file()
        content: dict[str, Any] = clean({"kind": kind, "schema": SCHEMA, **self.about, **fields})
        return content

    def save(self, folder: str | Path) -> None:
        """Write the file in a run folder; what it holds of other settings stays in it."""
        RunFolder(folder).add(self.to_dict())

    def _runs(self) -> list[tuple[str, Sequence[BlockProfile]]]:
        """Profiles that a notebook draws, by name."""
        return []

    def _repr_html_(self) -> str:
        from howlinear.report.notebook import html_of

        return html_of(repr(self).strip("<>"), self.to_dict(), self._runs())

    def __repr__(self) -> str:
        model = self.about.get("model")
        of = f" of {title(str(model['id']))}" if isinstance(model, dict) and "id" in model else ""
        return escaped(f"<{type(self).__name__}{of}: {self._line()}>")


def extremes(
    values: Iterable[tuple[object, float | None]], shown: Callable[[float], str] = number
) -> str:
    """(3, 0.352), (9, 0.930), ... -> 0.352 (block 3) to 0.930 (block 9)"""
    known = [(value, name) for name, value in values if value is not None and value == value]
    if not known:
        return "-"
    ends = (pick(known, key=lambda pair: pair[0]) for pick in (min, max))
    return " to ".join(f"{shown(value)} (block {name})" for value, name in ends)
