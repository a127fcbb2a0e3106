"""A compressed model as a checkpoint that other programs load, checked by reloading it.

One module for each kind of export.
`linear_blocks` is copied word for word into exports and imports nothing of howlinear.
"""
