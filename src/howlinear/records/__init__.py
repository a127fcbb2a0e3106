"""Results as frozen values that are written to JSON and read back checked.

Numbers as text, escaping, statistics over blocks and folds, the paper's figures.
No torch, no models, nothing of howlinear but this package.
"""
