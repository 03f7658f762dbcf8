"""Sentences about an answer for the people who asked for it: what the voice left out, and an end that the model did not choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.client.answer import Answer
    from omnistage.client.events import Done, Usage


def unspoken_text(account: Usage) -> str:
    """The characters that were not spoken and their number, in words for people; empty if all were spoken."""
    if not account.unspoken:
        return ""
    shown_characters = len(account.unspoken_words) - account.unspoken_words.count(" ")  # The spaces only separate them.
    ellipsis = "..." if account.unspoken > shown_characters else ""
    return f"{account.unspoken_words}{ellipsis} ({account.unspoken} character{'s' * (account.unspoken != 1)})"


def end_notes(product: Answer | Done, longer: str) -> tuple[str, ...]:
    """One sentence if the model did not end the answer itself, or ended it while it was thinking; else none. longer: words for the option
    by which the user asks for a longer answer."""
    tokens = product.usage.completion_tokens
    place = "" if tokens is None else f" at {tokens} tokens"
    match product.finish_reason:
        case "length":
            sentence = f"cut{place}"
        case "repetition":
            sentence = f"ended{place}, because it repeated itself"
        case _:
            sentence = ""
    rest = f"; {longer} lets it say more" if sentence else ""
    if product.usage.thought_tokens and not any(arrival.characters for arrival in product.timing.text):
        sentence = f"{sentence or 'ended'} while it was still thinking: there is no answer yet"
    return (sentence + rest,) if sentence else ()
