"""`python -m benchmarks.default`: all figures of the default model, as benchmarks/out/default.json and as a table."""

from __future__ import annotations

import asyncio

from benchmarks import latency, relay, spoken_words, thinker_batch
from benchmarks.figures import publish


def main() -> None:
    figures = asyncio.run(latency.measure())
    figures += thinker_batch.measure()
    figures += asyncio.run(relay.measure())
    figures += asyncio.run(relay.relaying())
    figures += asyncio.run(spoken_words.measure())
    publish("default", figures)


if __name__ == "__main__":
    main()
