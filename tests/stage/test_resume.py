"""A session that was begun at another replica, seen by a plain caller: it goes on exactly there, and whoever held it before is shut out.
The records that a stage takes for its beginning, and those that it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.run import RunStream, code_chunks, params, row_chunks
from helpers.servers import toy_logic
from helpers.stage import EXHAUSTED, INVALID, ROWS, Stage, chunk, hop_to, stage_of
from omnistage.link.replay import OutputAccount
from omnistage.models.toy import formulas
from omnistage.stage.opening import MAX_POSITION, Resumption
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

FRAMES = formulas.frames(ROWS)
SOUND = formulas.samples(FRAMES)[:, 0] * 32768
PER_FRAME = formulas.SAMPLES_PER_FRAME


def resume_codes(frames: int, *, ended: bool = False) -> stage_pb2.Resume:
    """So many frames of codes are out, in three chunks."""
    (history,) = code_chunks(FRAMES[:frames], [frames])
    history.last = ended
    return stage_pb2.Resume(positions=[stage_pb2.Position(port="codes", seq=3, first=frames, ended=ended)], history=[history])


def resume_audio(samples: int, seq: int = 5, *, ended: bool = False) -> stage_pb2.Resume:
    return stage_pb2.Resume(positions=[stage_pb2.Position(port="audio", seq=seq, first=samples, ended=ended)])


# Going on ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 5, 15, 16])
async def test_a_talker_goes_on_with_the_next_frame(frames: int):
    async with stage_of("talker") as stage:
        caller = await stage.begin(resume=resume_codes(frames), revision="1")
        assert list((await caller.opened()).needs) == []
        for part in row_chunks("hidden", ROWS, [3, 5]):
            await caller.send(chunk=part)
        heard = await caller.finish()
        assert heard.ended is not None and heard.ended.code == 0
        codes = heard.of("codes")
        assert (codes[0].seq, codes[0].first, codes[-1].last) == (3, frames, True)
        assert [code for part in codes for code in part.codes.codes] == FRAMES[frames:].ravel().tolist()


@pytest.mark.parametrize("samples", [1, PER_FRAME, 7 * PER_FRAME + 11, 16 * PER_FRAME])
@pytest.mark.parametrize("begin", [0, 1])
async def test_a_code2wav_goes_on_with_the_next_sample(samples: int, begin: int):
    """It says from which frame on; the chunk that holds this frame may begin before it."""
    async with stage_of("code2wav") as stage:
        caller = await stage.begin(resume=resume_audio(samples))
        (needs,) = (await caller.opened()).needs
        assert needs.port == "codes" and needs.first == max(samples // PER_FRAME - 2, 0)
        first = max(needs.first - begin, 0)
        for part in code_chunks(FRAMES[first:], [len(FRAMES) - first]):
            part.first = first
            await caller.send(chunk=part)
        heard = await caller.finish()
        assert heard.ended is not None and heard.ended.code == 0
        assert (heard.of("audio")[0].seq, heard.of("audio")[0].first) == (5, samples)
        np.testing.assert_array_equal(heard.samples(), SOUND[samples:])
        assert heard.reports[0].input_items["codes"] == len(FRAMES) - needs.first


async def test_a_window_that_begins_too_late_is_refused():
    """A Keep may have moved it on, but then everything before was heard."""
    async with stage_of("code2wav") as stage:
        caller = await stage.opened(resume=resume_audio(5 * PER_FRAME))
        (part,) = code_chunks(FRAMES[6:], [len(FRAMES) - 6])
        part.first = 6
        await caller.send(chunk=part)
        await caller.expect("BAD_REQUEST", INVALID)


async def test_input_that_must_come_whole_begins_with_item_0():
    async with stage_of("talker") as stage:
        caller = await stage.opened(resume=resume_codes(4), credits={})
        await caller.send(chunk=chunk(first=1))
        await caller.expect("PROTOCOL", INVALID)


@pytest.mark.parametrize("kind", ["thinker", "talker", "code2wav"])
async def test_a_session_of_which_all_is_out_ends_at_once(kind: str):
    """Its caller lost the end only."""
    async with stage_of(kind) as stage:
        if kind == "talker":
            resume = resume_codes(16, ended=True)
        elif kind == "code2wav":
            resume = resume_audio(16 * PER_FRAME, ended=True)
        else:
            words = chunk_pb2.TextChunk(text="w ", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
            resume = stage_pb2.Resume(
                positions=[stage_pb2.Position(port=port, seq=1, first=1, ended=True) for port in ("text", "hidden")],
                history=[chunk_pb2.Chunk(port="text", count=1, last=True, text=words)],
            )
        caller = await stage.opened(resume=resume)
        heard = await caller.finish()
        assert heard.ended is not None and heard.ended.code == 0 and not heard.chunks and heard.reports


async def test_credit_counts_from_the_beginning_of_the_new_stream():
    async with stage_of("talker", {"max_chunk": 1}) as stage:
        caller = await stage.opened(resume=resume_codes(4), credits={"codes": 2})
        await caller.send(chunk=chunk(rows=8, last=True))
        await caller.until(lambda heard: len(heard.of("codes")) == 2)
        await caller.until_silent(0.3)
        assert [part.seq for part in caller.heard.of("codes")] == [3, 4]
        await caller.send(credit=stage_pb2.Credit(port="codes", total=13))
        heard = await caller.finish()
        assert heard.ended is not None and heard.ended.code == 0 and heard.of("codes")[-1].last


async def test_a_replica_of_another_revision_does_not_go_on():
    async with stage_of("talker") as stage:
        await stage.refuse("REVISION_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION, resume=resume_codes(4), revision="2")


HIDDEN = stage_pb2.Resume(positions=[stage_pb2.Position(port="hidden", seq=1, first=1)])


@pytest.mark.parametrize(("kind", "takes", "resume"), [("talker", "codes", resume_codes(4)), ("thinker", "hidden", HIDDEN)])
async def test_a_port_that_the_caller_never_had_has_no_position(kind: str, takes: str, resume: stage_pb2.Resume):
    """It goes to the next hop only, which says itself where it goes on."""
    async with stage_of(kind) as stage:
        ended = await stage.refuse("BAD_REQUEST", resume=resume, route=[stage_pb2.Hop(takes=[takes], addresses=["127.0.0.1:1"])])
        assert ended.metadata["field"] == "resume.positions"


@pytest.mark.parametrize(
    ("kind", "resume"),
    [("talker", resume_codes(16)), ("code2wav", resume_audio(17 * PER_FRAME)), ("code2wav", resume_audio(1 << 48))],
    ids=["talker at its end", "code2wav beyond its end", "code2wav far beyond"],
)
async def test_a_session_cannot_go_on_after_its_end(kind: str, resume: stage_pb2.Resume):
    """The input that comes says less than what is said to be out: somebody is wrong, and nobody waits for ever."""
    async with stage_of(kind) as stage:
        caller = await stage.opened(resume=resume)
        if kind == "talker":
            await caller.send(chunk=chunk(rows=7, last=True))
        else:
            (part,) = code_chunks(FRAMES, [16])
            await caller.send(chunk=part)
        await caller.expect("BAD_REQUEST", INVALID)


# Being superseded ----------------------------------------------------------------------------------------------------------------------


async def _say_all(caller: RunStream) -> None:
    await caller.send(chunk=chunk(rows=8, last=True))
    heard = await caller.finish()
    assert heard.ended is not None and heard.ended.code == 0


@pytest.mark.parametrize(
    "attempts", [([0], [1]), ([], [0]), ([3], [4]), ([0, 7], [1, 0]), ([1, 2], [1, 3]), ([0], [1], [2], [3], [4])], ids=str
)
async def test_a_session_that_is_opened_again_ends_the_older_one(attempts: Sequence[list[int]]):
    async with stage_of("talker") as stage:
        callers = [await stage.opened(session_id="same", attempts=attempts[0])]
        for number in attempts[1:]:
            callers.append(await stage.opened(session_id="same", attempts=number, resume=stage_pb2.Resume()))
            await callers[-2].expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await stage.refuse("SUPERSEDED", grpc.StatusCode.ABORTED, session_id="same", attempts=attempts[0], resume=stage_pb2.Resume())
        await _say_all(callers[-1])


async def test_what_the_older_end_still_sends_reaches_nobody():
    async with stage_of("talker") as stage:
        older = await stage.opened(session_id="same", attempts=[0])
        await older.send(chunk=chunk())
        await older.until(lambda heard: bool(heard.of("codes")))
        newer = await stage.opened(session_id="same", attempts=[1], resume=resume_codes(2))
        for seq in range(1, 20):
            await older.send(chunk=chunk(seq=seq, first=seq))
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await newer.send(chunk=chunk(rows=8, last=True))
        heard = await newer.finish()
        assert [code for part in heard.of("codes") for code in part.codes.codes] == FRAMES[2:].ravel().tolist()


async def test_equal_attempts_and_other_ids_do_no_harm():
    async with stage_of("talker") as stage:
        callers = [await stage.opened(session_id=name, attempts=[0]) for name in ("same", "same", "other")]
        again = await stage.opened(session_id="third", attempts=[5], resume=stage_pb2.Resume())
        await asyncio.gather(*[_say_all(caller) for caller in (*callers, again)])


async def test_a_full_stage_takes_sessions_that_go_on_from_elsewhere_up_to_twice_its_places():
    async with stage_of("talker", max_sessions=1) as stage:
        running = await stage.opened(session_id="one")
        again = await stage.opened(session_id="two", resume=stage_pb2.Resume())
        for resume in (None, stage_pb2.Resume()):
            await stage.refuse("OVERLOADED", EXHAUSTED, session_id="three", resume=resume)
        await asyncio.gather(_say_all(running), _say_all(again))


async def test_the_stage_behind_is_superseded_with_it():
    """The older session's link is closed, and the newer one opens the same stage behind again."""
    async with stage_of("code2wav") as behind, stage_of("talker") as stage:
        hop = hop_to(behind.address, params=params("code2wav"))

        async def opened(stage: Stage, **fields: object) -> RunStream:
            return await stage.opened(session_id="same", route=[hop], credits={"audio": 1 << 20}, checkpoints=["codes"], **fields)

        older = await opened(stage, attempts=[0])
        newer = await opened(stage, attempts=[1], resume=stage_pb2.Resume())
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await newer.send(chunk=chunk(rows=8, last=True))
        heard = await newer.finish()
        heard.check_whole(["codes", "audio"])
        np.testing.assert_array_equal(heard.samples(), SOUND)


