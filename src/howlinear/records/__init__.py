"""Results as frozen values that are written to JSON and read back checked.

Also numbers as text, escaping, verdicts, statistics over blocks and folds.
No torch, no models; imports no other package of howlinear.
"""
