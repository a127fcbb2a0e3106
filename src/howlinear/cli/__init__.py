"""The command line: a module for each command with its flags and what it prints.

`flags`, `sources`, `output`, `progress` and `printer` are shared by several commands.
Modules read flags, call the library and print. Nothing imports this package but `__main__`.
"""
