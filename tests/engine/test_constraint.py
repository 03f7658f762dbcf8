"""Answers under a constraint: nothing else is drawn, beside free answers and after every break, and an end comes. Text comes out as soon as
it is final, never sooner, and never beyond a stop string."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from helpers.engines import NAN_TOKEN, TAPPED, TINY, drawn, items, make_engine, read, tiny_decoder, tiny_weights
from helpers.engines import ask as ask_any
from omnistage.engine.decoder import EMBEDDING, PackedDecoder
from omnistage.engine.detokenizer import BytePieces, Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.request import DeadEnd, SequenceEvent, SequenceFailed, SequenceRequest
from omnistage.engine.types import FinishReason, Sampling

END = 3


@dataclass(frozen=True)
class Sentences:
    """Implements `Constraint`: an answer is one of these lists of tokens, after the tokens of `history`."""

    sentences: tuple[tuple[int, ...], ...]
    history: tuple[int, ...] = ()
    vocabulary: int = TINY.vocab_size

    def begin(self) -> ConstrainedAnswer:
        return ConstrainedAnswer(self.sentences, list(self.history))


@dataclass
class ConstrainedAnswer:
    """Implements `Walk`."""

    sentences: tuple[tuple[int, ...], ...]
    ids: list[int]

    def next(self) -> set[int]:
        """Tokens that may come next."""
        so_far = tuple(self.ids)
        ways = [sentence for sentence in self.sentences if sentence[: len(so_far)] == so_far]
        return {END if sentence == so_far else sentence[len(so_far)] for sentence in ways}

    @property
    def must_end(self) -> bool:
        return self.next() == {END}

    complete = must_end

    def allowed(self) -> torch.Tensor:
        bits = np.zeros(-(-TINY.vocab_size // 32) * 32, bool)
        bits[list(self.next())] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def note(self, token_id: int) -> None:
        self.ids.append(token_id)


def engine(pages: int = 200, *, nan: bool = False, **limits: int) -> Engine:
    return make_engine(tiny_decoder(nan=nan), pages, **limits)


def ask(prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> SequenceRequest:
    return ask_any(prompt, **{"max_items": 60, "end_ids": frozenset({END}), "logprobs": True, **changes})


def ids(events: list[SequenceEvent]) -> tuple[int, ...]:
    return tuple(item[0] for item in items(events))


def any_sentences(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Many sentences begin alike, and some are the beginning of others."""
    stem = [rng.randrange(4, TINY.vocab_size - 1) for _ in range(24)]
    cuts = [rng.randrange(1, 24) for _ in range(rng.randrange(1, 6))]
    return tuple({tuple(stem[:cut] + [rng.randrange(4, TINY.vocab_size - 1) for _ in range(rng.choice([0, 0, 1, 9]))]) for cut in cuts})


def any_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.7, 2.0]),
        top_k=rng.choice([0, 1, 5, 200]),
        top_p=rng.choice([1.0, 0.5]),
        min_p=rng.choice([0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.5]),
        presence_penalty=rng.choice([0.0, -1.0]),
        frequency_penalty=rng.choice([0.0, 1.0]),
        logit_bias={rng.randrange(500): 100.0, END: rng.choice([-100.0, 100.0])},
    )


def kept(rng: random.Random) -> SequenceRequest:
    return ask(
        tuple(rng.randrange(4, 400) for _ in range(rng.randrange(1, 60))),
        seed=rng.getrandbits(64),
        sampling=any_sampling(rng),
        min_items=rng.choice([0, 0, 5, 30]),
        ignore_end=rng.random() < 0.3,
        constraint=Sentences(any_sentences(rng)),
    )


def free(rng: random.Random) -> SequenceRequest:
    return replace(kept(rng), constraint=None, max_items=25)


def continued(request: SequenceRequest, events: list[SequenceEvent], cut: int) -> SequenceRequest:
    said = ids(events)[:cut]
    assert isinstance(request.constraint, Sentences)
    return replace(request, history=tuple((each,) for each in said), constraint=replace(request.constraint, history=said))


async def test_only_what_is_allowed_is_said_and_free_answers_beside_it_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    requests = [*(kept(rng) for _ in range(8)), *(free(rng) for _ in range(6))]
    alone = engine(max_sequences=1)
    expected = [await read(alone.submit(request)) for request in requests]
    together = engine(max_sequences=6)
    order = rng.sample(range(14), 14)
    answers = await asyncio.gather(*(read(together.submit(requests[place])) for place in order))
    assert [drawn(answer) for answer in answers] == [drawn(expected[place]) for place in order]
    for request, events in zip(requests[:8], expected, strict=False):
        assert isinstance(request.constraint, Sentences)
        assert ids(events) in request.constraint.sentences
        assert events[-1].finish_reason is FinishReason.STOP
        longer = [sentence for sentence in request.constraint.sentences if sentence[: len(ids(events))] == ids(events)]
        if len(longer) > 1:  # The answer chose to end, and may have done so only at a place where it might.
            assert not request.ignore_end and len(ids(events)) >= request.min_items


