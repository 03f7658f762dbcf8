"""Text comes out as soon as it is final, never sooner, and never beyond a stop string."""

from __future__ import annotations

import random

import pytest

from omnistage.engine.detokenizer import BytePieces, Detokenizer

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