# Records --------------------------------------------------------------------------------------------------------------------------------


TALKER: Mapping[str, stage_pb2.Port] = {port.name: port for port in toy_logic("talker").description.produces}
THINKER: Mapping[str, stage_pb2.Port] = {port.name: port for port in toy_logic("thinker").description.produces}
PAYLOADS = ("text", "codes", "audio")


def text(first: int, count: int, *, last: bool = False, seq: int = 0) -> chunk_pb2.Chunk:
    words = chunk_pb2.TextChunk(text="w " * count, token_ids=range(first, first + count))
    return chunk_pb2.Chunk(port="text", seq=seq, first=first, count=count, last=last, text=words)


def codes(first: int, count: int, *, last: bool = False, width: int = 4, seq: int = 0) -> chunk_pb2.Chunk:
    frames = chunk_pb2.CodeChunk(codes=range(first * width, (first + count) * width), codebook_count=width) if count else None
    return chunk_pb2.Chunk(port="codes", seq=seq, first=first, count=count, last=last, codes=frames)


def at(port: str, seq: int, first: int, *, ended: bool = False) -> stage_pb2.Position:
    return stage_pb2.Position(port=port, seq=seq, first=first, ended=ended)


def of(
    positions: Sequence[stage_pb2.Position] = (), history: Sequence[chunk_pb2.Chunk] = (), ports: Mapping[str, stage_pb2.Port] = TALKER
) -> Resumption:
    return Resumption.of(stage_pb2.Open(resume=stage_pb2.Resume(positions=positions, history=history)), ports)


