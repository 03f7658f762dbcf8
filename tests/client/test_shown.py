"""An answer's figures, on arrivals that can be checked by hand, its line in a terminal, and its HTML in a notebook."""

from __future__ import annotations

import base64
import io
import re
import wave
from collections.abc import AsyncIterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from helpers.media_files import picture
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AsyncOmni, Audio, AudioChunk, Done, Omni, Picture, Rows, SoundFile, SpeechCodes, Usage
from omnistage.client.answer import collect
from omnistage.client.events import AudioArrival, Event, StageReport, TextArrival, Timing, buffer_levels, is_audible, play
from omnistage.client.files import LONGEST_SHOWN_S, MAX_PICTURE_BYTES, pictures_html

RATE = 1000


def chunks(*arrivals: tuple[float, int, bool]) -> list[AudioArrival]:
    """(arrival, samples, audible) each."""
    result, first = [], 0
    for arrival_s, samples, audible in arrivals:
        result.append(AudioArrival(arrival_s, first, samples, RATE, audible))
        first += samples
    return result


def test_first_sound_is_the_first_audible_chunk_not_the_first_chunk() -> None:
    timing = Timing([], chunks((0.1, 200, False), (0.3, 200, True), (0.4, 200, True)), 0.5)
    assert (timing.ttfa_s, Timing([], chunks((0.1, 200, False)), 0.5).ttfa_s) == (0.3, None)


@pytest.mark.parametrize(("level", "audible"), [(0.0, False), (0.0099, False), (0.0101, True), (-0.0101, True)])
def test_audible_means_above_minus_40_dbfs(level: float, audible: bool) -> None:
    samples = np.zeros(100, np.float32)
    samples[57] = level
    assert is_audible(samples) is audible and not is_audible(samples[:0])


def test_first_text_is_the_first_text_that_is_not_empty() -> None:
    assert Timing([TextArrival(0.1, 0), TextArrival(0.2, 3)], [], 0.5).ttft_s == 0.2


def test_real_time_factor_is_last_sound_over_audio() -> None:
    timing = Timing([], chunks((0.2, 1000, True), (0.5, 1000, True)), 0.9)
    assert (timing.audio_s, timing.rtf) == (2.0, 0.25)


def test_without_sound_there_is_no_real_time_factor() -> None:
    timing = Timing([TextArrival(0.1, 3)], [], 0.5)
    assert timing.rtf is None and timing.underrun_s == 0.0 and timing.is_continuous


def test_underrun_is_the_largest_lateness_of_a_chunk() -> None:
    arrivals = chunks((1.0, 100, True), (1.05, 100, True), (1.5, 100, True), (1.55, 100, True), (1.9, 100, True))
    by_definition = max(chunk.arrival_s - 1.0 - chunk.first_sample / RATE for chunk in arrivals)
    timing = Timing([], arrivals, 2.0)
    assert timing.underrun_s == pytest.approx(by_definition) and not timing.is_continuous


def test_a_player_waits_for_a_late_chunk_and_goes_on() -> None:
    played = play(chunks((1.0, 100, True), (1.3, 100, True), (1.31, 100, True)))
    assert [(round(p.start_s, 6), round(p.gap_s, 6)) for p in played] == [(1.0, 0.0), (1.3, 0.2), (1.4, 0.0)]
    assert Timing([], chunks((0.2, 500, True), (0.3, 500, True), (0.6, 500, True)), 0.7).underrun_s == 0.0, "these come in time"


def test_who_waits_as_it_was_told_hears_no_gap() -> None:
    late = chunks((1.0, 100, True), (1.3, 100, True), (1.31, 100, True))
    for told, gaps_s in ((None, 0.2), (0.0, 0.2), (0.15, 0.05), (0.2, 0.0), (3.0, 0.0)):
        timing = Timing([], [replace(late[0], prebuffer_s=told), *late[1:]], 2.0)
        assert timing.prebuffer_s == told and timing.starved_s == pytest.approx(gaps_s)
        assert timing.underrun_s == pytest.approx(0.2)


def test_a_player_with_a_buffer_starts_when_it_is_full_or_that_is_all() -> None:
    arrivals = chunks((1.0, 300, True), (1.2, 300, True), (1.9, 100, True))
    assert [round(p.start_s, 6) for p in play(arrivals, 0.5)] == [1.2, 1.5, 1.9]
    assert [round(p.start_s, 6) for p in play(arrivals)] == [1.0, 1.3, 1.9]
    assert [round(p.start_s, 6) for p in play(chunks((1.0, 200, True), (1.4, 100, True)), 0.5)] == [1.4, 1.6]


