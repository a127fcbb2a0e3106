"""The answer at a glance: a strip with a cell for each block, its legend, and a sentence.

A cell has the colour and the sign of the block's verdict and leads to the block's row. Where no cost
is known, cells show R2 instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.records.fields import BlockProfile
from howlinear.records.verdicts import costly_from
from howlinear.records.words import compact, finite, number, plural, ranges
from howlinear.report.markup import Markup, joined, tag
from howlinear.report.runs import Run
from howlinear.report.styles import SHADES
from howlinear.report.verdicts import ESTIMATED, LOOKS, MEASURED, SAFE_WORDS, words

MEANINGS = {
    "safe": "safe: below {safe:.3g} nats",
    "safe with units": "safe with hidden units kept",
    "some cost": "some cost: {safe:.3g} to {costly:.3g} nats",
    "costly": "costly: from {costly:.3g} nats on",
    "undecided": "undecided: the interval holds a limit",
    "likely safe": "likely safe: expected below {safe:.3g} nats",
    "likely some cost": "likely some cost: {safe:.3g} to {costly:.3g} nats",
    "likely costly": "likely costly: from {costly:.3g} nats on",
    "not measured": "not measured",
}


def block_id(run: int, index: int) -> str:
    """The id of a block's row, where its cell leads."""
    return f"block-{run}-{index}"


def strips(runs: Sequence[Run]) -> Markup | None:
    """One strip for each run, one above another, with one legend and a sentence for each run."""
    drawn = [(i, run, words(run)) for i, run in enumerate(runs) if run.blocks]
    if not drawn:
        return None
    several = len(runs) > 1
    costs = any(word != "not measured" for *_, verdicts in drawn for word in verdicts.values())
    rows = [_strip(run, i, verdicts if costs else {}, several) for i, run, verdicts in drawn]
    present = {word for *_, verdicts in drawn for word in verdicts.values()}
    legend = _legend(present, runs[0].limit) if costs else _scale()
    lines = (_sentence(run, i, verdicts, several) for i, run, verdicts in drawn)
    return tag("section", *rows, legend, *lines, id="verdicts", aria_label="Verdicts by block")


def _strip(run: Run, i: int, verdicts: dict[int, str], named: bool) -> Markup:
    cells = (_cell(run, i, b, verdicts.get(b.index)) for b in run.blocks)
    name = tag("h2", run.name) if named else None
    return tag("div", name, tag("ol", *cells), class_=f"strip r{i}")


def _cell(run: Run, i: int, b: BlockProfile, word: str | None) -> Markup:
    s = run.swaps.get(b.index)
    measured, expected = finite(s.kl) if s else None, finite(b.expected_kl)
    about = [f"block {b.index}", *([word] if word else []), f"R2 {number(b.r2, 2)}"]
    if measured is not None:
        about.append(f"{compact(measured)} nats")
    elif expected is not None:
        about.append(f"{compact(expected)} nats expected")
    if word is None:
        sign, class_ = number(b.r2, 2).removeprefix("0"), f"heat{_shade(b.r2)}"
    else:
        look = LOOKS[word]
        sign, class_ = look.sign, look.colour + ("" if look.measured else " open")
    label = ", ".join(about)
    content = joined(tag("span", b.index), tag("b", sign))
    link = tag(
        "a", content, href=f"#{block_id(i, b.index)}", class_=class_, title=label, aria_label=label
    )
    return tag("li", link)


def _shade(r2: float) -> int:
    return round(SHADES * min(1.0, max(0.0, r2)))


def _legend(present: set[str], safe: float) -> Markup:
    limits = {"safe": safe, "costly": costly_from(safe)}
    items = []
    for word, meaning in MEANINGS.items():
        if word in present:
            look = LOOKS[word]
            class_ = f"chip {look.colour}" + ("" if look.measured else " open")
            chip = tag("span", look.sign, class_=class_, aria_hidden="true")
            items.append(tag("li", chip, meaning.format(**limits)))
    return tag("ul", *items, class_="legend")


def _scale() -> Markup:
    steps = (tag("span", f"{k / 4:g}", class_=f"chip heat{5 * k}") for k in range(5))
    return tag("ul", tag("li", "R2 ", *steps), class_="legend")


def _sentence(run: Run, i: int, verdicts: dict[int, str], named: bool) -> Markup:
    name = tag("b", f"{run.name}: ") if named else None
    asked = any(word in MEASURED for word in verdicts.values()) or run.swaps
    command = None if asked else tag("code", f"howlinear swap {run.folder}")
    told = None if asked else joined(" ", command, " measures the cost.")
    return tag("p", name, _answer(run, verdicts), _sinks(run), told, class_=f"answer r{i}")


def _answer(run: Run, verdicts: dict[int, str]) -> str:
    """How many blocks can be replaced, or how linear they are where no cost is known."""
    safe, blocks = run.limit, plural(len(run.blocks), "block")
    measured = [index for index, word in verdicts.items() if word in MEASURED]
    if measured:
        return _measured(run, verdicts, measured, safe)
    if any(word in ESTIMATED for word in verdicts.values()):
        count = sum(word == ESTIMATED[0] for word in verdicts.values())
        return (
            f"By the profile's estimate, {count or 'none'} of {blocks} can become one matrix for less than "
            f"{safe:.3g} nats per token."
        )
    low, high = (f(run.blocks, key=lambda b: b.r2) for f in (min, max))
    told = " The model has no next-token loss, so a swap has no cost in nats." if run.swaps else ""
    return (
        f"The best matrix explains between {number(low.r2, 2)} (block {low.index}) and "
        f"{number(high.r2, 2)} (block {high.index}) of the variance of a block's output.{told}"
    )


def _measured(run: Run, verdicts: dict[int, str], measured: list[int], safe: float) -> str:
    count = sum(verdicts[index] in SAFE_WORDS for index in measured)
    tried = "" if len(measured) == len(run.blocks) else " that were tried"
    if count:
        units = sum(verdicts[index] == SAFE_WORDS[1] for index in measured)
        kept = f", {units} of them with hidden units kept" if units else ""
        return (
            f"{count} of {plural(len(measured), 'block')}{tried} can become one matrix for less than "
            f"{safe:.3g} nats per token, one at a time{kept}."
        )
    cheapest = min(measured, key=lambda index: run.swaps[index].kl or 0.0)
    cost = compact(finite(run.swaps[cheapest].kl))
    return (
        f"None of {plural(len(measured), 'block')}{tried} is shown to cost less than {safe:.3g} nats per token "
        f"as one matrix; the cheapest is block {cheapest} with {cost}."
    )


def _sinks(run: Run) -> str:
    sinks = [b.index for b in run.blocks if b.kind == "first-position only"]
    if not sinks:
        return ""
    *first, last = ranges(sinks).split(",")
    listed = f"{', '.join(first)} and {last}" if first else last
    subject = f"Block {listed} looks" if len(sinks) == 1 else f"Blocks {listed} look"
    return f" {subject} linear only because of the first position of a window."
