"""Tests whose worth grows with their length: short wherever tests run, long in `make test-long`."""

from __future__ import annotations

import pytest

LONG = (pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600))


def rounds(short: int, long: int) -> pytest.MarkDecorator:
    """Gives a test its argument `rounds`: `short`, and in its long form `long`. Both make the same claim; the long form meets rarer
    things."""
    return pytest.mark.parametrize("rounds", [pytest.param(short, id="short"), pytest.param(long, id="long", marks=LONG)])
