"""The clients against a real toy stack: what comes back is what the formulas of the toy models say."""

import asyncio
import threading
import wave
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omnistage.client import (
    AsyncOmni,
    AudioChunk,
    BadRequestError,
    ClosedError,
    DeadlineError,
    Done,
    Omni,
    OmniError,
    TextDelta,
    UnavailableError,
    UnknownModelError,
)
from omnistage.models.toy import formulas

ENDLESS = 32768
"""Tokens of an answer that is still running when the test is over."""


@pytest.fixture
def omni(toy_address: str) -> Iterator[Omni]:
    with Omni(address=toy_address) as client:
        yield client


def assert_is_the_formula(text: str, samples: NDArray[np.float32], seed: int, prompt: str, length: int) -> None:
    assert text == formulas.text(seed, prompt, length)
    assert np.array_equal(samples, formulas.audio(seed, prompt, length)[:, 0])


def test_generate_is_text_and_sound(omni: Omni) -> None:
    answer = omni.generate("Hello there", seed=5)
    assert answer.audio is not None
    assert_is_the_formula(answer.text, answer.audio.samples, 5, "Hello there", formulas.NATURAL_LENGTH)
    assert answer["content"] == answer.text
    assert (answer.seed, answer.pipeline, answer.finish_reason) == (5, "toy", "stop")
    assert answer.audio.sample_rate == formulas.SAMPLE_RATE_HZ
    assert [stage.stage for stage in answer.usage.stages] == ["thinker", "talker", "code2wav"]
    assert answer.timing.ttft_s is not None
    assert answer.timing.ttfa_s is not None
    assert 0 < answer.timing.ttft_s <= answer.timing.e2e_s
    assert 0 < answer.timing.ttfa_s <= answer.timing.e2e_s


@pytest.mark.parametrize("rate_hz", [8000, 44100])
def test_sound_at_another_rate(omni: Omni, rate_hz: int) -> None:
    """All that is said of it is at that rate: samples, places, lengths."""
    soxr = pytest.importorskip("soxr", reason="the models extra is not installed")
    own = formulas.audio(5, "Hello there", formulas.NATURAL_LENGTH)[:, 0]
    answer = omni.generate("Hello there", seed=5, sample_rate_hz=rate_hz)
    assert answer.audio is not None and answer.audio.sample_rate == rate_hz
    assert np.abs(answer.audio.samples - soxr.resample(own, formulas.SAMPLE_RATE_HZ, rate_hz, "VHQ")).max() < 1.01 / 65536
    assert answer.audio.duration_s == pytest.approx(len(own) / formulas.SAMPLE_RATE_HZ, abs=1 / rate_hz)
    assert answer.timing.audio_s == pytest.approx(answer.audio.duration_s)
    sounds = [event for event in omni.stream("Hello there", seed=5, sample_rate_hz=rate_hz) if isinstance(event, AudioChunk)]
    assert sum(sound.duration_s for sound in sounds) == pytest.approx(answer.audio.duration_s)
    assert sounds[-1].first_sample + len(sounds[-1].samples) == len(answer.audio.samples)


def test_a_rate_that_is_not_possible_is_refused(omni: Omni) -> None:
    with pytest.raises(BadRequestError, match="12345 is not possible; ask for one of 8000, 11025, ") as refused:
        omni.generate("Hi", sample_rate_hz=12345)
    assert [violation.field for violation in refused.value.fields] == ["code2wav.sample_rate_hz"]


def test_a_seed_that_was_not_given_is_told_and_repeats_the_answer(omni: Omni) -> None:
    first, other = omni.generate("Hi"), omni.generate("Hi")
    assert first.seed != other.seed
    assert omni.generate("Hi", seed=first.seed).text == first.text


def test_max_tokens_cuts_text_and_sound(omni: Omni) -> None:
    answer = omni.generate("Hi", seed=1, max_tokens=7)
    assert answer.audio is not None
    assert_is_the_formula(answer.text, answer.audio.samples, 1, "Hi", 7)
    assert answer.finish_reason == "length"


