"""Colours, strokes and fonts by name, for the page and for files.

Hues come from the Okabe-Ito palette, which colour-blind readers can tell apart. They are darkened on
white and lightened on black until each has a contrast of at least 3 to 1. Runs also differ in shape.
The colours of verdicts stay apart for readers who do not see red, green or blue; cells also have a sign.
"""

from __future__ import annotations

COLOURS = {  # on white, on black
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#57606a", "#a9b1ba"),
    "axis": ("#6e7781", "#8b949e"),
    "grid": ("#e3e6ea", "#2d333b"),
    "c0": ("#0065a3", "#56b4e9"),
    "c1": ("#c04a00", "#ff9457"),
    "c2": ("#007a58", "#2cc596"),
    "c3": ("#a8437c", "#e698c3"),
    "c4": ("#8a6000", "#e9c046"),
    "c5": ("#5a5fc0", "#a5a9ff"),
    "safe": ("#1673b5", "#4fb0f0"),
    "some": ("#b87a00", "#f0c64a"),
    "costly": ("#9b1b4b", "#e8487f"),
    "undecided": ("#7d8590", "#98a1ab"),
}
ON = {  # text on a verdict's colour: on white, on black
    "on-safe": ("#ffffff", "#14171b"),
    "on-some": ("#14171b", "#14171b"),
    "on-costly": ("#ffffff", "#14171b"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in (COLOURS | ON).items()} for i in (0, 1))
RUNS = tuple(f"c{i}" for i in range(6))
# The last but one comes with typst: PNG and PDF have letters without serifs where no font is installed.
FONT = 'system-ui, "Segoe UI", "DejaVu Sans", "Liberation Sans", Helvetica, Arial, "DejaVu Sans Mono", sans-serif'

# dark blue to yellow, evenly spaced in lightness (six stops of cividis)
STOPS = (
    *((0, 34, 78), (50, 72, 110), (98, 107, 121)),
    *((149, 143, 120), (207, 182, 96), (254, 232, 56)),
)


def heat(share: float) -> str:
    """The colour of a share from 0 to 1 on the scale of STOPS."""
    place = min(1.0, max(0.0, share)) * (len(STOPS) - 1)
    i = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (place - i) * (b - a)) for a, b in zip(STOPS[i], STOPS[i + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


SHADES = 20  # colours of `heat` that have a class on a page


def shades() -> str:
    """Rules for cells coloured by a share: classes heat0 to heat20, with text that can be read."""
    rules = []
    for k in range(SHADES + 1):
        ink = "#ffffff" if k < 0.48 * SHADES else "#000000"
        rules.append(f".heat{k}{{background:{heat(k / SHADES)};color:{ink}}}")
    return "".join(rules)


def variables(palette: dict[str, str]) -> str:
    """A palette as CSS variables."""
    return "".join(f"--{name}:{colour};" for name, colour in palette.items())


def stylesheet(palette: dict[str, str] | None = None) -> str:
    """Rules for marks: colours as CSS variables, or literal where a palette is passed (files)."""
    rules = [
        f".hl text{{font:13px {FONT}}}",
        ".hl .small{font-size:11.5px}.hl .bold{font-weight:600}",
        ".hl .l{fill:none;stroke-linejoin:round;stroke-width:1.7}",
        ".hl .thin{stroke-width:1}.hl .wide{stroke-width:7}",
        ".hl .d{stroke-width:1.4}.hl .soft{opacity:.45}",
        ".hl .dash{stroke-dasharray:6 3}.hl .dots{stroke-dasharray:1.5 3}",
    ]
    palette = palette or {name: f"var(--{name})" for name in COLOURS}
    for name in COLOURS:
        colour = palette[name]
        rules.append(f".hl .l.{name},.hl .d.{name}{{stroke:{colour}}}")
        rules.append(f".hl .d.{name},.hl .t.{name},.hl .b.{name}{{fill:{colour}}}")
    paper = palette["paper"]
    rules.append(f".hl .d.open{{fill:{paper}}}")
    rules.append(f".hl .halo{{paint-order:stroke;stroke:{paper};stroke-width:3.5px}}")
    return "".join(rules)
