"""Media larger than any request, through real processes: the memory of router and stage stays small, however much passes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from helpers.converse import PIECE, ConverseStream, TurnFailed, on_port, zeros
from helpers.lengths import LONG
from helpers.memory import Peak
from helpers.servers import ServerProcesses, all_free, omni_stub, stack
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, stage_pb2

MAX_GROWTH = 64 << 20
"""Bytes that a process may need for one turn: 12 MiB in the router and 16 in the stage, the buffers of gRPC, and what Python does not give
back. Media that were held would be five times that at least."""

LENGTH = 12


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    films = {"thinker": {"films": True}}
    with stack(tmp_path_factory.mktemp("media"), pipeline="toy-omni", family="toy-omni", options_of=films) as running:
        yield running


def film(size: int, *, said: bool) -> omni_pb2.GenerateRequest:
    message = stage_pb2.Message(role="user", parts=[on_port("media0", "video/mp4", size if said else 0)])
    return omni_pb2.GenerateRequest(seed=1, thinker=stage_pb2.ThinkerParams(messages=[message], max_tokens=LENGTH), outputs=["text"])


def seen(size: int) -> str:
    """The answer to a film of zeros."""
    digest = hashlib.sha256()
    for _ in range(size // PIECE):
        digest.update(bytes(PIECE))
    items = formulas.items(["u", formulas.film(digest.digest())])
    return "".join(formulas.word(formulas.omni_token(1, items, n)) for n in range(LENGTH))


def peaks(standing: ServerProcesses) -> list[Peak]:
    assert standing.router is not None
    return [Peak(server.pid) for server in (standing.router, standing.stages["thinker"])]


async def test_300_mb_pass_in_little_memory(standing: ServerProcesses):
    async with omni_stub(standing.address) as stub:
        conversation = ConverseStream(stub)
        await conversation.turn(film(PIECE, said=True), {"media0": zeros("media0", PIECE)})
        before = peaks(standing)
        answer = await conversation.turn(film(300 << 20, said=True), {"media0": zeros("media0", 300 << 20)})
        assert answer.text() == seen(300 << 20)
        assert [peak.growth for peak in before if peak.growth > MAX_GROWTH] == []
    await all_free(list(standing.addresses.values()))


@pytest.mark.parametrize("said", [pytest.param(True, id="said before"), pytest.param(False, id="found on the way", marks=LONG)])
async def test_a_film_of_1_gib_is_refused_by_its_limit_and_not_by_memory(standing: ServerProcesses, said: bool):
    """It is 512 MiB: one that says its size is refused before a byte of it is sent, another one there."""
    async with omni_stub(standing.address) as stub:
        conversation = ConverseStream(stub)
        before = peaks(standing)
        with pytest.raises(TurnFailed) as told:
            await conversation.turn(film(1 << 30, said=said), {"media0": zeros("media0", 1 << 30)})
        assert told.value.reason == "BAD_REQUEST" and "more than 536870912 bytes" in told.value.failed.message
        if said:
            assert not conversation.room
        else:
            assert (512 << 20) // PIECE < conversation.room["media0"] < (600 << 20) // PIECE
        assert [peak.growth for peak in before if peak.growth > MAX_GROWTH] == []
        answer = await conversation.turn(film(PIECE, said=False), {"media0": zeros("media0", PIECE)})
        assert answer.text() == seen(PIECE)
    await all_free(list(standing.addresses.values()))
