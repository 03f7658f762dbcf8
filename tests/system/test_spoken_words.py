"""When each word is spoken, from real processes of the default model: told to who asks, the same whatever is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import pytest_asyncio

from helpers import lengths
from helpers.ask import WholeAnswer, ask, refused, request
from helpers.converse import ConverseStream
from helpers.disturbed import (
    DisturbanceStep,
    ask_through,
    audio_chunks,
    begun,
    disturbed,
    kill_when,
    text_chunks,
)
from helpers.fleet import Fleet, fleet
from helpers.servers import omni_stub
from omnistage.client import Alignment, AsyncOmni, AudioChunk, Failover, SpokenWord, TextDelta
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

pytestmark = [
    pytest.mark.timeout(400),
    lengths.long_form(
        "models/test_alignment.py::test_every_spoken_word_is_told_with_its_place_in_the_markdown",
        "models/test_alignment.py::test_words_go_on_at_any_word_with_rows_or_without",
        "models/test_alignment.py::test_sound_is_the_same_with_words_and_without",
        "stage/test_kind_contract.py::test_the_times_of_words_keep_to_their_credit_and_are_not_sent_to_who_does_not_want_them",
        "router/test_request.py::test_what_is_given_on_request_is_given_to_who_names_it",
        "client/test_reader.py::test_words_come_with_their_text_however_it_was_cut_and_tokens_with_their_times",
    ),
]

ALL = ("text", "audio", "alignment")
TOKENS = 40
SEED = 11
QUESTION = "How do plants make food?"
KINDS = ("thinker", "talker", "code2wav")
MOMENTS = {"as it begins": begun, "in text": text_chunks(20), "in speech": audio_chunks(6)}
VERBATIM = "Dr. Lee came on March 3, 1999.\n\nNobody was at home: the door was open!\n\nSalt\nBread 🍞"
WORDS = ["Dr. Lee", "came", "on", "March 3,", "1999.", "Nobody", "was", "at", "home:", "the", "door", "was", "open!", "Salt", "Bread"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of each kind; every tensor goes through shared memory."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=2, family="smol", pipeline="smol", stage_args=["--inline-limit", "0"]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(house: Fleet) -> WholeAnswer:
    """The answer to `question` where nothing happens."""
    async with omni_stub(house.address("router")) as stub:
        return await ask(stub, question())


def question(*outputs: str, tokens: int = TOKENS, seed: int = SEED) -> omni_pb2.GenerateRequest:
    return request(QUESTION, seed, outputs=outputs or ALL, thinker={"max_tokens": tokens, "ignore_eos": True})


def verbatim(text: str, *outputs: str) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=1, outputs=outputs or ALL, thinker=stage_pb2.ThinkerParams(verbatim=text))


def words(answer: WholeAnswer) -> list[chunk_pb2.SpokenWord]:
    """All of them, with whole chunks and in their order."""
    for chunk in answer.of("alignment"):
        assert len(chunk.alignment.words) == chunk.count
    told = [word for chunk in answer.of("alignment") for word in chunk.alignment.words]
    for before, after in pairwise(told):
        assert before.begin_us < before.end_us <= after.begin_us
        assert before.first_character + before.character_count <= after.first_character
    return told


def check_same(answer: WholeAnswer, whole: WholeAnswer) -> None:
    answer.check_whole()
    assert answer.text() == whole.text() and len(answer.tokens()) == TOKENS
    assert words(answer) == words(whole) and len(words(whole)) > 15
    assert np.array_equal(answer.samples(), whole.samples())


@lengths.one_or_all("kind", KINDS)
@lengths.one_or_all("moment", MOMENTS)
async def test_words_are_the_same_whoever_is_killed(house: Fleet, whole: WholeAnswer, kind: str, moment: str, seed: int) -> None:
    kind = lengths.draw(kind, KINDS, seed)

    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]
    async with disturbed(house, alike=False, after=question(tokens=5)) as stub:
        answer = await ask_through(stub, question(), kill_when(strikes, house, kind))
        assert len(answer.failovers) == 1
        check_same(answer, whole)


async def test_every_word_of_what_is_said_is_told_with_its_place(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        answer = await ask(stub, verbatim(VERBATIM))
        answer.check_whole()
        text, spoken = answer.text(), words(answer)
        assert [text[word.first_character : word.first_character + word.character_count] for word in spoken] == WORDS
        assert spoken[0].begin_us <= 100_000
        assert spoken[-1].end_us / 1e6 <= len(answer.samples()) / 24_000
        assert answer.usage is not None
        assert [(stage.unspoken, stage.unspoken_words) for stage in answer.usage.stages] == [(0, ""), (1, "🍞"), (0, "")]


async def test_given_text_may_be_markdown(house: Fleet) -> None:
    """Its marks, and code, are not read; without being told so, each mark is."""
    text, ends_us = "**Hello** `and`\n```\n世界\n```\n_-5 °C_ outside 你好", list[int]()
    async with omni_stub(house.address("router")) as stub:
        for markdown, untold in ((True, "你好"), (False, "世界 你好")):
            asked = verbatim(text)
            asked.talker.markdown = markdown
            answer = await ask(stub, asked)
            assert answer.usage is not None
            assert answer.usage.stages[1].unspoken_words == untold
            ends_us.append(words(answer)[-1].end_us)
    assert ends_us[0] < ends_us[1], "star star takes time"


async def test_who_does_not_ask_is_told_nothing_and_hears_the_same(house: Fleet, whole: WholeAnswer) -> None:
    async with omni_stub(house.address("router")) as stub:
        asked = question()
        del asked.outputs[:]
        usual = await ask(stub, asked)
        assert list(usual.chunks.keys()) == ["text", "audio"]
        assert usual.text() == whole.text() and np.array_equal(usual.samples(), whole.samples())
        assert usual.usage is not None
        assert [stage.output_items.get("alignment", 0) for stage in usual.usage.stages] == [0, 0, 0]


async def test_words_alone_need_no_sound(house: Fleet, whole: WholeAnswer) -> None:
    async with omni_stub(house.address("router")) as stub:
        alone = await ask(stub, question("alignment"))
        assert words(alone) == words(whole) and list(alone.chunks) == ["alignment"]
        assert alone.usage is not None
        _, talker = alone.usage.stages
        assert talker.output_items["features"] == 0 and talker.output_items["alignment"] == len(words(alone))


async def test_a_turn_of_a_conversation_tells_them_too(house: Fleet, whole: WholeAnswer) -> None:
    async with omni_stub(house.address("router")) as stub:
        talk = ConverseStream(stub)
        first = await talk.turn(question())
        second = await talk.turn(question("text", "audio", tokens=10))
        await talk.send(credit=stage_pb2.Credit(port="alignment", total=1 << 20))
        third = await talk.turn(question())
        await talk.call.done_writing()
        check_same(first, whole)
        check_same(third, whole)
        assert second.of("alignment") == []


async def test_an_interrupted_turn_ends_them_too(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        talk = ConverseStream(stub)

        async def interrupt() -> None:
            await talk.send(interrupt=stage_pb2.Interrupt())

        cut = await talk.turn(question(tokens=200), None, None, DisturbanceStep(audio_chunks(2), interrupt))
        await talk.call.done_writing()
        cut.check_whole()
        assert cut.of("alignment")[-1].last and cut.of("text")[-1].text.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED
        told = words(cut)
        longer = question(tokens=len(cut.tokens()) + 20)
        assert told and told == words(await ask(stub, longer))[: len(told)]


async def test_speed_and_the_longest_speech(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        whole = words(await ask(stub, verbatim(VERBATIM)))
        slow, cut = verbatim(VERBATIM), verbatim(VERBATIM)
        slow.talker.speed, cut.talker.max_frames = 0.5, 100
        slower = words(await ask(stub, slow))
        assert len(slower) == len(whole) and slower[-1].begin_us > 1.5 * whole[-1].begin_us
        heard = [word.first_character for word in whole if word.begin_us < 2_500_000]
        assert [word.first_character for word in words(await ask(stub, cut))] == heard and len(heard) < len(whole)


async def test_a_pipeline_is_asked_for_what_it_does_not_give(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        told = await refused(stub, question("text", "pictures"))
        assert (told.reason, told.metadata["field"]) == ("BAD_REQUEST", "outputs") and "text, audio, alignment" in told.message
        (model,) = (await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)).models
        assert (list(model.outputs), list(model.on_request)) == (["text", "audio"], ["alignment"])


async def test_the_client_gives_words_with_their_text_and_tokens_their_times(house: Fleet) -> None:
    async with AsyncOmni(address=house.address("router")) as omni:
        answer = await omni.generate(QUESTION, outputs=ALL, max_tokens=20, seed=3, ignore_eos=True)
        assert answer.audio is not None and answer.words
        for word in answer.words:
            assert answer.text[word.first_character :].startswith(word.text) and word.text.strip() == word.text != ""
            assert 0 <= word.begin_s < word.end_s <= answer.audio.duration_s
        begins = answer.token_begins_s()
        assert len(begins) == len(answer.token_ids) == 20 and begins == sorted(begins)
        assert {word.begin_s for word in answer.words} >= set(begins) - {answer.words[-1].end_s}
        events = [event async for event in omni.stream(QUESTION, outputs=ALL, max_tokens=20, seed=3, ignore_eos=True)]
        streamed = [word for event in events if isinstance(event, Alignment) for word in event.words]
        assert tuple(streamed) == answer.words
        assert not (await omni.generate(QUESTION, max_tokens=10, seed=3)).words
        check_words_come_before_their_sound(events)


async def test_the_client_goes_on_with_words_when_its_router_is_killed(house: Fleet, whole: WholeAnswer) -> None:
    async with AsyncOmni(address=house.address("router"), resume_timeout_s=60) as omni:
        told: list[SpokenWord] = []
        lost, killed = list[str](), False
        async for event in omni.stream(QUESTION, outputs=ALL, max_tokens=TOKENS, seed=SEED, ignore_eos=True):
            match event:
                case Alignment():
                    told += event.words
                    if len(told) > 8 and not killed:
                        killed = True
                        house.kill("router")
                        house.begin("router")
                case Failover():
                    lost.append(event.stage)
        await asyncio.to_thread(house.ready, "router")
        assert lost == ["router"]
        places = [(word.first_character, len(word.text), round(word.begin_s * 1e6), round(word.end_s * 1e6)) for word in told]
        assert places == [(word.first_character, word.character_count, word.begin_us, word.end_us) for word in words(whole)]
        assert len(told) > 15


def check_words_come_before_their_sound(events: Sequence[object]) -> None:
    text, told_s, heard_s = "", 0.0, 0.0
    for event in events:
        match event:
            case TextDelta():
                text += event.text
            case Alignment():
                assert event.words[0].begin_s >= heard_s
                assert all(text[word.first_character :].startswith(word.text) for word in event.words)
                told_s = event.words[-1].end_s
            case AudioChunk():
                heard_s = (event.first_sample + len(event.samples)) / event.sample_rate_hz
    assert told_s <= heard_s


@lengths.rounds(3, 20)
async def test_many_at_once_are_each_told_their_own(house: Fleet, seed: int, rounds: int) -> None:
    asked = [question(tokens=10 + 3 * number, seed=seed + number) for number in range(rounds)]
    async with omni_stub(house.address("router")) as stub:
        for one, answer in zip(asked, await asyncio.gather(*(ask(stub, one) for one in asked)), strict=True):
            alone = await ask(stub, one)
            assert (words(answer), answer.text()) == (words(alone), alone.text())
