"""Speech over HTTP, as OpenAI's own client hears it, and sound in the forms of its interface, while it comes."""

from __future__ import annotations

import io
import sys
from base64 import b64decode
from typing import Any

import av
import httpx2
import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray

from helpers import lengths, servers
from helpers.openai_document import document, events_of
from omnistage.client import AsyncOmni
from omnistage.client.files import to_pcm16
from omnistage.gateway.failure import ApiError
from omnistage.gateway.sound import MEDIA_TYPES, RAW, new_encoder

TEXT = " ".join(f"word{n}" for n in range(80))
"""The toy makes 0.4 s of sound of it."""
RATE_HZ = 24_000

EXACT = ("wav", "flac", "pcm")
TYPES = {"mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac", "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm"}
READ_BY = {"wav": "wav", "flac": "flac", "mp3": "mp3", "opus": "ogg", "aac": "aac"}
"""FFmpeg's name of each format: named, so that nothing is guessed."""
ALIKE = 0.5
"""The toy's saw teeth are mostly above the frequencies that an encoder for speech keeps. Unrelated sound is below 0.1."""


def decoded(data: bytes, form: str) -> tuple[NDArray[np.float64], int]:
    """The samples of a file, full scale 1, and their rate."""
    if form == "pcm":
        return np.frombuffer(data, "<i2") / 32768, RATE_HZ
    with av.open(io.BytesIO(data), "r", format=READ_BY[form]) as file:
        rate_hz = file.streams.audio[0].rate
        frames = [frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)]
    samples = np.concatenate(frames)
    return samples.astype(np.float64) / (32768 if samples.dtype == np.int16 else 1), rate_hz


async def spoken(toy: servers.ServerProcesses, text: str, seed: int) -> NDArray[np.int16]:
    """The samples that gRPC gives."""
    async with AsyncOmni(address=toy.address) as omni:
        answer = await omni.say(text, seed=seed)
    assert answer.audio is not None and answer.audio.sample_rate == RATE_HZ
    return np.frombuffer(to_pcm16(answer.audio.samples), "<i2")


@lengths.drawn_cells(3, "form", TYPES)
async def test_every_format_holds_the_samples_of_grpc(form: str, toy: servers.ServerProcesses, client: openai.OpenAI, seed: int) -> None:
    expected = await spoken(toy, TEXT, seed) / 32768
    answer = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, response_format=form, extra_body={"seed": seed})  # type: ignore[arg-type]
    assert answer.response.headers["content-type"] == TYPES[form]
    heard, rate_hz = decoded(answer.content, form)
    if form in EXACT:
        assert rate_hz == RATE_HZ
        np.testing.assert_array_equal(heard, expected)
        return
    step = rate_hz // RATE_HZ
    heard = heard[::step]
    assert len(expected) <= len(heard) <= len(expected) + 4096, "what is added is the frames around it"
    assert likeness(heard, expected) > ALIKE


