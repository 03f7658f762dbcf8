"""Stages of the default model that are killed in the middle of an answer: the text and the samples are those of the undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from hashlib import sha256
from itertools import permutations

import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, ask, request
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks, begun, holder, killed_holder, nothing_left, restore, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, omni_stub
from omnistage.engine.linear import multiplies_bfloat16
from omnistage.v1 import omni_pb2

pytestmark = [
    pytest.mark.timeout(400),
    lengths.long_form(
        "models/contract/test_contract.py::test_the_default_model_goes_on_wherever_it_was_lost",
        "models/test_resumed_code2wav.py::test_sound_goes_on_at_any_sample_with_the_same_bits",
        "system/test_resume.py::test_a_second_kill_hits_the_resume",
    ),
]

SEED = 11
TOKENS = 120
COUNTS = {"thinker": 3, "talker": 2, "code2wav": 2}
"""A third Thinker, for an answer that loses two of them."""

QUESTION = "How do plants make food?"
TIMEOUT_S = 100.0


def asked() -> omni_pb2.GenerateRequest:
    return request(QUESTION, SEED, thinker={"max_tokens": TOKENS, "ignore_eos": True})


TURNS = ["-".join(CHAIN[turn:] + CHAIN[:turn]) for turn in range(3)]

OTHERS = ("the next one", "another stage")

DTYPES = ("float32", "bfloat16") if multiplies_bfloat16() else ("float32",)
"""That the Thinker of the short form may have: where a processor computes bfloat16 slowly, in float32, that is for the long form."""


class Replicas:
    """Replicas of each stage, and the digest of the undisturbed answer. dtype: of the Thinkers."""

    def __init__(self, running: Fleet, dtype: str) -> None:
        self.fleet = running
        self.dtype = dtype
        self._undisturbed = ""

    async def ask_through_all(self, *steps: DisturbanceStep) -> None:
        """Ask; whatever the steps do, the answer is that of the undisturbed run. Afterwards everything is restored and nothing is left."""
        try:
            async with omni_stub(self.fleet.address("router")) as stub:
                if not self._undisturbed:
                    self._undisturbed = digest(await ask(stub, asked(), timeout_s=TIMEOUT_S))
                answer = await ask_through(stub, asked(), *steps, timeout_s=TIMEOUT_S)
                print(self.dtype, [(failover.lost, failover.pause.ToMilliseconds()) for failover in answer.failovers])
                assert digest(answer) == self._undisturbed
                assert len(answer.failovers) >= len(steps)
                await restore(self.fleet, stub)
                await nothing_left(self.fleet)
        except BaseException as error:
            error.add_note(f"{self.dtype}\n{self.fleet.logs()}")
            raise

    async def kill_in_turn(self, kinds: Sequence[str]) -> None:
        moments = (begun, text_chunks(20), audio_chunks(15))
        await self.ask_through_all(*[DisturbanceStep(moment, self.kill(kind)) for moment, kind in zip(moments, kinds, strict=True)])

    def kill(self, kind: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            await killed_holder(self.fleet, kind)

        return act


def digest(answer: WholeAnswer) -> str:
    """The digest of the text, its tokens and the samples, however they were cut."""
    tokens = [token for chunk in answer.of("text") for token in chunk.text.token_ids]
    for chunks in answer.chunks.values():
        assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
        assert chunks[-1].last
    return sha256(repr((answer.text(), tokens)).encode() + answer.samples().tobytes()).hexdigest()


@pytest.fixture(scope="module", params=["drawn", *[pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float32", "bfloat16")]])
def replicas(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """Drawn: one of the dtypes, for all cases. Each of them is dear to start: seven processes that load a model."""
    dtype = random.choice(DTYPES) if request.param == "drawn" else request.param
    with fleet(
        tmp_path_factory.mktemp("logs"),
        replicas=COUNTS,
        family="smol",
        pipeline="smol",
        stage_args=["--inline-limit", "0"],
        args_of={"thinker": ["--dtype", dtype]},
    ) as running:
        yield Replicas(running, dtype)


@pytest.mark.parametrize("order", [pytest.param(order, marks=lengths.LONG) for order in (*TURNS, *OTHERS)])
async def test_more_than_one_is_killed(replicas: Replicas, order: str, seed: int) -> None:
    """One stage before the first output, one in mid text and one in mid speech; or the Thinker that replaced the first one; or another
    stage of the answer a few milliseconds after the first.

    In the long form. That the loss of one changes no sample of this model is in test_spoken_words, that an answer may lose several is in
    test_resume, of toys."""
    if order in TURNS:
        await replicas.kill_in_turn(order.split("-"))
        return
    if order == "the next one":
        kill = replicas.kill("thinker")
        await replicas.ask_through_all(DisturbanceStep(text_chunks(10), kill), DisturbanceStep(text_chunks(40), kill))
        return
    chance = random.Random(seed)
    first, second = chance.choice(list(permutations(CHAIN, 2)))

    async def kill_both() -> None:
        victims = [await holder(replicas.fleet, kind) for kind in (first, second)]
        replicas.fleet.kill(victims[0])
        await asyncio.sleep(chance.uniform(0.001, 0.005))
        replicas.fleet.kill(victims[1])

    print(first, second)
    await replicas.ask_through_all(DisturbanceStep(text_chunks(20), kill_both))