def test_a_new_session_has_nothing():
    new = Resumption.of(stage_pb2.Open(), TALKER)
    assert not new.is_resumed and new == Resumption()
    assert new.start({"hidden": 3}).first == {"hidden": 3}
    writer = new.writer("codes")
    assert (writer.seq, writer.first, writer.is_ended) == (0, 0, False)


def test_a_session_that_was_lost_before_its_first_output_is_one_that_goes_on():
    assert of().is_resumed and of() == Resumption(is_resumed=True)


def test_each_stage_takes_its_own_and_passes_on_the_rest():
    positions = [at("text", 3, 5), at("codes", 7, 4), at("audio", 9, 2880)]
    history = [text(0, 2), text(2, 3), codes(0, 4)]
    thinker = of(positions, history, THINKER)
    assert dict(thinker.positions) == {"text": positions[0]}
    (whole,) = thinker.history.values()
    assert (whole.count, list(whole.text.token_ids), whole.text.text) == (5, [0, 1, 2, 3, 4], "w " * 5)
    assert list(thinker.later_resume.positions) == positions[1:] and list(thinker.later_resume.history) == [codes(0, 4)]
    start = thinker.start({"hidden": 2})
    assert (dict(start.first), start.ended_ports, start.history) == ({"hidden": 2, "text": 5}, frozenset(), thinker.history)

    talker = Resumption.of(stage_pb2.Open(resume=thinker.later_resume), TALKER)
    assert dict(talker.positions) == {"codes": positions[1]} and dict(talker.history) == {"codes": codes(0, 4)}
    assert list(talker.later_resume.positions) == [positions[2]] and not talker.later_resume.history
    writer = talker.writer("codes")
    assert (writer.seq, writer.first, writer.is_ended) == (7, 4, False)


def test_a_port_that_ended_is_known():
    ended = of([at("codes", 2, 3, ended=True)], [codes(0, 3, last=True)])
    assert ended.ended_ports == {"codes"} and ended.start({}).ended_ports == {"codes"} and ended.writer("codes").is_ended