def likeness(heard: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The largest correlation, as much later as an encoder may hold it back."""
    room = len(heard) + len(expected)
    together = np.fft.irfft(np.fft.rfft(heard, room) * np.fft.rfft(expected, room).conj(), room)
    return float(together[:4096].max() / np.sqrt((heard**2).sum() * (expected**2).sum()))


def test_libsndfile_reads_every_file_that_it_knows(client: openai.OpenAI, seed: int) -> None:
    for form in ("wav", "mp3", "opus", "flac"):
        answer = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, response_format=form, extra_body={"seed": seed})
        samples, rate_hz = soundfile.read(io.BytesIO(answer.content))
        assert len(samples) / rate_hz == pytest.approx(0.4, abs=0.15), form


def test_the_default_is_mp3_and_what_clients_send_along_is_taken(client: openai.OpenAI) -> None:
    answer = client.audio.speech.create(model="gpt-4o-mini-tts", voice={"id": "toy"}, input="Hello", instructions="slowly", speed=1.5)
    assert answer.response.headers["content-type"] == "audio/mpeg" and decoded(answer.content, "mp3")[1] == RATE_HZ


def test_other_rates_are_asked_for_by_name(client: openai.OpenAI) -> None:
    ours = {"sample_rate_hz": 8000, "profile": "latency", "markdown": True}
    answer = client.audio.speech.create(model="toy", voice="toy", input=TEXT, response_format="wav", extra_body=ours)
    samples, rate_hz = decoded(answer.content, "wav")
    assert (rate_hz, len(samples)) == (8000, 3200)


async def test_it_comes_while_it_is_made(toy: servers.ServerProcesses, url: str, seed: int) -> None:
    """Read piece by piece, by the asynchronous client."""
    ours = {"seed": seed}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test", max_retries=0) as client:
        create = client.audio.speech.with_streaming_response.create
        async with create(model="tts-1", voice="alloy", input=TEXT, response_format="pcm", extra_body=ours) as answer:
            assert "content-length" not in answer.headers
            pieces = [piece async for piece in answer.iter_bytes()]
    assert np.array_equal(np.frombuffer(b"".join(pieces), "<i2"), await spoken(toy, TEXT, seed))


@lengths.drawn_cells(1, "form", ["pcm", "opus", "flac"])
async def test_events_hold_the_same_bytes_and_what_they_cost(form: str, toy: servers.ServerProcesses, url: str, seed: int) -> None:
    asked = {"model": "tts-1", "voice": "alloy", "input": TEXT, "response_format": form, "stream_format": "sse", "seed": seed}
    answer = httpx2.post(f"{url}/v1/audio/speech", json=asked)
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    *deltas, done = [data for _, data in events_of(answer.text)]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    heard, rate_hz = decoded(b"".join(b64decode(delta["audio"]) for delta in deltas), form)
    expected = await spoken(toy, TEXT, seed) / 32768
    assert likeness(heard[:: rate_hz // RATE_HZ], expected) > ALIKE
    # A word is a token, and a token two frames.
    usage = {"input_tokens": 80, "output_tokens": 160, "total_tokens": 240}
    async with AsyncOmni(address=toy.address) as omni:
        told = await omni.say(TEXT, seed=seed)
    assert told.unspoken > 0, "the toy has no sound for a first word"
    ours = {"unspoken": told.unspoken, "unspoken_words": told.unspoken_words}
    assert done == {"type": "speech.audio.done", "usage": usage, "omnistage": ours}


def test_only_events_have_times_of_words_and_only_of_a_pipeline_that_knows_them(url: str) -> None:
    asked: dict[str, Any] = {"input": TEXT, "timestamp_granularities": ["word"]}
    for more, words in (({}, "a file of sound has no room"), ({"stream_format": "sse"}, "toy gives text, audio, not 'alignment'")):
        refused = httpx2.post(f"{url}/v1/audio/speech", json={**asked, **more})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "timestamp_granularities") and words in error["message"]
    assert httpx2.post(f"{url}/v1/audio/speech", json={**asked, "timestamp_granularities": []}).status_code == 200


def test_events_are_as_the_document_has_them(url: str) -> None:
    asked = {"model": "tts-1", "voice": "alloy", "input": TEXT, "stream_format": "sse"}
    answer = httpx2.post(f"{url}/v1/audio/speech", json=asked)
    document().check(asked, "CreateSpeechRequest")
    for _, data in events_of(answer.text):
        document().check_answer(data, "/audio/speech", media_type="text/event-stream")


# Forms of sound


def seconds(data: bytes, form: str) -> float:
    """Seconds of sound that can be heard in a file that may have been broken off."""
    with av.open(io.BytesIO(data), "r", format=READ_BY[form]) as file:
        return float(sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0)))


def tone(duration_s: float) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(round(duration_s * RATE_HZ)) / RATE_HZ)).astype(np.float32)


@pytest.mark.parametrize("form", sorted(READ_BY.keys() - {"flac"}))
def test_it_can_be_heard_soon_and_wherever_it_ends(form: str) -> None:
    """Half a second has come in small pieces, and no more than 0.3 s of it are held back."""
    encoder = new_encoder(form, RATE_HZ, "format")
    begun = b"".join(encoder.encode(piece) for piece in np.split(tone(0.5), 25))
    assert 0.2 <= seconds(begun, form) <= 0.6 and 0.5 <= seconds(begun + encoder.finish(), form) <= 0.6


def test_a_flac_file_comes_as_a_whole_and_says_its_length() -> None:
    encoder = new_encoder("flac", RATE_HZ, "format")
    assert b"".join(encoder.encode(piece) for piece in np.split(tone(0.5), 25)) == b""
    samples, rate_hz = soundfile.read(io.BytesIO(encoder.finish()))
    assert (len(samples), rate_hz) == (RATE_HZ // 2, RATE_HZ)


@pytest.mark.parametrize("form", READ_BY)
async def test_beside_the_loop_it_is_the_same(form: str) -> None:
    beside, here = new_encoder(form, RATE_HZ, "format"), new_encoder(form, RATE_HZ, "format")
    pieces = np.split(tone(0.5), 5)
    written = b"".join([await beside.grown(piece) for piece in pieces]) + await beside.finished()
    expected = b"".join(map(here.encode, pieces)) + here.finish()
    if form == "opus":  # The number of its stream is drawn.
        assert (len(written), seconds(written, form)) == (len(expected), seconds(expected, form))
    else:
        assert written == expected


@pytest.mark.parametrize("form", READ_BY)
def test_two_channels_stay_apart(form: str) -> None:
    encoder = new_encoder(form, RATE_HZ, "format", 2)
    sound = np.stack([tone(0.5), np.zeros(RATE_HZ // 2, np.float32)], axis=1)
    data = b"".join(map(encoder.encode, np.split(sound, 5))) + encoder.finish()
    with av.open(io.BytesIO(data), "r", format=READ_BY[form]) as file:
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


def test_a_rate_that_a_form_cannot_have_is_refused_by_its_field() -> None:
    with pytest.raises(ApiError, match=r"^format: ") as refused:
        new_encoder("mp3", 12345, "format")
    assert (refused.value.status, refused.value.param) == (400, "format")
