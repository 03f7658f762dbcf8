"""Good media of all kinds, through the process that decodes."""

from __future__ import annotations

import pytest

from helpers import media_files
from omnistage.models.media.asks import FilmAsk, PictureAsk
from omnistage.models.media.decoder import MediaDecoder


async def test_a_picture_a_sound_and_a_film_come_out_as_asked(decoder: MediaDecoder, seed: int) -> None:
    picture = await decoder.picture(media_files.picture(seed, 100, 200), PictureAsk(max_pixels=56 * 84))
    assert picture.pixels.shape == (28, 84, 3)
    sound = await decoder.sound(media_files.sound(seed, 1.5, 48_000, 2))
    assert sound.samples.shape == (24_000,)
    film = await decoder.film(media_files.film(seed, 30, sound_s=3.0), FilmAsk(use_audio=True))
    assert film.frames.shape[0] == 6
    assert film.frame_s == pytest.approx(0.5)
    assert film.sound is not None
    assert len(film.sound.samples) == pytest.approx(48_000, abs=2048)
