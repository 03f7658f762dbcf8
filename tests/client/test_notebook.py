"""An answer in a notebook: its text, a player of its sound, and its pictures, all in the HTML itself."""

from __future__ import annotations

import base64
import io
import wave
from html.parser import HTMLParser

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from helpers.media_files import picture
from omnistage.client import Audio, Omni, Picture
from omnistage.client.files import LONGEST_SHOWN_S, MOST_PICTURE_BYTES, pictures_html


class NotebookPage(HTMLParser):
    """sources: what audio and img elements have in them, by their tag, with its media type. text: between all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sources: list[tuple[str, str, bytes]] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        source = dict(attrs).get("src")
        if source is not None:
            kind, _, data = source.partition(";base64,")
            self.sources.append((tag, kind.removeprefix("data:"), base64.b64decode(data, validate=True)))
        assert tag != "audio" or "controls" in dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def heard(wav: bytes) -> tuple[int, NDArray[np.int16]]:
    """The sample rate of a mono WAV of 16 bit, and its samples."""
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert len(samples) == file.getnframes()
        return file.getframerate(), samples


def test_a_sound_is_a_player_that_has_every_sample() -> None:
    samples = np.random.default_rng(1).integers(-32768, 32768, 24000, np.int16)
    ((tag, kind, wav),) = NotebookPage(Audio(samples.astype(np.float32) / np.float32(32768), 16000)._repr_html_()).sources
    assert (tag, kind) == ("audio", "audio/wav")
    rate_hz, played = heard(wav)
    assert rate_hz == 16000
    np.testing.assert_array_equal(played, samples)


def test_a_player_of_a_long_sound_says_how_much_it_has() -> None:
    rate_hz = 1000
    ramp = (np.arange(round(LONGEST_SHOWN_S * rate_hz) + 90_000) % 30000).astype(np.float32) / np.float32(32768)
    page = NotebookPage(Audio(ramp, rate_hz)._repr_html_())
    _, played = heard(page.sources[0][2])
    np.testing.assert_array_equal(played, (ramp[: round(LONGEST_SHOWN_S * rate_hz)] * 32768).astype(np.int16))
    assert page.text == "The first 10 of 11.5 minutes; save writes all."
    assert NotebookPage(Audio(ramp[:-90_000], rate_hz)._repr_html_()).text == ""


def test_an_answer_shows_its_text_and_its_player(toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        answer = omni.generate("Hi", seed=1)
        silent = omni.generate("Hi", seed=1, outputs=["text"])
    assert answer.audio is not None
    page = NotebookPage(answer._repr_html_())
    assert page.text == answer.text
    rate_hz, played = heard(page.sources[0][2])
    assert rate_hz == answer.audio.sample_rate
    np.testing.assert_array_equal(played, np.rint(answer.audio.samples * 32768).astype(np.int16))
    assert NotebookPage(silent._repr_html_()).text == silent.text
    assert NotebookPage(silent._repr_html_()).sources == []


def test_what_is_said_is_text_and_never_markup(toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        answer = omni.generate("Hi", seed=1, outputs=["text"])
    answer.text = 'a < b && <script>alert(1)</script>\n"c"  d'
    page = NotebookPage(answer._repr_html_())
    assert page.text == answer.text
    assert page.tags == ["div"]


def test_pictures_are_shown_as_they_came() -> None:
    png = picture(1, 6, 8)
    page = NotebookPage(Picture(png, "image/png", 0, 0, None, 1.0)._repr_html_())
    assert page.sources == [("img", "image/png", png)]
    assert Image.open(io.BytesIO(page.sources[0][2])).size == (8, 6)


def test_pictures_that_are_too_much_are_counted() -> None:
    large = bytes(MOST_PICTURE_BYTES - 1)
    page = NotebookPage(pictures_html([("image/png", large), ("image/png", b"12"), ("image/webp", b"1"), ('image/x" onerror="', b"1")]))
    assert [(tag, kind, len(data)) for tag, kind, data in page.sources] == [("img", "image/png", len(large)), ("img", "image/webp", 1)]
    assert page.text.startswith("2 more in pictures")
