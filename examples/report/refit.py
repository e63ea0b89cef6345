"""Short fits from a known place: bounded Gauss-Newton steps, their derivatives kept up to date by Broyden's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from objective import Vector, bounds
from scipy.optimize import lsq_linear

LEAST = 0.02
"""The next step is not worth its simulations where it promises less of the objective."""
DAMPING = 0.3
"""What moving a parameter's logarithm by 1 counts as, so that those that hardly matter stay where they are."""


def damped(slopes: Vector, goal: Vector) -> tuple[Vector, Vector]:
    """Both, with rows that say so (Levenberg and Marquardt)."""
    count = slopes.shape[1]
    return np.vstack([slopes, DAMPING * np.eye(count)]), np.concatenate([goal, np.zeros(count)])


def refit(
    residuals: Callable[[Vector], Vector],
    start: Vector,
    jacobian: Vector,
    names: Sequence[str],
    steps: int,
    reach: float = 0.5,
) -> tuple[Vector, float]:
    """From `start`, logarithms of the parameters `names`, in at most so many steps, none of which moves one by more
    than `reach` at first. Returns where that ends, and the objective there."""
    low, high = bounds(names)
    x, slopes = np.clip(start, low, high), jacobian.copy()
    found = residuals(x)
    for _ in range(steps):
        box = np.maximum(low - x, -reach) - 1e-9, np.minimum(high - x, reach) + 1e-9
        move = lsq_linear(*damped(slopes, -found), bounds=box).x
        promised = found @ found - np.sum(np.square(found + slopes @ move))
        if promised < LEAST:
            break
        moved = np.clip(x + move, low, high)
        move = moved - x
        new = residuals(moved)
        slopes += np.outer(new - found - slopes @ move, move) / (move @ move)
        if new @ new < found @ found:
            x, found, reach = moved, new, 2 * reach
        else:
            reach = float(np.abs(move).max()) / 4
    return x, float(found @ found)
