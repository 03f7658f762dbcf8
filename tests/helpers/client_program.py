"""A program that uses what the client offers, for an environment that holds nothing else; run by client/test_alone.py. Prints what it got.

Its words: the address of a router that speaks and draws, and a file that is too large for a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import io
import json
import pkgutil
import sys
from contextlib import aclosing
from pathlib import Path

import google.protobuf
import grpc

import omnistage.client
import omnistage.v1
from omnistage.client import AsyncOmni, Audio, AudioChunk, BadRequestError, Done, Omni, Picture, Progress, TextDelta, UnavailableError
from omnistage.client import UnknownModelError as Unknown


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def samples(audio: Audio | None) -> str:
    assert audio is not None
    return digest(audio.samples.tobytes())


def import_everything() -> int:
    """All modules of the client and of the stubs. Returns how many."""
    names = [one.name for top in (omnistage.client, omnistage.v1) for one in pkgutil.walk_packages(top.__path__, top.__name__ + ".")]
    return len([importlib.import_module(name) for name in names])


def ask(omni: Omni, film: Path, folder: Path) -> dict[str, object]:
    answer = omni.generate("What is a kite?", seed=3)
    answer.save(folder / "answer.wav")
    events = list(omni.stream("What is a kite?", seed=3))
    said = omni.say("one two three", seed=5, pipeline="toy")
    drawn = omni.draw("a hill", seed=4, width=24, height=16, steps=2)
    steps = [event.done for event in omni.stream_draw("a hill", seed=4, steps=3) if isinstance(event, Progress)]
    large = omni.generate("?", videos=[film], seed=4, max_tokens=12, outputs=["text"], pipeline="toy-omni")
    return {
        "text": answer.text,
        "sound": samples(answer.audio),
        "file": digest((folder / "answer.wav").read_bytes()),
        "streamed": "".join(event.text for event in events if isinstance(event, TextDelta)),
        "chunks": sum(len(event.samples) for event in events if isinstance(event, AudioChunk)),
        "done": isinstance(events[-1], Done),
        "said": [said.text, samples(said.audio)],
        "drawn": [digest(picture.data) for picture in drawn.pictures],
        "steps": steps,
        "large": large.text,
        "pipelines": [one.name for one in omni.pipelines()],
        "replicas": len(omni.replicas()),
    }


def go_wrong(omni: Omni) -> list[str]:
    """Causes each error, and returns what it says of itself: the details of the call and the client's own text."""
    told = []
    try:
        omni.draw("a hill", steps=100_000)
    except BadRequestError as error:
        told += [error.message, *(field.field for field in error.fields)]
    try:
        omni.generate("Hi", pipeline="none")
    except Unknown as error:
        told += [error.message, *sorted(error.metadata)]
    try:
        omni.generate("Hi", images=[io.BytesIO(b"nothing")])
    except BadRequestError as error:
        told.append(error.message)
    try:
        Omni(address="127.0.0.1:1", connect_timeout_s=0.1)
    except UnavailableError as error:
        told.append(error.message)
    return told


async def ask_beside(address: str) -> list[str]:
    """Several at once on one event loop, one of which is left in the middle."""
    async with AsyncOmni(address=address) as omni:
        answers = await asyncio.gather(*(omni.generate(f"Number {number}", seed=number) for number in range(4)))
        async with aclosing(omni.stream("Tell me more.", seed=1)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        drawn = await omni.draw("a hill", seed=4, steps=2)
        assert isinstance(drawn.pictures[0], Picture)
        return [*(answer.text for answer in answers), digest(drawn.pictures[0].data)]


def main() -> None:
    address, film, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    got: dict[str, object] = {"versions": [grpc.__version__, google.protobuf.__version__], "modules": import_everything()}
    with Omni(address=address) as omni:
        got |= ask(omni, film, folder) | {"errors": go_wrong(omni)}
    got["beside"] = asyncio.run(ask_beside(address))
    print(json.dumps(got))


if __name__ == "__main__":
    main()
