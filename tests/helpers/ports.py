"""Loopback addresses that are known before anybody listens there: for the allow-lists of stages that start side by side."""

from __future__ import annotations

import itertools

from omnistage.cli.ports import Ports

_COUNT = 64

_HELD = Ports()
"""For the life of this process."""

NEIGHBOURS = tuple(_HELD.take() for _ in range(_COUNT))
"""Where servers of tests listen: all that a stage of a test may dial unless it says otherwise."""

_NEXT = itertools.cycle(NEIGHBOURS)


def take_address() -> str:
    """HOST:PORT of NEIGHBOURS; one that was taken comes again only after all others."""
    return next(_NEXT)
