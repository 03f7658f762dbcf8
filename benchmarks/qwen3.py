"""`python -m benchmarks.qwen3`: Qwen3-Omni's Thinker beside Transformers, and the cost of its experts at published widths."""

from __future__ import annotations

import asyncio
import sys

import torch

from benchmarks import experts, omni
from benchmarks.figures import Report, arguments


def main() -> int:
    given = arguments(__doc__).parse_args()
    report = Report("qwen3")
    torch.set_num_threads(1)
    with report.part("beside Transformers"):
        asyncio.run(omni.qwen3(report))
    with report.part("experts"):
        experts.measure(report)
    return report.finish(judge=not given.report)


if __name__ == "__main__":
    sys.exit(main())
