"""Turns tokens into text, which is given out only when it is final.

A byte-level vocabulary may cut a character into several tokens, and a stop string may begin in any of them. Text is held back while its
last bytes are an incomplete UTF-8 character, or its end may be the beginning of a stop string. Text that was given out is never taken back,
and no text from a stop string on is given out.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence


class _StopString:
    """Looks for one string in a text that comes character by character, by the algorithm of Knuth, Morris and Pratt (1977), whose work for
    a character does not grow with the length of the string. text: the string. matched: how many of the string's first characters are now
    the end of the text."""

    __slots__ = ("_shorter", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each beginning of the string, the length of the longest shorter beginning that is also its end.
        self._shorter = [0] * len(text)
        matched = 0
        for index in range(1, len(text)):
            while matched and text[index] != text[matched]:
                matched = self._shorter[matched - 1]
            matched += text[index] == text[matched]
            self._shorter[index] = matched

    def meets(self, character: str) -> bool:
        """Add the next character. Returns whether the text now ends with the string; after that, do not call it again."""
        text, matched = self.text, self.matched
        while matched and text[matched] != character:
            matched = self._shorter[matched - 1]
        self.matched = matched + (text[matched] == character)
        return self.matched == len(text)


class Detokenizer:
    """Makes the text of one answer, token by token. piece: returns the bytes of a token id, empty for a token that is not text. stop:
    strings that end the text; the string that ends earliest in the text counts, and among several that end there, the longest. Invalid
    bytes become U+FFFD, one for each maximal part, as in Unicode's recommended practice (and in tokenizers' own decoder)."""

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string is empty")
        self.piece = piece
        self._stop = [_StopString(text) for text in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_text = ""
        self._stopped = False
        self.decoded = 0
        """Number of complete characters of all tokens so far."""
        self.given_characters = 0
        """Number of characters given out so far."""

    @property
    def needed_characters(self) -> int:
        """Number of characters in all tokens so far: when `given_characters` has reached it, their text was given out. An incomplete
        character counts as one."""
        incomplete, _ = self._decoder.getstate()
        return self.decoded + bool(incomplete)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; then the text is complete."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Add the next token. Returns the text that became final; empty: none did."""
        return self._advance(self._decoder.decode(self.piece(token_id)))

    def finish(self) -> str:
        """End the text, and return the rest that was held back, or "". Incomplete bytes become U+FFFD."""
        text = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held_text = self._held_text, ""
        self.given_characters += len(rest)
        return text + rest

    def _advance(self, fresh: str) -> str:
        """Add decoded text; returns the text that became final with it."""
        self.decoded += len(fresh)
        final = self._final(fresh)
        self.given_characters += len(final)
        return final

    def _final(self, fresh: str) -> str:
        """The beginning of the held text and `fresh` that no stop string can cut any more; the rest is held back."""
        if self._stopped:
            return ""
        if not self._stop:
            return fresh
        # Character by character, because a stop string is found where it ends, not where it begins.
        for character in fresh:
            self._held_text += character
            stop_lengths = [len(stop.text) for stop in self._stop if stop.meets(character)]
            if stop_lengths:
                final = self._held_text[: -max(stop_lengths)]
                self._held_text, self._stopped = "", True
                return final
        final_length = len(self._held_text) - max(stop.matched for stop in self._stop)
        final, self._held_text = self._held_text[:final_length], self._held_text[final_length:]
        return final


def byte_alphabet() -> dict[str, int]:
    """character -> the byte that it stands for in a byte-level vocabulary: printable Latin-1 characters stand for themselves, U+0100 and
    the following for the other bytes, in order (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class BytePieces:
    """Called with a token id, returns the bytes of this token of a byte-level vocabulary; they are kept for the next call.

    token: returns the vocabulary's entry of an id, None for an unknown id. special_bytes: id -> bytes, for ids whose bytes do not follow
    from the entry. A call raises ValueError for an unknown id."""

    def __init__(self, token: Callable[[int], str | None], special_bytes: Mapping[int, bytes]) -> None:
        self._token, self._alphabet = token, byte_alphabet()
        self._pieces = dict(special_bytes)

    def __call__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._token(token_id)
            if token is None:
                raise ValueError(f"token id {token_id} is not in the vocabulary")
            piece = self._pieces[token_id] = self._bytes(token)
        return piece

    def _bytes(self, token: str) -> bytes:
        """The bytes of a vocabulary's entry. An entry with a character that stands for no byte is the text itself, as in tokenizers' own
        decoder."""
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:
            return token.encode()
