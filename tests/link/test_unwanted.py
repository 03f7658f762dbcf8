"""If a stage is lost after every wanted port has ended, that is no loss, whatever is missing on unwanted ports."""

from __future__ import annotations

import pytest

from helpers.link import bare_peer, failovers_of, hear, link_by, opening, route_to, says
from omnistage.v1 import chunk_pb2, stage_pb2

TEXT = chunk_pb2.TextChunk(text="all", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=["1"]))
WHOLE = stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", count=1, last=True, text=TEXT))


@pytest.mark.parametrize("unwanted", [["hidden"], []])
async def test_a_stage_that_is_lost_when_only_unwanted_ports_are_left(unwanted: list[str]):
    """The caller grants credit for the port all the same, for stages that do not know of unwanted ports."""
    request = opening("thinker", checkpoints=["text"], unwanted=unwanted)
    async with (
        bare_peer(says(OPENED, WHOLE)) as one,
        bare_peer(says(OPENED, stage_pb2.RunResponse(ended=stage_pb2.Ended()))) as other,
        link_by(route_to(one, other, kind="thinker"), request) as link,
    ):
        await link.open()
        events = await hear(link)
    assert [event.chunk.text.text for event in events if event.HasField("chunk")] == ["all"]
    assert len(failovers_of(events)) == (0 if unwanted else 1)
