"""`python -m benchmarks.default`: all figures of the default model, as benchmarks/out/default.json and as a table."""

from __future__ import annotations

import asyncio
import sys

from benchmarks import latency, relay, spoken_words, thinker_batch
from benchmarks.figures import Report, arguments


def main() -> int:
    given = arguments(__doc__).parse_args()
    report = Report("default")
    with report.part("latency"):
        asyncio.run(latency.measure(report))
    with report.part("thinker alone"):
        thinker_batch.measure(report)
    with report.part("chain of toys"):
        asyncio.run(relay.measure(report))
    with report.part("relays"):
        asyncio.run(relay.relaying(report))
    with report.part("spoken words"):
        asyncio.run(spoken_words.measure(report))
    return report.finish(judge=not given.report)


if __name__ == "__main__":
    sys.exit(main())
