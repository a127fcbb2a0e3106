"""The command line: one module for each command, flags that several share, tables.

Modules read flags, call the library and print.
Nothing imports this package but `__main__`.
"""
