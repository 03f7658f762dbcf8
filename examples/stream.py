"""Print text while it is being spoken, with asyncio. A player would take the samples where this counts them.

python examples/stream.py "What is a kite?" --address host:50050
"""

import argparse
import asyncio
from contextlib import aclosing

from omnistage.client import AsyncOmni, AudioChunk, Done, TextDelta


async def main(prompt: str, address: str | None) -> None:
    heard_s = 0.0
    async with AsyncOmni(address=address) as omni, aclosing(omni.stream(prompt)) as events:
        async for event in events:
            match event:
                case TextDelta():
                    print(event.text, end="", flush=True)
                case AudioChunk():
                    heard_s += event.duration_s
                case Done():
                    print(f"\n{heard_s:.2f} s of sound, real-time factor {event.timing.rtf}, seed {event.seed}")


parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--address")
arguments = parser.parse_args()
asyncio.run(main(arguments.prompt, arguments.address))
