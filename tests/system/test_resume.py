"""Stages that are killed in the middle of an answer: the listener hears the same samples as if nothing had happened."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, read, request
from helpers.disturbed import (
    MOMENTS,
    SLOW,
    SLOWER_SOUND,
    DisturbanceStep,
    ask_through,
    begun,
    disturbed,
    holder,
    kill_when,
    killed_holder,
    nothing_left,
    restore,
    text_chunks,
)
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, omni_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.v1 import omni_pb2, stage_pb2

TOKENS = 150
LONG = {"max_tokens": TOKENS, "ignore_eos": True}

MUTE_EVERY = 10
"""The Talkers tell one of so many words of an answer as not spoken."""

PAIRS = {f"{first}-{second}": (first, second) for first, second in itertools.product(CHAIN, CHAIN)}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three of each kind, so that one is left when two are lost at once. They cut their output at random, sound comes slower than text, and
    every tensor is a reference into memory that dies with its owner."""
    folder, arguments = tmp_path_factory.mktemp("logs"), ["--inline-limit", "0"]
    own: dict[str, dict[str, Any]] = {**SLOWER_SOUND, "talker": {"mute_every": MUTE_EVERY}}
    with fleet(folder, replicas=3, options=SLOW, options_of=own, stage_args=arguments) as running:
        yield running


@lengths.one_or_all("moment", MOMENTS)
@pytest.mark.parametrize("kind", CHAIN)
async def test_a_stage_is_killed(toys: Fleet, kind: str, moment: str, seed: int) -> None:
    moment, lost = lengths.draw(moment, MOMENTS, seed), list[str]()

    async with disturbed(toys) as stub:
        answer = await ask_through(stub, request("hello", seed, thinker=LONG), kill_when(MOMENTS[moment], toys, kind, lost))
        answer.check_toy(seed, "hello", TOKENS)
        answer.check_unspoken(MUTE_EVERY)
        # On a busy machine, the stage before it may not find another one in time, and is then the one that is replaced.
        assert answer.failovers and {failover.lost for failover in answer.failovers} <= {*lost, *map(toys.address, toys.of("thinker"))}
        print(f"{kind}, {moment}: replaced in {answer.failovers[0].pause.ToMilliseconds()} ms")


@lengths.one_or_all("pair", PAIRS)
async def test_a_second_kill_hits_the_resume(toys: Fleet, pair: str, seed: int) -> None:
    """Another stage that has the session, or another replica of the same kind, which may just be taking it over."""
    chance = random.Random(seed)
    first, second = PAIRS[lengths.draw(pair, PAIRS, seed)]
    moment = chance.choice(list(MOMENTS))

    async def kill_both() -> None:
        victim = await holder(toys, first)
        other = await holder(toys, second) if second != first else chance.choice([name for name in toys.of(first) if name != victim])
        toys.signal(victim, signal.SIGKILL)
        await asyncio.sleep(chance.uniform(0.001, 0.005))
        toys.signal(other, signal.SIGKILL)

    async with disturbed(toys) as stub:
        answer = await ask_through(stub, request("hello", seed, thinker=LONG), DisturbanceStep(MOMENTS[moment], kill_both))
        answer.check_toy(seed, "hello", TOKENS)
        assert answer.failovers
        print(moment, [(failover.lost, failover.pause.ToMilliseconds()) for failover in answer.failovers])


@lengths.long_form(
    "system/test_cancel.py::test_cancels_at_random_moments",
    unkept="A client that goes away while its session is opened elsewhere leaves nothing.",
)
@lengths.rounds(1, 3)
async def test_cancels_during_a_resume_leave_nothing(toys: Fleet, seed: int, rounds: int) -> None:
    """The client goes away within milliseconds of a loss: at once, before anybody has seen it, or while the session is opened elsewhere."""
    chance = random.Random(seed)
    for _ in range(rounds):
        async with disturbed(toys) as stub:
            for kind in chance.sample(CHAIN, 3):
                call = stub.Generate(request("hello", seed, thinker=LONG), timeout=60)
                answer = WholeAnswer()
                while not MOMENTS["in mid text"](answer):
                    answer.take(await read(call))
                await killed_holder(toys, kind)
                await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.02), chance.uniform(0, 0.1)]))
                call.cancel()
                await nothing_left(toys)


@lengths.one_or_all("steps_done", ["0", "2"])
async def test_a_diffusion_is_killed(tmp_path: Path, steps_done: str, seed: int) -> None:
    """The next one draws the pictures that are missing from their first step on; progress begins anew."""
    done = int(lengths.draw(steps_done, ["0", "2"], seed))
    with fleet(tmp_path, kinds=("diffusion",), pipeline="toy-picture", options={"interval_s": 0.5}) as running:
        params = stage_pb2.DiffusionParams(prompt="grey", width=8, height=8, steps=6, results=2)
        asked = omni_pb2.GenerateRequest(seed=seed, diffusion=params)
        async with omni_stub(running.address("router")) as stub:
            moment = kill_when(lambda answer: begun(answer) and len(answer.of("progress")) >= done, running, "diffusion")
            answer = await ask_through(stub, asked, moment)
            assert len(answer.failovers) == 1
            pictures = [chunk.image.data.data for chunk in answer.of("image") if chunk.count]
            shades = np.add.outer(np.arange(8), np.arange(8))
            assert pictures == [png(((seed + n + shades) % 256).astype(np.uint8)) for n in range(2)]
            for chunks in answer.chunks.values():
                assert [chunk.seq for chunk in chunks] == list(range(len(chunks))) and chunks[-1].last
            await restore(running, stub)
            await nothing_left(running)


THINKS = 60
"""Tokens of a thought."""


async def test_a_thinker_is_killed_while_it_thinks(tmp_path: Path, seed: int) -> None:
    """Thought and answer go on, and what is heard is the answer alone."""
    lost = list[str]()

    with fleet(tmp_path, replicas=2, options=SLOW, options_of={"thinker": {"thinks": THINKS}}) as thinking:
        async with disturbed(thinking, alike=False) as stub:
            asked = request("hello", seed, thinker=LONG)
            answer = await ask_through(stub, asked, kill_when(text_chunks(5), thinking, "thinker", lost))
    answer.check_whole()
    assert [failover.lost for failover in answer.failovers] == lost
    said = [chunk for chunk in answer.of("text") if not chunk.text.HasField("thought")]
    thought = [chunk for chunk in answer.of("text") if chunk.text.HasField("thought")]
    whole = formulas.text(seed, "hello", TOKENS)
    assert sum(chunk.count for chunk in thought) == THINKS
    assert "".join(chunk.text.thought for chunk in thought) + answer.text() == whole
    assert answer.text() == "".join(chunk.text.text for chunk in said) == whole.removeprefix(formulas.text(seed, "hello", THINKS))
    first = THINKS * formulas.FRAMES_PER_ROW * formulas.SAMPLES_PER_FRAME
    np.testing.assert_array_equal(answer.samples(), formulas.audio(seed, "hello", TOKENS)[first:, 0] * 32768)
