"""Two Thinkers of the default model of which one has the instructions of an older processor: it does not go on with the other's answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from helpers import lengths
from helpers.instructions import OLDER_PROCESSORS
from helpers.ports import take_address
from helpers.run import RunAnswer, params
from helpers.servers import ServerProcess, stage_flags, stage_stub
from helpers.stage import Stage
from omnistage.v1 import chunk_pb2, stage_pb2

pytestmark = lengths.long_form(
    "models/test_revision.py::test_where_answers_differ_revisions_differ",
    "stage/test_resume.py::test_a_replica_of_another_revision_does_not_go_on",
    unkept="A Thinker with the instructions of an older processor has another revision where it answers otherwise.",
)

TOKENS = 30


def token_ids(heard: RunAnswer) -> list[int]:
    return [token_id for chunk in heard.of("text") for token_id in chunk.text.token_ids]


@pytest.mark.timeout(400)
async def test_a_thinker_with_other_instructions_does_not_go_on_with_an_answer(tmp_path: Path) -> None:
    asked = params("thinker", "How do plants make food?", max_tokens=TOKENS, ignore_eos=True)
    async with thinker(tmp_path, {}) as here:
        ids = token_ids(await (await here.opened(params=asked)).finish())
        assert len(ids) == TOKENS
        history = chunk_pb2.Chunk(port="text", count=4, text=chunk_pb2.TextChunk(token_ids=ids[:4]))
        resume = stage_pb2.Resume(positions=[stage_pb2.Position(port="text", seq=1, first=4)], history=[history])
        revision = here.description.revision
        taken_up = here.caller()
        await taken_up.send(open=here.open(params=asked, resume=resume, revision=revision))
        assert token_ids(await taken_up.finish()) == ids[4:]
        for older in OLDER_PROCESSORS:
            async with thinker(tmp_path, older) as there:
                if there.description.revision == revision:
                    assert token_ids(await (await there.opened(params=asked)).finish()) == ids, (
                        f"one revision, and unlike answers with {older}"
                    )
                    continue
                refused = there.caller()
                await refused.send(open=there.open(params=asked, resume=resume, revision=revision))
                await refused.expect("REVISION_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION)
                return
    pytest.skip("this processor computes the same with the oldest instructions")


@asynccontextmanager
async def thinker(folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Stage]:
    flags = (*stage_flags(family="smol"), "--address", take_address())
    with ServerProcess("omnistage.thinker", *flags, log_folder=folder, environment=environment) as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub:
            yield Stage(server.address, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
