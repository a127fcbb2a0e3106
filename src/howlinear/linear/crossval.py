"""Cross-validation: each group of rows scored by the map of all other groups.

scores = cross_validate(groups)      # one accumulator for each fold
Score.pooled(scores).r2, r2_se(scores)
"""

from __future__ import annotations

from collections.abc import Sequence

from howlinear.linear.affine import Score, score, solve
from howlinear.linear.moments import Accumulator, merged


def cross_validate(groups: Sequence[Accumulator]) -> list[Score]:
    """The score of each group by the least-squares map of the others; groups without rows are left out."""
    filled = [group for group in groups if group.n]
    if len(filled) < 2:
        raise ValueError("all rows fall into one fold: give more text (--tokens)")
    return [
        score(solve(merged([*filled[:i], *filled[i + 1 :]]))[0], held)
        for i, held in enumerate(filled)
    ]
