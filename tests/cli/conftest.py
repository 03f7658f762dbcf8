"""A real toy stack, started once for all tests of the command."""

from collections.abc import Iterator

import pytest

from omnistage.client import Omni


@pytest.fixture(scope="session")
def toy_address() -> Iterator[str]:
    """HOST:PORT of a router in front of toy stages; it takes a few answers at once."""
    with Omni(pipeline="toy", max_sessions=16) as omni:
        yield omni.address
