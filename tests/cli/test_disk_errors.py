"""Errors of the disk name the path, and the option or variable that decides it, whichever command meets them."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from helpers.command import omnistage
from helpers.output import refusal
from omnistage.cli.places import explain
from omnistage.models.fetch.own_files import cache_directory

NOWHERE = "/proc/no-such"
"""Nobody can make it, root neither."""

DETACHED = ("serve", "toy", "--detach", "--address", "127.0.0.1:0")
IN_FRONT = ("serve", "toy", "--address", "127.0.0.1:0")


@pytest.mark.parametrize("words", [("stop",), DETACHED, ("chat", "--continue", "--pipeline", "toy"), ("logs",)], ids=" ".join)
@pytest.mark.parametrize("place", [NOWHERE, "/proc/version/state"])
def test_a_folder_of_the_state_that_cannot_be_made_names_its_variable(words: tuple[str, ...], place: str) -> None:
    lines = refusal(*words, variables={"OMNISTAGE_STATE": place})
    reason = "No such file or directory" if place == NOWHERE else "Not a directory"
    assert lines == [f"error: {place}: {reason}; set OMNISTAGE_STATE to a folder of yours"]


@pytest.mark.parametrize("words", [("stop",), DETACHED, ("list",)], ids=" ".join)
def test_a_user_without_a_home_is_told_the_variable(words: tuple[str, ...]) -> None:
    variable = "OMNISTAGE_CACHE" if words == ("list",) else "OMNISTAGE_STATE"
    lines = refusal(*words, variables={variable: "~no-such-user/x"})
    assert lines == [f"error: ~no-such-user/x has no home directory: set {variable} to a folder of yours"]


@pytest.mark.parametrize("words", [DETACHED, IN_FRONT], ids=["detached", "in front"])
def test_a_folder_of_logs_that_cannot_be_made_names_the_option(words: tuple[str, ...], tmp_path: Path) -> None:
    told = f"{NOWHERE}: No such file or directory"
    assert refusal(*words, "--log-dir", f"{NOWHERE}/logs") == [f"error: --log-dir {told}"]
    variables = {"OMNISTAGE_SERVE_LOG_DIR": NOWHERE}
    assert refusal(*words, variables=variables) == [f"error: --log-dir (OMNISTAGE_SERVE_LOG_DIR) {told}"]
    (tmp_path / "stack.yaml").write_text(f"log_dir: {NOWHERE}\n")
    assert refusal(*words, "--config", str(tmp_path / "stack.yaml")) == [f"error: --log-dir (the file) {told}"]


@pytest.mark.parametrize("words", [("protos",), ("make-tiny", "qwen2.5-omni")], ids=" ".join)
def test_a_folder_to_write_into_names_the_argument(words: tuple[str, ...]) -> None:
    [line] = refusal(*words, NOWHERE)
    assert line.startswith("error: DIR /proc") and line.endswith(": No such file or directory")


def test_a_conversation_that_cannot_be_kept_says_where(tmp_path: Path) -> None:
    variables = {"OMNISTAGE_STATE": NOWHERE}
    done = omnistage("chat", "--pipeline", "toy", "--text-only", text="Hi\n", variables=variables, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.strip()
    told = f"the conversation cannot be kept: {NOWHERE}: No such file or directory; set OMNISTAGE_STATE to a folder of yours"
    assert told in done.stderr.splitlines()


def test_what_a_place_is_of_is_said_of_every_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "state" / "run" / "x"))
    told = f"{tmp_path}/state/run/x: No space left on device; make room there, or set OMNISTAGE_STATE to another folder"
    assert explain(full) == told
    model = cache_directory() / "smol" / "x"
    assert explain(PermissionError(errno.EACCES, "Permission denied", str(model))).endswith("; set OMNISTAGE_CACHE to a folder of yours")
    temporary = Path(tempfile.gettempdir()) / "omnistage-logs-0"
    assert explain(PermissionError(errno.EACCES, "Permission denied", str(temporary))).endswith("; set TMPDIR to a folder of yours")
    assert explain(PermissionError(errno.EACCES, "Permission denied", b"/etc/x")) == "/etc/x: Permission denied"
    assert explain(OSError(errno.ENOMEM, "Cannot allocate memory")) == "Cannot allocate memory"
    assert explain(OSError("of a library")) == "of a library"
