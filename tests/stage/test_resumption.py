"""The records that a stage takes for the beginning of a session that was lost elsewhere, and those that it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.servers import toy_logic
from omnistage.link.replay import OutputAccount
from omnistage.stage.opening import MAX_POSITION, Resumption
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

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
    assert not new.again and new == Resumption()
    assert new.start({"hidden": 3}).first == {"hidden": 3}
    writer = new.writer("codes")
    assert (writer.seq, writer.first, writer.ended) == (0, 0, False)


def test_a_session_that_was_lost_before_its_first_output_is_one_that_goes_on():
    assert of().again and of() == Resumption(again=True)


def test_each_stage_takes_its_own_and_passes_on_the_rest():
    positions = [at("text", 3, 5), at("codes", 7, 4), at("audio", 9, 2880)]
    history = [text(0, 2), text(2, 3), codes(0, 4)]
    thinker = of(positions, history, THINKER)
    assert dict(thinker.positions) == {"text": positions[0]}
    (whole,) = thinker.history.values()
    assert (whole.count, list(whole.text.token_ids), whole.text.text) == (5, [0, 1, 2, 3, 4], "w " * 5)
    assert list(thinker.behind.positions) == positions[1:] and list(thinker.behind.history) == [codes(0, 4)]
    start = thinker.start({"hidden": 2})
    assert (dict(start.first), start.ended, start.history) == ({"hidden": 2, "text": 5}, frozenset(), thinker.history)

    talker = Resumption.of(stage_pb2.Open(resume=thinker.behind), TALKER)
    assert dict(talker.positions) == {"codes": positions[1]} and dict(talker.history) == {"codes": codes(0, 4)}
    assert list(talker.behind.positions) == [positions[2]] and not talker.behind.history
    writer = talker.writer("codes")
    assert (writer.seq, writer.first, writer.ended) == (7, 4, False)


def test_a_port_that_ended_is_known():
    ended = of([at("codes", 2, 3, ended=True)], [codes(0, 3, last=True)])
    assert ended.ended == {"codes"} and ended.start({}).ended == {"codes"} and ended.writer("codes").ended


@given(
    pieces=st.lists(st.tuples(st.sampled_from(PAYLOADS), st.integers(0, 4), st.sampled_from([False] * 4 + [True])), max_size=30),
)
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
    talker = Resumption.of(stage_pb2.Open(resume=thinker.behind), TALKER)
    for port, own in (("text", thinker), ("codes", talker)):
        seq, first, ended = place.get(port, (0, 0, False))
        writer = own.writer(port)
        assert (writer.seq, writer.first, writer.ended) == (seq, first, ended)
        assert own.start({}).first.get(port, 0) == first
        assert (port in own.history) == (port in place)
        if port in place:
            history = own.history[port]
            assert (history.count, history.first, history.last) == (first, 0, ended)
    behind = {p.port: (p.seq, p.first, p.ended) for p in talker.behind.positions}
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
