"""What every measured result has: plain values to keep, and a line to read.

    result.to_dict()    # what the file in the run folder holds
    result              # in a notebook: a drawing and a table
    repr(result)        # <Profile of gpt2: 12 blocks, R2 0.352 (block 3) to 0.930 (block 11)>

A result says its `_file` and its `_line`; the rest is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from howlinear.records.escaping import escaped
from howlinear.records.fields import BlockProfile
from howlinear.records.files import SCHEMA, clean
from howlinear.records.words import number


class Result:
    """A result about a model and a text: `about` says which."""

    about: dict[str, Any]

    def _file(self) -> tuple[str, dict[str, Any]]:
        """Kind and fields of the file in a run folder."""
        raise NotImplementedError

    def _line(self) -> str:
        """What was found, in a few words."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """What the file in a run folder holds: plain values, None for numbers that are not finite."""
        kind, fields = self._file()
        found: dict[str, Any] = clean({"kind": kind, "schema": SCHEMA, **self.about, **fields})
        return found

    def _runs(self) -> list[tuple[str, Sequence[BlockProfile]]]:
        """Profiles that a notebook draws, by name."""
        return []

    def _repr_html_(self) -> str:
        from howlinear.report.notebook import html_of

        return html_of(repr(self).strip("<>"), self.to_dict(), self._runs())

    def __repr__(self) -> str:
        model = self.about.get("model")
        of = f" of {model['id']}" if isinstance(model, dict) and "id" in model else ""
        return escaped(f"<{type(self).__name__}{of}: {self._line()}>")


def extremes(
    values: Iterable[tuple[object, float | None]], shown: Callable[[float], str] = number
) -> str:
    """(3, 0.352), (9, 0.930), ... -> 0.352 (block 3) to 0.930 (block 9)"""
    found = [(value, name) for name, value in values if value is not None and value == value]
    if not found:
        return "-"
    low, high = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    return f"{shown(low[0])} (block {low[1]}) to {shown(high[0])} (block {high[1]})"
