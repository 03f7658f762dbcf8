"""The router, too, asks a replica last that gave a link further behind no sign of life, whenever that was found."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from helpers.ask import request
from helpers.link import ENDED, Behaviour, bare_peer, says
from helpers.servers import toy_logic
from omnistage.host.places import Client
from omnistage.link.channels import Channels
from omnistage.router.admission import Admission
from omnistage.router.answer import AnswerLimits, Generation
from omnistage.router.pipeline import load_pipeline
from omnistage.router.placement import SERVING, Placement
from omnistage.router.request import validate
from omnistage.router.telemetry import Tally
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.channel import Credentials
from omnistage.wire.errors import StageError

HUNG, WELL = "127.0.0.1:1", "127.0.0.1:2"
"""Two Talkers, of which nothing is there: only Thinkers would speak with them."""


def opened(*silent: str) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(opened=stage_pb2.Opened(silent=silent))


def token(seq: int) -> stage_pb2.RunResponse:
    text = chunk_pb2.TextChunk(text="a", token_ids=[seq])
    return stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", seq=seq, first=seq, count=1, text=text))


def placement_of(channels: Channels, thinkers: Sequence[str]) -> Placement:
    """All of them serve, and none sends another report."""
    replicas = {"thinker": thinkers, "talker": [HUNG, WELL], "code2wav": ["127.0.0.1:3"]}
    placement = Placement(channels, replicas, boot_id="here")
    for replica in placement.all():
        replica.description, replica.state = toy_logic(replica.kind).description, SERVING
    return placement


async def answer(placement: Placement, channels: Channels, heard: list[omni_pb2.GenerateResponse]) -> None:
    """Ask for sound and hear all of it."""

    async def hear(event: omni_pb2.GenerateResponse) -> None:
        heard.append(event)

    pipeline = load_pipeline("toy")
    descriptions: dict[str, stage_pb2.DescribeResponse] = {stage.kind: toy_logic(stage.kind).description for stage in pipeline.stages}
    async with Admission(lambda: 1, 1).place(Client("client")) as place:
        limits = AnswerLimits(time.monotonic() + 30, 30)
        valid = validate(request("hello", 3), {"toy": pipeline})
        await Generation(valid, descriptions, placement, channels, hear, limits, (), place, Tally()).run()


def suspects(placement: Placement) -> list[str]:
    return [replica.address for replica in placement.all() if replica.suspect]


@pytest.mark.parametrize(
    ("second", "ends_well"),
    [
        pytest.param(says(opened(HUNG), token(1), ENDED), True, id="the answer goes on"),
        pytest.param(says(opened(HUNG), stage_pb2.RunResponse(opened=stage_pb2.Opened())), False, id="and ends by an error"),
    ],
)
async def test_what_is_found_silent_when_a_stage_is_replaced_in_mid_answer(second: Behaviour, ends_well: bool):
    heard: list[omni_pb2.GenerateResponse] = []
    async with bare_peer(says(opened(), token(0))) as one, bare_peer(second) as other, Channels(Credentials()) as channels:
        placement = placement_of(channels, [one, other])
        try:
            await answer(placement, channels, heard)
        except StageError as error:
            assert not ends_well and error.reason == "PROTOCOL"
        assert [event.failover.replica for event in heard if event.HasField("failover")] == [other]
        assert suspects(placement) == [one, HUNG]
        assert placement.place("talker") == [WELL, HUNG]


async def test_what_is_found_silent_when_the_answer_opens():
    async with bare_peer(says(opened(HUNG), token(0), ENDED)) as one, Channels(Credentials()) as channels:
        placement = placement_of(channels, [one])
        await answer(placement, channels, [])
        assert suspects(placement) == [HUNG]