async def test_it_goes_on_after_every_token_and_without_its_pages(seed: int) -> None:
    rng = random.Random(seed)
    roomy, small = engine(), engine(pages=6, max_sequences=12)
    requests = [kept(rng) for _ in range(8)]
    expected = await asyncio.gather(*(read(roomy.submit(request)) for request in requests))
    crowded = [*requests, *(replace(free(rng), max_items=60, ignore_end=True) for _ in range(4))]  # Four that grow need a page more each.
    again = await asyncio.gather(*(read(small.submit(request)) for request in crowded))
    assert small.stats().preemptions > 0
    assert [drawn(events) for events in again[:8]] == [drawn(events) for events in expected]
    request, events = max(zip(requests, expected, strict=True), key=lambda pair: len(pair[1]))
    for cut in range(len(ids(events)) + 1):
        rest = await read(roomy.submit(continued(request, events, cut)))
        if cut < len(ids(events)):
            assert drawn(rest) == drawn(events)[cut:], f"cut after {cut} tokens"
        else:
            assert (ids(rest), rest[-1].finish_reason) == ((), FinishReason.STOP)


@pytest.mark.parametrize("wants_taps", [False, True])
async def test_a_whole_answer_has_stopped_also_with_its_last_token_and_all_its_rows(wants_taps: bool) -> None:
    """The rows of the last token come if somebody wants them; otherwise no step is taken for them."""
    decoder = PackedDecoder(TINY, tiny_weights(torch.float32), TAPPED)
    running = make_engine(decoder, 50, kept_pages=0)
    said = (9, 8, 7)
    asked = ask(constraint=Sentences((said,)), taps_from=0 if wants_taps else None, ignore_end=True, min_items=5)
    events = await read(running.submit(asked))
    assert (ids(events), events[-1].finish_reason) == (said, FinishReason.STOP)
    assert [event.complete for event in events if event.item] == [False, False, True]
    assert sum(len(event.taps.rows) for event in events if event.taps) == (6 if wants_taps else 0)
    assert running.stats().rows == (6 if wants_taps else 5)
    shortest = await read(running.submit(replace(asked, max_items=3)))
    assert (ids(shortest), shortest[-1].finish_reason) == (said, FinishReason.STOP)
    cut = await read(running.submit(replace(asked, max_items=2)))
    assert (ids(cut), cut[-1].finish_reason) == (said[:2], FinishReason.LENGTH)


async def test_a_constraint_that_leads_nowhere_ends_its_answer_and_no_other(seed: int) -> None:
    running = engine(nan=True)
    streams = [
        running.submit(ask(constraint=Sentences(()))),
        running.submit(ask((NAN_TOKEN, 5), constraint=Sentences(((9, 8),)))),
        running.submit(ask(constraint=Sentences(((9, 8),)))),
        running.submit(ask(max_items=30, ignore_end=True)),
    ]
    nowhere, broken, whole, other = await asyncio.gather(*map(read, streams), return_exceptions=True)
    assert isinstance(nowhere, DeadEnd) and "after 0 tokens" in str(nowhere)
    assert isinstance(broken, SequenceFailed) and not isinstance(broken, DeadEnd), "numbers that are none are told as such"
    assert isinstance(whole, list) and ids(whole) == (9, 8)
    assert isinstance(other, list) and len(other) == 30


async def test_a_constraint_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="100"):
        engine().check(ask(constraint=Sentences((), vocabulary=100)))


async def test_a_constraint_is_for_the_tokens_that_can_be_drawn() -> None:
    """The constraint says nothing about the other items that a row can have."""
    weight = tiny_weights(torch.float32)

    def longer(name: str) -> torch.Tensor | None:
        found = weight(name)
        return torch.cat((found, torch.zeros(40, TINY.hidden_size))) if name == EMBEDDING and found is not None else found

    decoder = PackedDecoder(replace(TINY, vocab_size=TINY.vocab_size + 40), longer)
    running = make_engine(decoder, 20)
    assert ids(await read(running.submit(ask(constraint=Sentences(((9, 8, 7),)))))) == (9, 8, 7)
    with pytest.raises(ValueError, match="540"):
        running.check(ask(constraint=Sentences((), vocabulary=TINY.vocab_size + 40)))


