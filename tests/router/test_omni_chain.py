"""A question with a picture and a sound in it, asked of the whole chain: text and speech are the formula, whoever is lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from helpers.ask import WholeAnswer, ask, read, read_all, refused
from helpers.families import PICTURE, SEEN, looked_at
from helpers.run import messages
from helpers.servers import CHAIN, Local, all_free, family_logic, is_busy, local_router, local_stage, omni_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

ARENA = 256 << 20


@asynccontextmanager
async def house(
    replicas: Mapping[str, int] | None = None, **options: object
) -> AsyncIterator[tuple[omni_pb2_grpc.OmniServiceAsyncStub, dict[str, list[tuple[Local, AsyncExitStack]]]]]:
    """toy-omni behind a router, with an arena each: the client's stub, and of each kind its replicas with what ends them."""
    async with AsyncExitStack() as everything:
        running: dict[str, list[tuple[Local, AsyncExitStack]]] = {}
        for kind in CHAIN:
            for _ in range((replicas or {}).get(kind, 1)):
                own = await everything.enter_async_context(AsyncExitStack())
                local = await own.enter_async_context(local_stage(family_logic("toy-omni", kind, options), arena_bytes=ARENA))
                running.setdefault(kind, []).append((local, own))
        addresses = [(kind, local.address) for kind, all_of_it in running.items() for local, _ in all_of_it]
        router = await everything.enter_async_context(local_router(addresses, load_pipeline("toy-omni")))
        stub = await everything.enter_async_context(omni_stub(router.address))
        yield stub, running


def question(given: list[stage_pb2.Message], seed: int) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=seed, thinker=stage_pb2.ThinkerParams(messages=given))


def check(answer: WholeAnswer, seen: tuple[formulas.Seen, ...], seed: int) -> None:
    answer.check_whole()
    items = formulas.items(seen)
    tokens = [formulas.omni_token(seed, items, n) for n in range(formulas.NATURAL_LENGTH)]
    assert answer.text() == "".join(map(formulas.word, tokens))
    expected = formulas.samples(formulas.omni_frames(items, tokens))[:, 0] * 32768
    np.testing.assert_array_equal(answer.samples(), expected)


async def test_it_speaks_from_what_it_sees_and_hears(seed: int):
    async with house() as (stub, running):
        answer = await ask(stub, question(looked_at(), seed))
        check(answer, SEEN, seed)
        await all_free([local.address for locals_ in running.values() for local, _ in locals_])


async def test_prompt_rows_of_megabytes_go_down_in_pieces(seed: int):
    """65,536 patches: a mebibyte of rows and two of places, and not one chunk above a mebibyte."""
    pixels = (np.add.outer(np.arange(512), 7 * np.arange(512)) % 256).astype(np.uint8)
    media = stage_pb2.Media(data=png(pixels), media_type="image/png")
    given = [stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media), stage_pb2.Part(text="?")])]
    async with house() as (stub, running):
        answer = await ask(stub, question(given, seed))
        check(answer, ("u", pixels, "?"), seed)
        assert answer.usage is not None
        rows = 256 * 256 + 2
        assert {port: n for port, n in answer.usage.stages[1].input_items.items() if port != "hidden"} == {"prompt": rows, "places": rows}
        await all_free([local.address for locals_ in running.values() for local, _ in locals_])


@pytest.mark.parametrize("lost", CHAIN)
async def test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap(lost: str, seed: int):
    async with house({lost: 2}, interval_s=0.15) as (stub, running):
        answer = WholeAnswer()
        call = stub.Generate(question(looked_at(), seed), timeout=60)
        while len(answer.of("audio")) < 3:
            answer.take(await read(call))
        (busy,) = [own for local, own in running[lost] if is_busy(local)]
        await busy.aclose()
        async for event in read_all(call):
            answer.take(event)
        check(answer, SEEN, seed)
        assert [stage_pb2.StageKind.Name(failover.kind).lower() for failover in answer.failovers] == [f"stage_kind_{lost}"]


async def test_a_picture_that_cannot_be_read_is_refused_in_words_and_the_next_one_is_seen(seed: int):
    async with house() as (stub, _):
        media = stage_pb2.Media(data=png(PICTURE)[:50], media_type="image/png")
        bad = await refused(stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media)])], seed))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["thinker.messages.parts.media"])
        assert "PNG" in bad.message
        film = stage_pb2.Media(data=b"x", media_type="video/mp4")
        bad = await refused(stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=film)])], seed))
        assert "takes text, image and audio, not 'video/mp4'" in bad.message
        check(await ask(stub, question(looked_at(), seed)), SEEN, seed)
        check(await ask(stub, question(messages("Only words."), seed)), ("u", "Only words."), seed)
