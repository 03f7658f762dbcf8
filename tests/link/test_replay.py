"""A link can send its input again: after any order of adds, sends, keeps, cuts and restarts, a replica gets every item that it needs, once
and in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omnistage.connector.tensors import PART_BYTES
from omnistage.connector.transport import Sender
from omnistage.link.replay import InputLog, OutputAccount, ReplayExpired, merge_chunks
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import StageError
from omnistage.wire.limits import MAX_PORTS

EVERYTHING = 1 << 40
NOWHERE = Sender(None)


def piece(first: int, count: int, *, last: bool = False) -> Output:
    """A piece in which item n of the port is token n."""
    return Output("text", count, chunk_pb2.TextChunk(token_ids=range(first, first + count)) if count else None, last)


class Log(RuleBasedStateMachine):
    """An InputLog beside the plain facts: how many items there are, and which of them this stream has had."""

    @initialize(first=st.sampled_from([0, 0, 5, 1 << 31]))
    def begin(self, first: int) -> None:
        self.log = InputLog("text", first)
        self.first = self.end = self.kept = self.cut_to = self.start = first
        self.ended = False
        self.had: list[chunk_pb2.Chunk] = []

    @precondition(lambda self: not self.ended)
    @rule(count=st.integers(0, 4), last=st.sampled_from([False] * 9 + [True]))
    def add(self, count: int, last: bool) -> None:
        self.log.add(piece(self.end, count, last=last), NOWHERE)
        self.end += count
        self.ended = last

    @precondition(lambda self: self.ended)
    @rule()
    def add_after_the_last(self) -> None:
        with pytest.raises(StageError, match="PROTOCOL"):
            self.log.add(piece(self.end, 1), NOWHERE)

    @rule(more=st.integers(0, 5))
    def send(self, more: int) -> None:
        """Send items, never beyond the credit."""
        credit = len(self.had) + more
        while (chunk := self.log.next_chunk(NOWHERE, credit)) is not None:
            self.had.append(chunk)
        assert len(self.had) <= credit

    @rule(needed=st.integers(0, 30))
    def keep(self, needed: int) -> None:
        self.log.keep(self.first + needed)
        self.kept = max(self.kept, min(self.first + needed, self.end))

    @precondition(lambda self: self.log.can_forget_oldest)
    @rule()
    def cut(self) -> None:
        before = self.log.bytes
        sent_to = self.had[-1].first + self.had[-1].count if self.had else self.start
        self.log.forget_oldest()
        assert self.log.bytes <= before
        self.cut_to = self.log.first
        assert self.cut_to <= max(sent_to, self.start), "what was not sent was cut"

    @rule(needed=st.integers(0, 30))
    def restart(self, needed: int) -> None:
        """Restart with a replica that needs items from `needed` on; a Keep may have said that it needs fewer."""
        start = max(self.first + needed, self.kept)
        try:
            self.log.restart(self.first + needed)
        except ReplayExpired as expired:
            assert start < self.cut_to and expired.metadata == {"port": "text"}
            self.begin(self.first)  # A caller that gets this error gives the link up.
            return
        assert start >= self.cut_to
        self.start, self.had = start, []

    @invariant()
    def what_was_sent_is_right(self) -> None:
        for number, chunk in enumerate(self.had):
            assert (chunk.port, chunk.seq) == ("text", number)
            assert list(chunk.text.token_ids) == list(range(chunk.first, chunk.first + chunk.count))
        for one, other in pairwise(self.had):
            assert other.first == one.first + one.count and not one.last
        if self.had:
            assert self.had[0].first <= self.start or self.had[0].first == self.first

    @invariant()
    def with_credit_all_that_is_needed_would_be_sent(self) -> None:
        if self.log.unsent == 0 and self.start <= self.end:
            reached = self.had[-1].first + self.had[-1].count if self.had else self.start
            assert reached == self.end or (reached < self.end <= self.start and not self.ended)
            assert any(chunk.last for chunk in self.had) == self.ended

    def teardown(self) -> None:
        while self.had and (chunk := self.log.next_chunk(NOWHERE, EVERYTHING)) is not None:
            self.had.append(chunk)
        self.log.close()
        assert self.log.unsent == 0


Log.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLog = Log.TestCase


def everything(log: InputLog, credit: int = EVERYTHING) -> list[chunk_pb2.Chunk]:
    chunks = []
    while (chunk := log.next_chunk(NOWHERE, credit)) is not None:
        chunks.append(chunk)
    return chunks


def filled(count: int) -> InputLog:
    """A log of this many items, one to a piece, all of them sent, the last one with `last`."""
    log = InputLog("text")
    for n in range(count):
        log.add(piece(n, 1, last=n == count - 1), NOWHERE)
    everything(log)
    return log


def test_a_replica_that_needs_nothing_but_the_end_gets_the_end_however_much_was_cut():
    """The replica has heard everything. If the log forgot `last` together with the item that carried it, the replica would wait for
    ever."""
    log = filled(5)
    while log.can_forget_oldest:
        log.forget_oldest()
    assert log.bytes == 0
    log.restart(5)
    assert [(chunk.first, chunk.count, chunk.last) for chunk in everything(log)] == [(5, 0, True)]
    with pytest.raises(ReplayExpired):
        log.restart(4)


def test_a_log_that_is_kept_short_still_ends():
    log = filled(5)
    log.keep(5)
    log.restart(0)
    assert [(chunk.first, chunk.last) for chunk in everything(log)] == [(4, True)]


def test_items_before_the_needed_one_come_only_as_part_of_its_piece():
    log = InputLog("text")
    for first in (0, 3, 6):
        log.add(piece(first, 3), NOWHERE)
    everything(log)
    log.restart(4)
    assert [(chunk.seq, chunk.first) for chunk in everything(log)] == [(0, 3), (1, 6)]


def test_a_tensor_in_parts_is_sent_as_credit_comes_and_from_its_beginning_to_the_next_replica():
    rows = np.arange(3 * PART_BYTES // 4, dtype=np.float32).reshape(3, -1)
    log = InputLog("hidden")
    log.add(Output("hidden", 3, rows, last=True), NOWHERE)
    assert ([chunk.count for chunk in everything(log, credit=2)], log.unsent) == ([0, 0], 0)
    assert [(chunk.seq, chunk.count, chunk.last) for chunk in everything(log, credit=3)] == [(2, 3, True)]
    log.restart(0)
    assert [chunk.tensor.inline.offset for chunk in everything(log, credit=1)] == [0]
    log.restart(2)
    parts = everything(log)
    assert [(chunk.seq, chunk.count) for chunk in parts] == [(0, 0), (1, 0), (2, 3)]
    np.testing.assert_array_equal(np.frombuffer(b"".join(part.tensor.inline.data for part in parts), "<f4").reshape(3, -1), rows)


PORTS = ("text", "codes", "audio")


def content(port: str, first: int, count: int) -> dict[str, Any]:
    """The content by which item n of each port is known."""
    items = range(first, first + count)
    if port == "text":
        return {"text": chunk_pb2.TextChunk(text="".join(f"w{n} " for n in items), token_ids=items, logprobs=[-n / 4 for n in items])}
    if port == "codes":
        return {"codes": chunk_pb2.CodeChunk(codes=[code for n in items for code in (n, n + 1)], codebook_count=2)} if count else {}
    return {"audio": chunk_pb2.AudioChunk(data=bytes(n % 256 for n in items))} if count else {}


class ChunkSource:
    """Makes the chunks of a port, in pieces of any size."""

    def __init__(self, port: str) -> None:
        self.port, self.seq, self.first, self.ended = port, 0, 0, False

    def next(self, count: int, *, last: bool = False) -> chunk_pb2.Chunk:
        held = content(self.port, self.first, count)
        chunk = chunk_pb2.Chunk(port=self.port, seq=self.seq, first=self.first, count=count, last=last, **held)
        if last and self.port == "text":
            chunk.text.finish_reason = chunk_pb2.FINISH_REASON_STOP
        self.seq, self.first, self.ended = self.seq + 1, self.first + count, last
        return chunk


steps = st.lists(st.tuples(st.sampled_from(PORTS), st.integers(0, 5), st.sampled_from([False] * 5 + [True])), max_size=40)


@given(steps=steps, moves=st.lists(st.integers(0, 40), max_size=4), granted=st.integers(0, 3))
def test_an_account_is_what_came(steps: list[tuple[str, int, bool]], moves: list[int], granted: int) -> None:
    """Any chunks of any ports come, over any number of streams. At some moments the account becomes the beginning of another link, as when
    its caller is replaced too."""
    account = OutputAccount(PORTS, ("text", "codes"))
    sources = {port: ChunkSource(port) for port in PORTS}
    on_link, on_stream = dict.fromkeys(PORTS, 0), dict.fromkeys(PORTS, 0)
    for number, (port, count, last) in enumerate(steps):
        if number in moves and granted:
            account.new_stream()
            on_stream = dict.fromkeys(PORTS, 0)
        elif number in moves:
            account = OutputAccount(PORTS, ("text", "codes"), account.resume())
            on_link, on_stream = dict.fromkeys(PORTS, 0), dict.fromkeys(PORTS, 0)
        source = sources[port]
        if source.ended:
            with pytest.raises(StageError, match="PROTOCOL"):
                account.accept(chunk_pb2.Chunk(port=port, seq=source.seq, first=source.first))
            continue
        account.accept(source.next(count, last=last))
        on_link[port] += 1
        on_stream[port] += 1
        for wrong in (source.seq - 1, source.seq + 1):
            if not last:
                with pytest.raises(StageError, match="PROTOCOL"):
                    account.accept(chunk_pb2.Chunk(port=port, seq=wrong, first=source.first))
    begun = {port: source for port, source in sources.items() if source.seq}
    assert (account.complete, account.empty) == (all(source.ended for source in sources.values()), not begun)
    assert {port: account.earlier(port) for port in PORTS} == {port: on_link[port] - on_stream[port] for port in PORTS}
    resume = account.resume()
    places = {port: (source.seq, source.first, source.ended) for port, source in begun.items()}
    assert {p.port: (p.seq, p.first, p.ended) for p in resume.positions} == places
    assert {chunk.port: chunk for chunk in resume.history} == {port: _whole(begun[port]) for port in ("text", "codes") if port in begun}


def _whole(source: ChunkSource) -> chunk_pb2.Chunk:
    chunk = ChunkSource(source.port).next(source.first, last=source.ended)
    chunk.seq = 0
    return chunk


@given(port=st.sampled_from(["text", "codes"]), cuts=st.lists(st.integers(0, 5), min_size=1, max_size=20), data=st.data())
def test_merging_is_the_same_in_one_go_or_several(port: str, cuts: Sequence[int], data: st.DataObject) -> None:
    source = ChunkSource(port)
    chunks = [source.next(count, last=number == len(cuts) - 1) for number, count in enumerate(cuts)]
    expected = _whole(source)
    together = [*chunks]
    assert merge_chunks(together) == expected and together == [expected]
    half = data.draw(st.integers(0, len(chunks)))
    begun = chunks[:half]
    merge_chunks(begun)
    begun.extend(chunks[half:])
    assert merge_chunks(begun) == expected and merge_chunks([]) is None


def test_a_port_that_the_caller_waits_for_is_not_complete_before_it_began():
    """Credit that was granted after the Open counts as well. Otherwise the sound of a stage that is lost before its first sample would be
    forgotten."""
    account = OutputAccount(["codes"], ["codes"])
    account.accept(chunk_pb2.Chunk(port="codes", last=True))
    assert account.complete
    account.expect("audio")
    assert not account.complete
    account.accept(chunk_pb2.Chunk(port="audio", last=True))
    assert account.complete


def test_the_number_of_ports_is_bounded():
    account = OutputAccount([], [])
    for n in range(MAX_PORTS):
        account.accept(chunk_pb2.Chunk(port=f"p{n}"))
    with pytest.raises(StageError, match="PROTOCOL"):
        account.accept(chunk_pb2.Chunk(port="one_more"))


def test_what_was_held_at_the_beginning_ends_too():
    held = stage_pb2.Resume(positions=[stage_pb2.Position(port="codes", seq=3, first=4, ended=True)])
    account = OutputAccount(["codes", "audio"], [], held)
    assert account.has_ended("codes") and not account.has_ended("audio") and not account.complete and not account.empty
    account.accept(chunk_pb2.Chunk(port="audio", last=True))
    assert account.complete


def test_what_else_could_have_been_said_is_no_part_of_a_history() -> None:
    account = OutputAccount(["text"], ["text"])
    top = [chunk_pb2.TopLogprobs(token_ids=[1, 2], logprobs=[-1, -2], pieces=[b"a", b"b"])]
    for seq in range(3):
        text = chunk_pb2.TextChunk(text="a", token_ids=[1], logprobs=[-1], top_logprobs=top, pieces=[b"a"])
        chunk = chunk_pb2.Chunk(port="text", seq=seq, first=seq, count=1, text=text)
        account.accept(chunk)
        assert len(chunk.text.top_logprobs) == len(chunk.text.pieces) == 1, "what is passed on has them"
    (history,) = account.resume().history
    assert (history.count, list(history.text.token_ids), list(history.text.logprobs)) == (3, [1, 1, 1], [-1, -1, -1])
    assert not history.text.top_logprobs and not history.text.pieces