def test_text_only_has_no_sound(omni: Omni) -> None:
    answer = omni.generate("Hi", seed=1, outputs=["text"])
    assert answer.audio is None
    assert answer.timing.ttfa_s is None
    assert answer.text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_say_speaks_exactly_the_text(omni: Omni) -> None:
    answer = omni.say("Good morning to you.")
    assert answer.text.split() == ["Good", "morning", "to", "you."]
    assert answer.audio is not None


def test_a_conversation_goes_on_with_its_answers(omni: Omni) -> None:
    conversation: list[Mapping[str, str]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first = omni.chat(conversation, seed=2)
    conversation += [first, {"role": "user", "content": "And then?"}]
    second = omni.chat(conversation, seed=2)
    assert first["content"] != second["content"]
    assert second.text


def test_a_saved_file_holds_the_chunks(omni: Omni, tmp_path: Path) -> None:
    chunks = [event.samples for event in omni.stream("Hi", seed=3) if isinstance(event, AudioChunk)]
    answer = omni.generate("Hi", seed=3)
    assert answer.audio is not None
    answer.audio.save(tmp_path / "answer.wav")
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, formulas.SAMPLE_RATE_HZ)
        stored = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert len(chunks) > 1
    assert np.array_equal(stored / np.float32(32768), np.concatenate(chunks))


def test_a_stream_is_in_order_and_ends_with_done(omni: Omni) -> None:
    events = list(omni.stream("Hello", seed=9, max_tokens=200, ignore_eos=True))
    texts = [event for event in events if isinstance(event, TextDelta)]
    sounds = [event for event in events if isinstance(event, AudioChunk)]
    assert len(texts) > 1
    assert len(sounds) > 1
    assert isinstance(events[-1], Done)
    assert sum(isinstance(event, Done) for event in events) == 1
    arrivals = [event.arrival_s for event in events if not isinstance(event, Done)]
    assert arrivals == sorted(arrivals)
    first_samples = [sound.first_sample for sound in sounds]
    lengths = [len(sound.samples) for sound in sounds]
    assert first_samples == [0, *np.cumsum(lengths)[:-1].tolist()]
    first_tokens = [text.first_token for text in texts]
    assert first_tokens == [0, *np.cumsum([len(text.token_ids) for text in texts])[:-1].tolist()]
    assert_is_the_formula("".join(text.text for text in texts), np.concatenate([s.samples for s in sounds]), 9, "Hello", 200)


def test_stream_chat_and_stream_say(omni: Omni) -> None:
    spoken = "".join(event.text for event in omni.stream_say("one two") if isinstance(event, TextDelta))
    assert spoken.split() == ["one", "two"]
    answered = list(omni.stream_chat([{"role": "user", "content": "Hi"}], seed=4))
    assert "".join(event.text for event in answered if isinstance(event, TextDelta)) == formulas.text(4, "Hi", formulas.NATURAL_LENGTH)


def test_many_threads_hear_their_own_answers(omni: Omni) -> None:
    def ask(number: int) -> None:
        answer = omni.generate(f"question {number}", seed=number)
        assert answer.audio is not None
        assert_is_the_formula(answer.text, answer.audio.samples, number, f"question {number}", formulas.NATURAL_LENGTH)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))


async def test_async_answers_at_once(toy_address: str) -> None:
    async with AsyncOmni(address=toy_address) as omni:
        answers = await asyncio.gather(*(omni.generate(f"q{i}", seed=i) for i in range(8)))
    for i, answer in enumerate(answers):
        assert answer.audio is not None
        assert_is_the_formula(answer.text, answer.audio.samples, i, f"q{i}", formulas.NATURAL_LENGTH)


