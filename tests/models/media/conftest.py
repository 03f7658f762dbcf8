"""Decoders that leave nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from helpers.decoding import decoding
from omnistage.models.media.decoder import MediaDecoder


@pytest.fixture
async def decoder() -> AsyncIterator[MediaDecoder]:
    async with decoding() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_decoder() -> AsyncIterator[MediaDecoder]:
    """One of all tests of a file, which share the loop of the module, too."""
    async with decoding() as one:
        yield one
