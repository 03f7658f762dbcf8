"""`make chaos` in its short form: a minute of mixed load while processes are killed, stopped and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_chaos_leaves_only_right_answers_retryable_errors_and_nothing_else(seed: int) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", str(SECONDS), "--seed", str(seed)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380, check=False)
    print(done.stdout)
    assert done.returncode == 0
