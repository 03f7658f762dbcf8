"""The whole chain with the default model: four real processes that speak what they print."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from benchmarks.asr import heard, recogniser, word_error_rate
from helpers import lengths
from helpers.shared_memory import files_of, left_of
from omnistage.cli.layout import ServerOptions
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.stack import Stack
from omnistage.client import AsyncOmni, BadRequestError
from omnistage.client.answer import Answer
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.token import VARIABLE, Token

QUESTIONS = ("How do plants make food?", "What is a river?", "Why should I drink water?")
MAX_TOKENS = 40
TOKEN = Token("a-token-of-this-test-0123456789")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def known_token() -> Iterator[None]:
    """The stacks take it instead of one that only they know, so that a test can look at their stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, TOKEN.secret)
        yield


@asynccontextmanager
async def serving(inline_limit: int | None = None) -> AsyncIterator[Stack]:
    stack = Stack(layout_of(Choice(pipeline="smol", servers=ServerOptions(inline_limit=inline_limit))))
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(known_token: None) -> AsyncIterator[Stack]:
    """As it is by default: its tensors are small enough to travel inline."""
    async with serving() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sharing(known_token: None) -> AsyncIterator[Stack]:
    """Every tensor goes through shared memory, of which no segment is left when the servers are gone."""
    async with serving(inline_limit=0) as running:
        yield running
        files = set().union(*(files_of(child.pid) for child in running.children))
        assert left_of(files), "no process uses shared memory: the rest would show nothing"
    assert left_of(files) == set()


async def ask_all(address: str, seed: int) -> list[Answer]:
    async with AsyncOmni(address=address) as omni:
        return [await omni.generate(question, seed=seed, max_tokens=MAX_TOKENS, temperature=0.7) for question in QUESTIONS]


async def watch(stack: Stack, name: str) -> stage_pb2.WatchResponse:
    """The present load report of one stage."""
    (child,) = [child for child in stack.children if child.name == name]
    async with grpc.aio.insecure_channel(child.address) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).Watch(stage_pb2.WatchRequest(), metadata=TOKEN.metadata)
        report = await call.read()
        call.cancel()
    assert isinstance(report, stage_pb2.WatchResponse)
    return report


def sound(answer: Answer) -> np.ndarray:
    assert answer.audio is not None
    return answer.audio.samples


async def test_every_tensor_through_shared_memory_gives_the_same_samples(stack: Stack, sharing: Stack, seed: int) -> None:
    inline = await ask_all(stack.address, seed)
    async with AsyncOmni(address=sharing.address) as omni:
        events = omni.stream(QUESTIONS[0], seed=seed, max_tokens=MAX_TOKENS)
        await anext(events)
        during = await watch(sharing, "code2wav")
        await events.aclose()
    shared = await ask_all(sharing.address, seed)
    after = await watch(sharing, "talker")
    assert during.transports == {"shared_memory": 1}
    assert after.leases == 0
    for one, other in zip(inline, shared, strict=True):
        assert one.text == other.text
        np.testing.assert_array_equal(sound(one), sound(other))


async def test_the_words_in_the_sound_are_the_words_on_the_screen(stack: Stack) -> None:
    answers = await ask_all(stack.address, 1)
    model = await asyncio.to_thread(recogniser)
    pairs = []
    for answer in answers:
        assert answer.audio is not None
        pairs.append((answer.text, heard(model, answer.audio.samples, answer.audio.sample_rate)))
    assert word_error_rate(pairs) <= 0.1, pairs


async def test_two_who_ask_at_once_each_hear_their_own_answer(stack: Stack, seed: int) -> None:
    """Bit-equal to what each hears alone: neighbours in a batch change nothing."""
    async with AsyncOmni(address=stack.address) as omni:
        alone = [await omni.generate(question, seed=seed, max_tokens=MAX_TOKENS, temperature=0.7) for question in QUESTIONS]
        together = await asyncio.gather(
            *(omni.generate(question, seed=seed, max_tokens=MAX_TOKENS, temperature=0.7) for question in QUESTIONS)
        )
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        np.testing.assert_array_equal(sound(one), sound(other))


async def test_say_speaks_exactly_this_text(stack: Stack) -> None:
    text = "The number 42 costs $3.50, said Dr. Smith."
    async with AsyncOmni(address=stack.address) as omni:
        answer = await omni.say(text)
    assert answer.text == text
    model = await asyncio.to_thread(recogniser)
    assert answer.audio is not None
    assert word_error_rate([(text, heard(model, answer.audio.samples, answer.audio.sample_rate))]) <= 0.1


@pytest.mark.parametrize(
    "text", ["🙂🙂🙂", "word " * 600, "word " * 9000, "日本語だけ", "# Title\n\n- one\n- two\n\n```\ncode\n```", "\x00\x01", "a"]
)
async def test_strange_texts_are_answered_or_refused_with_a_reason_and_the_next_request_works(stack: Stack, text: str) -> None:
    async with AsyncOmni(address=stack.address) as omni:
        try:
            answer = await omni.generate(text, max_tokens=8)
            assert answer.finish_reason in ("stop", "length")
        except BadRequestError as error:
            assert "thinker" in str(error)
        following = await omni.generate(QUESTIONS[0], max_tokens=8)
    assert following.text and following.audio is not None


async def settled(stack: Stack, name: str, before: stage_pb2.WatchResponse) -> None:
    """Wait until a stage holds no more than before; Watch reports every change."""
    (child,) = [child for child in stack.children if child.name == name]
    held = ""
    async with grpc.aio.insecure_channel(child.address) as channel:
        try:
            async with asyncio.timeout(10):
                stub = stage_pb2_grpc.StageServiceStub(channel)
                async for report in stub.Watch(stage_pb2.WatchRequest(), metadata=TOKEN.metadata):
                    held = f"{name}: before {before} now {report}"
                    if report.sessions == 0 and report.leases <= before.leases and report.kv_pages_used <= before.kv_pages_used:
                        return
        except TimeoutError:
            pytest.fail(held)


@lengths.rounds(20, 60)
async def test_after_cancels_nothing_is_held(sharing: Stack, seed: int, rounds: int) -> None:
    """Pages, sessions, leases: all zero when the last cancelled answer is gone."""
    async with AsyncOmni(address=sharing.address) as omni:
        names = ("thinker", "talker", "code2wav")
        before = [await watch(sharing, name) for name in names]
        rng = np.random.default_rng(seed)
        for number in range(rounds):
            # At any moment: while it opens, in the prompt, before the first sound, in mid speech.
            asking = asyncio.create_task(omni.generate(QUESTIONS[number % 3], seed=number, max_tokens=64))
            await asyncio.wait({asking}, timeout=float(rng.exponential(0.15)))
            asking.cancel()
            await asyncio.wait({asking})
        for name, old in zip(names, before, strict=True):
            await settled(sharing, name, old)
