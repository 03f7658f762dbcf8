"""Sums many values of one figure up in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of many values of one figure, in its unit. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Sum values up; None if there are none."""
        if not len(values):
            return None
        array = np.asarray(values, np.float64)
        median, p90, p99 = np.percentile(array, (50, 90, 99), method="linear")
        return cls(len(array), float(array.mean()), float(median), float(p90), float(p99), float(array.max()))
