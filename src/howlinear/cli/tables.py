"""Lines and tables that fit the terminal they are printed on, in signs that it can show.

    console = terminal_console()
    write(console, f"{model}, {n} blocks")
    print_table(console, ("#", "R2", "kind"), [("0", "0.887", "broadly linear")], words=("kind",))

Everything printed here is taken as text: no markup, no control codes. Colour is rich's to decide: on
a terminal, unless NO_COLOR is set. It never says what no word says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from howlinear.records.escaping import escaped, spelled

HEADING = 30  # cells of a heading, at most
LEAST = 20  # words of so many cells are not cut

Cell = str | Text


def terminal_console() -> Console:
    return Console(highlight=False)


def plain(text: object, width: int | None = None) -> Text:
    """Text from outside, without control characters, cut in the middle to `width`."""
    shown = escaped(text)
    return Text(shown if width is None else cut(shown, width))


def cut(text: str, width: int, mark: str = "…") -> str:
    """The beginning and the end of a text, in `width` cells."""
    if cell_len(text) <= width:
        return text
    room = max(width - len(mark), 0)
    head, tail = room // 2, room - room // 2
    return set_cell_size(text, head) + mark[:width] + set_cell_size(text[::-1], tail)[::-1]


def write(
    console: Console, text: object = "", *, style: str = "", width: int | None = None
) -> None:
    """A line, wrapped at words; or cut to `width`."""
    shown = spelled(escaped(text), console.encoding)
    if width is not None:
        shown = cut(shown, width, spelled("…", console.encoding))
    console.print(Text(shown, style=style))


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    words: Collection[str] = (),
) -> None:
    """Numbers stand to the right and are never cut; `words` names columns that stand to the left and
    are cut in the middle where they must be. Columns that do not fit go on below, beside the first.
    """
    mark = spelled("…", console.encoding)
    heads = [Text(cut(_text(console, name).plain, HEADING, mark), style="bold") for name in columns]
    grid = [heads, *([_text(console, cell) for cell in row] for row in rows)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*grid, strict=True)]
    left = [i for i, name in enumerate(columns) if name in words]
    _narrow(widths, left, console.width)
    for part in _parts(widths, console.width):
        for row in grid:
            cells = [_padded(row[i], widths[i], i in left, mark) for i in part]
            line = Text(" ").join(cells)
            line.rstrip()
            console.print(line, soft_wrap=True)


def _text(console: Console, cell: Cell) -> Text:
    style = cell.style if isinstance(cell, Text) else ""
    return Text(spelled(escaped(cell), console.encoding), style=style)


def _narrow(widths: list[int], left: list[int], room: int) -> None:
    """Take from the widest words until all fits, or no words are left to cut."""
    for i in left:
        widths[i] = min(widths[i], max(room, LEAST))
    while left and sum(widths) + len(widths) - 1 > room:
        widest = max(left, key=lambda i: widths[i])
        if widths[widest] <= LEAST:
            return
        widths[widest] -= 1


def _parts(widths: list[int], room: int) -> list[list[int]]:
    """Which columns stand side by side; the first is there each time."""
    parts = [[0]]
    for i in range(1, len(widths)):
        used = sum(widths[k] + 1 for k in parts[-1])
        if used + widths[i] > room and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(i)
    return parts


def _padded(cell: Text, width: int, left: bool, mark: str) -> Text:
    shown = cut(cell.plain, width, mark)
    space = " " * (width - cell_len(shown))
    return Text(shown + space if left else space + shown, style=cell.style)
