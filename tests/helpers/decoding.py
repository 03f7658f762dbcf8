"""Decoders of media with the limits of a test, which leave nothing behind; and pictures as they come out of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import MediaLimits, PicturePreprocessing

AS_IT_IS = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=1 << 30)
"""For a picture that is not resized."""


@asynccontextmanager
async def decoding(limits: MediaLimits | None = None, **options: int) -> AsyncIterator[MediaDecoder]:
    """A decoder, closed in the end. options: as those of MediaDecoder."""
    decoder = MediaDecoder(limits, **options)
    try:
        yield decoder
    finally:
        await decoder.close()


async def pixels_of(decoder: MediaDecoder, data: bytes, asked: PicturePreprocessing = AS_IT_IS) -> NDArray[np.uint8]:
    return (await decoder.picture(data, asked)).pixels
