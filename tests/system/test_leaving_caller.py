"""A caller that breaks the rules of `Run`, reads nothing, and then goes away while the stage still tries to tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from helpers.run import code_chunks, open_of
from helpers.servers import ServerProcess, all_free, stage_flags, stage_stub
from omnistage.models.toy import formulas
from omnistage.v1 import stage_pb2


@pytest.mark.parametrize("pause_s", [0.1, 0.5])
async def test_it_leaves_no_task_that_nobody_looks_at(tmp_path: Path, pause_s: float) -> None:
    """Its output fills the stream, so that the stage waits for a write; it is cancelled within that wait."""
    rows = np.stack([formulas.row(token) for token in range(100)])
    with ServerProcess("omnistage.code2wav", *stage_flags({"samples_per_frame": 24000}), log_folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_ready)
        async with stage_stub(server.address) as stub:
            opening = open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
            call = stub.Run(timeout=60)
            await call.write(stage_pb2.RunRequest(open=opening))
            for chunk in code_chunks(formulas.frames(rows), [20] * 10):
                await call.write(stage_pb2.RunRequest(chunk=chunk))
            await asyncio.sleep(0.5)  # Nobody tells when the stream is full.
            await call.write(stage_pb2.RunRequest(open=opening))
            await asyncio.sleep(pause_s)
            call.cancel()
            await all_free([server.address])
        assert server.stop() == 0
        assert "never retrieved" not in server.log()
