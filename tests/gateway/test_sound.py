"""Sound in the forms that OpenAI's interface knows, while it comes."""

from __future__ import annotations

import io
import sys

import av
import numpy as np
import pytest
import soundfile

from omnistage.gateway.failure import ApiError
from omnistage.gateway.sound import MEDIA_TYPES, RAW, new_encoder

RATE_HZ = 24_000
FILES = {"wav": "wav", "flac": "flac", "mp3": "mp3", "opus": "ogg", "aac": "aac"}
"""By the name of a format, what FFmpeg calls its file."""


def seconds(data: bytes, form: str) -> float:
    """Seconds of sound that can be heard in a file that may have been broken off."""
    with av.open(io.BytesIO(data), "r", format=FILES[form]) as file:
        return float(sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0)))


def tone(duration_s: float) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(round(duration_s * RATE_HZ)) / RATE_HZ)).astype(np.float32)


@pytest.mark.parametrize("form", sorted(FILES.keys() - {"flac"}))
def test_it_can_be_heard_soon_and_wherever_it_ends(form: str) -> None:
    """Half a second has come in small pieces, and no more than 0.3 s of it are held back."""
    encoder = new_encoder(form, RATE_HZ, "format")
    begun = b"".join(encoder.encode(piece) for piece in np.split(tone(0.5), 25))
    assert 0.2 <= seconds(begun, form) <= 0.6
    assert 0.5 <= seconds(begun + encoder.finish(), form) <= 0.6


def test_a_flac_file_comes_as_a_whole_and_says_its_length() -> None:
    encoder = new_encoder("flac", RATE_HZ, "format")
    assert b"".join(encoder.encode(piece) for piece in np.split(tone(0.5), 25)) == b""
    samples, rate_hz = soundfile.read(io.BytesIO(encoder.finish()))
    assert (len(samples), rate_hz) == (RATE_HZ // 2, RATE_HZ)


@pytest.mark.parametrize("form", FILES)
async def test_beside_the_loop_it_is_the_same(form: str) -> None:
    beside, here = new_encoder(form, RATE_HZ, "format"), new_encoder(form, RATE_HZ, "format")
    pieces = np.split(tone(0.5), 5)
    written = b"".join([await beside.grown(piece) for piece in pieces]) + await beside.finished()
    expected = b"".join(map(here.encode, pieces)) + here.finish()
    if form == "opus":  # The number of its stream is drawn.
        assert (len(written), seconds(written, form)) == (len(expected), seconds(expected, form))
    else:
        assert written == expected


@pytest.mark.parametrize("form", FILES)
def test_two_channels_stay_apart(form: str) -> None:
    encoder = new_encoder(form, RATE_HZ, "format", 2)
    sound = np.stack([tone(0.5), np.zeros(RATE_HZ // 2, np.float32)], axis=1)
    data = b"".join(map(encoder.encode, np.split(sound, 5))) + encoder.finish()
    with av.open(io.BytesIO(data), "r", format=FILES[form]) as file:
        frames = [frame.to_ndarray() for frame in file.decode(audio=0)]
        assert file.streams.audio[0].codec_context.channels == 2
    loud, silent = np.concatenate([np.atleast_2d(frame).reshape(2, -1, order="F" if len(frame) == 1 else "C") for frame in frames], axis=1)
    assert np.abs(loud).max() > 20 * np.abs(silent).max()


def test_raw_samples_are_the_mean_of_channels() -> None:
    data = new_encoder("pcm", RATE_HZ, "format", 2).encode(np.array([[0.5, 0.25]], np.float32))
    assert np.frombuffer(data, "<i2").tolist() == [12288]


@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_louder_than_full_scale_is_clipped(form: str) -> None:
    encoder = new_encoder(form, RATE_HZ, "format")
    data = encoder.encode(np.full(4800, 3, np.float32)) + encoder.finish()
    assert data if form not in RAW else np.array_equal(np.frombuffer(data, "<i2"), np.full(4800, 32767))


@pytest.mark.parametrize("form", ["aac", "opus"])
def test_what_needs_a_package_that_is_missing_says_so(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ApiError, match=r"format: .*av") as refused:
        new_encoder(form, RATE_HZ, "format")
    assert (refused.value.status, refused.value.param, refused.value.hint.count("mp3")) == (400, "format", 1)


@pytest.mark.parametrize(("form", "rate_hz"), [("aac", 12345), ("opus", 22050)])
def test_sound_of_a_rate_that_a_form_cannot_have_gets_one_that_it_can(form: str, rate_hz: int) -> None:
    encoder = new_encoder(form, rate_hz, "format")
    data = encoder.encode(np.zeros(rate_hz, np.float32)) + encoder.finish()
    assert seconds(data, form) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("form", "rate_hz"), [("mp3", 12345), ("vorbis", RATE_HZ)])
def test_what_cannot_be_written_is_refused_by_its_field(form: str, rate_hz: int) -> None:
    with pytest.raises(ApiError, match=r"^format: ") as refused:
        new_encoder(form, rate_hz, "format")
    assert (refused.value.status, refused.value.param) == (400, "format")
