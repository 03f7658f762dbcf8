"""Qwen2.5-Omni's Thinker and Talker as real processes: codes of speech while text is being written, the same whoever is lost on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
import pytest_asyncio

from helpers import lengths
from helpers.ask import WholeAnswer, ask
from helpers.disturbed import DisturbanceStep, ask_through, begun, disturbed, found, holder, killed_holder
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG, WAKE
from helpers.omni_family import seen
from helpers.servers import all_free, omni_stub, stage_stub
from omnistage.models.tiny.qwen2_5_omni import SIZES
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = [
    lengths.long_form(
        "models/qwen2_5_omni/test_thinker.py::test_it_goes_on_after_any_token",
        "models/qwen2_5_omni/test_thinker.py::test_text_that_is_given_has_the_rows_of_an_answer",
        "models/qwen2_5_omni/test_talker.py::test_it_goes_on_after_any_code",
        "models/qwen2_5_omni/test_talker.py::test_however_the_rows_come_it_says_the_same",
        "router/test_omni_chain.py::test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap",
        "router/test_omni_chain.py::test_prompt_rows_of_megabytes_go_down_in_pieces",
        "system/test_frozen.py::test_a_frozen_replica_is_left_and_the_answer_goes_on",
    ),
]

TOKENS, FRAMES = 150, 300
DRAWN = stage_pb2.Sampling(temperature=1, top_p=0.9, repetition_penalty=1.05)
ENDS = dict.fromkeys((8292, 8294), -100.0)
"""The bias for the ends of speech: they are never drawn, so that it lasts as long as is asked for."""
Moment = Callable[[WholeAnswer], bool]


def tokens(count: int) -> Moment:
    return lambda answer: len(answer.tokens()) >= count


def codes(count: int) -> Moment:
    """Not their chunks: whoever is slow to read them gets several in one."""
    return lambda answer: len(answer.codes()) >= count


def after_text(count: int) -> Moment:
    return lambda answer: bool(answer.of("text")) and answer.of("text")[-1].last and len(answer.codes()) >= count


MOMENTS: dict[str, Moment] = {"as it begins": begun, "in text": tokens(20), "in speech": codes(30), "late": after_text(TOKENS)}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, omni_checkpoint: Path) -> Iterator[Fleet]:
    """Two of each kind; rows of prompts go by shared memory."""
    with fleet(
        tmp_path_factory.mktemp("house"),
        kinds=("thinker", "talker"),
        pipeline="qwen2_5_omni-codes",
        family="qwen2_5_omni",
        # A page of rows is above the limit, however few a step takes on a busy machine; a row of an answer is not.
        stage_args=["--checkpoint", str(omni_checkpoint), "--dtype", "float32", "--inline-limit", "8192"],
        can_hang=True,
    ) as running:
        yield running


def question(
    seed: int, *media: stage_pb2.Media, tokens: int = TOKENS, frames: int = FRAMES, words: str = "What?"
) -> omni_pb2.GenerateRequest:
    parts = [*(stage_pb2.Part(media=medium) for medium in media), stage_pb2.Part(text=words)]
    thinker = stage_pb2.ThinkerParams(
        messages=[stage_pb2.Message(role="user", parts=parts)], sampling=DRAWN, max_tokens=tokens, ignore_eos=True
    )
    speech = stage_pb2.Sampling(temperature=0.9, top_k=40, logit_bias=ENDS)
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker, talker=stage_pb2.TalkerParams(max_frames=frames, sampling=speech))


@dataclass(frozen=True)
class WholeTalk:
    """An answer about a picture, a sound and a film to which nothing happened, and what was asked."""

    asked: omni_pb2.GenerateRequest
    answer: WholeAnswer

    def check_same(self, answer: WholeAnswer) -> None:
        answer.check_whole()
        assert (answer.text(), answer.codes()) == (self.answer.text(), self.answer.codes())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(house: Fleet) -> WholeTalk:
    seed = random.getrandbits(32)
    asked = question(seed, *seen(seed))
    async with omni_stub(house.address("router")) as stub:
        return WholeTalk(asked, await ask(stub, asked))


async def test_what_was_seen_and_heard_is_spoken_of(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        answers = await asyncio.gather(*(ask(stub, question(seed + n, *seen(seed)[: n % 4], tokens=20 + n, frames=40)) for n in range(5)))
        for answer in answers:
            answer.check_whole()
            assert len(answer.codes()) == 40
        for n, answer in enumerate(answers):
            alone = await ask(stub, question(seed + n, *seen(seed)[: n % 4], tokens=20 + n, frames=40))
            assert (alone.text(), alone.codes()) == (answer.text(), answer.codes())
    await all_free([house.address(name) for name in house.stages])


@lengths.one_or_all("kind", ["thinker", "talker"])
@lengths.one_or_all("moment", MOMENTS)
async def test_one_of_them_is_killed(house: Fleet, whole: WholeTalk, kind: str, moment: str, seed: int) -> None:
    kind = lengths.draw(kind, ["thinker", "talker"], seed)
    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]

    async def kill() -> None:
        await killed_holder(house, kind)

    async with disturbed(house, alike=False, after=question(seed, tokens=5, frames=5)) as stub:
        answer = await ask_through(stub, whole.asked, DisturbanceStep(strikes, kill))
        assert len(answer.failovers) == 1
        whole.check_same(answer)


@lengths.one_or_all("kind", ["thinker", "talker"])
async def test_the_event_loop_of_one_of_them_hangs(house: Fleet, whole: WholeTalk, kind: str, seed: int) -> None:
    kind = lengths.draw(kind, ["thinker", "talker"], seed)
    hung = list[str]()

    async def hang() -> None:
        hung.append(await holder(house, kind))
        house.signal(hung[0], HANG)

    async with disturbed(house, alike=False, after=question(seed, tokens=5, frames=5)) as stub:
        try:
            answer = await ask_through(stub, whole.asked, DisturbanceStep(codes(30), hang))
        finally:
            for name in hung:
                if house.server(name).alive:
                    house.signal(name, WAKE)
        await found(house, stub)
        assert len(answer.failovers) == 1
        whole.check_same(answer)


async def test_text_that_is_given_is_spoken(house: Fleet, seed: int) -> None:
    """Its codes are those of an answer that says the same."""
    async with omni_stub(house.address("router")) as stub:
        said = await ask(stub, question(seed, tokens=30, frames=50))
        given = omni_pb2.GenerateRequest(
            seed=seed,
            thinker=stage_pb2.ThinkerParams(verbatim="It is far away.", max_tokens=30),
            talker=stage_pb2.TalkerParams(max_frames=50),
        )
        spoken = await ask(stub, given)
        spoken.check_whole()
        assert spoken.text() == "It is far away." and len(spoken.codes()) == 50 and spoken.codes() != said.codes()
        assert (await ask(stub, given)).codes() == spoken.codes()
        given.talker.voice = "Ethan"
        assert (await ask(stub, given)).codes() != spoken.codes()


async def test_the_rows_of_a_long_prompt_go_once_through_shared_memory(house: Fleet, seed: int) -> None:
    """2,000 tokens and more are 1.5 MiB of rows here; those of the answer go inline. A request for text alone moves none."""
    words = "".join(random.Random(seed).choices("abcdefgh ", k=5000))
    # More frames than rows: who has all of its frames is sent no more.
    asked = question(seed, words=words, tokens=20, frames=40)
    before = await sent(house)
    async with omni_stub(house.address("router")) as stub:
        text = omni_pb2.GenerateRequest(outputs=["text"])
        text.MergeFrom(asked)
        assert (await ask(stub, text)).text()
        assert await sent(house) == before
        answer = await ask(stub, asked)
        assert answer.usage is not None
        rows = answer.usage.stages[1].input_items["prompt"]
        assert rows > 2000
        after = await sent(house)
    width = SIZES["tiny"]["thinker"]["hidden_size"]
    moved = {way: after[way] - before[way] for way in after}
    assert sum(moved.values()) == (rows + 19) * width * 4 + rows * 3 * 4, "with the rows of the answer, and where those of the prompt stand"
    assert moved["shared_memory"] > 0.9 * rows * width * 4, "but for the last few, which are below the limit"
    await all_free([house.address(name) for name in house.stages])
    for name in house.of("thinker"):
        async with stage_stub(house.address(name)) as stage:
            report = await stage.Watch(stage_pb2.WatchRequest(), timeout=10).read()
            assert isinstance(report, stage_pb2.WatchResponse) and report.arena_bytes_used == 0 == report.leases


async def sent(house: Fleet) -> dict[str, float]:
    """Bytes of tensors that the Thinkers gave to Talkers so far, by the way they went."""
    total = {"inline": 0.0, "shared_memory": 0.0}
    for name in house.of("thinker"):
        with await asyncio.to_thread(urlopen, f"http://{house.server(name).metrics_address}/metrics", timeout=10) as response:
            for line in response.read().decode().splitlines():
                if line.startswith("omnistage_connector_sent_bytes_total"):
                    total[line.partition('transport="')[2].partition('"')[0]] += float(line.rpartition(" ")[2])
    return total
