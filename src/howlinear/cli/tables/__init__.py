"""What commands print: one module for each command's tables, and the printer that all of them use.

    show_profile(terminal_console(), result.to_dict(), result.blocks)

A `show_` function takes the console, the content of the result's JSON file and the result's blocks.
Tables fit 80 columns; some have more columns on wider terminals.
"""
