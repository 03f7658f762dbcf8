"""An engine whose thread hangs ends its process; whoever has a session there goes on at another replica."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from helpers.link import chunks_of, failovers_of, hear, link_by, opening, route_to
from helpers.run import params
from helpers.servers import ServerProcess, all_free
from omnistage.host.process import BROKEN
from omnistage.v1 import stage_pb2

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
TOKENS = 60


def thinker(folder: Path, **options: int) -> ServerProcess:
    flags = ["--family", "breaking", "--options", json.dumps(options)]
    return ServerProcess("helpers.breaking", *flags, log_folder=folder, environment=ENVIRONMENT)


async def answer(*addresses: str) -> list[stage_pb2.RunResponse]:
    """All events of one answer, asked of the first address that works."""
    request = opening("thinker", {}, model="breaking", checkpoints=["text"], params=params("thinker", max_tokens=TOKENS, ignore_eos=True))
    async with link_by(route_to(*addresses, kind="thinker"), request) as link:
        await link.open()
        return await hear(link)


def tokens_of(events: list[stage_pb2.RunResponse]) -> list[int]:
    return [token for chunk in chunks_of(events, "text") for token in chunk.text.token_ids]


async def test_an_engine_that_hangs_ends_its_process_and_the_answer_goes_on_elsewhere(tmp_path: Path):
    with ExitStack() as running:
        hanging = running.enter_context(thinker(tmp_path, hangs_at=20))
        hanging.wait_ready()
        sound = running.enter_context(thinker(tmp_path))
        sound.wait_ready()
        expected = tokens_of(await answer(sound.address))
        events = await answer(hanging.address, sound.address)
        assert tokens_of(events) == expected
        assert len(expected) == TOKENS
        (failover,) = failovers_of(events)
        assert (failover.lost, failover.replica) == (hanging.address, sound.address)
        assert hanging.wait() == BROKEN
        lines = [json.loads(line) for line in hanging.log().splitlines() if line.startswith("{")]
        (wedged,) = [line for line in lines if line["event"] == "thread.wedged"]
        assert wedged["thread"] == "omnistage-engine"
        assert wedged["step"] == 18  # The prompt and 17 tokens were computed before.
        assert "no CPU" in wedged["reason"]
        assert {"server.stopped", "server.broken"} <= {line["event"] for line in lines}
        await all_free([sound.address])
