"""A conversation: every line is a turn, and every answer becomes a turn too. It is shown and heard while it is made; Ctrl-C ends it.

python examples/chat.py --address host:50050        # without it the router that runs here, or a stack of its own
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from omnistage.client import AudioChunk, Omni, OverloadedError, Player, TextDelta, find_loudspeaker


def questions() -> Iterator[str]:
    """The questions of a person, or of a pipe."""
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line


def show_answer(omni: Omni, conversation: list[Mapping[str, str]]) -> str:
    """Show and play the answer to a conversation. Returns its text when all of it was shown and heard."""
    loudspeaker = find_loudspeaker()
    player = Player(loudspeaker) if loudspeaker else None
    text = ""
    try:
        for event in omni.stream_chat(conversation):
            if isinstance(event, TextDelta):
                text += event.text
                print(event.text, end="", flush=True)
            elif isinstance(event, AudioChunk) and player:
                player.write(event)
        print()
        if player:
            player.finish()
    finally:
        if player:
            player.stop()
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    conversation: list[Mapping[str, str]] = [{"role": "system", "content": "You are brief and friendly."}]
    with Omni(address=parser.parse_args().address) as omni:
        for question in questions():
            turn = {"role": "user", "content": question}
            try:
                answer = show_answer(omni, [*conversation, turn])
            except OverloadedError as error:
                print(f"busy; ask again in {error.retry_delay_s} s")
                continue
            conversation += [turn, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
