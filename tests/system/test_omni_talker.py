"""Qwen2.5-Omni's Thinker and Talker as real processes: codes of speech while text is being written, the same whoever is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import lengths, media_files
from helpers.ask import Answer, ask
from helpers.disturbed import Step, ask_through, begun, disturbed, found, holder, killed_holder, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG, WAKE
from helpers.servers import all_free, omni_stub
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = pytest.mark.slow

TOKENS, FRAMES = 300, 400
DRAWN = stage_pb2.Sampling(temperature=1, top_p=0.9, repetition_penalty=1.05)
Moment = Callable[[Answer], bool]


def code_chunks(count: int) -> Moment:
    return lambda answer: len(answer.of("codes")) >= count


def after_text(count: int) -> Moment:
    return lambda answer: bool(answer.of("text")) and answer.of("text")[-1].last and len(answer.codes()) >= count


MOMENTS: dict[str, Moment] = {"as it begins": begun, "in text": text_chunks(20), "in speech": code_chunks(30), "late": after_text(TOKENS)}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, omni_checkpoint: Path) -> Iterator[Fleet]:
    """Two of each kind; rows of prompts go by shared memory."""
    with fleet(
        tmp_path_factory.mktemp("house"),
        kinds=("thinker", "talker"),
        pipeline="qwen2_5_omni-codes",
        family="qwen2_5_omni",
        stage_args=["--checkpoint", str(omni_checkpoint)],
        can_hang=True,
    ) as running:
        yield running


def question(
    seed: int, *media: stage_pb2.Media, tokens: int = TOKENS, frames: int = FRAMES, words: str = "What?"
) -> omni_pb2.GenerateRequest:
    parts = [*(stage_pb2.Part(media=medium) for medium in media), stage_pb2.Part(text=words)]
    thinker = stage_pb2.ThinkerParams(
        messages=[stage_pb2.Message(role="user", parts=parts)], sampling=DRAWN, max_tokens=tokens, ignore_eos=True
    )
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker, talker=stage_pb2.TalkerParams(max_frames=frames))


def seen(seed: int) -> tuple[stage_pb2.Media, ...]:
    """A picture, a sound and a film."""
    return (
        stage_pb2.Media(data=media_files.picture(seed), media_type="image/png"),
        stage_pb2.Media(data=media_files.sound(seed), media_type="audio/wav"),
        stage_pb2.Media(data=media_files.film(seed, sound_s=1), media_type="video/mp4", use_audio=True),
    )


async def test_what_was_seen_and_heard_is_spoken_of(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        answers = await asyncio.gather(*(ask(stub, question(seed + n, *seen(seed)[: n % 4], tokens=20 + n, frames=60)) for n in range(8)))
        for answer in answers:
            answer.check_whole()
            assert 0 < len(answer.codes()) <= 60
        for n, answer in enumerate(answers):
            alone = await ask(stub, question(seed + n, *seen(seed)[: n % 4], tokens=20 + n, frames=60))
            assert (alone.text(), alone.codes()) == (answer.text(), answer.codes())
    await all_free([house.address(name) for name in house.stages])


@pytest.mark.parametrize("kind", ["thinker", "talker"])
@lengths.one_or_all("moment", MOMENTS)
async def test_one_of_them_is_killed(house: Fleet, kind: str, moment: str, seed: int) -> None:
    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]

    async def kill() -> None:
        await killed_holder(house, kind)

    async with disturbed(house, alike=False, after=question(seed, frames=5)) as stub:
        answer = await ask_through(stub, question(seed, *seen(seed)), Step(strikes, kill))
        answer.check_whole()
        assert len(answer.failovers) == 1
        whole = await ask(stub, question(seed, *seen(seed)))
        assert (whole.text(), whole.codes()) == (answer.text(), answer.codes())


@pytest.mark.parametrize("kind", ["thinker", "talker"])
async def test_the_event_loop_of_one_of_them_hangs(house: Fleet, kind: str, seed: int) -> None:
    hung = list[str]()

    async def hang() -> None:
        hung.append(await holder(house, kind))
        house.signal(hung[0], HANG)

    async with disturbed(house, alike=False, after=question(seed, frames=5)) as stub:
        try:
            answer = await ask_through(stub, question(seed), Step(code_chunks(30), hang))
        finally:
            for name in hung:
                if house.server(name).alive:
                    house.signal(name, WAKE)
        await found(house, stub)
        answer.check_whole()
        assert len(answer.failovers) == 1
        whole = await ask(stub, question(seed))
        assert (whole.text(), whole.codes()) == (answer.text(), answer.codes())


async def test_text_that_is_given_is_spoken(house: Fleet, seed: int) -> None:
    """Its codes are those of an answer that says the same."""
    async with omni_stub(house.address("router")) as stub:
        said = await ask(stub, question(seed, tokens=30, frames=50))
        given = omni_pb2.GenerateRequest(
            seed=seed,
            thinker=stage_pb2.ThinkerParams(verbatim="It is far away.", max_tokens=30),
            talker=stage_pb2.TalkerParams(max_frames=50),
        )
        spoken = await ask(stub, given)
        spoken.check_whole()
        assert spoken.text() == "It is far away." and len(spoken.codes()) == 50 and spoken.codes() != said.codes()
        assert (await ask(stub, given)).codes() == spoken.codes()
        given.talker.voice = "Ethan"
        assert (await ask(stub, given)).codes() != spoken.codes()
