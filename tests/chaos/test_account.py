"""That the account of a chaos run sees what is wrong: answers, grown memory, logs; and that a seed repeats a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from chaos import checks
from chaos.checks import ALLOWED_BYTES, MemoryOfHouse, MemorySample
from chaos.house import ENDS, Action, is_spared, plan
from chaos.questions import LIVE, Collected, EventsOfAnswer, LookingQuestion, Question, SpeechQuestion, WrongAnswer
from omnistage.client import AudioChunk, TextDelta
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2

QUESTION = SpeechQuestion("hello", 5, 8)
NAMES = ["thinker-0", "thinker-1", "router"]


def answer() -> list[omni_pb2.GenerateResponse]:
    """The right one, in chunks of two tokens."""
    events = [omni_pb2.GenerateResponse(started=omni_pb2.Started())]
    per_chunk = QUESTION.totals()["audio"] // 4
    for seq in range(4):
        tokens = QUESTION.tokens[2 * seq : 2 * seq + 2]
        text = chunk_pb2.TextChunk(text="".join(map(formulas.word, tokens)), token_ids=tokens)
        sound = QUESTION.samples[per_chunk * seq : per_chunk * (seq + 1)].tobytes()
        audio = chunk_pb2.AudioChunk(data=sound, sample_rate_hz=24000, channel_count=1)
        chunks = [
            chunk_pb2.Chunk(port="text", seq=seq, first=2 * seq, count=2, last=seq == 3, text=text),
            chunk_pb2.Chunk(port="audio", seq=seq, first=per_chunk * seq, count=per_chunk, last=seq == 3, audio=audio),
        ]
        events += [omni_pb2.GenerateResponse(chunk=chunk) for chunk in chunks]
    return [*events, omni_pb2.GenerateResponse(usage=omni_pb2.Usage())]


def take(events: list[omni_pb2.GenerateResponse], question: Question = QUESTION) -> None:
    heard = EventsOfAnswer(question)
    for event in events:
        heard.take(event)
    heard.check_whole()


def test_the_right_answer_is_right() -> None:
    take(answer())


def looked(kinds: tuple[str, ...], *, streamed: bool) -> list[omni_pb2.GenerateResponse]:
    """The answer of a toy to these media, as the only chunk; a question with the same media must accept it as right."""
    question = LookingQuestion(5, 8, kinds, streamed, 1000)
    text = chunk_pb2.TextChunk(text="".join(map(formulas.word, question.tokens)), token_ids=question.tokens)
    chunk = chunk_pb2.Chunk(port="text", count=8, last=True, text=text)
    events = [omni_pb2.GenerateResponse(started=omni_pb2.Started()), omni_pb2.GenerateResponse(chunk=chunk)]
    return [*events, omni_pb2.GenerateResponse(usage=omni_pb2.Usage())]


def test_an_answer_to_other_media_is_seen() -> None:
    shown = ("image", "video", LIVE, "audio")
    for streamed in (True, False):
        question = LookingQuestion(5, 8, shown, streamed, 1000)
        take(looked(shown, streamed=not streamed), question)
        assert len(question.pieces()) == (4 if streamed else 1)
        assert sum(part.WhichOneof("content") == "media" for part in question.request().thinker.messages[0].parts) == 3 * (not streamed)
        for other in (shown[1:], (shown[1], shown[0], *shown[2:])):
            events = looked(other, streamed=streamed)
            with pytest.raises(WrongAnswer):
                take(events, question)


Events = list[omni_pb2.GenerateResponse]
FAULTS: dict[str, Callable[[Events], object]] = {
    "an event is missing": lambda events: events.pop(4),
    "an event comes twice": lambda events: events.insert(4, events[4]),
    "items come twice": lambda events: setattr(events[3].chunk, "first", 0),
    "a sample differs": lambda events: setattr(events[2].chunk.audio, "data", b"\1" + events[2].chunk.audio.data[1:]),
    "a word differs": lambda events: setattr(events[1].chunk.text, "text", events[1].chunk.text.text + " "),
    "it ends early": lambda events: [events.pop(-2), events.pop(-2)],
    "a port that nobody wants": lambda events: setattr(events[1].chunk, "port", "codes"),
    "no end": lambda events: events.pop(),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_a_wrong_answer_is_seen(spoil: Callable[[Events], object]) -> None:
    events = answer()
    spoil(events)
    with pytest.raises(WrongAnswer):
        take(events)


def test_a_gap_in_what_the_client_library_says_is_seen() -> None:
    collected = Collected(QUESTION)
    collected.take(TextDelta("".join(map(formulas.word, QUESTION.tokens[:2])), 0, tuple(QUESTION.tokens[:2]), 0.0))
    with pytest.raises(WrongAnswer):
        collected.take(TextDelta("", 3, (), 0.0))
    with pytest.raises(WrongAnswer):
        collected.take(AudioChunk((QUESTION.samples[1:5] / 32768).astype(np.float32), 0, 24000, 0.0))
    with pytest.raises(WrongAnswer):
        collected.check_whole()


def test_a_seed_repeats_its_schedule_and_another_one_does_not(seed: int) -> None:
    assert plan(seed, 600, NAMES, can_fill=True) == plan(seed, 600, NAMES, can_fill=True)
    assert plan(seed, 600, NAMES, can_fill=True) != plan(seed + 1, 600, NAMES, can_fill=True)


def test_a_schedule_has_every_action_and_spares_some_in_its_second_part(seed: int) -> None:
    disturbances = plan(seed, 6000, NAMES, can_fill=True)
    assert {disturbance.action for disturbance in disturbances} == set(Action)
    ended = [disturbance for disturbance in disturbances if disturbance.action in ENDS]
    assert {disturbance.victim for disturbance in ended if disturbance.at_s < 3000} == set(NAMES)
    assert not any(is_spared(disturbance.victim) for disturbance in ended if disturbance.at_s > 3000)
    assert not any(disturbance.action is Action.FILL for disturbance in plan(seed, 6000, NAMES, can_fill=False))


def samples(*bytes_by_age: int) -> Iterator[MemorySample]:
    for age, held in enumerate(bytes_by_age):
        yield MemorySample(float(age), held, 10, 10)


def test_growth_after_the_warm_up_is_seen_and_growth_in_it_is_not() -> None:
    memory = MemoryOfHouse(warm_s=2.0)
    memory.samples["flat", 1] = list(samples(0, 1 << 30, 1 << 30, 1 << 30, 1 << 30))
    memory.samples["grown", 2] = list(samples(0, 1, 1, 1, ALLOWED_BYTES + 2))
    memory.samples["young", 3] = list(samples(0, 1 << 30))
    assert {name: flat for name, _, _, flat in memory.grown()} == {"flat (1)": True, "grown (2)": False}


def test_bugs_in_a_log_are_told_once_and_losses_are_none(tmp_path: Path) -> None:
    bug = '{"event": "session.bug", "level": "error", "exception": "Traceback\\n  File x\\nValueError: no"}\n'
    (tmp_path / "a.log").write_text('{"event": "link.lost", "level": "warning"}\n' + 2 * bug)
    (tmp_path / "b.log").write_text("Task exception was never retrieved\n")
    found = checks.logged(tmp_path)
    assert found == [
        "session.bug: ValueError: no (2 times, first in a.log)",
        "Task exception was never retrieved (1 times, first in b.log)",
    ]
