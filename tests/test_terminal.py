"""What people see: tables that fit, numbers that are whole, signs and colours a terminal can show."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

import shown
from howlinear.cli import printer
from howlinear.cli.profile_table import modules
from howlinear.records import words
from howlinear.records.words import escaped, spelled

# a number as figures.py writes it, standing alone
NUMBERS = {
    "usual": ["0.887", "+4.60", "±0.85", "±.003", "2.32M", "2,320,000", "+0.8870", "123457"],
    "wild": [
        "-12.345",
        "+1.2e6",
        "±3.0e5",
        "±.123",
        "1.00B",
        "1,000,000,000",
        "-12.3451",
        "123457",
    ],
}
SAYS = {  # which of them, by place in the lists above
    "profile": (0, 3),
    "experts": (0, 3),
    "shard": (),
    "swap": (1, 2),
    "swap of an encoder": (0,),
    "swap --experts": (0, 1),
    "probe bilinear": (0, 1, 6),
    "probe degree": (0, 1),
    "probe units": (0, 1, 4),
    "probe dense": (0, 1, 4, 6),
    "probe poly": (0, 1, 4, 6),
    "probe seeded": (0, 1, 4, 6),
    "probe trained": (0,),
    "probe where": (0,),
    "probe quantised": (1,),
    "probe healing": (1,),
    "compress": (1, 2, 5),
    "bench": (4, 7),
    "compare 2": (0, 3),
    "compare 9": (0, 3),
    "control random-init": (0, 3),
    "control cross-feed": (0,),
    "control matched": (0,),
    "control checkpoints": (0,),
}


def render(result, width, encoding="utf-8", **how):
    show, data, blocks = result
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, newline="\n")  # strict, as a pipe is
    console = Console(file=file, width=width, highlight=False, **how)
    show(console, data, *([] if blocks is None else [blocks]))
    file.flush()
    return buffer.getvalue().decode(encoding)


def whole(number, text):
    """Does the number stand there, with nothing cut off or stuck to it?"""
    return re.search(rf"(?<![\w.±+-]){re.escape(number)}(?![\w.…])", text) is not None


@pytest.mark.parametrize("numbers", shown.EVERY)
@pytest.mark.parametrize("name", shown.RESULTS)
def test_every_table_fits_and_its_numbers_are_whole(name, numbers):
    for width in (80, 132, 200, 60):
        text = render(shown.RESULTS[name](shown.EVERY[numbers]), width)
        assert max(map(cell_len, text.splitlines())) <= width
        assert not re.search(r"nan|None", text)
        if numbers in NUMBERS:
            lacking = [n for i in SAYS[name] if not whole(n := NUMBERS[numbers][i], text)]
            assert not lacking, (width, lacking)
    render(shown.RESULTS[name](shown.EVERY[numbers]), 1)  # nothing fits, nothing breaks


def test_the_check_above_sees_cut_numbers():
    assert whole("-12.345", "a -12.345 b")
    assert not whole("-12.345", "a -12.3… b")
    assert not whole("+4.60", "a +4.601")
    assert not whole("0.887", "a -0.887")


def test_wide_terminals_are_told_more():
    row = render(shown.profile(shown.USUAL), 140)
    narrow = render(shown.profile(shown.USUAL), 80)
    for number in ("12288/12288", "1.5e12", "4.4358"):
        assert whole(number, row)
        assert number not in narrow
    assert "cosine" in render(shown.swap(shown.WILD), 120)
    assert whole("0.8870", render(shown.swap(shown.USUAL), 80))
    assert "(+854 % ± " in render(shown.profile(shown.USUAL), 96)  # exp(2.256) - 1, beyond reach
    assert "+854 %" not in narrow


@pytest.mark.parametrize("name", shown.RESULTS)
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_no_sign_is_too_much_for_a_terminal(name, encoding):
    text = render(shown.RESULTS[name](shown.WILD), 80, encoding)  # raises if there is
    assert max(map(cell_len, text.splitlines())) <= 80


def test_signs_are_spelled_out():
    text = render(shown.profile(shown.USUAL), 80, "ascii")
    assert "0.887 +-.003 #########  " in text
    assert "dppl +- se" in render(shown.swap(shown.USUAL), 80, "ascii")
    assert "\\u4e2d" in render(shown.probe("where")(shown.USUAL), 200, "ascii")
    assert spelled("Δ ± …", "latin-1") == "d ± ..."
    assert all(len(spelled(c, "ascii")) == 1 for c in "▏▎▍▌▋▊▉█")  # columns stay columns


def test_what_did_not_converge_has_a_star_and_its_meaning():
    assert "3000*" in (told := render(shown.probe("dense")(shown.USUAL), 80))
    assert "*: not converged" in told
    assert "*: not" not in render(shown.probe("bilinear")(shown.USUAL), 80)  # has no such column


def test_a_verdict_is_whole():
    assert "no polynomial of degree 3\n" in render(shown.probe("degree")(shown.WILD), 80)


def test_bars():
    assert [words.bar(x) for x in (0.53, 1.0, 7.0, 0.1)] == ["█████▎", "█" * 10, "█" * 10, "█"]
    assert [words.bar(x) for x in (0.0, -12.3, None, float("nan"))] == [""] * 4
    lengths = [words.bar(i / 80, 1) for i in range(0, 81, 10)]
    assert lengths == ["", *"▏▎▍▌▋▊▉█"]
    profile = render(shown.profile(shown.USUAL), 80)
    assert "0.887 ±.003 ████████▉  " in profile
    assert "█" not in render(shown.profile(shown.WILD), 80)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.88712, "0.887"),
        (-12.3451, "-12.345"),
        (123.456, "123.5"),
        (-1234567.0, "-1.2e6"),
        (float("inf"), "inf"),
        (float("nan"), "-"),
        (None, "-"),
    ],
)
def test_numbers(value, text):
    assert words.number(value) == text


def test_other_figures():
    assert [words.signed(x) for x in (4.6, -381.2, 8.2e5)] == ["+4.60", "-381", "+8.2e5"]
    assert [words.power(x) for x in (4e3, 1.25e-7, None)] == ["4.0e3", "1.2e-7", "-"]
    sizes = [words.count(x) for x in (12, 2_320_000, 10**9, 7 * 10**12)]
    assert sizes == ["12", "2.32M", "1.00B", "7.00T"]
    assert words.with_se(1.5, None) == "1.500"


def test_where_blocks_are():
    paths = [(i, f"encoder.block.{i}.layer.1.ff") for i in range(3)]
    paths += [(3 + i, f"decoder.block.{i}.layer.2.ff") for i in (0, 2)]
    assert modules(paths) == [
        "blocks 0-2: encoder.block.{0-2}.layer.1.ff",
        "blocks 3,5: decoder.block.{0,2}.layer.2.ff",
    ]
    assert modules([(0, "h.#.x"), (1, f"h.{'9' * 5000}.x")])[0] == "block 0: h.#.x"


HOSTILE = "a\x1b[31m\x07\u202eevil\u2066\r\n[red]b[/red]\x9b"


def test_strings_from_outside_are_text():
    assert escaped(HOSTILE) == r"a\x1b[31m\x07\u202eevil\u2066\r\n[red]b[/red]\x9b"
    for codes in (range(0x202A, 0x202F), range(0x2066, 0x206A), range(0x20), range(0x7F, 0xA0)):
        assert all(
            escaped(chr(code)).isascii() and chr(code) not in escaped(chr(code)) for code in codes
        )


def planted(value):
    """The same with every string from outside made hostile, keys and our own words left alone."""
    ours = {"broadly linear", "costly", "second", "shuffled", "ours", "swap", "r2", "zero", "sgd"}
    ours |= {
        "adam",
        "adamw",
        "raw",
        "whitened",
        "routed",
        "shared",
        "outlier-concentrated",
        "healed",
    }
    if isinstance(value, str):
        return value if value in ours else value + HOSTILE
    if isinstance(value, dict):
        return {k: planted(v) for k, v in value.items()}
    return [planted(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", shown.RESULTS)
def test_no_string_commands_a_terminal(name):
    function, data, blocks = shown.RESULTS[name](shown.USUAL)
    if blocks is None or isinstance(blocks[0], dict):
        blocks = planted(blocks)
    else:
        blocks = [type(b)(**planted(b.to_dict())) for b in blocks]
    text = render((function, planted(data), blocks), 80, force_terminal=True, color_system=None)
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert max(map(cell_len, text.splitlines())) <= 80
    assert r"\x9b" in "".join(text.split())  # shown, not dropped


def test_colour_never_stands_alone():
    """Without it the same words are there."""
    for name in shown.RESULTS:
        result = shown.RESULTS[name](shown.USUAL)
        coloured = render(result, 80, force_terminal=True, color_system="standard")
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == render(result, 80)
    assert "\x1b[" in render(shown.profile(shown.USUAL), 80, force_terminal=True)


def test_words_are_cut_in_the_middle_and_by_cells():
    assert printer.cut("model.layers.0.mlp", 9) == "mode….mlp"
    assert cell_len(printer.cut("中文字符" * 9, 10)) == 10
