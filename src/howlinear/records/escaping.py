"""Strings from outside (model names, module paths, tokens) as text that is safe to print.

    escaped("a\\x1b[31m b\\u202e")     # characters that are not printable become codes
    spelled("Δppl ± se", "ascii")    # dppl +- se

`escaped` leaves no control character, no line break and no character that changes the direction of
writing. `spelled` is for terminals and files whose encoding lacks some characters.
"""

from __future__ import annotations

SPELLING = {"±": "+-", "Δ": "d", "…": "...", "→": "->", "␣": "_"}
SPELLING |= dict.fromkeys("▌▋▊▉█", "#") | dict.fromkeys("▏▎▍", " ")  # cells of a bar, rounded


def escaped(text: object) -> str:
    """The text on one line, with a code in place of each character that is not printable."""
    return "".join(c if c.isprintable() else _code(c) for c in str(text))


def spelled(text: str, encoding: str) -> str:
    """The text in characters that an encoding has."""
    if _holds(text, encoding):
        return text
    return "".join(c if _holds(c, encoding) else SPELLING.get(c, _code(c)) for c in text)


def _holds(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
