"""Where the documents of a text begin: articles, files, rows of a dataset.

    text = Documents.joined(["a first row\n", "a second\n"])    # a str that knows its documents
    text.starts                                                 # (0, 12), in characters
    text.part(0, 20)                                            # keeps them; text[0:20] does not

Tokens of one document are alike: folds keep documents whole, and standard errors count them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, pairwise

HEADING = re.compile(r"^ = [^=\n][^\n]* = $", re.MULTILINE)  # of an article of WikiText


class Documents(str):
    """A text, and the characters at which its documents begin, the first at 0; () where not known."""

    starts: tuple[int, ...]

    def __new__(cls, text: str, starts: Iterable[int] = ()) -> Documents:
        self = super().__new__(cls, text)
        self.starts = tuple(starts)
        return self

    @classmethod
    def found(cls, text: str) -> Documents:
        """The articles of a text that has headings as WikiText has; else no document is known."""
        starts = [match.start() for match in HEADING.finditer(text)]
        return cls(text, sorted({0, *starts}) if len(starts) > 1 else ())

    @classmethod
    def joined(cls, documents: Iterable[str]) -> Documents:
        """Documents one after the other; of WikiText's rows, the articles."""
        parts = list(documents)
        text = cls.found("".join(parts))
        return text if text.starts else cls(text, accumulate(map(len, parts[:-1]), initial=0))

    def part(self, start: int, end: int) -> Documents:
        """The characters from `start` to `end`."""
        inside = self.starts[bisect_left(self.starts, start) : bisect_left(self.starts, end)]
        return Documents(
            self[start:end], sorted({0, *(s - start for s in inside)}) if inside else ()
        )

    def pieces(self) -> list[str]:
        """The documents; the whole text where they are not known."""
        return [self[a:b] for a, b in pairwise([*(self.starts or (0,)), len(self)])]
