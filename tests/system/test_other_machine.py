"""Two Thinkers of the default model of which one has the instructions of an older processor: it does not go on with the other's answer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from helpers.ports import take_address
from helpers.run import Heard, params
from helpers.servers import ServerProcess, stage_flags, stage_stub
from helpers.stage import Stage
from omnistage.v1 import chunk_pb2, stage_pb2

OLDER = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
TOKENS = 60


def token_ids(heard: Heard) -> list[int]:
    return [token_id for chunk in heard.of("text") for token_id in chunk.text.token_ids]


@pytest.mark.slow
async def test_a_thinker_with_other_instructions_does_not_go_on_with_an_answer(tmp_path: Path) -> None:
    with ExitStack() as servers:
        newer, older = (
            servers.enter_context(
                ServerProcess(
                    "omnistage.thinker",
                    *stage_flags(family="smol"),
                    "--address",
                    take_address(),
                    log_folder=tmp_path,
                    environment=environment,
                )
            )
            for environment in ({}, OLDER)
        )
        newer.wait_ready()
        older.wait_ready()
        async with stage_stub(newer.address) as one, stage_stub(older.address) as other:
            here = Stage(newer.address, one, await one.Describe(stage_pb2.DescribeRequest(), timeout=10))
            there = Stage(older.address, other, await other.Describe(stage_pb2.DescribeRequest(), timeout=10))
            revision = here.description.revision
            asked = params("thinker", "How do plants make food?", max_tokens=TOKENS, ignore_eos=True)
            ids, others = [token_ids(await (await stage.opened(params=asked)).finish()) for stage in (here, there)]
            assert len(ids) == TOKENS
            if revision == there.description.revision:
                assert ids == others, "one revision, and unlike answers"
                pytest.skip("without the newest instructions this processor computes the same")
            history = chunk_pb2.Chunk(port="text", count=4, text=chunk_pb2.TextChunk(token_ids=ids[:4]))
            resume = stage_pb2.Resume(positions=[stage_pb2.Position(port="text", seq=1, first=4)], history=[history])
            taken_up = here.caller()
            await taken_up.send(open=here.open(params=asked, resume=resume, revision=revision))
            rest = await taken_up.finish()
            assert token_ids(rest) == ids[4:]
            refused = there.caller()
            await refused.send(open=there.open(params=asked, resume=resume, revision=revision))
            await refused.expect("REVISION_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION)
