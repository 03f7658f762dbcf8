"""Sentences about an answer for the people who asked for it: what the voice left out, and an end that the model did not choose."""

from __future__ import annotations


def unspoken_text(count: int, words: str) -> str:
    """The characters that were not spoken and their number, in words for people; empty if all were spoken. count, words: `unspoken` and
    `unspoken_words` of Usage."""
    if not count:
        return ""
    shown_characters = len(words) - words.count(" ")  # The spaces only separate them.
    ellipsis = "..." if count > shown_characters else ""
    return f"{words}{ellipsis} ({count} character{'s' * (count != 1)})"


def end_notes(finish_reason: str, tokens: int | None, thought_tokens: int, longer: str) -> tuple[str, ...]:
    """One sentence if the model did not end the answer itself, or ended it while it was thinking; else none. tokens, thought_tokens: as in
    Usage. longer: words for the option by which the user asks for a longer answer."""
    place = "" if tokens is None else f" at {tokens} tokens"
    match finish_reason:
        case "length":
            sentence = f"cut{place}"
        case "repetition":
            sentence = f"ended{place}, because it repeated itself"
        case _:
            sentence = ""
    rest = f"; {longer} lets it say more" if sentence else ""
    if thought_tokens and thought_tokens == tokens:
        sentence = f"{sentence or 'ended'} while it was still thinking: there is no answer yet"
    return (sentence + rest,) if sentence else ()
