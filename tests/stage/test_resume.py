"""A session that was begun at another replica, seen by a plain caller: it goes on exactly there, and whoever held it before is shut out."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from helpers.run import RunStream, code_chunks, params, row_chunks
from helpers.stage import EXHAUSTED, INVALID, ROWS, Stage, chunk, stage_of
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2

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
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume_codes(frames), revision="1"))
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
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume_audio(samples)))
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
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume_audio(5 * PER_FRAME)))
        await caller.opened()
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
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume))
        await caller.opened()
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
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume_codes(4), revision="2"))
        await caller.expect("REVISION_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION)


@pytest.mark.parametrize(
    ("kind", "resume", "field"),
    [
        ("talker", resume_codes(4), "resume.positions"),
        ("thinker", stage_pb2.Resume(positions=[stage_pb2.Position(port="hidden", seq=1, first=1)]), "resume.positions"),
    ],
)
async def test_a_port_that_the_caller_never_had_has_no_position(kind: str, resume: stage_pb2.Resume, field: str):
    """It goes to the next hop only, which says itself where it goes on."""
    takes = {"talker": "codes", "thinker": "hidden"}[kind]
    async with stage_of(kind) as stage:
        caller = stage.caller()
        await caller.send(open=stage.open(resume=resume, route=[stage_pb2.Hop(takes=[takes], addresses=["127.0.0.1:1"])]))
        ended = await caller.expect("BAD_REQUEST", INVALID)
        assert ended.metadata["field"] == field


@pytest.mark.parametrize(
    ("kind", "resume"),
    [
        ("talker", resume_codes(16)),
        ("code2wav", resume_audio(17 * PER_FRAME)),
        ("code2wav", resume_audio(1 << 48)),
    ],
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


async def test_many_credits_are_refused():
    async with stage_of("talker") as stage:
        caller = stage.caller()
        await caller.send(open=stage.open(credits={f"port{n}": 1 for n in range(65)}))
        assert (await caller.expect("BAD_REQUEST", INVALID)).metadata["field"] == "open.credits"


# Being superseded ----------------------------------------------------------------------------------------------------------------------


async def _say_all(caller: RunStream) -> None:
    await caller.send(chunk=chunk(rows=8, last=True))
    heard = await caller.finish()
    assert heard.ended is not None and heard.ended.code == 0


@pytest.mark.parametrize(("before", "after"), [([0], [1]), ([], [0]), ([3], [4]), ([0, 7], [1, 0]), ([1, 2], [1, 3])])
async def test_a_session_that_is_opened_again_ends_the_older_one(before: list[int], after: list[int]):
    async with stage_of("talker") as stage:
        older = await stage.opened(session_id="same", attempts=before)
        newer = await stage.opened(session_id="same", attempts=after, resume=stage_pb2.Resume())
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        late = stage.caller()
        await late.send(open=stage.open(session_id="same", attempts=before, resume=stage_pb2.Resume()))
        await late.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        assert late.heard.opened is None
        await _say_all(newer)


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
            caller = stage.caller()
            await caller.send(open=stage.open(session_id="three", resume=resume))
            await caller.expect("OVERLOADED", EXHAUSTED)
        await asyncio.gather(_say_all(running), _say_all(again))


async def test_again_and_again():
    async with stage_of("talker") as stage:
        callers = [await stage.opened(session_id="same", attempts=[n], resume=stage_pb2.Resume()) for n in range(5)]
        for caller in callers[:-1]:
            await caller.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await _say_all(callers[-1])


async def test_the_stage_behind_is_superseded_with_it():
    """The older session's link is closed, and the newer one opens the same stage behind again."""
    async with stage_of("code2wav") as behind, stage_of("talker") as stage:
        hop = stage_pb2.Hop(
            kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=[behind.address], takes=["codes"], params=params("code2wav")
        )

        async def opened(stage: Stage, **fields: object) -> RunStream:
            return await stage.opened(session_id="same", route=[hop], credits={"audio": 1 << 20}, checkpoints=["codes"], **fields)

        older = await opened(stage, attempts=[0])
        newer = await opened(stage, attempts=[1], resume=stage_pb2.Resume())
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await newer.send(chunk=chunk(rows=8, last=True))
        heard = await newer.finish()
        heard.check_whole(["codes", "audio"])
        np.testing.assert_array_equal(heard.samples(), SOUND)
