"""Fixtures for tests of the link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omnistage.connector.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Shared memory that exposes a reader who comes too late, and that forgets lost streams at once, so that a test can count blocks."""
    arena = Arena.create(max_bytes=1 << 22, segment_bytes=1 << 18, poison=True, grace_s=0.0)
    assert arena is not None
    yield arena
    arena.close()
