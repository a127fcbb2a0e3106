"""What the formats of exports store for a replaced block, so that a plan can count it.

    GGUF.parameters(d, rank, units)        # of a map of this rank beside so many kept hidden units
    is_stock_width(1344, 1536)             # may all blocks of a stock model have this width?

A map y ~ B(Ax) + b + D h_S of rank r beside k units is a stock gated block of r + k units there
(`export.stock_units`): 3 d (r + k) parameters and biases, where a matrix alone would take d^2.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """How a format stores the width and the biases of a block."""

    name: str  # of the export
    multiple: int  # widths are multiples of this
    every_bias: bool  # are there biases in all blocks, also where they are zero?

    def width(self, rank: int, units: int) -> int:
        """Hidden units of a block that holds a map of this rank beside so many kept units."""
        return max(-(-(rank + units) // self.multiple), 1) * self.multiple

    def parameters(self, d: int, rank: int, units: int) -> int:
        """Parameters of that block: gate, up and down with their biases."""
        width = self.width(rank, units)
        gate_and_up = 2 * width if self.every_bias else width if rank else 0
        return 3 * d * width + gate_and_up + d

    def added(self, d: int, width: int) -> int:
        """Parameters that a block which stays gains: biases, where the format has them everywhere."""
        return 2 * width + d if self.every_bias else 0


GGUF = Format("gguf", 32, every_bias=False)  # q8_0 packs 32 weights of a row
NEMOTRON = Format("nemotron-nas", 256, every_bias=True)  # readers round widths up to 256
FORMATS = {form.name: form for form in (GGUF, NEMOTRON)}
INSTEAD = 'use `kind="hf"`'  # what the other kinds of export recommend: it holds every map
NO_LLAMA = 'use `kind="stock"` or hf'  # what formats for Llamas recommend
STOCK = "stock"  # one width for all blocks, of hidden units that are kept; no linear ones


def is_stock_width(units: int, before: int) -> bool:
    """May blocks of `before` hidden units keep so many? Multiples of 32, as engines and q8_0 want them,
    where there are enough of these to choose from."""
    return units > 0 and (before < 16 * GGUF.multiple or units % GGUF.multiple == 0)
