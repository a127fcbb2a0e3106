"""Rows -> moments -> the exact least-squares map and its scores.

    rows         inputs and outputs of a block in one batch
    folds        which rows are held out
    moments      `Moments` and `TSQR`: `accumulators`, which add up exactly
    stores       the accumulators and the row sample of one block
    affine       maps: a matrix, two factors, a matrix beside hidden units
    solving      accumulator -> map
    scoring      map and held-out accumulator -> R2 and other scores, cross-validation
    unit_selection  which hidden units to keep beside a matrix

Needs torch. Imports no models: rows may come from anywhere.
"""
