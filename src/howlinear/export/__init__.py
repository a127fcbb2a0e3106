"""A compressed model as a checkpoint that other programs load, checked by reloading it.

`write` is the way in; `hf`, `stock`, `nemotron_nas`, `gguf_write` and `gguf_family` are kinds of export; `reload`
checks the result.
`linear_blocks` is copied verbatim into exports and imports nothing of howlinear.
"""
