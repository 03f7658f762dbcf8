"""The repr of each object: its contents in a line, and none of its bytes and samples."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AsyncOmni, Audio, AudioChunk, Done, Omni, Picture, Rows, SoundFile, SpeechCodes, Timing, Usage
from omnistage.client.answer import collect
from omnistage.client.events import AudioArrival, Event, StageReport, TextArrival


def test_timing_tells_its_figures_and_none_of_its_arrivals() -> None:
    text = [TextArrival(0.1 + number / 100, 4) for number in range(500)]
    audio = [AudioArrival(0.4 + number / 10, number * 4800, 4800, 24000, True, 0.05 if not number else None) for number in range(100)]
    timing = Timing(text, audio, 10.4)
    assert repr(timing) == (
        "Timing(ttft_s=0.1, ttfa_s=0.4, e2e_s=10.4, audio_s=20.0, rtf=0.515, underrun_s=0.0, prebuffer_s=0.05, starved_s=0.0)"
    )
    assert repr(Timing(text, (), 10.4)) == "Timing(ttft_s=0.1, e2e_s=10.4)"
    assert repr(Timing((), (), 0.25)) == "Timing(e2e_s=0.25)"


def test_events_tell_shapes_and_no_values() -> None:
    chunk = AudioChunk(np.zeros(4800, np.float32), 9600, 24000, 0.51234, "pcm16", 0.1)
    assert repr(chunk) == (
        "AudioChunk(float32 [4800], first_sample=9600, sample_rate_hz=24000, 'pcm16', duration_s=0.2, arrival_s=0.512, prebuffer_s=0.1)"
    )
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
        file.write(AudioChunk(np.zeros(4800, np.float32), 0, 24000, 0.1))
        file.write(AudioChunk(np.zeros(4800, np.float32), 4800, 24000, 0.2))
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
    assert repr(answer) == f"Answer('', no sound, finish_reason='stop'{end}"
    assert answer.seed == 7