@given(pieces=st.lists(st.tuples(st.sampled_from(PAYLOADS), st.integers(0, 4), st.sampled_from([False] * 4 + [True])), max_size=30))
def test_whatever_a_link_holds_is_taken(pieces: Sequence[tuple[str, int, bool]]) -> None:
    """From the Thinker's caller to the Thinker, and from there, when it fails alone, to the Talker."""
    account = OutputAccount(PAYLOADS, ("text", "codes"))
    place: dict[str, tuple[int, int, bool]] = {}
    for port, count, last in pieces:
        seq, first, ended = place.get(port, (0, 0, False))
        if ended:
            continue
        if port == "audio":
            chunk = chunk_pb2.Chunk(port=port, seq=seq, first=first, count=count, last=last, audio=chunk_pb2.AudioChunk(data=b"."))
        else:
            chunk = text(first, count, last=last, seq=seq) if port == "text" else codes(first, count, last=last, seq=seq)
        account.accept(chunk)
        place[port] = (seq + 1, first + count, last)
    thinker = Resumption.of(stage_pb2.Open(resume=account.resume()), THINKER)
    talker = Resumption.of(stage_pb2.Open(resume=thinker.later_resume), TALKER)
    for port, own in (("text", thinker), ("codes", talker)):
        seq, first, ended = place.get(port, (0, 0, False))
        writer = own.writer(port)
        assert (writer.seq, writer.first, writer.is_ended) == (seq, first, ended)
        assert own.start({}).first.get(port, 0) == first
        assert (port in own.history) == (port in place)
        if port in place:
            history = own.history[port]
            assert (history.count, history.first, history.last) == (first, 0, ended)
    behind = {p.port: (p.seq, p.first, p.ended) for p in talker.later_resume.positions}
    assert behind == {port: where for port, where in place.items() if port == "audio"}


BAD = [
    ([at("Codes", 1, 1)], [], "resume.positions"),
    ([at("", 0, 0)], [], "resume.positions"),
    ([at("a" * 33, 0, 0)], [], "resume.positions"),
    ([at("audio\n", 0, 0)], [], "resume.positions"),
    ([at("audio", 0, 0), at("audio", 1, 1)], [], "resume.positions"),
    ([at("audio", 0, 3)], [], "resume.positions"),
    ([at("audio", 0, 0, ended=True)], [], "resume.positions"),
    ([at("audio", (1 << 64) - 1, 3)], [], "resume.positions"),
    ([at("audio", 1, MAX_POSITION + 1)], [], "resume.positions"),
    ([at("codes", 1, 3)], [], "resume.history"),
    ([at("codes", 1, 0)], [], "resume.history"),
    ([], [codes(0, 3)], "resume.history"),
    ([at("codes", 1, 3)], [codes(0, 2)], "resume.history"),
    ([at("codes", 1, 3)], [codes(0, 4)], "resume.history"),
    ([at("codes", 1, 3)], [codes(1, 2)], "resume.history"),
    ([at("codes", 2, 3)], [codes(0, 2), codes(1, 1)], "resume.history"),
    ([at("codes", 2, 3)], [codes(0, 1), codes(2, 1)], "resume.history"),
    ([at("codes", 2, 3)], [codes(0, 2, last=True), codes(2, 1)], "resume.history"),
    ([at("codes", 2, 3, ended=True)], [codes(0, 3)], "resume.history"),
    ([at("codes", 2, 3)], [codes(0, 3, last=True)], "resume.history"),
    ([at("codes", 1, 3)], [chunk_pb2.Chunk(port="codes", count=3)], "resume.history"),
    ([at("codes", 1, 3)], [chunk_pb2.Chunk(port="codes", count=3, text=text(0, 3).text)], "resume.history"),
    ([at("codes", 1, 3)], [chunk_pb2.Chunk(port="codes", count=3, codes=codes(0, 2).codes)], "resume.history"),
    ([at("audio", 1, 3)], [chunk_pb2.Chunk(port="audio", count=3, audio=chunk_pb2.AudioChunk(data=b"123456"))], "resume.history"),
]


@pytest.mark.parametrize(("positions", "history", "field"), BAD, ids=range(len(BAD)))
def test_what_does_not_fit_is_refused(positions: Sequence[stage_pb2.Position], history: Sequence[chunk_pb2.Chunk], field: str):
    with pytest.raises(StageError, match="BAD_REQUEST") as raised:
        of(positions, history)
    assert raised.value.metadata == {"field": field}


def test_history_of_a_port_that_is_no_checkpoint_is_refused():
    with pytest.raises(StageError, match="BAD_REQUEST"):
        of([at("hidden", 1, 3)], [_named(codes(0, 3), "hidden")], THINKER)


def _named(chunk: chunk_pb2.Chunk, port: str) -> chunk_pb2.Chunk:
    chunk.port = port
    return chunk
