"""The child processes of a server's models end with the server, however it ends, and even if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import StartedProcess, wait_end

END_S = 60.0
SERVERS = {
    "decodes media": """
        from omnistage.models.media.decoder import DecodingProcess
        from omnistage.models.media.terms import MediaLimits
        process = DecodingProcess(MediaLimits())
        await process.wait_ready()
        return process
    """,
    "makes grammars on trial": """
        from omnistage.models.text.constraint import GrammarTrials
        from omnistage.models.text.grammar import TokenPieces
        trials = GrammarTrials(lambda: TokenPieces([b"a", b"b", b""], special=[2], ends=[2]))
        await trials.start()
        return trials._process
    """,
    "is a rank": """
        import torch
        from helpers.parts import RANDOM_READER, read_random
        from omnistage.models.options import LoadOptions
        from omnistage.models.ranks.team import Team
        settings = LoadOptions(dtype="float32", tensor_parallel_size=2, family={"seed": 0})
        team = Team(RANDOM_READER, Path(), settings)
        part = read_random(Path(), settings, team.group)
        team.connect(torch.device("cpu"))
        return team._ranks[0]
    """,
}
"""By the work of a child: a server that has started one; it returns the process."""

PROGRAM = """
import asyncio, signal
from pathlib import Path

async def started():{}
print(asyncio.run(started()).pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("work", SERVERS)
def test_a_child_that_hangs_ends_with_a_killed_server(work: str, tmp_path: Path) -> None:
    """One that is stopped hears of nothing, and the kernel has to end it."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM.format(SERVERS[work])]
    with StartedProcess(command, env=variables, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        server.kill()
    assert wait_end(pid, END_S)
