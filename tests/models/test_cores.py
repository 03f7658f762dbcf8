"""Cores that a process may compute on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omnistage.models.devices import cores


@pytest.mark.parametrize(
    ("quota", "least"), [("max 100000", 1 << 20), ("150000 100000", 1), ("50000 100000", 1), ("200000 100000", 2), ("9900000 100000", 99)]
)
def test_a_container_may_have_fewer(tmp_path: Path, quota: str, least: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cores(tmp_path / "cpu.max") == min(least, len(os.sched_getaffinity(0)))


def test_without_containers_it_is_what_the_process_may_run_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, allowed)
