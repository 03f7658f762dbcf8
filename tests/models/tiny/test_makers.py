"""Making a checkpoint: whoever is killed in the middle leaves nothing that the next one trips over, and what cannot be made is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny import makers
from omnistage.models.tiny.makers import CheckpointOrder, MakeError, Maker, make_tiny

MAKE = """
import os, signal, sys
from pathlib import Path
from omnistage.models.tiny import makers

def make(name, out, order, report):
    (out / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

sys.modules["killed"] = sys.modules["__main__"]
makers.MAKERS["files"] = makers.Maker("killed", ("tiny",))
makers.make_tiny("files", Path(sys.argv[1]), makers.CheckpointOrder())
"""


def make(name: str, out: Path, order: CheckpointOrder, report: ShowProgress) -> None:
    """A maker: of one file."""
    (out / "weights").write_text("whole")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_in_which_a_maker_was_killed_is_as_empty_as_before(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "checkpoint"
    if is_there:
        place.mkdir()
    done = subprocess.run([sys.executable, "-c", MAKE, str(place)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("weights")), "it was killed in the middle"
    monkeypatch.setitem(sys.modules, "weights", sys.modules[__name__])
    monkeypatch.setitem(makers.MAKERS, "files", Maker("weights", ("tiny",)))
    make_tiny("files", place, CheckpointOrder())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("weights", "whole")]
    umask = os.umask(0o022)
    os.umask(umask)
    assert place.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize(
    ("name", "order", "told"),
    [
        ("qwen9", CheckpointOrder(), "'qwen9'.*qwen2.5-omni"),
        ("qwen2.5-omni", CheckpointOrder(size="huge"), "size 'huge'.*tiny, small, 100m"),
        ("qwen2.5-omni", CheckpointOrder(tokenizer="x"), "tokenizer 'x'.*built, qwen"),
        ("qwen2.5-omni", CheckpointOrder(dtype="float16"), "dtype 'float16'.*float32, bfloat16"),
        ("qwen2.5-omni", CheckpointOrder(seed=-1), "seed -1"),
        ("z-image", CheckpointOrder(size="100m"), "size '100m'.*tiny, small"),
        ("z-image", CheckpointOrder(tokenizer="qwen"), "tokenizer 'qwen': a checkpoint of z-image can have built"),
        ("stable-audio", CheckpointOrder(tokenizer="qwen"), "tokenizer 'qwen': a checkpoint of stable-audio can have built"),
    ],
)
def test_what_cannot_be_made_is_told_and_leaves_nothing(name: str, order: CheckpointOrder, told: str, tmp_path: Path) -> None:
    with pytest.raises(MakeError, match=told):
        make_tiny(name, tmp_path / "made", order)
    assert list(tmp_path.iterdir()) == []