SMILE = "\U0001f600".encode()
PIECES = [*(bytes([byte]) for byte in range(256)), b"hello", b" world", "é".encode(), SMILE[:2], SMILE[2:], b""]


def text_of(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(PIECES.__getitem__, stop)
    parts = []
    for token_id in ids:
        parts.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    parts.append(detokenizer.finish())
    return parts, detokenizer.stopped


def encode(text: str, rng: random.Random) -> list[int]:
    """The text as single bytes, now and then as a larger piece."""
    data, ids = text.encode(), []
    while data:
        fitting = [index for index, piece in enumerate(PIECES) if piece and data.startswith(piece)]
        ids.append(rng.choice(fitting))
        data = data[len(PIECES[ids[-1]]) :]
    return ids


def test_deltas_join_to_the_whole_for_any_ids(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10_000):
        ids = rng.choices(range(len(PIECES)), k=rng.randrange(30))
        parts, stopped = text_of(ids)
        assert "".join(parts) == b"".join(PIECES[token_id] for token_id in ids).decode("utf-8", "replace")
        assert not stopped


def test_a_character_comes_out_whole_with_its_last_byte_and_incomplete_bytes_at_the_end_as_one_replacement() -> None:
    assert text_of(list("aé\U0001f600".encode()))[0] == ["a", "", "é", "", "", "", "\U0001f600", ""]
    assert text_of([0x61, *SMILE[:3]])[0] == ["a", "", "", "", "�"]


@pytest.mark.parametrize("stop", [("STOP",), ("\n\n", "User:"), ("aab", "ab"), ("é\U0001f600",), ("x",)])
def test_nothing_from_a_stop_string_on_comes_out_at_any_cut(stop: tuple[str, ...], seed: int) -> None:
    rng = random.Random(seed)
    alphabet = [*"abxSTOPUser:\n é", "\U0001f600", *stop]
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(14)))
        parts, stopped = text_of(encode(text, rng), stop)
        # The first end of a stop string decides; of several that end there, the longest.
        ends = [text.find(word) + len(word) for word in stop if word in text]
        expected = text
        if ends:
            longest = max(len(word) for word in stop if text[: min(ends)].endswith(word))
            expected = text[: min(ends) - longest]
        assert ("".join(parts), stopped) == (expected, bool(ends))


def plain_deltas(text: str, stop: tuple[str, ...]) -> list[str]:
    """The text that comes out after each character, found by looking at everything anew each time; no more after a stop string."""
    deltas, given = [], 0
    for end in range(1, len(text) + 1):
        seen = text[:end]
        met = max((len(word) for word in stop if seen.endswith(word)), default=0)
        held = max((size for word in stop for size in range(1, len(word)) if seen.endswith(word[:size])), default=0)
        final = end - (met or held)
        deltas.append(text[given:final])
        given = final
        if met:
            break
    return deltas


def test_every_delta_is_that_of_the_plain_search(seed: int) -> None:
    """Strings of few letters overlap themselves and each other in all ways."""
    rng = random.Random(seed)
    for _ in range(3000):
        letters = "ab" if rng.random() < 0.5 else "abc"
        stop = tuple("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 6)))
        text = "".join(rng.choices(letters, k=rng.randrange(40)))
        detokenizer, deltas = Detokenizer(PIECES.__getitem__, stop), []
        for byte in text.encode():
            deltas.append(detokenizer.push(byte))
            if detokenizer.stopped:
                break
        assert deltas == plain_deltas(text, stop), (text, stop)


def test_what_may_begin_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    detokenizer = Detokenizer(PIECES.__getitem__, ("STOP",))
    assert [detokenizer.push(byte) for byte in b"aSTSTx"] == ["a", "", "", "ST", "", "STx"]
    assert detokenizer.push(ord("S")) == ""
    assert detokenizer.finish() == "S"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(PIECES.__getitem__, ("",))


def test_byte_pieces_read_the_alphabet_of_byte_level_vocabularies() -> None:
    vocabulary = {0: "<end>", 1: "Ġhi", 2: "Ã©", 3: "Ċ", 4: "ł"}
    pieces = BytePieces(vocabulary.get, {0: b""})
    assert [pieces(token_id) for token_id in (0, 1, 2, 3, 4)] == [b"", b" hi", "é".encode(), b"\n", b"\xa0"]
    with pytest.raises(ValueError, match="vocabulary"):
        pieces(9)
