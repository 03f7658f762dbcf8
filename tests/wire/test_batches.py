"""Several chunks in one message have the same effect as each of them in a message of its own, on every hop, for every receiver that takes
them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.ask import WholeAnswer, read_all, request
from helpers.link import ENDED, Context, bare_peer, chunk, hear, heard, link_by, listen, opening, route_to, say, says
from helpers.servers import Local, all_free, local_chain, local_router, omni_stub
from omnistage.client import AsyncOmni
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.chunks import MAX_BATCH_BYTES, Output, batch_chunks, chunks_of
from omnistage.wire.errors import StageError
from omnistage.wire.limits import MAX_BATCH

CHUNKS = 1000
SOUND = {"samples_per_frame": CHUNKS, "chunk_samples": formulas.FRAMES_PER_ROW, "max_chunk": 1}
"""A token has CHUNKS chunks of sound."""


OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=["7"]))


def batch(*chunks: stage_pb2.RunResponse) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(chunks=chunk_pb2.Chunks(chunks=[message.chunk for message in chunks]))


async def test_a_link_takes_a_batch_as_its_chunks():
    peer = says(OPENED, chunk(0), batch(chunk(1), chunk(2), chunk(3, last=True)), ENDED)
    async with bare_peer(peer) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        assert [event.chunk.seq for event in await hear(link) if event.HasField("chunk")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(batch(chunk(0), chunk(2)), id="a gap inside"),
        pytest.param(batch(chunk(0), chunk(1, last=True), chunk(2)), id="more after the last"),
        pytest.param(batch(*(chunk(seq) for seq in range(MAX_BATCH + 1))), id="too many"),
    ],
)
async def test_a_batch_is_checked_chunk_by_chunk(bad: stage_pb2.RunResponse):
    async with bare_peer(says(OPENED, bad, ENDED)) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        with pytest.raises(StageError) as refused:
            await hear(link)
    assert refused.value.reason == "PROTOCOL"


async def sent_to_a_stage(texts: Sequence[str], *, batches: bool) -> list[stage_pb2.RunRequest]:
    """The messages in which these pieces come down to a stage that grants credit when all of them wait. batches: the stage takes several
    chunks in one message."""
    seen: list[stage_pb2.RunRequest] = []

    async def stage(opened: stage_pb2.Open, context: Context) -> None:
        assert opened.batches
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(batches=batches)))
        await say(context, stage_pb2.RunResponse(credit=stage_pb2.Credit(port="text", total=100)))
        while sum(map(len, map(pieces, seen))) < len(texts):
            seen.append(await heard(context))
        await say(context, chunk(0, last=True), ENDED)
        await listen(context)

    async with bare_peer(stage) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        for n, text in enumerate(texts):
            await link.feed.send(Output("text", 1, chunk_pb2.TextChunk(text=text, token_ids=[n]), last=n == len(texts) - 1))
        await hear(link)
    assert [piece.seq for message in seen for piece in pieces(message)] == list(range(len(texts)))
    return seen


def pieces(message: stage_pb2.RunRequest) -> Sequence[chunk_pb2.Chunk]:
    return message.chunks.chunks or ([message.chunk] if message.HasField("chunk") else [])


@pytest.mark.parametrize("batches", [True, False])
async def test_what_waited_for_credit_goes_down_together_to_a_stage_that_takes_it_so(batches: bool):
    seen = await sent_to_a_stage([str(n) for n in range(40)], batches=batches)
    assert [len(message.chunks.chunks) for message in seen if message.HasField("chunks")] == ([MAX_BATCH, 8] if batches else [])


async def test_a_large_chunk_is_a_message_of_its_own_between_small_ones():
    seen = await sent_to_a_stage(["x" * size for size in (10, 10, 900_000, 10, 10)], batches=True)
    assert [[piece.seq for piece in pieces(message)] for message in seen] == [[0, 1], [2], [3, 4]]


def test_no_message_of_a_router_is_beyond_the_bounds():
    sizes = [10, MAX_BATCH_BYTES // 2, MAX_BATCH_BYTES // 2, *[1] * (MAX_BATCH + 1), 2 * MAX_BATCH_BYTES, 1]
    pieces = [chunk_pb2.Chunk(port="audio", seq=n, audio=chunk_pb2.AudioChunk(data=bytes(size))) for n, size in enumerate(sizes)]
    together = list(batch_chunks(pieces, omni_pb2.GenerateResponse, together=True))
    assert [piece for message in together for piece in chunks_of(message)] == pieces
    assert [len(chunks_of(message)) for message in together] == [2, MAX_BATCH, 2, 1, 1]
    singly = list(batch_chunks(pieces, omni_pb2.GenerateResponse, together=False))
    assert [message.chunk for message in singly] == pieces


async def _ask(router: Local, *, batches: bool) -> tuple[WholeAnswer, int]:
    """Ask for an answer of three tokens of sound. Returns the answer, and in how many messages it came."""
    asked = request("batches", 3, thinker={"max_tokens": 3})
    asked.batches = batches
    answer, messages = WholeAnswer(), 0
    async with omni_stub(router.address) as stub:
        async for event in read_all(stub.Generate(asked, timeout=60)):
            answer.take(event)
            messages += 1
    return answer, messages


async def test_a_client_that_takes_batches_hears_the_same_in_fewer_messages():
    async with local_chain(SOUND) as stages, local_router({kind: stage.address for kind, stage in stages.items()}) as router:
        singly, messages_singly = await _ask(router, batches=False)
        together, messages_together = await _ask(router, batches=True)
        assert (singly.samples() == together.samples()).all() and len(singly.samples())
        assert singly.text() == together.text()
        assert messages_singly > 3 * CHUNKS > messages_together
        async with AsyncOmni(address=router.address) as omni:
            heard = await omni.generate("batches", seed=3, max_tokens=3)
        assert heard.audio is not None and len(heard.audio.samples) == len(singly.samples())
        await all_free([stage.address for stage in stages.values()])
