"""The profile: one pass over a text, moments of every block, maps, scores, the swap signal.

Layer by layer, in shards, in mixed precision; merged, compared, watched during training.
Replaces no block: `swapping` does.
"""
