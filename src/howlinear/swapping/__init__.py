"""What replacing each block of a run by its map costs.

Fits maps from a run's moments and measures them with `losses.sweeps`.
Replaces one block at a time; several at once is what `compression` does.
"""