def test_the_buffer_is_what_was_received_and_not_played() -> None:
    levels = buffer_levels(chunks((1.0, 300, True), (1.2, 300, True), (2.0, 200, True)), 0.5)
    assert [(round(level.at_s, 6), round(level.buffered_s, 6)) for level in levels] == [
        *((1.0, 0.0), (1.0, 0.3), (1.2, 0.3), (1.2, 0.6), (1.5, 0.3)),
        *((1.8, 0.0), (2.0, 0.0), (2.0, 0.2), (2.2, 0.0)),  # From 1.8 s to 2 s the listener waits.
    ]
    assert buffer_levels([]) == []


def test_the_buffer_is_empty_only_where_the_listener_waits(seed: int) -> None:
    random = np.random.default_rng(seed)
    arrivals = chunks(*((float(at_s), 200, True) for at_s in np.sort(random.uniform(0.0, 4.0, 20))))
    played = play(arrivals, 0.5)
    for level in buffer_levels(arrivals, 0.5):
        if played[0].start_s < level.at_s < arrivals[-1].arrival_s and level.buffered_s < 1e-9:
            assert any(chunk.start_s - chunk.gap_s - 1e-9 <= level.at_s <= chunk.start_s + 1e-9 for chunk in played)
    assert sum(level.buffered_s < 1e-9 for level in buffer_levels(arrivals, 0.5)) >= 2 * sum(chunk.gap_s > 1e-9 for chunk in played)


def test_timing_tells_its_figures_and_none_of_its_arrivals() -> None:
    text = [TextArrival(0.1 + number / 100, 4) for number in range(500)]
    audio = [AudioArrival(0.4 + number / 10, number * 4800, 4800, 24000, True, 0.05 if not number else None) for number in range(100)]
    timing = Timing(text, audio, 10.4)
    figures = "ttft_s=0.1, ttfa_s=0.4, e2e_s=10.4, audio_s=20.0, rtf=0.515, underrun_s=0.0, prebuffer_s=0.05, starved_s=0.0"
    assert repr(timing) == f"Timing({figures})"
    assert repr(Timing(text, (), 10.4)) == "Timing(ttft_s=0.1, e2e_s=10.4)"
    assert repr(Timing((), (), 0.25)) == "Timing(e2e_s=0.25)"


def test_events_tell_shapes_and_no_values() -> None:
    chunk = AudioChunk(np.zeros(4800, np.float32), 9600, 24000, 0.51234, "pcm16", 0.1)
    contents = "float32 [4800], first_sample=9600, sample_rate_hz=24000, 'pcm16', duration_s=0.2, arrival_s=0.512, prebuffer_s=0.1"
    assert repr(chunk) == f"AudioChunk({contents})"
    assert repr(SpeechCodes(np.zeros((12, 16), np.uint32), 24, 0.5)) == "SpeechCodes(uint32 [12, 16], first_frame=24, arrival_s=0.5)"
    assert repr(Rows("pixels", np.zeros((64, 3), np.uint8), 0, 1.5)) == "Rows('pixels', uint8 [64, 3], first_row=0, arrival_s=1.5)"
    assert repr(Picture(bytes(9000), "image/png", 1, 0, None, 2.0)) == "Picture(image/png, 9000 bytes, index=1, layer=0, arrival_s=2.0)"
    assert "preview_step=3" in repr(Picture(bytes(9000), "image/png", 0, 0, 3, 2.0))
    assert repr(Audio(np.zeros(36000, np.float32), 24000)) == "Audio(float32 [36000], sample_rate=24000, 'pcm16', duration_s=1.5)"


def test_usage_tells_times_that_there_are() -> None:
    assert repr(Usage((), 0.0, 0.2, None, 1.0)) == "Usage(queued_s=0.0, first_text_s=0.2, total_s=1.0, stages: none)"


def test_a_sound_file_tells_how_much_it_holds(tmp_path: Path) -> None:
    with SoundFile(tmp_path / "a.wav") as file:
        assert repr(file) == f"SoundFile('{tmp_path}/a.wav', 0.00 s of sound, open)"
        for first in (0, 4800):
            file.write(AudioChunk(np.zeros(4800, np.float32), first, 24000, 0.1))
        assert repr(file) == f"SoundFile('{tmp_path}/a.wav', 0.40 s of sound, open)"
    assert repr(file) == f"SoundFile('{tmp_path}/a.wav', 0.40 s of sound, closed)"


