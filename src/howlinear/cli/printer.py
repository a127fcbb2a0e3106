"""Lines and tables that fit the terminal, in characters that it can show.

    console = terminal_console()
    write(console, f"{model}, {n} blocks")
    columns = (Column("#", "index"), Column("R2", "r2", number), Column("kind", "kind", words=True))
    print_table(console, columns, blocks)

Everything printed here is text: no markup, no control codes. rich decides about colour: on a
terminal, unless NO_COLOR is set. Colour repeats what a word says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from howlinear.records.words import escaped, number, spelled

MAX_HEADING = 30  # cells
MIN_WORDS = 20  # cells to which a column of words may be cut


def terminal_console() -> Console:
    return Console(highlight=False)


# -- lines


def write(
    console: Console, text: object = "", *, style: str = "", width: int | None = None
) -> None:
    """Print a line, wrapped at words; or cut to `width` cells."""
    line = spelled(escaped(text), console.encoding)
    if width is not None:
        line = cut(line, width, spelled("…", console.encoding))
    console.print(Text(line, style=style))


def write_whole(console: Console, text: object) -> None:
    """Print a line that is neither wrapped nor cut, such as a path to copy."""
    console.print(Text(spelled(escaped(text), console.encoding)), soft_wrap=True)


def write_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        write(console, f"note: {note}")


def cut(text: str, width: int, mark: str = "…") -> str:
    """The beginning and the end of a text, in `width` cells."""
    if cell_len(text) <= width:
        return text
    room = max(width - len(mark), 0)
    head, tail = room // 2, room - room // 2
    return set_cell_size(text, head) + mark[:width] + set_cell_size(text[::-1], tail)[::-1]


# -- tables


def or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def digits(count: int, write: Callable[..., str] = number) -> Callable[[Any], str]:
    """The format `number` or `signed` with so many digits after the point."""
    return partial(write, digits=count)


@dataclass(frozen=True)
class Column:
    """A heading, the value of a row, and how the value is written.

    Numbers stand to the right and are never cut. `words` stand to the left and are cut in the
    middle where the terminal is too narrow.
    """

    heading: str
    value: str | Callable[[Any], Any]  # a field or key of the row, or a function of the row
    format: Callable[[Any], str] = or_dash
    words: bool = False
    style: Callable[[Any], str] | None = None  # rich style of the row's cell
    above: str = ""  # first line of a heading of two lines

    def cell(self, row: Any, encoding: str) -> Text:
        if callable(self.value):
            value = self.value(row)
        else:
            value = row[self.value] if isinstance(row, Mapping) else getattr(row, self.value)
        style = self.style(row) if self.style else ""
        return Text(spelled(escaped(self.format(value)), encoding), style=style)


def print_table(console: Console, columns: Sequence[Column], rows: Iterable[Any]) -> None:
    """Print a row of cells for each row. Columns that do not fit follow below, beside the first."""
    encoding, mark = console.encoding, spelled("…", console.encoding)
    headings = [[c.above for c in columns]] if any(c.above for c in columns) else []
    headings.append([c.heading for c in columns])
    grid = [
        [Text(cut(spelled(escaped(text), encoding), MAX_HEADING, mark), "bold") for text in line]
        for line in headings
    ]
    grid += [[c.cell(row, encoding) for c in columns] for row in rows]
    widths = [max(cell.cell_len for cell in cells) for cells in zip(*grid, strict=True)]
    words = [i for i, c in enumerate(columns) if c.words]
    _narrow(widths, words, console.width)
    for group in _groups(widths, console.width):
        for line in grid:
            cells = [_padded(line[i], widths[i], columns[i].words, mark) for i in group]
            text = Text(" ").join(cells)
            text.rstrip()
            console.print(text, soft_wrap=True)


def _narrow(widths: list[int], words: list[int], room: int) -> None:
    """Shorten the widest columns of words until the table fits or all of them are short."""
    for i in words:
        widths[i] = min(widths[i], max(room, MIN_WORDS))
    while words and sum(widths) + len(widths) - 1 > room:
        widest = max(words, key=lambda i: widths[i])
        if widths[widest] <= MIN_WORDS:
            return
        widths[widest] -= 1


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """Columns that stand side by side; the first column is in every group."""
    groups = [[0]]
    for i in range(1, len(widths)):
        used = sum(widths[k] + 1 for k in groups[-1])
        if used + widths[i] > room and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(i)
    return groups


def _padded(cell: Text, width: int, left: bool, mark: str) -> Text:
    text = cut(cell.plain, width, mark)
    space = " " * (width - cell_len(text))
    return Text(text + space if left else space + text, style=cell.style)