async def test_the_async_client_does_it_all(toy_address: str) -> None:
    async with AsyncOmni(address=toy_address) as omni:
        assert [model.name for model in await omni.pipelines()] == ["toy"]
        assert [replica.stage for replica in await omni.replicas()] == ["thinker", "talker", "code2wav"]
        assert (await omni.say("one two")).text.split() == ["one", "two"]
        assert (await omni.chat([{"role": "user", "content": "Hi"}], seed=1)).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    with pytest.raises(ClosedError):
        await omni.generate("Hi")


def test_models_and_replicas(omni: Omni) -> None:
    (model,) = omni.pipelines()
    assert (model.name, model.stages, model.outputs) == ("toy", ("thinker", "talker", "code2wav"), ("text", "audio"))
    omni.generate("Hi")
    replicas = omni.replicas()
    assert [(replica.stage, replica.state) for replica in replicas] == [
        ("thinker", "serving"),
        ("talker", "serving"),
        ("code2wav", "serving"),
    ]
    assert all(replica.pid > 0 for replica in replicas)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"pipeline": "absent"}, UnknownModelError),
        ({"outputs": ["video"]}, BadRequestError),
        ({"max_tokens": 40000}, BadRequestError),
        ({"temperature": 3.0}, BadRequestError),
        ({"temperature": float("nan")}, BadRequestError),
        ({"images": [b"\x89PNG\r\n\x1a\n0"]}, BadRequestError),
        ({"timeout_s": 0.001, "max_tokens": ENDLESS, "ignore_eos": True}, DeadlineError),
    ],
)
def test_errors_have_a_type_and_the_next_request_works(omni: Omni, options: dict[str, Any], kind: type[OmniError]) -> None:
    with pytest.raises(kind) as caught:
        omni.generate("Hi", **options)
    assert caught.value.message
    assert bool(caught.value.hint) is not isinstance(caught.value, BadRequestError | UnknownModelError), "which say all there is to say"
    assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_a_bad_field_is_named(omni: Omni) -> None:
    with pytest.raises(BadRequestError) as caught:
        omni.generate("Hi", max_tokens=40000)
    assert [violation.field for violation in caught.value.fields] == ["thinker.max_tokens"]


def test_nobody_at_the_address(free_port: int) -> None:
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{free_port}"):
        Omni(address=f"127.0.0.1:{free_port}", connect_timeout_s=0.3)


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(BadRequestError, match="address"):
        Omni(address="")


def test_settings_that_do_not_exist_or_do_not_fit() -> None:
    with pytest.raises(TypeError, match="Omni takes no gpus: here it is tensor_parallel_size"):
        Omni(gpus=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="private stack"):
        Omni(address="127.0.0.1:50050", device="cpu")


def test_a_closed_client_says_so(toy_address: str) -> None:
    omni = Omni(address=toy_address)
    omni.close()
    omni.close()
    with pytest.raises(ClosedError):
        omni.generate("Hi")


def test_leaving_a_stream_early_frees_the_client(omni: Omni) -> None:
    stream = omni.stream("Hi", max_tokens=ENDLESS, ignore_eos=True)
    assert next(stream)
    stream.close()
    assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_closing_ends_what_runs_in_other_threads(toy_address: str) -> None:
    omni = Omni(address=toy_address)
    begun = threading.Event()

    def listen() -> None:
        for _ in omni.stream("Hi", max_tokens=ENDLESS, ignore_eos=True):
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        assert begun.wait(30)
        omni.close()
        with pytest.raises(ClosedError):
            listening.result(30)


def test_two_clients_of_one_process_do_not_touch_each_other(toy_address: str) -> None:
    with Omni(address=toy_address) as first:
        with Omni(address=toy_address) as second:
            assert second.generate("Hi", seed=1).text
        assert first.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_the_name_of_a_pipeline_is_guessed_among_those_of_the_router(omni: Omni) -> None:
    with pytest.raises(UnknownModelError, match=r"this router has toy; did you mean toy\?") as refused:
        omni.generate("Hi", pipeline="toyy")
    assert refused.value.hint == "", "the message lists them"
