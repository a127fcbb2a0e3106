"""The profile: one pass over a text, moments of every block, maps, scores, expected costs.

Layer by layer, in shards, in mixed precision; merged, compared, watched during training.
Replaces no block: `swapping` does.
"""
