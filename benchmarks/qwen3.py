"""`python -m benchmarks.qwen3`: Qwen3-Omni's Thinker compared with Transformers, and the cost of its experts at published widths."""

from __future__ import annotations

import sys

from benchmarks import experts, omni
from benchmarks.figures import run

if __name__ == "__main__":
    sys.exit(run("qwen3", __doc__, {"beside Transformers": omni.qwen3, "experts": experts.measure}))
