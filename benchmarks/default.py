"""`python -m benchmarks.default`: all figures of the default model, as benchmarks/out/default.json and as a table."""

from __future__ import annotations

import sys

from benchmarks import asr, latency, relay, thinker_batch
from benchmarks.figures import run

if __name__ == "__main__":
    sys.exit(
        run(
            "default",
            __doc__,
            {
                "latency": latency.measure,
                "thinker alone": thinker_batch.measure,
                "chain of toys": relay.measure,
                "relays": relay.relaying,
                "spoken words": asr.measure,
            },
        )
    )
