"""Qwen2.5-Omni's Thinker as real processes: what it sees and hears is said the same by the other replica when one is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from helpers import lengths, media_files
from helpers.ask import WholeAnswer, ask, refused
from helpers.converse import ConverseStream, TurnFailed, file_chunks, on_port
from helpers.disturbed import ask_through, begun, disturbed, kill_when, report_of, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.metrics import fetched, value
from helpers.omni_family import FAMILIES
from helpers.servers import all_free, omni_stub
from omnistage.client import AsyncOmni, Video
from omnistage.client.request import Options
from omnistage.models.tiny.qwen2_5_omni import SIZES
from omnistage.router.conversation import REPLAY_BYTES
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = [
    lengths.long_form(
        "models/qwen2_5_omni/test_thinker.py::test_it_goes_on_after_any_token",
        "models/qwen2_5_omni/test_thinker.py::test_media_that_are_streamed_are_those_that_are_sent",
        "models/qwen2_5_omni/test_thinker.py::test_media_that_cannot_be_read_are_told_and_the_next_is_answered",
        "router/test_converse.py::test_a_thinker_that_is_lost_while_it_is_sent_a_film",
        "cli/test_attached.py::test_a_film_that_is_larger_than_a_request_is_streamed",
        "models/contract/test_contract.py::test_contract_of_a_slow_model",
        "router/test_chain.py::test_prompt_rows_of_megabytes_go_down_in_pieces",
    )
]

TOKENS = 60
LONG_ANSWER = 300
"""Tokens, so that there are many to come when a Thinker is struck after the first few."""

SAMPLING = stage_pb2.Sampling(temperature=1, top_p=0.9, repetition_penalty=1.05)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, omni_checkpoint: Path) -> Iterator[Fleet]:
    """Two Thinkers."""
    with fleet(
        tmp_path_factory.mktemp("house"),
        kinds=("thinker",),
        pipeline="qwen2_5_omni-text",
        family="qwen2_5_omni",
        stage_args=["--checkpoint", str(omni_checkpoint)],
    ) as running:
        yield running


def question(seed: int, *media: stage_pb2.Media, tokens: int = TOKENS, words: str = "What is this?") -> omni_pb2.GenerateRequest:
    parts = [*(stage_pb2.Part(media=medium) for medium in media), stage_pb2.Part(text=words)]
    thinker = stage_pb2.ThinkerParams(
        messages=[stage_pb2.Message(role="user", parts=parts)], sampling=SAMPLING, max_tokens=tokens, ignore_eos=True
    )
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker)


def long_film(seed: int) -> stage_pb2.Media:
    """Thousands of tokens, which take a while to read."""
    return stage_pb2.Media(data=media_files.film(seed, 60, rate_hz=1, sound_s=60), media_type="video/mp4", use_audio=True)


@pytest.mark.parametrize(
    "moment", [pytest.param(begun, id="while it reads"), pytest.param(text_chunks(5), id="while it writes", marks=lengths.LONG)]
)
async def test_a_thinker_is_killed(house: Fleet, moment: Callable[[WholeAnswer], bool], seed: int) -> None:
    asked = question(seed, long_film(seed), stage_pb2.Media(data=media_files.picture(seed), media_type="image/png"))

    async with disturbed(house, alike=False, after=question(seed, tokens=5)) as stub:
        answer = await ask_through(stub, asked, kill_when(moment, house, "thinker"))
        answer.check_whole()
        assert len(answer.failovers) == 1
        assert answer.text() == (await ask(stub, asked)).text()
    await all_free([house.address(name) for name in house.stages])


@dataclass(frozen=True)
class StreamedAnswer:
    """A long answer to a picture that is in the request and to a film that is streamed, where nothing happens; and what was asked."""

    asked: omni_pb2.GenerateRequest
    film: bytes
    tokens: list[int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streamed(house: Fleet) -> StreamedAnswer:
    seed = random.getrandbits(32)
    picture = stage_pb2.Part(media=stage_pb2.Media(data=media_files.picture(seed), media_type="image/png"))
    asked, film = question(seed, tokens=LONG_ANSWER), media_files.film(seed, sound_s=2)
    asked.thinker.messages[0].parts.extend([picture, on_port("media0", "video/mp4")])
    async with omni_stub(house.address("router")) as stub:
        answer = await ConverseStream(stub).turn(asked, {"media0": file_chunks("media0", film)})
    answer.check_whole()
    return StreamedAnswer(asked, film, answer.tokens())


def with_nothing(film: bytes, nothing: int) -> bytes:
    """The same film with so many bytes of nothing behind it, as the format allows."""
    return film + (nothing + 8).to_bytes(4, "big") + b"free" + bytes(nothing)


async def test_a_thinker_is_killed_while_it_writes_of_what_was_streamed(house: Fleet, streamed: StreamedAnswer, seed: int) -> None:
    async with disturbed(house, alike=False, after=question(seed, tokens=5)) as stub:
        sent = {"media0": file_chunks("media0", streamed.film, [10_000])}
        answer = await ConverseStream(stub).turn(streamed.asked, sent, None, kill_when(text_chunks(5), house, "thinker"))
        answer.check_whole()
        assert [failover.kind for failover in answer.failovers] == [stage_pb2.STAGE_KIND_THINKER]
        assert answer.tokens() == streamed.tokens
    await all_free([house.address(name) for name in house.stages])


async def test_a_thinker_is_killed_and_more_was_streamed_to_it_than_is_kept(house: Fleet, streamed: StreamedAnswer, seed: int) -> None:
    """The client is told what was lost, when to ask again, and what to do; it does so, and in the same call."""
    large = with_nothing(streamed.film, REPLAY_BYTES)

    async with disturbed(house, alike=False, after=question(seed, tokens=5)) as stub:
        conversation = ConverseStream(stub)
        with pytest.raises(TurnFailed) as told:
            await conversation.turn(
                streamed.asked, {"media0": file_chunks("media0", large)}, None, kill_when(text_chunks(5), house, "thinker")
            )
        failed = told.value.failed
        assert (failed.reason, failed.code, failed.metadata["stage"]) == ("STAGE_LOST", grpc.StatusCode.UNAVAILABLE.value[0], "thinker")
        assert failed.retry_delay.ToTimedelta().total_seconds() > 0 and "ask and stream it again" in failed.message
        again = await conversation.turn(streamed.asked, {"media0": file_chunks("media0", large)})
        again.check_whole()
        assert not again.failovers
        assert again.tokens() == streamed.tokens
    await all_free([house.address(name) for name in house.stages])


async def test_a_film_that_is_larger_than_a_request_is_seen_as_a_small_one_is(house: Fleet, tmp_path: Path, seed: int) -> None:
    """The same film with 70 MiB of nothing behind it: the client streams it."""
    data = media_files.film(seed, sound_s=2)
    large = tmp_path / "film.mp4"
    large.write_bytes(with_nothing(data, 70 << 20))
    options: Options = {"seed": seed, "max_tokens": 20, "ignore_eos": True, "temperature": 1}
    async with AsyncOmni(address=house.address("router")) as omni:
        small, streamed = [await omni.generate("What?", videos=[Video(film, use_audio=True)], **options) for film in (data, large)]
    assert small.text and streamed.text == small.text
    assert streamed.usage.stages[0].input_items["media0"] == large.stat().st_size
    await all_free([house.address(name) for name in house.stages])


async def test_media_that_cannot_be_read_are_told_and_the_next_one_is_served(house: Fleet, seed: int) -> None:
    good = media_files.picture(seed)
    async with omni_stub(house.address("router")) as stub:
        for data, kind in ((good[: len(good) // 2], "image/png"), (b"", "image/png"), (good, "audio/wav"), (good, "video/mp4")):
            refusal = await refused(stub, question(seed, stage_pb2.Media(data=data, media_type=kind)))
            assert refusal.reason == "BAD_REQUEST"
            assert refusal.metadata["field"].startswith("thinker.messages.parts.media"), refusal
        assert (await ask(stub, question(seed, stage_pb2.Media(data=good, media_type="image/png"), tokens=5))).text()
    await all_free([house.address(name) for name in house.stages])


async def test_the_rows_of_a_long_prompt_go_once_through_shared_memory(tmp_path: Path, omni_checkpoint: Path, seed: int) -> None:
    """2,000 tokens and more are 1.5 MiB of rows here; those of the answer go inline. A request for text alone moves none."""
    kinds, arguments = ("thinker", "talker"), ["--checkpoint", str(omni_checkpoint), "--dtype", "float32", "--inline-limit", "8192"]
    with fleet(tmp_path, replicas=1, kinds=kinds, pipeline="qwen2_5_omni-codes", family="qwen2_5_omni", stage_args=arguments) as chain:
        asked = question(seed, tokens=20, words="".join(random.Random(seed).choices("abcdefgh ", k=5000)))
        # The speech does not end, and has more frames than rows: who has all of its frames is sent no more.
        asked.talker.CopyFrom(stage_pb2.TalkerParams(max_frames=40, sampling=FAMILIES["qwen2_5_omni"].endless()))
        thinker = chain.server("thinker-0")

        async def sent() -> dict[str, float]:
            """Bytes of tensors that the Thinker gave to the Talker so far, by the way they went."""
            page = await asyncio.to_thread(fetched, thinker.metrics_address)
            return {way: value(page, "omnistage_connector_sent_bytes_total", transport=way) for way in ("inline", "shared_memory")}

        before = await sent()
        async with omni_stub(chain.address("router")) as stub:
            text = omni_pb2.GenerateRequest(outputs=["text"])
            text.MergeFrom(asked)
            assert (await ask(stub, text)).text() and await sent() == before
            answer = await ask(stub, asked)
        assert answer.usage is not None
        rows = answer.usage.stages[1].input_items["prompt"]
        assert rows > 2000
        width = SIZES["tiny"]["thinker"]["hidden_size"]
        moved = {way: size - before[way] for way, size in (await sent()).items()}
        # With the rows of the answer, and where those of the prompt stand.
        assert sum(moved.values()) == (rows + 19) * width * 4 + rows * 3 * 4
        assert moved["shared_memory"] > 0.9 * rows * width * 4, "but for the last few, which are below the limit"
        await all_free([chain.address(name) for name in chain.stages])
        report = await report_of(thinker.address)
        assert report.arena_bytes_used == 0 == report.leases