def test_an_answer_is_told_in_a_few_lines_whatever_is_printed(toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        answer = omni.generate("Hi", seed=1)
        (done,) = (event for event in omni.stream("Hi", seed=1) if isinstance(event, Done))
        silent = omni.generate("Hi", seed=1, outputs=["text"])
    for told in (answer, answer.audio, answer.timing, answer.usage):
        assert len(repr(told)) < 300
    assert len(repr(done)) < 700
    tokens = "prompt_tokens=2, cached_tokens=0, completion_tokens=24"
    times = r"queued_s=\d\S*, first_text_s=\d\S*, first_audio_s=\d\S*, total_s=\d\S*"
    assert re.search(rf"{tokens}, {times}, stages: thinker, talker, code2wav\)$", repr(answer.usage))
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert answer.usage.first_audio_s is not None and answer.usage.first_audio_s > 0
    assert silent.usage.first_audio_s is None and silent.usage.first_text_s is not None


def test_a_client_tells_where_it_asks_and_whether_it_can(toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        assert repr(omni) == f"Omni({toy_address}, open)"
    assert repr(omni) == f"Omni({toy_address}, closed)"


async def test_a_private_stack_is_told_as_one(tmp_path: Path) -> None:
    omni = AsyncOmni(pipeline=toy_pipeline(tmp_path))
    assert repr(omni) == "AsyncOmni(not started, private stack, open)"
    async with omni:
        assert repr(omni) == f"AsyncOmni({omni.address}, private stack, open)"
        async with AsyncOmni(address=omni.address) as other:
            assert repr(other) == f"AsyncOmni({omni.address}, open)"
    assert repr(omni) == f"AsyncOmni({omni.address}, private stack, closed)"


@pytest.mark.parametrize(("drew", "end"), [(True, ", seed=7)"), (None, ", seed=7)"), (False, ")")])
async def test_an_answer_names_its_seed_unless_none_was_drawn_with(drew: bool | None, end: str) -> None:
    report = StageReport("thinker", "one", 0.0, 0.0, 0.1, {}, {}, 0, 0, drew=drew)

    async def events() -> AsyncIterator[Event]:
        yield Done("id", "smol", 7, "stop", Usage((report,), 0.0, None, None, 0.1), Timing((), (), 0.1))

    answer = await collect(events())
    assert (repr(answer), answer.seed) == (f"Answer('', no sound, finish_reason='stop'{end}", 7)


@pytest.mark.parametrize(
    ("reason", "tokens", "thought_tokens", "notes"),
    [
        ("repetition", 265, 0, ["ended at 265 tokens, because it repeated itself; /max-tokens N lets it say more"]),
        ("length", 512, 512, ["cut at 512 tokens while it was still thinking: there is no answer yet; /max-tokens N lets it say more"]),
        ("stop", 3, 3, ["ended while it was still thinking: there is no answer yet"]),
        ("stop", 3, 0, []),
        ("interrupted", 3, 0, []),
        ("a reason of a newer server", None, 0, []),
    ],
)
def test_an_end_that_the_model_did_not_choose_is_told_in_words(
    reason: str, tokens: int | None, thought_tokens: int, notes: list[str]
) -> None:
    done = Done("id", "smol", 7, reason, Usage((), 0.0, None, None, 0.1, tokens, thought_tokens), Timing((), (), 0.1))
    assert list(done.end_notes("/max-tokens N")) == notes
    assert [note.replace("max_tokens=N", "/max-tokens N") for note in done.notes] == notes


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
    assert (page.text, page.tags) == (answer.text, ["div"])


def test_pictures_are_shown_as_they_came() -> None:
    png = picture(1, 6, 8)
    page = NotebookPage(Picture(png, "image/png", 0, 0, None, 1.0)._repr_html_())
    assert page.sources == [("img", "image/png", png)]
    assert Image.open(io.BytesIO(page.sources[0][2])).size == (8, 6)


def test_pictures_that_are_too_much_are_counted() -> None:
    large = bytes(MAX_PICTURE_BYTES - 1)
    page = NotebookPage(pictures_html([("image/png", large), ("image/png", b"12"), ("image/webp", b"1"), ('image/x" onerror="', b"1")]))
    assert [(tag, kind, len(data)) for tag, kind, data in page.sources] == [("img", "image/png", len(large)), ("img", "image/webp", 1)]
    assert page.text.startswith("2 more in pictures")
