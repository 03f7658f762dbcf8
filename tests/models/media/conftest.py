"""A decoder that leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from omnistage.models.media.decoder import MediaDecoder


@pytest.fixture
async def decoder() -> AsyncIterator[MediaDecoder]:
    one = MediaDecoder()
    yield one
    await one.close()
