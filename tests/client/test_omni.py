"""The clients against a real toy stack: what comes back is what the formulas of the toy models say, for a list of texts too."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import lengths
from helpers.waiting import until
from omnistage.client import Answer, AsyncOmni, AudioChunk, Done, Omni, TextDelta, errors
from omnistage.client.call import FIRST_ROOM, LARGEST_ROOM, Together
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png

ENDLESS = 32768
"""Tokens of an answer that is still running when the test is over."""


@pytest.fixture
def omni(toy_address: str) -> Iterator[Omni]:
    with Omni(address=toy_address) as client:
        yield client


def assert_is_the_formula(text: str, samples: NDArray[np.float32], seed: int, prompt: str, length: int) -> None:
    assert text == formulas.text(seed, prompt, length)
    assert np.array_equal(samples, formulas.audio(seed, prompt, length)[:, 0])


def assert_is_of_the_formula(answer: Answer, seed: int, prompt: str, length: int = formulas.NATURAL_LENGTH) -> None:
    assert answer.audio is not None
    assert_is_the_formula(answer.text, answer.audio.samples, seed, prompt, length)


def test_generate_is_text_and_sound(omni: Omni) -> None:
    answer = omni.generate("Hello there", seed=5)
    assert_is_of_the_formula(answer, 5, "Hello there")
    assert answer.audio is not None and answer.audio.sample_rate == formulas.SAMPLE_RATE_HZ
    assert answer["content"] == answer.text
    assert (answer.seed, answer.pipeline, answer.finish_reason) == (5, "toy", "stop")
    assert [stage.stage for stage in answer.usage.stages] == ["thinker", "talker", "code2wav"]
    assert answer.timing.ttft_s is not None and answer.timing.ttfa_s is not None
    assert 0 < answer.timing.ttft_s <= answer.timing.e2e_s and 0 < answer.timing.ttfa_s <= answer.timing.e2e_s


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
    with pytest.raises(errors.BadRequestError, match="12345 is not possible; ask for one of 8000, 11025, ") as refused:
        omni.generate("Hi", sample_rate_hz=12345)
    assert [violation.field for violation in refused.value.fields] == ["code2wav.sample_rate_hz"]


def test_a_seed_that_was_not_given_is_told_and_repeats_the_answer(omni: Omni) -> None:
    first, other = omni.generate("Hi"), omni.generate("Hi")
    assert first.seed != other.seed and omni.generate("Hi", seed=first.seed).text == first.text


def test_max_tokens_cuts_text_and_sound(omni: Omni) -> None:
    answer = omni.generate("Hi", seed=1, max_tokens=7)
    assert_is_of_the_formula(answer, 1, "Hi", 7)
    note = "cut at 7 tokens; max_tokens=N lets it say more"
    assert (answer.finish_reason, answer.notes) == ("length", (note,))
    assert note in repr(answer) and note in answer._repr_html_()
    assert omni.generate("Hi", seed=1).notes == ()
    sound_alone = omni.generate("Hi", seed=1, max_tokens=7, outputs=["audio"])
    assert sound_alone.notes == ("cut; max_tokens=N lets it say more",), "who takes no text is not told its length"


def test_max_frames_cuts_the_sound_and_says_so(omni: Omni) -> None:
    answer = omni.generate("Hi", seed=1, max_frames=9)
    assert answer.text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH) and answer.finish_reason == "stop"
    assert answer.notes == ("the speech was cut at 9 frames; a higher max_frames lets it say more",)


def test_text_only_has_no_sound(omni: Omni) -> None:
    answer = omni.generate("Hi", seed=1, outputs=["text"])
    assert answer.audio is None and answer.timing.ttfa_s is None
    assert answer.text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_a_conversation_goes_on_with_its_answers(omni: Omni) -> None:
    conversation: list[Mapping[str, str]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first = omni.chat(conversation, seed=2)
    conversation += [first, {"role": "user", "content": "And then?"}]
    second = omni.chat(conversation, seed=2)
    assert first["content"] != second["content"] and second.text


def test_a_stream_is_in_order_and_ends_with_done(omni: Omni) -> None:
    events = list(omni.stream("Hello", seed=9, max_tokens=200, ignore_eos=True))
    texts = [event for event in events if isinstance(event, TextDelta)]
    sounds = [event for event in events if isinstance(event, AudioChunk)]
    assert len(texts) > 1 and len(sounds) > 1
    assert isinstance(events[-1], Done) and sum(isinstance(event, Done) for event in events) == 1
    arrivals = [event.arrival_s for event in events if not isinstance(event, Done)]
    assert arrivals == sorted(arrivals)
    assert [sound.first_sample for sound in sounds] == [0, *np.cumsum([len(sound.samples) for sound in sounds])[:-1].tolist()]
    assert [text.first_token for text in texts] == [0, *np.cumsum([len(text.token_ids) for text in texts])[:-1].tolist()]
    assert_is_the_formula("".join(text.text for text in texts), np.concatenate([s.samples for s in sounds]), 9, "Hello", 200)


def test_stream_chat_and_stream_say(omni: Omni) -> None:
    spoken = "".join(event.text for event in omni.stream_say("one two") if isinstance(event, TextDelta))
    assert spoken.split() == ["one", "two"]
    answered = list(omni.stream_chat([{"role": "user", "content": "Hi"}], seed=4))
    assert "".join(event.text for event in answered if isinstance(event, TextDelta)) == formulas.text(4, "Hi", formulas.NATURAL_LENGTH)


def test_many_threads_hear_their_own_answers(omni: Omni) -> None:
    def ask(number: int) -> None:
        assert_is_of_the_formula(omni.generate(f"question {number}", seed=number), number, f"question {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))


async def test_the_async_client_does_it_all(toy_address: str) -> None:
    async with AsyncOmni(address=toy_address) as omni:
        assert [model.name for model in await omni.pipelines()] == ["toy"]
        assert [replica.stage for replica in await omni.replicas()] == ["thinker", "talker", "code2wav"]
        spoken = await omni.say("Good morning to you.")
        assert spoken.text.split() == ["Good", "morning", "to", "you."] and spoken.audio is not None
        assert (await omni.chat([{"role": "user", "content": "Hi"}], seed=1)).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        answers = await asyncio.gather(*(omni.generate(f"q{i}", seed=i) for i in range(8)))
    for i, answer in enumerate(answers):
        assert_is_of_the_formula(answer, i, f"q{i}")
    with pytest.raises(errors.ClosedError):
        await omni.generate("Hi")


def test_models_and_replicas(omni: Omni) -> None:
    (model,) = omni.pipelines()
    assert (model.name, model.stages, model.outputs) == ("toy", ("thinker", "talker", "code2wav"), ("text", "audio"))
    assert omni.voices() == {"toy": model.voices} and model.voices
    omni.generate("Hi")
    replicas = omni.replicas()
    assert [(replica.stage, replica.state) for replica in replicas] == [(stage, "serving") for stage in model.stages]
    assert all(replica.pid > 0 for replica in replicas)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"pipeline": "absent"}, errors.UnknownModelError),
        ({"outputs": ["video"]}, errors.BadRequestError),
        ({"max_tokens": 40000}, errors.BadRequestError),
        ({"temperature": 3.0}, errors.BadRequestError),
        ({"temperature": float("nan")}, errors.BadRequestError),
        ({"images": [b"\x89PNG\r\n\x1a\n0"]}, errors.BadRequestError),
        ({"timeout_s": 0.001, "max_tokens": ENDLESS, "ignore_eos": True}, errors.DeadlineError),
    ],
)
def test_errors_have_a_type_and_the_next_request_works(omni: Omni, options: dict[str, Any], kind: type[errors.OmniError]) -> None:
    with pytest.raises(kind) as caught:
        omni.generate("Hi", **options)
    assert caught.value.message
    says_it_all = isinstance(caught.value, errors.BadRequestError | errors.UnknownModelError)
    assert bool(caught.value.hint) is not says_it_all
    assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_an_error_names_the_request_if_a_router_was_asked(omni: Omni, free_port: int) -> None:
    """By its own name if it has one. The note is what Python shows of it."""
    with pytest.raises(errors.BadRequestError) as caught:
        omni.generate("Hi", voice="nobody")
    assert len(caught.value.request_id) == 32 and f"request: {caught.value.request_id}" in caught.value.__notes__
    with pytest.raises(errors.BadRequestError) as caught:
        list(omni.stream("Hi", voice="nobody", request_id="mine"))
    assert caught.value.request_id == "mine"
    with pytest.raises(errors.BadRequestError) as caught:
        omni.generate("Hi", seed=-1)
    assert caught.value.request_id == "" and not getattr(caught.value, "__notes__", ())
    with pytest.raises(errors.UnavailableError) as unavailable, Omni(address=f"127.0.0.1:{free_port}", connect_timeout_s=0.5) as nowhere:
        nowhere.generate("Hi")
    assert unavailable.value.request_id == ""


def test_settings_of_a_stack_do_not_fit_an_address() -> None:
    with pytest.raises(TypeError, match="private stack"):
        Omni(address="127.0.0.1:50050", device="cpu")


def test_leaving_a_stream_early_frees_the_client(omni: Omni) -> None:
    stream = omni.stream("Hi", max_tokens=ENDLESS, ignore_eos=True)
    assert next(stream)
    stream.close()
    assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_closing_ends_what_runs_in_other_threads(toy_address: str) -> None:
    omni, begun = Omni(address=toy_address), threading.Event()

    def listen() -> None:
        for _ in omni.stream("Hi", max_tokens=ENDLESS, ignore_eos=True):
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        assert begun.wait(30)
        omni.close()
        with pytest.raises(errors.ClosedError):
            listening.result(30)
    omni.close()
    with pytest.raises(errors.ClosedError):
        omni.generate("Hi")


def test_two_clients_of_one_process_do_not_touch_each_other(toy_address: str) -> None:
    with Omni(address=toy_address) as first:
        with Omni(address=toy_address) as second:
            assert second.generate("Hi", seed=1).text
        assert first.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


def test_the_name_of_a_pipeline_is_guessed_among_those_of_the_router(omni: Omni) -> None:
    with pytest.raises(errors.UnknownModelError, match=r"this router has toy \(toy-thinker\); did you mean toy\?") as refused:
        omni.generate("Hi", pipeline="toyy")
    assert refused.value.hint == "", "the message lists them"


ANSWER = Answer.__new__(Answer)


class PlacesTogether:
    """Something to ask, with as many places as it says. others: how many of them somebody else has."""

    def __init__(self, places: int, wrong: Sequence[str] = (), others: int = 0, delay_s: float | None = 0.0) -> None:
        self.places, self.wrong, self.others, self.delay_s = places, wrong, others, delay_s
        self.now = self.most = self.refused = 0
        self.ended: list[str] = []

    async def ask(self, text: str) -> Answer:
        if self.now + self.others >= self.places:
            self.refused += 1
            error = errors.OverloadedError("all places are taken")
            error.retry_delay_s = self.delay_s
            if not self.now:
                self.others -= 1
            raise error
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if text in self.wrong:
                raise errors.BadRequestError.of("prompt", f"{text} is wrong")
            return ANSWER
        finally:
            self.now -= 1
            self.ended.append(text)


@pytest.mark.parametrize("places", [1, 2, 3, 7, 200])
async def test_all_are_answered_however_few_places_there_are(places: int) -> None:
    asked = PlacesTogether(places)
    texts = [str(i) for i in range(200)]
    assert (len(await Together(asked.ask, 60.0).answers(texts)), sorted(asked.ended)) == (200, sorted(texts))
    assert asked.most <= min(places, LARGEST_ROOM)
    assert asked.refused <= FIRST_ROOM + 4, "it learns how many there are"


async def test_a_moment_without_places_does_not_bind_the_rest() -> None:
    """All have places but the first ones: at the beginning, and once more in the middle."""
    for full in ({*range(4)}, {*range(150, 170)}):
        asked = PlacesTogether(1 << 30)
        count = 0

        async def ask(text: str, full: set[int] = full, asked: PlacesTogether = asked) -> Answer:
            nonlocal count
            count += 1
            if count - 1 in full:
                await asyncio.sleep(0)
                error = errors.OverloadedError("all places are taken")
                error.retry_delay_s = 0.0
                raise error
            return await asked.ask(text)

        assert len(await Together(ask, 60.0).answers([str(i) for i in range(400)])) == 400
        assert asked.most == LARGEST_ROOM
        asked.most = 0


async def test_each_time_that_places_are_tried_out_again_is_rarer() -> None:
    asked = PlacesTogether(1)
    await Together(asked.ask, 60.0).answers([str(i) for i in range(2000)])
    assert asked.refused <= FIRST_ROOM + 4 + 2000 // LARGEST_ROOM


async def test_places_that_are_known_are_not_tried_out() -> None:
    asked = PlacesTogether(2)
    await Together(asked.ask, 60.0, 2).answers([str(i) for i in range(20)])
    assert (asked.most, asked.refused) == (2, 0)


async def test_what_others_have_is_waited_for() -> None:
    asked = PlacesTogether(3, others=3)
    assert len(await Together(asked.ask, 60.0).answers(["a", "b", "c"])) == 3


async def test_patience_ends() -> None:
    asked = PlacesTogether(0, others=1 << 30, delay_s=5.0)
    with pytest.raises(errors.OverloadedError) as refused:
        await Together(asked.ask, 1.0).answers(["a", "b"])
    assert refused.value.answers == [None, None]


async def test_the_first_error_of_the_list_comes_when_all_have_ended_with_the_answers_that_came() -> None:
    asked = PlacesTogether(100, wrong=["7", "3"])
    with pytest.raises(errors.BadRequestError, match="3 is wrong") as refused:
        await Together(asked.ask, 60.0).answers([str(i) for i in range(10)])
    assert len(asked.ended) == 10
    assert [i for i, answer in enumerate(refused.value.answers) if answer is None] == [3, 7]
    assert any("prompt[3] of 10, and 1 more failed" in note for note in refused.value.__notes__)


async def test_what_is_no_error_of_an_answer_ends_all_at_once() -> None:
    asked = PlacesTogether(100)

    async def ask(text: str) -> Answer:
        if text == "2":
            raise TypeError("a bug")
        return await asked.ask(text)

    with pytest.raises(TypeError, match="a bug"):
        await Together(ask, 60.0).answers([str(i) for i in range(50)])
    assert asked.now == 0 and len(asked.ended) < 50


async def test_as_few_tasks_as_are_asked_at_once() -> None:
    seen: list[int] = []

    async def ask(text: str) -> Answer:
        seen.append(len(asyncio.all_tasks()))
        return ANSWER

    assert len(await Together(ask, 60.0).answers(["a"] * 10_000)) == 10_000 and max(seen) <= LARGEST_ROOM + 2


def test_a_list_is_answered_in_its_order_by_both_clients(toy_address: str) -> None:
    texts = [f"text {i}" for i in range(30)]
    with Omni(address=toy_address) as omni:
        alone = omni.generate(texts[7], seed=3)
        answers = omni.generate(texts, seed=3)
        assert_type(alone, Answer)
        assert_type(answers, list[Answer])
        assert [answer.text for answer in answers] == [formulas.text(3, text, formulas.NATURAL_LENGTH) for text in texts]
        assert (answers[7].text, answers[7].seed, omni.generate([])) == (alone.text, 3, [])
        assert len(omni.generate(tuple(texts[:2]))) == 2

    async def asked() -> list[Answer]:
        async with AsyncOmni(address=toy_address) as other:
            return await other.generate(texts, seed=3)

    assert [answer.text for answer in asyncio.run(asked())] == [answer.text for answer in answers]


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        (["a", 3], {}, r"prompt\[1\]: is 3; it must be text"),
        ([{"role": "user", "content": "a"}], {}, r"prompt\[0\]: is a turn of a conversation, which chat takes"),
        (["a", ""], {}, r"prompt\[1\]: is empty"),
        (["a", " "], {}, r"prompt\[1\]: is empty"),
        ([], {"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number"),
        (["a", "b"], {"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number"),
        ({"a": 1}, {}, "chat takes a conversation"),
        (iter(["a"]), {}, r"a list of texts: list\(...\) makes one"),
        (["a"], {"request_id": "one"}, "request_id: names a single answer"),
    ],
)
def test_a_list_that_is_not_one_is_refused_before_anything_is_asked(toy_address: str, prompt: Any, options: Any, told: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(errors.BadRequestError, match=told) as told_error:
        omni.generate(prompt, **options)
    assert not getattr(told_error.value, "__notes__", ()), "it is about all of them, or names the one"


def test_events_are_those_of_one_text(toy_address: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(errors.BadRequestError, match="generate also takes a list of texts"):
        omni.stream(["a", "b"])  # type: ignore[arg-type]


async def test_a_cancelled_list_leaves_nothing_behind(toy_address: str) -> None:
    async with AsyncOmni(address=toy_address) as omni:
        beside = asyncio.all_tasks()
        asking = asyncio.create_task(omni.generate(["a"] * 9, max_tokens=ENDLESS, ignore_eos=True))
        await until(lambda: len(asyncio.all_tasks() - beside) > FIRST_ROOM)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not [task for task in asyncio.all_tasks() - beside if "ask" in str(task.get_coro())]
        assert (await omni.generate("Hi", seed=1)).text, "and the next one is answered"


@lengths.long_form(
    "client/test_omni.py::test_a_list_is_answered_in_its_order_by_both_clients",
    "client/test_media.py::test_a_file_is_what_it_was_however_it_is_handed_over",
    unkept="a file is read once for all texts",
)
def test_all_texts_have_the_same_media_also_of_an_open_file() -> None:
    file = io.BytesIO(png(np.arange(64, dtype=np.uint8).reshape(8, 8)))
    with Omni(pipeline="toy-omni") as omni:
        alone = omni.generate("What?", images=file.getvalue(), seed=1)
        file.seek(0)
        answers = omni.generate(["What?", "And?", "What?"], images=file, seed=1)
    assert answers[0].text == answers[2].text == alone.text != answers[1].text
