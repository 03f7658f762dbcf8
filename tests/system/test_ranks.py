"""A Thinker of two ranks as a real stage: one rank that ends or stops ends all of it, and its answers go on elsewhere.

The seed of the run chooses one of the families."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import lengths
from helpers.ask import ask
from helpers.disturbed import DisturbanceStep, ask_through, disturbed, holder, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.processes import wait_end
from helpers.randomness import SEED
from helpers.servers import omni_stub
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = [
    lengths.long_form(
        "models/test_team.py::test_where_one_is_killed_a_thread_of_the_first_one_ends",
        "models/test_team.py::test_several_ranks_say_what_one_says",
        "host/test_watchdog.py::test_a_thread_that_waits_for_another_process_hangs_when_that_does_nothing",
        "system/test_broken.py::test_an_engine_that_hangs_ends_its_process_and_the_answer_goes_on_elsewhere",
        unkept="Ranks end with a stage that is killed, and with one that is told to end only after its answers.",
    )
]

END_S = 20.0
BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
FAMILIES = {"qwen2_5_omni": "omni_checkpoint", "qwen3_omni": "qwen3_checkpoint"}
DRAWN = stage_pb2.Sampling(temperature=1, top_p=0.9)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    family = lengths.draw("", FAMILIES, int(os.environ[SEED]))
    checkpoint: Path = request.getfixturevalue(FAMILIES[family])
    with fleet(
        tmp_path_factory.mktemp("house"),
        kinds=("thinker",),
        pipeline=f"{family}-text",
        family=family,
        # Each step waits for both ranks: beside other work an answer takes longer than toys are given to end.
        stage_args=["--checkpoint", str(checkpoint), "--dtype", "float32", "--tensor-parallel-size", "2", "--grace", "20"],
    ) as running:
        yield running


def question(seed: int, tokens: int = 100) -> omni_pb2.GenerateRequest:
    words = [stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="What?")])]
    thinker = stage_pb2.ThinkerParams(messages=words, sampling=DRAWN, max_tokens=tokens, ignore_eos=True)
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker)


def other_rank(pid: int) -> int:
    """The process that follows that of a stage."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    (rank,) = [child for child in children if b"omnistage.models.ranks.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return rank


@lengths.one_or_all("how", BLOWS)
async def test_a_rank_is_lost(house: Fleet, how: str, seed: int) -> None:
    blow = BLOWS[lengths.draw(how, BLOWS, seed)]
    lost = dict[str, tuple[int, int]]()

    async def strike() -> None:
        name = await holder(house, "thinker")
        pid = house.server(name).pid
        lost[name] = (pid, other_rank(pid))
        os.kill(lost[name][1], blow)

    async with disturbed(house, alike=False, after=question(seed, 5)) as stub:
        answer = await ask_through(stub, question(seed), DisturbanceStep(text_chunks(5), strike))
        answer.check_whole()
        assert len(answer.failovers) == 1
        whole = await ask(stub, question(seed))
        assert whole.text() == answer.text()
        ((name, (_, rank)),) = lost.items()
        server = house.server(name)
        assert await asyncio.to_thread(server.wait) not in (0, -signal.SIGKILL), "it ends by itself, and says that it is broken"
        assert await asyncio.to_thread(wait_end, rank, END_S)
        told = server.log()
        assert ("rank 1 ended with signal SIGKILL" if blow == signal.SIGKILL else "used no CPU") in told


async def test_a_stage_that_is_killed_takes_its_ranks_with_it(house: Fleet, seed: int) -> None:
    async with disturbed(house, alike=False, after=question(seed, 5)):
        name = house.of("thinker")[0]
        rank = other_rank(house.server(name).pid)
        house.kill(name)
        assert await asyncio.to_thread(wait_end, rank, END_S)


async def test_a_stage_that_is_told_to_end_lets_its_answers_finish_and_ends_its_ranks(house: Fleet, seed: int) -> None:
    """Also where all of its processes are told, as some tell a whole service."""
    ending = dict[str, int]()

    async def end() -> None:
        name = await holder(house, "thinker")
        ending[name] = other_rank(house.server(name).pid)
        os.kill(ending[name], signal.SIGTERM)
        house.server(name).terminate()

    async with disturbed(house, alike=False, after=question(seed, 5)) as stub:
        answer = await ask_through(stub, question(seed, 60), DisturbanceStep(text_chunks(3), end))
        answer.check_whole()
        assert not answer.failovers
        ((name, rank),) = ending.items()
        server = house.server(name)
        assert await asyncio.to_thread(server.wait) == 0
        assert await asyncio.to_thread(wait_end, rank, END_S)
        assert "Traceback" not in server.log()


async def test_many_at_once_say_what_each_says_alone(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        together = await asyncio.gather(*(ask(stub, question(seed + n, 20)) for n in range(5)))
        for n, answer in enumerate(together):
            answer.check_whole()
            assert (await ask(stub, question(seed + n, 20))).text() == answer.text()
