"""`make chaos` in its short forms: mixed load while processes are killed, stopped and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import lengths

pytestmark = lengths.long_form(
    "chaos/test_account.py::test_a_wrong_answer_is_seen",
    "system/test_storm.py::test_a_stage_is_killed",
    "system/test_frozen.py::test_a_frozen_replica_is_left_and_the_answer_goes_on",
    unkept="Mixed load is answered rightly while processes of every kind are killed, stopped and started again.",
)

TESTS = Path(__file__).parents[1]


@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [15, pytest.param(120, marks=pytest.mark.long)])
def test_chaos_leaves_only_right_answers_retryable_errors_and_nothing_else(seed: int, seconds: int) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", str(seconds), "--seed", str(seed)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380, check=False)
    print(done.stdout)
    assert done.returncode == 0
